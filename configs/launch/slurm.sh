#!/usr/bin/env bash
# The same run under SLURM; srun starts one torchrun on each node.
#   sbatch configs/launch/slurm.sh --config configs/qwen3_4b.yaml --config configs/strategy/hsdp.yaml
# A job that is requeued goes on where it stopped: add --ckpt_path last.
#SBATCH --job-name=trace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=runs/%x-%j.out
set -euo pipefail

export NODES=$SLURM_NNODES GPUS_PER_NODE=${GPUS_PER_NODE:-8} RUN_ID=$SLURM_JOB_ID
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

# SLURM copies this script elsewhere; the folder it was submitted from holds the project.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec configs/launch/torchrun.sh "$@"' -- "$@"
