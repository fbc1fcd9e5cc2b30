"""Predict with a fine-tuned model: one example per line in, one JSON object per line out.

A line is a JSON object with the fields of the training files (RACE: article, question, options; SQuAD: context, question). For a task
with one text, a line may also be the text itself; for a task with two texts, both texts separated by a tab, or a JSON list of them. In
tables (.csv, .parquet, and .tsv with a header), each row is an example. A SQuAD model also reads SQuAD's .json files.

Examples:
  python finetune/predict.py runs/mrpc < pairs.tsv
  python finetune/predict.py runs/mrpc/model questions.jsonl > predictions.jsonl

docs/finetuning.md lists the fields of each task.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.common.errors import check_minimum
from xlpre.config.cli import CommandParser


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    text = "fine-tuned model folder, such as runs/mrpc/model, or the folder of its run"
    parser.add_argument("model", metavar="MODEL", type=Path, help=text)
    text = "file with one example per line (default: standard input)"
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help=text)
    text = "examples per forward pass (default: 32)"
    parser.add_argument("--batch-size", metavar="N", type=int, default=32, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    check_minimum("--batch-size", args.batch_size, 1, "Leave it out for 32.")

    from finetune.tasks.span import SpanTask
    from finetune.trainer.inference import CHUNK_SIZE, predict_lines, read_input
    from finetune.trainer.task_model import open_task_model
    from xlpre.common.tables import print_json

    model, task = open_task_model(args.model)
    lines = read_input(args.file, task.text_columns, isinstance(task, SpanTask))
    is_interactive = args.file is None and os.isatty(0)
    for prediction in predict_lines(model, task, lines, args.batch_size, 1 if is_interactive else CHUNK_SIZE):
        print_json(prediction)


if __name__ == "__main__":
    run_main(main)
