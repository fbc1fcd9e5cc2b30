"""Fine-tune a pretrained model on a task: classification, regression, ranking, multiple choice or question answering.

`init_from` is the folder of the pretrained model. `task` is a public task, or `classify`, `regress` or `rank` for your own files. The
scores of each seed, the predictions and the model are written to runs/NAME. The same command resumes a stopped run from its last
checkpoint.

Examples:
  python finetune/run.py --config configs/finetune/classify.yaml init_from=runs/quickstart/model data.train=[train.csv] data.text=[review]
  deepspeed finetune/run.py --config configs/finetune/glue.yaml task=glue/mrpc init_from=runs/quickstart/model data.dir=glue_data name=mrpc
  deepspeed finetune/run.py --config configs/finetune/race.yaml task=race init_from=runs/quickstart/model data.dir=RACE num_seeds=3

See docs/finetuning.md for all tasks and their files, and docs/finetuning_settings.md for all settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune.config import FinetuneConfig, apply_precedence, task_overrides
from xlpre.common.cli_main import run_main
from xlpre.common.launcher import read_launcher
from xlpre.config.cli import SettingsParser

COMMON = (
    "task",
    "name",
    "init_from",
    "num_seeds",
    "epochs",
    "warmup_ratio",
    "data.dir",
    "data.train",
    "data.dev",
    "data.test",
    "data.text",
    "data.label",
    "data.max_seq_len",
    "optim.lr",
    "train.steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "eval.every",
)


def build_parser() -> SettingsParser[FinetuneConfig]:
    """Return the parser of the command line."""
    return SettingsParser(FinetuneConfig, __doc__, COMMON)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    read_launcher()
    config, explicit_keys, _ = build_parser().parse_config(argv, task_overrides)
    config = apply_precedence(config, explicit_keys.args, explicit_keys.own_file)

    from finetune.trainer.trainer import finetune
    from xlpre.training.distributed import destroy_process_group

    finetune(config)
    destroy_process_group()


if __name__ == "__main__":
    run_main(main)
