#!/usr/bin/env bash
# A Slurm job: Ray on all nodes of the allocation, then `springline run` on the first of them.
#
#     sbatch examples/slurm.sh train.py --lr 0.1
#     sbatch --nodes 8 examples/slurm.sh -m package.train
#
# Submitted again with the same RUN, it goes on from the center: RUN=runs/one sbatch ...
# Needs the same Python with springline[ray] on all nodes, and a directory that they share: here the
# one that the job is submitted from. See docs/many-machines.md.
#SBATCH --job-name=springline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120

set -euo pipefail

: "${SLURM_JOB_ID:?This is a job script: submit it with sbatch.}"
run="${RUN:-runs/slurm-$SLURM_JOB_ID}"
port=$((20000 + SLURM_JOB_ID % 10000)) # another job may share a node
cpus="${SLURM_CPUS_PER_TASK:-1}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"

# Each `ray start --block` is a step of the job, and ends with it.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --port="$port" --num-cpus="$cpus" --block &
until ray health-check --address "$head:$port" 2>/dev/null; do
  kill -0 $! # else it has not started: the job fails now and not at its time limit
  sleep 2
done
if ((${#nodes[@]} > 1)); then
  others="$(IFS=,; echo "${nodes[*]:1}")"
  srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --nodelist="$others" --overlap \
    ray start --address="$head:$port" --num-cpus="$cpus" --block &
fi

# One worker per node with all of its cores; for GPUs add --gpus.
wanted=$((${#nodes[@]} * cpus))
until [[ "$(ray status --address "$head:$port" 2>/dev/null)" == *"/$wanted.0 CPU"* ]]; do
  kill -0 $!
  sleep 2
done
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  springline run --address "$head:$port" --workers "${#nodes[@]}" --cpus "$cpus" \
  --run "$run" --no-live --max-restarts 3 --restart-window 600 "$@" &
launcher=$!

# Slurm sends SIGTERM two minutes before the end: the launcher saves the center, and the run can go on.
trap 'kill -TERM "$launcher"' TERM
status=0
wait "$launcher" || status=$?
if kill -0 "$launcher" 2>/dev/null; then # the trap has ended the first wait
  wait "$launcher" || status=$?
fi
jobs -p | xargs -r kill 2>/dev/null || true
exit "$status"
