#!/usr/bin/env bash
# One run over several nodes, started once on each of them:
#   NODE_RANK=0 NODES=2 MASTER_ADDR=node0 configs/launch/torchrun.sh --config configs/qwen3_4b.yaml --config configs/strategy/hsdp.yaml
# GPUS_PER_NODE (8), MASTER_PORT (29500) and PYTHON can be set as well. All nodes need the same files,
# and one folder that all of them see as trainer.logger.init_args.save_dir.
set -euo pipefail

: "${NODE_RANK:?number of this node, from 0}" "${NODES:?number of nodes}" "${MASTER_ADDR:?host name of node 0}"
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# A rank that fails ends the run on all nodes; a collective that waits longer than
# trainer.strategy.init_args.timeout_s is an error.
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE" \
    --rdzv-backend c10d --rdzv-id "${RUN_ID:-trace}" \
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" \
    -m trace_pl fit "$@" --trainer.num_nodes "$NODES" --trainer.devices "$GPUS_PER_NODE"
