"""SLURM scripts of an ablation: a job array with one task per pretraining run, and a job for all other stages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

ARRAY = """\
#!/bin/bash
# The pretraining runs of {file} as a SLURM job array, one task per run. Submit it from the folder of the repository; options of sbatch
# override the lines below:
#
#   sbatch {path}
#
# pretrain/slurm.sh explains the options.

#SBATCH --job-name={name}
#SBATCH --array=0-{last}
{resources}
#SBATCH --output=slurm-%x-%A_%a.out

case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
exec bash pretrain/slurm.sh "$@"
"""

FINISH = """\
#!/bin/bash
# Evaluate, fine-tune and compare the runs of {file} when their job array has ended. With more GPUs, several stages run at a time. If the
# job is stopped or its time ends, submit it again: it resumes.

#SBATCH --job-name={name}
{resources}
#SBATCH --output=slurm-%x-%j.out

export PATH="$PWD/.venv/bin:$PATH"
exec {command}
"""

RESOURCES = """\
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gpus-per-node={processes}
#SBATCH --cpus-per-task={cores}
#SBATCH --time=24:00:00
#SBATCH --signal={signal}
#SBATCH --requeue
#SBATCH --open-mode=append"""
CORES = 4  # of a process


def job_array(file: str, path: str, name: str, runs: Sequence[Sequence[str]], processes: int) -> str:
    """Return the script of a job array.

    Args:
        file: the ablation file.
        path: path of the script.
        name: name of the job.
        runs: arguments of pretrain/run.py for each run.
        processes: number of processes of a run.
    """
    cases = "\n".join(f"{index}) set -- {shlex.join(arguments)} ;;" for index, arguments in enumerate(runs))
    resources = RESOURCES.format(tasks=processes, processes=processes, cores=CORES, signal="B:USR1@300")
    return ARRAY.format(
        file=shlex.quote(file),
        path=shlex.quote(path),
        name=shlex.quote(name),
        last=len(runs) - 1,
        resources=resources,
        cases=cases,
    )


def finishing_job(file: str, name: str, command: Sequence[str], processes: int) -> str:
    """Return the script of the job that runs all stages after pretraining.

    Args:
        file: the ablation file.
        name: name of the job array.
        command: command that runs all stages.
        processes: number of processes of a stage.
    """
    resources = RESOURCES.format(tasks=1, processes=processes, cores=CORES * processes, signal="B:TERM@300")
    return FINISH.format(
        file=shlex.quote(file), name=shlex.quote(f"{name}_finish"), resources=resources, command=shlex.join(command)
    )
