"""A trained policy for use without Coterie: an ONNX file, its description, and a web page where it plays."""
