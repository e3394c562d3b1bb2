# The backend on NVIDIA's Triton image.  This serves the demo model:
#   docker build -t inflight .
#   docker run --gpus all --shm-size 1g -p 8000-8002:8000-8002 inflight
# To serve other models, mount a repository:
#   docker run ... -v "$PWD/models:/models" inflight tritonserver --model-repository=/models
ARG TAG=24.10-py3

# The CPU kernels are compiled on the image's distribution or an older one: they load with the C library of this
# stage or a newer one.  The image itself needs no compiler.
FROM ubuntu:22.04 AS kernels
# hadolint ignore=DL3008 # mirrors keep the newest version only, so that pinned ones soon fail
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 \
    && rm -rf /var/lib/apt/lists/*
COPY backend/inflight /inflight
RUN python3 /inflight/kernels/cpu/build.py

FROM nvcr.io/nvidia/tritonserver:${TAG}

# What `backend/inflight` imports: the extra `backend` of pyproject.toml, and msgspec.  This Triton's stub does not
# support numpy 2.
RUN pip install --no-cache-dir \
        "torch>=2.11,<2.14" "transformers>=5.17,<6" "tokenizers>=0.22" "safetensors>=0.5" \
        "huggingface-hub>=1.0" "jinja2>=3.1" "ahocorasick_rs>=1.0" "msgspec>=0.19" "numpy<2" \
    && install -d -o 1000 -g 1000 /var/cache/inflight

COPY --from=kernels /inflight /opt/tritonserver/backends/inflight
COPY model_repository /models

# `triton-server`, the image's unprivileged user.  Its home caches checkpoints from the hub and compiled kernels.
USER 1000:1000
ENV HOME=/var/cache/inflight
VOLUME /var/cache/inflight

EXPOSE 8000 8001 8002
CMD ["tritonserver", "--model-repository=/models", "--model-control-mode=explicit", "--load-model=demo"]
