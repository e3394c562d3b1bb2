# The backend on NVIDIA's Triton image, for GPUs; `Dockerfile.cpu` makes a smaller one for CPUs.  This serves the demo model:
#   docker build -t inflight .
#   docker run --gpus all --shm-size 1g -p 127.0.0.1:8000-8002:8000-8002 -p 127.0.0.1:9000:9000 inflight
# with OpenAI's API at http://127.0.0.1:9000/v1; INFLIGHT_OPENAI_PORT= turns that off, INFLIGHT_API_KEY asks for a key.
# To serve other models, mount a repository:
#   docker run ... -v "$PWD/models:/models" inflight inflight-tritonserver --model-repository=/models
# `compose.yaml` runs the two apart.  `inflight-tritonserver` is tritonserver with an admin key, which it prints (docs/operations/access.md).  In
# the container the ports listen on all addresses; `-p 127.0.0.1:...` keeps them on this machine.
#
# 26.07 is the newest release whose Python (3.12) and numpy (below 2) were found fit by reading its sources.  The tests
# run on 24.10: --build-arg TAG=24.10-py3.  A digest pins it: --build-arg TAG=26.07-py3@sha256:...
ARG TAG=26.07-py3

# The CPU kernels are compiled on the image's distribution or an older one: they load with the C library of this
# stage or a newer one.  The image itself needs no compiler.
FROM ubuntu:22.04@sha256:0bced47fffa3361afa981854fcabcd4577cd43cebbb808cea2b1f33a3dd7f508 AS kernels
# hadolint ignore=DL3008 # mirrors keep the newest version only, so that pinned ones soon fail
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 \
    && rm -rf /var/lib/apt/lists/*
COPY backend/inflight /inflight
RUN python3 /inflight/kernels/cpu/build.py

FROM nvcr.io/nvidia/tritonserver:${TAG}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Inflight" \
      org.opencontainers.image.description="Continuous batching for Hugging Face language models on NVIDIA Triton, with OpenAI's API" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

# What pyproject.toml asks for, for the backend and for the gateway, which speaks gRPC only, for spans, for KV in Redis and
# LMCache, and psutil for `inflight-drain`.  The stub of 24.10 does not support numpy 2, and newer images have numpy 1 as well.  Those guard their own
# Python against pip.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN pip install --no-cache-dir \
        "torch>=2.11,<2.14" "transformers>=5.17,<6" "tokenizers>=0.22" "safetensors>=0.5" \
        "huggingface-hub>=1.0" "jinja2>=3.1" "llguidance>=1.3,<2" "ahocorasick-rs>=1.0" "regex>=2024.5" "xxhash>=3.4" "msgspec>=0.19" "numpy<2" \
        "starlette>=0.46" "uvicorn>=0.34" "httptools>=0.6" "uvloop>=0.21" "prometheus-client>=0.21" "uhashring>=2.4" "orjson>=3.10" \
        "tritonclient[grpc]>=2.50" "httpx2>=2.14" "typer>=0.15" "rich>=13.9" "psutil>=6" \
        "opentelemetry-sdk>=1.30" "opentelemetry-exporter-otlp-proto-http>=1.30" "redis>=5.2" "pyzmq>=25" \
    && install -d -o 1000 -g 1000 /var/cache/inflight

COPY --from=kernels /inflight /opt/tritonserver/backends/inflight
COPY client/inflight_client /opt/inflight/inflight_client
COPY gateway/inflight_gateway /opt/inflight/inflight_gateway
COPY tools/inflight_tools /opt/inflight/inflight_tools
COPY model_repository /models
COPY --chmod=755 deploy/container /usr/local/bin

# `triton-server`, the image's unprivileged user.  Its home caches checkpoints from the hub and compiled kernels.
USER 1000:1000
ENV HOME=/var/cache/inflight
VOLUME /var/cache/inflight

ENV INFLIGHT_OPENAI_PORT=9000
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=20s --timeout=12s --retries=3 --start-period=300s CMD ["inflight-healthy"]
CMD ["inflight-tritonserver", "--model-repository=/models", "--model-control-mode=explicit", "--load-model=demo"]
