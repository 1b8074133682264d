# syntax=docker/dockerfile:1
#
# One target a role: router, scheduler, frontend, tokenizer, worker-cpu, worker-cuda.
#
#     docker build --target frontend --tag penstock/frontend .
#
# Each image holds what its process imports and nothing else: the packages come from the role's
# dependency group in pyproject.toml, and penstock itself is installed without dependencies. So the
# images of router, scheduler and frontend hold no torch, no transformers and no tokenizers. None
# holds `penstock bench` and what else measures, nor the training of the built-in model; the model is
# where a process reads it.
#
# OTEL_TRACES=true adds what --otel-traces needs.
# TORCH is pinned as in the Makefile; a comma or a second package is not understood.

# A release of Python and of Debian, so that an image built again is built on the same; raise it for
# their security fixes.
ARG PYTHON_VERSION=3.12.12
ARG TORCH=torch==2.13.0

# --- what the images are made with

FROM python:${PYTHON_VERSION}-slim-bookworm AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# 25.1 is the first pip that reads dependency groups.
RUN --mount=type=cache,target=/root/.cache/pip pip install 'pip>=25.1' \
    && python -m venv --without-pip /opt/penstock
WORKDIR /src
COPY pyproject.toml ./

FROM tools AS wheel
COPY README.md LICENSE ./
COPY penstock ./penstock
COPY protocol ./protocol
COPY client ./client
COPY services ./services
COPY kernels ./kernels
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /wheels .

FROM wheel AS wheel-with-model
COPY demo/model ./demo/model
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /wheels .

FROM tools AS router-packages
ARG OTEL_TRACES=false
RUN --mount=type=cache,target=/root/.cache/pip \
    case $OTEL_TRACES in [Tt][Rr][Uu][Ee]|1) otel='--group otel' ;; *) otel= ;; esac; \
    pip --python /opt/penstock/bin/python install --group router $otel
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/penstock/bin/python install --no-deps /wheels/*.whl

FROM tools AS scheduler-packages
ARG OTEL_TRACES=false
RUN --mount=type=cache,target=/root/.cache/pip \
    case $OTEL_TRACES in [Tt][Rr][Uu][Ee]|1) otel='--group otel' ;; *) otel= ;; esac; \
    pip --python /opt/penstock/bin/python install --group scheduler $otel
COPY --from=wheel-with-model /wheels /wheels
RUN pip --python /opt/penstock/bin/python install --no-deps /wheels/*.whl

FROM tools AS frontend-packages
# Of the extras: "grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos", "valkey".
ARG FRONTEND_PACKAGES=
ARG OTEL_TRACES=false
RUN --mount=type=cache,target=/root/.cache/pip \
    case $OTEL_TRACES in [Tt][Rr][Uu][Ee]|1) otel='--group otel' ;; *) otel= ;; esac; \
    pip --python /opt/penstock/bin/python install --group frontend \
        ${FRONTEND_PACKAGES} $otel
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/penstock/bin/python install --no-deps /wheels/*.whl

FROM tools AS tokenizer-packages
ARG OTEL_TRACES=false
RUN --mount=type=cache,target=/root/.cache/pip \
    case $OTEL_TRACES in [Tt][Rr][Uu][Ee]|1) otel='--group otel' ;; *) otel= ;; esac; \
    pip --python /opt/penstock/bin/python install --group tokenizer $otel
COPY --from=wheel-with-model /wheels /wheels
RUN pip --python /opt/penstock/bin/python install --no-deps /wheels/*.whl

# Torch goes first: nothing else may choose its build.
FROM tools AS worker-cpu-packages
ARG TORCH
ARG OTEL_TRACES=false
RUN --mount=type=cache,target=/root/.cache/pip \
    case $OTEL_TRACES in [Tt][Rr][Uu][Ee]|1) otel='--group otel' ;; *) otel= ;; esac; \
    pip --python /opt/penstock/bin/python install \
        --index-url https://download.pytorch.org/whl/cpu "${TORCH}" \
    && pip --python /opt/penstock/bin/python install --group worker $otel
COPY --from=wheel-with-model /wheels /wheels
RUN pip --python /opt/penstock/bin/python install --no-deps /wheels/*.whl

FROM tools AS worker-cuda-packages
ARG TORCH
ARG OTEL_TRACES=false
RUN --mount=type=cache,target=/root/.cache/pip \
    case $OTEL_TRACES in [Tt][Rr][Uu][Ee]|1) otel='--group otel' ;; *) otel= ;; esac; \
    pip --python /opt/penstock/bin/python install "${TORCH}" \
    && pip --python /opt/penstock/bin/python install --group worker $otel
COPY --from=wheel-with-model /wheels /wheels
RUN pip --python /opt/penstock/bin/python install --no-deps /wheels/*.whl

# --- what the images are

FROM python:${PYTHON_VERSION}-slim-bookworm AS runtime
# /run/secrets and /var/cache/penstock are there so that a new volume mounted over them belongs to
# this user.
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid penstock --no-create-home --home-dir /tmp penstock \
    && install --directory --owner penstock --group penstock --mode 700 \
        /run/secrets /var/cache/penstock
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    PENSTOCK_STATE_FILE=/tmp/penstock-state
USER penstock
# The main loop of a process touches its file once a second, also while it loads or drains.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD test -n "$(find /tmp/penstock-state -newermt '-10 seconds' 2>/dev/null)"

# Commands are lists: the process itself is the container's, so it gets the signal to drain.

FROM runtime AS router
COPY --from=router-packages /opt/penstock /opt/penstock
CMD ["penstock", "router"]

FROM runtime AS scheduler
COPY --from=scheduler-packages /opt/penstock /opt/penstock
CMD ["penstock", "scheduler"]

FROM runtime AS frontend
COPY --from=frontend-packages /opt/penstock /opt/penstock
ENV PENSTOCK_HOST=0.0.0.0
EXPOSE 8000
CMD ["penstock", "frontend"]

FROM runtime AS tokenizer
COPY --from=tokenizer-packages /opt/penstock /opt/penstock
CMD ["penstock", "tokenizer"]

FROM runtime AS worker-cpu
COPY --from=worker-cpu-packages /opt/penstock /opt/penstock
# A step that is larger than any before may take two minutes, and the loop waits for it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD test -n "$(find /tmp/penstock-state -newermt '-150 seconds' 2>/dev/null)"
CMD ["penstock", "worker", "--device", "cpu"]

FROM runtime AS worker-cuda
USER root
# Triton compiles the launchers of its kernels with a C compiler, once, into its cache.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER penstock
ENV TRITON_CACHE_DIR=/var/cache/penstock/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/penstock/inductor
COPY --from=worker-cuda-packages /opt/penstock /opt/penstock
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD test -n "$(find /tmp/penstock-state -newermt '-150 seconds' 2>/dev/null)"
CMD ["penstock", "worker", "--device", "cuda"]
