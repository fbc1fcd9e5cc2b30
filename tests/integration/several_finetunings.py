"""Fine-tune several times in one process (or one job), given a JSON list of {"args": [...], "stop_at": STEP, "plot": true or false}.

With `stop_at`, which may be null, the process sends itself a signal after that number of steps: `signal`, or SIGTERM; with `in_seed`, only
in the run of that seed. `plot` false skips the plots, which take longer than a tiny training. `encode_alone` true lets every process encode
all examples. Prints the examples that each process encodes.
"""

import json
import os
import signal
import sys
from functools import partialmethod

import finetune.trainer.final_results
import finetune.trainer.inputs
from finetune.config import FinetuneConfig, task_overrides
from finetune.tasks.sequence import SequenceTask
from finetune.trainer.trainer import finetune as run
from xlpre.config.loader import load_config
from xlpre.training.progress import Progress

begin_step, end_step = Progress.begin_step, Progress.end_step
plot_all = finetune.trainer.final_results.plot_all
encode, share = SequenceTask.encode, finetune.trainer.inputs.encode_once_per_machine


def begin_step_of_seed(progress: Progress, seed: int, *args) -> None:
    progress.seed = seed
    begin_step(progress, seed, *args)


def end_step_and_stop(progress: Progress, stop_at: int | None, in_seed: int | None, number: int) -> bool:
    if progress.step + 1 == stop_at and in_seed in (None, progress.seed):
        os.kill(os.getpid(), number)
    return end_step(progress)


def encode_and_print(task: SequenceTask, examples, tokenizer):
    print(f"process {os.environ.get('RANK', '0')} encodes {len(examples)} examples", flush=True)
    return encode(task, examples, tokenizer)


SequenceTask.encode = encode_and_print
Progress.begin_step = begin_step_of_seed
for job in json.loads(sys.argv[-1]):
    stop = {"stop_at": job["stop_at"], "in_seed": job.get("in_seed"), "number": job.get("signal", signal.SIGTERM)}
    Progress.end_step = partialmethod(end_step_and_stop, **stop)
    finetune.trainer.final_results.plot_all = plot_all if job["plot"] else lambda *arguments: None
    encode_alone = job.get("encode_alone", False)
    finetune.trainer.inputs.encode_once_per_machine = (lambda encode, comm: encode()) if encode_alone else share
    print(job["args"], flush=True)
    run(load_config(FinetuneConfig, None, job["args"], task_overrides))
