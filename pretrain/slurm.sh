#!/bin/bash
# Pretrain under SLURM, on any number of nodes and for any number of time limits. See docs/distributed.md.
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 pretrain/slurm.sh --config configs/pretrain/xlnet_base.yaml name=mine
#
# Submit it from the folder of the repository, which must be on a file system that all nodes share. Options of sbatch override the
# lines below. A site may also require --account and --partition.

#SBATCH --job-name=xlpre
#SBATCH --nodes=1
# one task per GPU
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
# send SIGUSR1 to this script only, 300 s before the time limit; this number must be larger than XLPRE_SAVE_SECONDS
#SBATCH --signal=B:USR1@300
# SLURM itself requeues the job after the failure of a node
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

save_seconds=${XLPRE_SAVE_SECONDS:-240} # seconds to save after a stop request; then the training is killed
tries=${XLPRE_TRIES:-3}                 # number of starts in this allocation if the training crashes
requeues=${XLPRE_REQUEUES:-10}          # after this number of requeues for any reason, a crash no longer requeues the job

export PATH="$PWD/.venv/bin:$PATH"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
request="" step="" deadline=0

# SIGUSR1 (time limit): save and requeue. SIGTERM, SIGINT (scancel): save and exit; requeueing would make the job impossible to cancel.
# scancel sends SIGTERM to the tasks, which are the training processes themselves, and not to this script; srun would kill its tasks if it
# received SIGTERM. torchrun is not used: it would kill them after 30 seconds of saving (not configurable before torch 2.12), exit with
# status 1 although they saved, and restart them after a user error.
request_stop() {
    request=${request:-$1}
    deadline=$((SECONDS + save_seconds))
    echo "slurm.sh: $1 requested; the training saves"
    [ -z "$step" ] || scancel --signal=TERM "$SLURM_JOB_ID"
}
trap 'request_stop requeue' USR1
trap 'request_stop stop' TERM INT

requeue() {
    echo "slurm.sh: requeueing the job"
    exec scontrol requeue "$SLURM_JOB_ID" # ends this job
}

train() {
    # a port that depends on the job and the try, because the default, 29500, may be in use on a shared node
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + $1) % 10000))
    shift
    # --wait: the other processes are killed 60 s after the first exit. --kill-on-bad-exit would kill them at once and hide status 2.
    srun --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" python -u pretrain/run.py "$@" &
    step=$!
    # not `wait`: a trapped signal interrupts it, and its status then looks like the exit status of the training
    while kill -0 "$step" 2>/dev/null; do
        [ -z "$request" ] || [ "$SECONDS" -lt "$deadline" ] || kill -KILL "$step"
        sleep 0.5
    done
    wait "$step" # the exit status of srun is the highest of its tasks
}

status=1
for try in $(seq "$tries"); do
    [ -z "$request" ] || break
    train "$try" "$@"
    status=$?
    [ "$status" -ne 0 ] && [ "$status" -ne 2 ] || break # 0: finished, or saved and stopped; 2: error in a setting, a file or a disk
    echo "slurm.sh: the training ended with status $status (try $try of $tries)"
done

[ "$request" != requeue ] || requeue
if [ -z "$request" ] && [ "$status" -ne 0 ] && [ "$status" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    requeue
fi
exit "$status"
