#!/usr/bin/env bash
# The training processes of one node: train_node.sh NODE NUM_NODES MASTER ENDPOINTS CONFIG [key=value …]
# NODE counts from 0; MASTER is the address of node 0, ENDPOINTS are URLs with commas.
set -euo pipefail
node=$1 num_nodes=$2 master=$3 endpoints=$4 config=$5
shift 5
hosts=$(mktemp)
for ((n = 0; n < num_nodes; n++)); do echo "node$n slots=${DEVICES:-8}"; done >"$hosts"
exec "${DEEPSPEED:-deepspeed}" --hostfile "$hosts" --no_ssh --node_rank "$node" \
  --master_addr "$master" --master_port "${MASTER_PORT:-29500}" --module easyrl.train "$config" \
  "weight_sync.advertise_host=$master" "inference.endpoints=[$endpoints]" "$@"
