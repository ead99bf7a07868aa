# luffy in a container, as a user installs it: the wheel with the pinned packages, no tests, no development tools.
#   docker build --tag luffy .                                                                   # CPU
#   docker build --tag luffy --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 .              # NVIDIA GPU
#   docker run --rm --volume "$PWD:/work" luffy quickstart                                       # with a GPU: --gpus all
ARG BASE=python:3.12-slim
FROM ${BASE}

# CUDA images bring no Python, and Triton compiles a little C when a kernel first runs.
RUN if [ -n "$CUDA_VERSION" ] || ! command -v python3 > /dev/null; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc python3-dev python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python3 -m venv /opt/luffy
ENV PATH=/opt/luffy/bin:$PATH

# On a CUDA image torch comes from PyPI, with its CUDA libraries; elsewhere from PyTorch's index, without them.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# For example peft,ray
ARG EXTRAS=
WORKDIR /opt/source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY luffy ./luffy
RUN if [ -n "$CUDA_VERSION" ]; then unset PIP_EXTRA_INDEX_URL; fi; \
    pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"

# Runs and caches go to the folder that is mounted here, whoever the user is.
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["luffy"]
CMD ["--help"]
