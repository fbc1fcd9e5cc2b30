"""Fine-tune a pretrained model on a task.

deepspeed finetune/run.py --config configs/finetune/glue.yaml task=glue/mrpc init=runs/quickstart/model data.dir=glue_data name=mrpc
deepspeed finetune/run.py --config configs/finetune/race.yaml task=race init=runs/quickstart/model data.dir=RACE seeds=3 name=race
python finetune/run.py --config configs/finetune/classify.yaml init=runs/quickstart/model data.train=[train.csv] data.text=[review]

Stopped at any time, the same command goes on from the last checkpoint. docs/finetuning.md has all tasks.
"""

from __future__ import annotations

from finetune.config import FinetuneConfig, apply_cli_precedence, task_overrides
from finetune.trainer.loop import finetune
from xlpre.common.cli_main import run_main
from xlpre.config.cli import parse_config_and_flags, read_explicit_keys
from xlpre.training.distributed import destroy_process_group


def main() -> None:
    """The command."""
    config, _ = parse_config_and_flags(FinetuneConfig, __doc__ or "", {}, recipe=task_overrides)
    finetune(apply_cli_precedence(config, read_explicit_keys({}).words))
    destroy_process_group()


if __name__ == "__main__":
    run_main(main)
