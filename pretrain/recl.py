"""Measure the relative effective context length (RECL) of causal models: how many tokens of context still help.

RECL compares each model with the best model of the group that has a shorter context, so give all models that you want to compare at
once. They must have the same vocabulary. Each token is predicted from windows of its own with 50, 100, 150, ... tokens of context, up to
--max-context. RECL is the context from which a step lowers the perplexity by less than 1 %. --fraction r counts only the fraction r of
the tokens which the best model with the shorter context predicts worst.

Examples:
  python pretrain/recl.py runs/causal --text stores/mine
  python pretrain/recl.py runs/causal runs/no_memory --text 'books/*.txt' --max-context 800 --step 50 --picture recl.png

Source: Transformer-XL, arXiv:1901.02860, section 4.3 and appendix C. See docs/evaluation.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum, option_name
from xlpre.config.cli import CommandParser, check_output_files


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="+", help="run folders or model folders of causal models")
    text = "files, globs, datasets, or one token store"
    parser.add_argument("--text", metavar="TEXT", nargs="+", required=True, help=text)
    text = "longest context in tokens (default: 400)"
    parser.add_argument("--max-context", metavar="N", type=int, default=400, help=text)
    text = "difference between two contexts, and the shortest of them (default: 50)"
    parser.add_argument("--step", metavar="N", type=int, default=50, help=text)
    text = "number of tokens to predict, at random positions of the text (default: 1000)"
    parser.add_argument("--tokens", metavar="N", type=int, default=1000, help=text)
    text = "fractions r (default: 0.1,0.5,1)"
    parser.add_argument("--fraction", metavar="R,R,...", default="0.1,0.5,1", help=text)
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="seed of the positions (default: 1)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write JSON lines, one per model")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw loss and gains by context (.png, .svg, .pdf)"
    )
    parser.add_device_option()
    return parser


def check_options(args: argparse.Namespace) -> list[float]:
    """Raise InputError if an option is out of range. Return the fractions."""
    for name, minimum in (("step", 1), ("tokens", 1), ("seed", 0), ("max_context", 2 * args.step)):
        check_minimum(option_name(name), getattr(args, name), minimum)
    check_output_files(args.out, args.picture)
    try:
        fractions = [float(value) for value in args.fraction.split(",")]
    except ValueError:
        fractions = []
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise InputError(
            f"--fraction={args.fraction} is invalid: it must be numbers above 0 and at most 1, separated by commas, such as 0.1,0.5,1."
        )
    return fractions


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    fractions = check_options(args)

    from pretrain.tools.context_group import draw_contexts, measure_contexts, to_records, to_rows
    from xlpre.common.files import write_text
    from xlpre.common.progress_bar import ProgressBar
    from xlpre.common.tables import to_jsonl, to_text
    from xlpre.training.distributed import select_device

    device = select_device(args.device)
    contexts = list(range(args.step, args.max_context + 1, args.step))
    with ProgressBar(None, "context") as progress:
        losses = measure_contexts(args.model, args.text, contexts, args.tokens, args.seed, device, progress.report)
    if args.out:
        write_text(args.out, to_jsonl(to_records(args.model, losses, contexts, fractions)))
    if args.picture:
        draw_contexts(args.model, losses, contexts, min(fractions), args.picture)
    print(
        f"{' '.join(args.text)}: {losses.shape[2]:,} tokens, contexts of {contexts[0]:,} to {contexts[-1]:,} tokens\n"
    )
    print(to_text(to_rows(args.model, losses, contexts, fractions)))


if __name__ == "__main__":
    run_main(main)
