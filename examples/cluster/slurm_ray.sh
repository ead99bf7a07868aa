#!/bin/bash
# With Ray a lost machine restarts the workers instead of the job; one machine is spare.
# Follows the documentation of SLURM and Ray; it has not been run.
#SBATCH --nodes=9 --ntasks-per-node=1 --gpus-per-node=8
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --port=6379 --block &
sleep 20
srun --nodes=8 --ntasks=8 --exclude="$head" ray start --address="$head:6379" --block &
sleep 20
srun --overlap --nodes=1 --ntasks=1 -w "$head" luffy train paper/luffy out=/shared/runs name=big \
    launch=ray parallel.workers=64 parallel.shard=hybrid ray.address=auto
