# docker build --target cpu -t anabranch:cpu .
# docker build --target cuda -t anabranch:cuda .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
# gcc compiles the kernels in C for CPUs, and the launchers of Triton's. Without tini the program would be process 1, for which
# the kernel ignores SIGTERM until there is a handler: while Python imports, and during all of `generate`.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev tini && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv && useradd --create-home --uid 1000 anabranch
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
ENV HF_HOME=/cache/huggingface ANABRANCH_CACHE=/cache/anabranch TRITON_CACHE_DIR=/cache/triton
RUN mkdir -p /cache && chown anabranch /cache
VOLUME /cache
EXPOSE 8000
# A server that is loading is not healthy yet: the first half hour does not count.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
ENTRYPOINT ["tini", "--", "anabranch"]
# Other machines are served with a key only: docker run -e ANABRANCH_API_KEY=...
CMD ["serve", "--host", "0.0.0.0"]

# USER is a number: Kubernetes (runAsNonRoot) does not accept a name.
FROM base AS cpu
RUN uv pip install --system --no-cache --torch-backend cpu -c constraints.txt .
WORKDIR /home/anabranch
USER 1000

FROM base AS cuda
# The CUDA libraries come with torch, the driver with the host.
RUN uv pip install --system --no-cache -c constraints.txt .
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /home/anabranch
USER 1000
