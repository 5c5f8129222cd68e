#!/usr/bin/env bash
# vLLM endpoints on the devices of this node, at ports 8000, 8001, …: serve.sh MODEL DEVICES_PER_SERVER
# Ends, and ends the others, when one of them ends. What the flags are for: docs/endpoints.md.
# Whoever reaches the ports can use them: in a network that is not yours alone, with a key.
set -euo pipefail
model=$1 per_server=$2
devices=${DEVICES:-8}
visible=${VISIBLE_DEVICES:-CUDA_VISIBLE_DEVICES} # Ascend: ASCEND_RT_VISIBLE_DEVICES
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap exit TERM INT
for ((first = 0; first + per_server <= devices; first += per_server)); do
  own=$(seq -s, "$first" $((first + per_server - 1)))
  env "$visible=$own" VLLM_SERVER_DEV_MODE=1 "${VLLM:-.venv-vllm/bin/vllm}" serve "$model" \
    --host 0.0.0.0 --port $((8000 + first / per_server)) --tensor-parallel-size "$per_server" \
    --dtype bfloat16 --max-model-len "${MAX_MODEL_LEN:-16384}" --enable-scale-out \
    --weight-transfer-config '{"backend": "easyrl"}' --worker-extension-cls easyrl_vllm.WeightProof \
    --logprobs-mode processed_logprobs --generation-config vllm &
done
wait -n
