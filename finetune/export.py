"""Write a fine-tuned model for Hugging Face's transformers, its head included.

python finetune/export.py runs/mrpc exported/mrpc

`AutoModelForSequenceClassification` (of RACE `AutoModelForMultipleChoice`, of SQuAD `XLNetForQuestionAnswering`) and `AutoTokenizer`
open the result.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from finetune.tasks.regression import RegressionTask
from finetune.trainer.task_model import open_task_model
from xlpre.common.cli_main import run_main
from xlpre.conversion.task_model import save_huggingface_task_model


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a fine-tuned folder, such as runs/mrpc/model, or a run's")
    parser.add_argument("target", type=Path, help="the folder to write; one that is there is never overwritten")
    words = parser.parse_args(argv)
    if words.target.exists():
        raise ValueError(f"{words.target} is there already; name a folder that is not")
    model, task = open_task_model(words.source)
    if isinstance(task, RegressionTask):
        model = dataclasses.replace(model, head=task.unscaled(model.head))
    summary = model.task["pooling"]
    save_huggingface_task_model(words.target, model, task.head_kind, task.label_names, summary, task.padding_side)
    print(f"{words.source}: {task.name}, written to {words.target} for Hugging Face's transformers")


if __name__ == "__main__":
    run_main(main)
