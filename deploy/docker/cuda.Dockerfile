# twophase with CUDA: docker build -f deploy/docker/cuda.Dockerfile -t twophase:cuda .
# Never built where it was written, which has neither Docker nor a card (docs/gpu.md).
#
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 \
#     -v $HOME/.cache/twophase:/root/.cache/twophase \
#     twophase:cuda serve --without-ray deploy/examples/gpu-4p4d.yaml
#
# --ipc=host: workers of one host share memory, and CUDA IPC wants one namespace. --network=host:
# ports are chosen at run time, and NCCL and UCX look for network cards. memlock: RDMA pins memory.
# For RDMA also: --device=/dev/infiniband --cap-add=IPC_LOCK.

ARG CUDA=13.0.1

# flash-attn has no wheels in the package index: it is compiled once, for the cards named here.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS flash-attn
ARG TORCH=2.13.0
ARG FLASH_ATTN=2.8.3.post2
ARG CARDS=80;90
ARG MAX_JOBS=8
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir torch==${TORCH} ninja packaging psutil setuptools wheel
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS=${CARDS} MAX_JOBS=${MAX_JOBS} \
    /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation \
    --wheel-dir /wheels flash-attn==${FLASH_ATTN}

# torch brings CUDA's libraries, so that a plain image does; Triton's compiler is not needed.
FROM ubuntu:24.04
ARG TORCH=2.13.0
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/twophase PATH=/opt/twophase/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python3 -m venv $VIRTUAL_ENV && pip install --no-cache-dir torch==${TORCH}
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[rdma]'
RUN --mount=from=flash-attn,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl
ENTRYPOINT ["twophase"]
CMD ["serve", "--without-ray", "deploy/examples/gpu-4p4d.yaml"]
