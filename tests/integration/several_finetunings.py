"""Fine-tune several times in one process (or one job), given a JSON list of {"args": [...], "stop_at": STEP, "plot": true or false}.

With `stop_at`, which may be null, the process sends itself a signal after that number of steps: `signal`, or SIGTERM. `plot` false skips
the plots, which take longer than a tiny training.
"""

import json
import os
import signal
import sys
from functools import partialmethod

import finetune.trainer.final_results
from finetune.config import FinetuneConfig, task_overrides
from finetune.trainer.trainer import finetune as run
from xlpre.config.loader import load_config
from xlpre.training.progress import Progress

end_step, plot_all = Progress.end_step, finetune.trainer.final_results.plot_all


def end_step_and_stop(progress: Progress, stop_at: int | None, number: int) -> bool:
    if progress.step + 1 == stop_at:
        os.kill(os.getpid(), number)
    return end_step(progress)


for job in json.loads(sys.argv[-1]):
    Progress.end_step = partialmethod(
        end_step_and_stop, stop_at=job["stop_at"], number=job.get("signal", signal.SIGTERM)
    )
    finetune.trainer.final_results.plot_all = plot_all if job["plot"] else lambda *arguments: None
    print(job["args"], flush=True)
    run(load_config(FinetuneConfig, None, job["args"], task_overrides))
