"""Fine-tune several times in one process (or one job): a JSON list of {"words": [...], "stop_at": STEP, "draws": true or false}.

With `stop_at`, which may be null, the process is asked to stop, by a signal, once it has made so many updates. Pictures, which take longer
than a tiny training, are drawn of what `draws`.
"""

import json
import os
import signal
import sys

import finetune.trainer.finalize
from finetune.config import FinetuneConfig, task_overrides
from finetune.trainer.loop import finetune as run
from xlpre.config.loader import load_config
from xlpre.training.progress import Progress

end_step, draw = Progress.end_step, finetune.trainer.finalize.draw

for one in json.loads(sys.argv[-1]):

    def stop_on_signal(course: Progress, stop_at=one["stop_at"]) -> bool:
        if course.step + 1 == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return end_step(course)

    Progress.end_step = stop_on_signal
    finetune.trainer.finalize.draw = draw if one["draws"] else lambda *arguments: None
    print(one["words"], flush=True)
    run(load_config(FinetuneConfig, None, one["words"], task_overrides))
