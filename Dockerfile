# The backend on NVIDIA's Triton image:
#   docker build -t inflight .
#   docker run --gpus all --shm-size 1g -p 8000-8002:8000-8002 inflight
# serves the demo model; for models of your own, mount a repository over it:
#   docker run ... -v "$PWD/models:/models" inflight tritonserver --model-repository=/models
ARG TAG=24.10-py3

# The CPU kernels, compiled on the distribution of the image below or an older one, whose C library
# decides on which they load.  The image itself needs no compiler.
FROM ubuntu:22.04 AS kernels
# hadolint ignore=DL3008 # a mirror keeps only the newest version, so that a pinned one soon fails
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 \
    && rm -rf /var/lib/apt/lists/*
COPY backend/inflight /inflight
RUN python3 /inflight/kernels/cpu/build.py

FROM nvcr.io/nvidia/tritonserver:${TAG}

# What `backend/inflight` imports: the extra `backend` of pyproject.toml and msgspec.  The stub of this
# Triton cannot read arrays of numpy 2.
RUN pip install --no-cache-dir \
        "torch>=2.11,<2.14" "transformers>=5.17,<6" "tokenizers>=0.22" "safetensors>=0.5" \
        "huggingface-hub>=1.0" "jinja2>=3.1" "msgspec>=0.19" "numpy<2" \
    && install -d -o 1000 -g 1000 /var/cache/inflight

COPY --from=kernels /inflight /opt/tritonserver/backends/inflight
COPY model_repository /models

# `triton-server`, the image's own user without privileges.  Checkpoints from the hub and compiled
# kernels are cached under its home.
USER 1000:1000
ENV HOME=/var/cache/inflight
VOLUME /var/cache/inflight

EXPOSE 8000 8001 8002
CMD ["tritonserver", "--model-repository=/models", "--model-control-mode=explicit", "--load-model=demo"]
