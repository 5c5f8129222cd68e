#!/usr/bin/env bash
# Nodes that log in on each other: started on the first node of configs/launch/hostfile, in the checkout, which
# is under the same path everywhere (docs/several_nodes.md). Not run on a cluster.
#
#   INFERENCE_HOSTS="infer0" configs/launch/ssh.sh configs/qwen3_8b_16_devices.yaml models/Qwen3-8B 1
set -euo pipefail
config=$1 model=$2 per_server=$3
shift 3
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
read -ra infer <<<"${INFERENCE_HOSTS:?names of the inference nodes}"
for host in "${infer[@]}"; do # -tt: a server ends with its connection
  ssh -tt "$host" "cd '$PWD' && configs/launch/serve.sh '$model' $per_server" </dev/null &
done
master=$(awk 'NF {print $1; exit}' configs/launch/hostfile)
deepspeed --hostfile configs/launch/hostfile --module easyrl.train "$config" \
  "weight_sync.advertise_host=$master" \
  "inference.endpoints=[$(configs/launch/endpoint_urls.sh "$per_server" "${infer[@]}")]" "$@"
