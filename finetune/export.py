"""Export a fine-tuned model with its head for Hugging Face transformers.

Load the result with `AutoTokenizer` and `AutoModelForSequenceClassification` (RACE: `AutoModelForMultipleChoice`, SQuAD:
`XLNetForQuestionAnswering`). The model card, README.md, contains the settings and scores of the run.

Examples:
  python finetune/export.py runs/mrpc exported/mrpc
  python finetune/export.py runs/mrpc exported/mrpc_hub --push me/my-mrpc

See docs/finetuning.md for what the run folder contains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.config.cli import CommandParser, add_push_option


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    text = "fine-tuned model folder, such as runs/mrpc/model, or the folder of its run"
    parser.add_argument("source", metavar="SOURCE", type=Path, help=text)
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write; it must not exist")
    add_push_option(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    if args.target.exists():
        raise InputError(f"TARGET={args.target} is invalid: it exists already. Name a new folder.")

    from finetune.tasks.regression import RegressionTask
    from finetune.tasks.span import SpanTask
    from finetune.tasks.text_classification import CSV_CORPORA
    from finetune.trainer.run_record import read_record
    from finetune.trainer.task_model import open_task_model
    from xlpre.conversion.hub_upload import check_repository, finish_export
    from xlpre.conversion.model_card import task_model_card, without_paths
    from xlpre.conversion.task_model_folder import save_huggingface_task_model

    if args.push:
        check_repository(args.push)
    model, task = open_task_model(args.source)
    if isinstance(task, RegressionTask):
        model = dataclasses.replace(model, head=task.denormalize_head(model.head))
    record = read_record(args.source, task, model.folder.provenance)
    name = args.push or args.target.name
    n_texts = 1 if task.name in CSV_CORPORA else len(task.text_columns)  # these corpora join their columns
    threshold = task.no_answer_threshold if isinstance(task, SpanTask) else None
    card = task_model_card(model.folder, name, task.name, task.head_kind, n_texts, task.label_names, record, threshold)
    model = dataclasses.replace(model, folder=without_paths(model.folder))
    save_huggingface_task_model(
        args.target,
        model,
        task.head_kind,
        task.label_names,
        model.task["pooling"],
        task.padding_side,
        card.render(),
    )
    print(f"{args.source}: exported {task.name} for Hugging Face transformers to {args.target}")
    finish_export(args.source, args.target, args.push)


if __name__ == "__main__":
    run_main(main)
