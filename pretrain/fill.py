"""Predict the missing words of sentences.

python pretrain/fill.py runs/quickstart/model "The ____ of the function is a list of strings."
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pretrain  # noqa: F401  before torch

# isort: split
from xlpre.common.cli_main import run_main
from xlpre.conversion.model_folder import load_folder
from xlpre.inference.cloze import BLANK, fill_blanks, format_result
from xlpre.objectives.registry import OBJECTIVES


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder, such as runs/quickstart/model")
    parser.add_argument("text", nargs="+", help=f"sentences with {BLANK} in place of a missing word")
    args = parser.parse_args(argv)
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
