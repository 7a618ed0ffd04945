"""A trained policy for use without Coterie: ONNX with a description beside it, and a page on which it plays."""
