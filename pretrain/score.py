"""Compute the log-likelihood of sentences, or the accuracy on minimal pairs.

Each line of FILE is a text. The output has one JSON object per line with the log-likelihood in nats (`log_likelihood`), the number of
tokens, and the number of <unk> among them. Modes:

  any-order  chain rule in several factorization orders, the first from left to right; mean and standard deviation over the orders
  pll        pseudo-log-likelihood: each token, given all others
  causal     chain rule from left to right, of causal models

Permutation models have the modes pll (the default) and any-order, denoising models pll, and causal models causal.

With --pairs, the files hold minimal pairs in the form of BLiMP: JSON lines with `sentence_good`, `sentence_bad`, `UID` (the paradigm) and
`linguistics_term` (the phenomenon). A pair is right if the good sentence has the higher log-likelihood.

Examples:
  python pretrain/score.py runs/mine sentences.txt --out scores.jsonl
  python pretrain/score.py runs/mine sentences.txt --mode any-order --orders 1 --tokens
  python pretrain/score.py runs/mine --pairs blimp --prefix "$(cat configs/minimal_pairs/paragraph.txt)" --out blimp.json

See docs/scoring.md for the modes, and docs/python.md for the same from Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum, option_name
from xlpre.config.cli import CommandParser, check_output_files

COUNTS = ("orders", "window", "batch_tokens", "limit")  # options that are at least 1


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="run folder, such as runs/quickstart, or model folder")
    text = "text file, perhaps compressed, with one text per line (default: standard input)"
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help=text)
    text = ".jsonl files of minimal pairs, or folders of them"
    parser.add_argument("--pairs", metavar="FILE", type=Path, nargs="+", help=text)
    text = "any-order, pll or causal (default: causal for causal models, otherwise pll)"
    parser.add_argument("--mode", choices=("any-order", "pll", "causal"), help=text)
    text = "text that comes before each text; it is read, but not scored (default: none)"
    parser.add_argument("--prefix", metavar="TEXT", default="", help=text)
    text = "number of orders of any-order (default: 4); 1 is from left to right only"
    parser.add_argument("--orders", metavar="N", type=int, help=text)
    parser.add_argument("--seed", metavar="N", type=int, help="seed of the random orders (default: 1)")
    parser.add_argument("--tokens", action="store_true", help="also print the score of each token")
    text = "pairs of each paradigm to read, from the start (default: all)"
    parser.add_argument("--limit", metavar="N", type=int, help=text)
    text = "write the JSON lines, or the accuracies of --pairs as a JSON object, to this file"
    parser.add_argument("--out", metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw the accuracies of --pairs (.png, .svg, .pdf)"
    )
    text = "longest window in tokens; longer texts are read in windows, with memory (default: 512)"
    parser.add_argument("--window", metavar="N", type=int, default=512, help=text)
    text = "tokens of memory for texts longer than a window (default: that of the model)"
    parser.add_argument("--mem-len", metavar="N", type=int, help=text)
    text = "content and query rows of a forward pass (default: 1024); a GPU is faster with more"
    parser.add_argument("--batch-tokens", metavar="N", type=int, default=1024, help=text)
    parser.add_device_option()
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Raise InputError if options contradict each other or are out of range."""
    for name in COUNTS:
        check_minimum(option_name(name), getattr(args, name), 1)
    for name in ("seed", "mem_len"):
        check_minimum(option_name(name), getattr(args, name), 0)
    for name in ("orders", "seed"):
        if (value := getattr(args, name)) is not None and args.mode != "any-order":
            raise InputError(f"--{name}={value} is invalid without --mode any-order: it has no effect. Leave it out.")
    if args.pairs and (args.file or args.tokens):
        option = "--tokens" if args.tokens else f"FILE={args.file}"
        raise InputError(f"{option} is invalid with --pairs. Leave one of them out.")
    for name in ("limit", "picture"):
        if getattr(args, name) is not None and not args.pairs:
            raise InputError(
                f"--{name}={getattr(args, name)} is invalid without --pairs. Leave it out, or give --pairs FILE."
            )
    if args.file and not args.file.is_file():
        problem = "it is not a regular file" if args.file.exists() else "there is no such file"
        raise InputError(
            f"FILE={args.file} is invalid: {problem}. Give a text file, or leave it out to read standard input."
        )
    if args.file and not args.file.stat().st_size:
        raise InputError(f"FILE={args.file} is invalid: it is empty. Write one text per line.")
    if args.file and args.file.suffix == ".jsonl":
        raise InputError(
            f"FILE={args.file} is invalid: each line of FILE is a text, not JSON. For minimal pairs, use --pairs {args.file}."
        )
    check_output_files(args.out, args.picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    check_options(args)

    from functools import partial

    from pretrain.tools.text_scores import CHUNK_LINES, draw_accuracies, score_lines, score_pairs, write_records
    from xlpre import load
    from xlpre.common.files import write_text
    from xlpre.common.messages import counted
    from xlpre.common.tables import to_text
    from xlpre.inference.minimal_pairs import read_pairs
    from xlpre.inference.modes import SCORE_MODES, resolve_mode
    from xlpre.inference.scoring import N_ORDERS

    pairs = read_pairs(args.pairs, args.limit) if args.pairs else []
    lm = load(args.model, args.device)
    mode = resolve_mode(args.mode, lm.objective, SCORE_MODES)
    n_orders, seed = args.orders or N_ORDERS, 1 if args.seed is None else args.seed
    score_texts = partial(
        lm.score,
        mode=mode,
        prefix=args.prefix,
        n_orders=n_orders,
        seed=seed,
        window=args.window,
        mem_len=args.mem_len,
        batch_tokens=args.batch_tokens,
    )
    if not args.pairs:
        is_interactive = args.file is None and sys.stdin.isatty()
        chunk_lines = 1 if is_interactive else CHUNK_LINES
        write_records(score_lines(score_texts, lm.tokenizer, args.file, chunk_lines, args.tokens), args.out)
        return
    accuracies = score_pairs(score_texts, lm.tokenizer, pairs)
    orders = {"n_orders": n_orders, "seed": seed} if mode == "any-order" else {}
    prefix = {"prefix": args.prefix} if args.prefix else {}
    name = f"{mode}, {counted(n_orders, 'order')}" if orders else mode
    name += f", prefix {args.prefix!r}" if prefix else ""
    print(to_text(accuracies.paradigm_table()), to_text(accuracies.phenomenon_table()), sep="\n\n")
    print(
        f"\n{args.model}, {name}: {accuracies.overall.percent:.2f} % of {accuracies.overall.n_pairs:,} pairs, mean over paradigms"
    )
    if lm.model.config.mem_len and not args.prefix:
        print(
            'note: models trained with memory judge sentences better after a paragraph of other text: --prefix "TEXT" '
            "(docs/scoring.md#minimal-pairs)",
            file=sys.stderr,
        )
    if args.out:
        write_text(args.out, json.dumps({"mode": mode, **accuracies.to_json(), **orders, **prefix}, indent=1) + "\n")
    if args.picture:
        draw_accuracies(accuracies, args.picture, f"{args.model}, {name}: {accuracies.overall.percent:.1f} %")


if __name__ == "__main__":
    run_main(main)
