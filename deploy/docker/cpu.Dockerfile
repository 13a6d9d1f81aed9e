# twophase on CPUs: docker build -f deploy/docker/cpu.Dockerfile -t twophase:cpu .
# Never built where it was written, which has no Docker.
#
#   docker run --shm-size=256m --stop-timeout=40 --network=host \
#     -v $HOME/.cache/twophase:/home/twophase/.cache/twophase twophase:cpu
#
# --shm-size: Ray's object store does not fit the 64 MB that containers get unasked (twophase itself
# needs none of it). --stop-timeout: router.drain_s and 10 s. --network=host: servers listen on
# loopback, and workers take free ports (docs/deploy.md).

FROM python:3.12-slim
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# KubeRay's own probes and its autoscaler need what ray[default] adds; twophase does not.
ARG RAY=ray[default]==2.60.0
RUN useradd --create-home --uid 1000 twophase
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} torch==${TORCH} \
    && pip install --no-cache-dir "${RAY}"
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir .
USER twophase
WORKDIR /home/twophase
ENV RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT ["twophase"]
CMD ["serve"]
