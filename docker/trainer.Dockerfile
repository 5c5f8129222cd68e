# The trainer's side. From the checkout:
#   docker build -f docker/trainer.Dockerfile -t easyrl-trainer .
#   docker build -f docker/trainer.Dockerfile -t easyrl-trainer:cuda --build-arg DEVICE=cuda .
# docs/docker.md says how it is used. Versions are those of constraints.txt.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS base-cpu
# From PyPI torch comes with CUDA, several GB.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hub,report,prometheus
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX EXTRAS=$EXTRAS DS_ACCELERATOR=cpu
# torch compiles FlexAttention where a configuration asks for it
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# With the compiler: DeepSpeed builds its optimizers on first use. The toolkit has to be of the
# CUDA version that torch was built for.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base-cuda
ARG EXTRAS=hub,report,prometheus,liger
ENV EXTRAS=$EXTRAS
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ ninja-build openssh-client pdsh python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM base-${DEVICE} AS trainer
# The user has the same number in the server's image: weights in /dev/shm are their owner's alone.
RUN useradd --create-home --uid 10001 easyrl && python3 -m venv /opt/easyrl
ENV PATH=/opt/easyrl/bin:$PATH
WORKDIR /opt/easyrl/source
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY setup.py pyproject.toml README.md LICENSE ./
COPY easyrl ./easyrl
COPY dataloaders ./dataloaders
COPY inference_client ./inference_client
COPY kernels ./kernels
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

USER 10001
WORKDIR /home/easyrl/work
COPY --chown=10001 configs ./configs
COPY --chown=10001 examples ./examples
RUN mkdir runs models data
# Nothing is fetched at run time: models and data are mounted.
ENV HF_HUB_OFFLINE=1
CMD ["easyrl", "--help"]
