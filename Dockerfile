# docker build -t coterie .
# docker build -t coterie --build-arg TORCH=https://download.pytorch.org/whl/cu128 .    (for NVIDIA GPUs)
# Untried so far: no Docker daemon was at hand.
FROM python:3.11-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "torch>=2.6,<2.14" --index-url "$TORCH"
COPY pyproject.toml README.md LICENSE /src/
COPY coterie /src/coterie
RUN pip install --no-cache-dir "/src[envpool,video,plots]" && useradd --create-home coterie
USER coterie
WORKDIR /home/coterie
# a volume that is mounted here belongs to this user
RUN mkdir runs
ENTRYPOINT []
CMD ["coterie", "--help"]
