#!/usr/bin/env bash
# URLs of what serve.sh starts on each of the hosts, with commas: endpoint_urls.sh DEVICES_PER_SERVER HOST…
set -euo pipefail
servers=$((${DEVICES:-8} / $1))
shift
for host in "$@"; do
  for ((server = 0; server < servers; server++)); do echo "http://$host:$((8000 + server))"; done
done | paste -sd,
