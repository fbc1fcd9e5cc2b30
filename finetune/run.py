"""Fine-tune a pretrained model on a task.

deepspeed finetune/run.py --config configs/finetune/glue.yaml task=glue/mrpc init_from=runs/quickstart/model data.dir=glue_data name=mrpc
deepspeed finetune/run.py --config configs/finetune/race.yaml task=race init_from=runs/quickstart/model data.dir=RACE num_seeds=3 name=race
python finetune/run.py --config configs/finetune/classify.yaml init_from=runs/quickstart/model data.train=[train.csv] data.text=[review]

A run that was stopped resumes from its last checkpoint with the same command. docs/finetuning.md lists all tasks.
"""

from __future__ import annotations

from finetune.config import FinetuneConfig, apply_cli_precedence, task_overrides
from finetune.trainer.trainer import finetune
from xlpre.common.cli_main import run_main
from xlpre.config.cli import parse_config_and_flags, read_explicit_keys
from xlpre.training.distributed import destroy_process_group


def main() -> None:
    """Run the command."""
    config, _ = parse_config_and_flags(FinetuneConfig, __doc__ or "", {}, derive_overrides=task_overrides)
    finetune(apply_cli_precedence(config, read_explicit_keys({}).args))
    destroy_process_group()


if __name__ == "__main__":
    run_main(main)
