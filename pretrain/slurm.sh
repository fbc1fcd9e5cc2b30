#!/bin/bash
# Pretrain under SLURM, on as many nodes as it takes for as many days as it takes: docs/clusters.md.
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 pretrain/slurm.sh --config configs/pretrain/xlnet_base.yaml name=mine
#
# Submit it from the folder of the repository, which all nodes must see. Options of sbatch win over the lines below; a site may want
# --account and --partition besides.

#SBATCH --job-name=xlpre
#SBATCH --nodes=1
# one task for each GPU
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
# SIGUSR1 to this script alone, so many seconds before the time is over: what saving takes, and XLPRE_SAVE_SECONDS below that
#SBATCH --signal=B:USR1@300
# after the failure of a node SLURM itself puts the job back into the queue
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

save_seconds=${XLPRE_SAVE_SECONDS:-240} # for saving, once asked to stop; then the job goes back into the queue, saved or not
tries=${XLPRE_TRIES:-3}                 # starts of the training in this allocation, if it crashes
requeues=${XLPRE_REQUEUES:-10}          # no crash puts the job back into the queue once it has been there so often, for whatever reason

export PATH="$PWD/.venv/bin:$PATH"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
asked="" step="" deadline=0

# SIGUSR1 (the time is nearly over): save, and go on later. SIGTERM, SIGINT (somebody cancels): save, and that is all; a job that puts
# itself back into the queue when cancelled could not be got rid of.
# srun hands SIGTERM on to its tasks. These are the training processes themselves: torchrun, between the two, would kill them after
# 30 seconds of saving (before torch 2.12 that was not to be changed), end with status 1 although they saved, and start again what ended
# with a user's mistake.
ask() {
    asked=${asked:-$1}
    deadline=$((SECONDS + save_seconds))
    echo "slurm.sh: asked to $1; the training saves"
    [ -z "$step" ] || kill -TERM "$step" 2>/dev/null
}
trap 'ask requeue' USR1
trap 'ask stop' TERM INT

requeue() {
    echo "slurm.sh: back into the queue"
    exec scontrol requeue "$SLURM_JOB_ID" # which ends this job
}

train() {
    # a port of this job's own (and of this try's): 29500, everybody's default, may be taken on a shared node
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + $1) % 10000))
    shift
    # --wait: 60 s after the first process has ended the others are ended too; not at once (--kill-on-bad-exit), which would hide status 2
    # shellcheck disable=SC2016  # the variables are the task's
    srun --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
        # a site that binds GPUs to tasks shows each its own alone, as number 0
        [[ -z ${CUDA_VISIBLE_DEVICES:-} || $CUDA_VISIBLE_DEVICES == *,* ]] || LOCAL_RANK=0
        exec python -u pretrain/run.py "$@"' task "$@" &
    step=$!
    # not `wait`, which a trapped signal ends and which then cannot be told from the end of the training
    while kill -0 "$step" 2>/dev/null; do
        [ -z "$asked" ] || [ "$SECONDS" -lt "$deadline" ] || kill -KILL "$step"
        sleep 0.5
    done
    wait "$step" # srun ends with the highest status of its tasks
}

status=1
for try in $(seq "$tries"); do
    [ -z "$asked" ] || break
    train "$try" "$@"
    status=$?
    [ "$status" -ne 0 ] && [ "$status" -ne 2 ] || break # 0: finished, or saved and stopped; 2: a setting, a file or a disk is wrong
    echo "slurm.sh: the training ended with status $status (try $try of $tries)"
done

[ "$asked" != requeue ] || requeue
if [ -z "$asked" ] && [ "$status" -ne 0 ] && [ "$status" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ]; then
    requeue
fi
exit "$status"
