"""SLURM job array of an ablation: a script with one task per run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SCRIPT = """\
#!/bin/bash
# The pretraining runs of {file} as a SLURM job array, one task per run. Submit it from the folder of the repository; options of sbatch
# override the lines below:
#
#   sbatch {path}
#
# pretrain/slurm.sh explains the options. When all tasks are finished, evaluate, fine-tune and compare the runs:
#
#   python pretrain/ablate.py {file} --run

#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={processes}
#SBATCH --gpus-per-node={processes}
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out

case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
exec bash pretrain/slurm.sh "$@"
"""


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
    return SCRIPT.format(
        file=shlex.quote(file), path=shlex.quote(path), name=name, last=len(runs) - 1, processes=processes, cases=cases
    )
