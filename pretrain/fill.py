"""Predict the missing words of sentences with a pretrained model.

A missing word is written as ____ (three or more underscores). Each blank is one token of the vocabulary.

Examples:
  python pretrain/fill.py runs/quickstart "Returns the ____ of the list."
  python pretrain/fill.py runs/quickstart "Returns a ____ of strings." "If ____ is given, it must be a ____."

See docs/python.md for the same from Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from xlpre.common.cli_main import run_main
from xlpre.config.cli import CommandParser
from xlpre.text.blanks import BLANK


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="run folder, such as runs/quickstart, or model folder")
    parser.add_argument(
        "text", metavar="TEXT", nargs="+", help=f"sentence in quotes, with {BLANK} in place of a missing word"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)

    from xlpre.conversion.model_folder import load_folder
    from xlpre.inference.cloze import fill_blanks, format_result
    from xlpre.objectives.registry import OBJECTIVES

    folder = load_folder(args.model)
    if not OBJECTIVES[folder.objective].sees_ahead:
        raise ValueError(
            f"{args.model} is invalid: a {folder.objective} model does not see the text after a blank. "
            "Use a model trained with objective.name=permutation or denoising."
        )
    model, tokenizer = folder.model(), folder.require_tokenizer(args.model)
    for text in args.text:
        print(format_result(fill_blanks(model, tokenizer, text)))


if __name__ == "__main__":
    run_main(main)
