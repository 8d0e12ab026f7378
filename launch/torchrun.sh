#!/usr/bin/env bash
# Train with torchrun, on one host or on several: the same line on each host, each with its own NODE_RANK.
set -euo pipefail

if [ $# -eq 0 ]; then
    cat >&2 <<'USAGE'
usage: launch/torchrun.sh CONFIG [section.key=value ...]

in the environment:
  NNODES       hosts of the job (1)
  NODE_RANK    number of this host, from 0 (0)
  MASTER_ADDR  name or address of host 0, as the others reach it
  MASTER_PORT  a free TCP port there (29500)
  NPROC        processes on this host (its GPUs; without a GPU, this host's part of those that the layout needs)
  PYTHON       the Python that has megascale (.venv/bin/python beside launch/, else python3)
  MEGASCALE_JOB_SECRET  with several hosts that share no folder: 32 characters or more, the same on each (docs/security.md)
USAGE
    exit 2
fi

NNODES=${NNODES:-1}

# check_number NAME LEAST MOST: a value out of this range is a mistake of the environment.
check_number() {
    local value=${!1:-}
    if [ -n "$value" ] && ! { [[ $value =~ ^[0-9]{1,9}$ ]] && ((10#$value >= $2 && 10#$value <= $3)); }; then
        echo "environment  $1: '$value' is not a whole number from $2 to $3  -> correct it, or unset it" >&2
        exit 2
    fi
}
check_number NNODES 1 999999
check_number NODE_RANK 0 $((10#$NNODES - 1))
check_number MASTER_PORT 1 65535
check_number NPROC 1 999999
if [ "$NNODES" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    echo "MASTER_ADDR: not set  -> with NNODES=$NNODES, the name or address of host 0" >&2
    exit 2
fi
venv=$(dirname "$0")/../.venv/bin/python
PYTHON=${PYTHON:-$([ -x "$venv" ] && echo "$venv" || echo python3)}

if [ -z "${NPROC:-}" ]; then
    NPROC=$("$PYTHON" -c 'from megascale.device import gpu_count; print(gpu_count())')
fi
if [ "$NPROC" -eq 0 ]; then
    "$PYTHON" -m megascale check "$@" >/dev/null
    processes=$("$PYTHON" -m megascale check "$@" --json |
        "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["processes"])')
    NPROC=$(((processes + NNODES - 1) / NNODES))
fi

# Mistakes are found here, on every host, before any process starts.
"$PYTHON" -m megascale check "$@" --gpus $((NNODES * NPROC))

threads=$(($(nproc) / NPROC))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))} # torchrun's own default is 1

if [ "$NNODES" -eq 1 ]; then
    # Not --standalone, whose rendezvous unpickles what any user of this host may write into its store.
    port=$("$PYTHON" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
    hosts=(--nnodes 1 --rdzv-backend static --master-addr 127.0.0.1 --master-port "$port"
        --local-addr 127.0.0.1) # this host's own name may have no address
    MEGASCALE_JOB_SECRET=${MEGASCALE_JOB_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    export MEGASCALE_JOB_SECRET
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # nothing of a job on one host is open to the network
else
    hosts=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
# Each start of the ranks opens a store of its own, at a fresh port. In torchrun's store, which outlives a restart, they
# would read what the start before has written.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

exec "$PYTHON" "$(dirname "$0")/torchrun.py" "${hosts[@]}" --nproc-per-node "$NPROC" -m megascale train "$@"
