#!/bin/bash
# SEED RL under SLURM: the first node learns, all others step environments for it. A preempted job is requeued and resumes.
#   sbatch examples/slurm.sh
#SBATCH --job-name=coterie
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -u
RUN=${RUN:-$PWD/runs/slurm}               # on a file system that all nodes see
ENV=${ENV:-Breakout-v5}
PORT=${PORT:-8765}
HEAD=${HEAD:-$(hostname -s)}              # this script runs on the first node
KEYS=$RUN.keys

rm -rf "$KEYS" && coterie keys "$KEYS" --host "$HEAD"
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}   # srun does not take it from sbatch
if compgen -G "$RUN/checkpoints/*/manifest.json" > /dev/null; then
  learn=(coterie resume --or-earlier "$RUN")
else
  [ -e "$RUN" ] && mv "$RUN" "$RUN.$(date +%s)"   # it was killed before its first checkpoint
  learn=(coterie train seed-vtrace --env "$ENV" --actors 0 --out "$RUN" --wire.bind "0.0.0.0:$PORT"
    --wire.token-file "$KEYS/token" --wire.cert "$KEYS/cert.pem" --wire.key "$KEYS/key.pem" ${OPTIONS:-})
fi
srun --nodes=1 --ntasks=1 --nodelist="$HEAD" "${learn[@]}" &
learner=$!
others=$((SLURM_NNODES - 1))               # named as tasks, too: sbatch has set SLURM_NTASKS for all nodes
srun --nodes=$others --ntasks=$others --exclude="$HEAD" coterie envs --connect "$HEAD:$PORT" --env "$ENV" \
  --env.num-envs 64 --wire.token-file "$KEYS/envs.token" --wire.cert "$KEYS/cert.pem" &
wait $learner
code=$?
if [ $code -eq 75 ]; then                 # checkpointed on the signal
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
