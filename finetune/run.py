"""Fine-tune a pretrained model on a task.

deepspeed finetune/run.py --config configs/finetune/glue.yaml task=glue/mrpc init=runs/quickstart/model data.dir=glue_data name=mrpc
deepspeed finetune/run.py --config configs/finetune/race.yaml task=race init=runs/quickstart/model data.dir=RACE seeds=3 name=race
python finetune/run.py --config configs/finetune/classify.yaml init=runs/quickstart/model data.train=[train.csv] data.text=[review]

Stopped at any time, the same command goes on from the last checkpoint. docs/finetuning.md has all tasks.
"""

from __future__ import annotations

from finetune.config import FinetuneConfig
from finetune.recipe import apply_cli_precedence, task_overrides
from finetune.trainer.loop import finetune
from xlpre.common.cli_main import run_main
from xlpre.config.cli import given_keys, with_flags
from xlpre.training.distributed import leave


def main() -> None:
    """The command."""
    config, _ = with_flags(FinetuneConfig, __doc__ or "", {}, recipe=task_overrides)
    finetune(apply_cli_precedence(config, given_keys({}).words))
    leave()


if __name__ == "__main__":
    run_main(main)
