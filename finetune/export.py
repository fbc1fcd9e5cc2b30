"""Export a fine-tuned model with its head for Hugging Face transformers.

python finetune/export.py runs/mrpc exported/mrpc

Load the result with `AutoModelForSequenceClassification` (RACE: `AutoModelForMultipleChoice`, SQuAD: `XLNetForQuestionAnswering`) and
`AutoTokenizer`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from finetune.tasks.regression import RegressionTask
from finetune.trainer.task_model import open_task_model
from xlpre.common.cli_main import run_main
from xlpre.conversion.task_model_folder import save_huggingface_task_model


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="a fine-tuned model folder, such as runs/mrpc/model, or the folder of its run"
    )
    parser.add_argument("target", type=Path, help="new folder to write to; it must not exist")
    args = parser.parse_args(argv)
    if args.target.exists():
        raise ValueError(f"target={args.target} is invalid: it exists already. Name a new folder.")
    model, task = open_task_model(args.source)
    if isinstance(task, RegressionTask):
        model = dataclasses.replace(model, head=task.denormalize_head(model.head))
    pooling = model.task["pooling"]
    save_huggingface_task_model(args.target, model, task.head_kind, task.label_names, pooling, task.padding_side)
    print(f"{args.source}: exported {task.name} for Hugging Face transformers to {args.target}")


if __name__ == "__main__":
    run_main(main)
