#!/bin/bash
# One task per machine, eight GPUs each. Submit the same job again to resume.
# Follows the documentation of SLURM and torchrun; it has not been run.
#SBATCH --nodes=8 --ntasks-per-node=1 --gpus-per-node=8 --requeue
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=8 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29500" \
    -m luffy train paper/luffy out=/shared/runs name=big launch=torchrun parallel.shard=hybrid
