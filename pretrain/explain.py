"""Show how the model sees a text: tokens, targets, factorization order, and the attention masks of both streams.

The command needs a vocabulary, but no model and no token store. Settings select the window, the objective and the memory. With --model,
it also shows the probability of each target in this order, and its probability if no other target is seen (XLNet, section 2.6).

Examples:
  python pretrain/explain.py "Your text." --config configs/pretrain/quickstart.yaml
  python pretrain/explain.py "Your text." --config configs/pretrain/quickstart.yaml objective.max_span=1 --step 7 --picture masks.png
  python pretrain/explain.py --model runs/quickstart --picture attention.png

See docs/objectives.md, which explains the output line by line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.config.cli import SettingsParser, check_output_files
from xlpre.config.loader import load_config

COMMON = (
    "seed",
    "tokenizer.path",
    "data.seq_len",
    "data.reuse_len",
    "objective.name",
    "objective.partial_k",
    "objective.perm_size",
    "objective.max_span",
    "objective.left_to_right",
    "objective.independent",
    "objective.next_sentence",
    "model.mem_len",
    "model.attention_span",
    "memory",
)


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    parser = SettingsParser(PretrainConfig, __doc__, COMMON)
    text = "text; a line is a paragraph (default: an example)"
    parser.add_argument("text", metavar="TEXT", nargs="?", help=text)
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        default=0,
        help="training step; each step draws other targets and another order (default: 0)",
    )
    parser.add_argument("--backward", action="store_true", help="read from right to left")
    text = "run or model folder that predicts the targets"
    parser.add_argument("--model", metavar="MODEL", type=Path, help=text)
    text = "draw masks, or attention of --model (.png, .svg, .pdf)"
    parser.add_argument("--picture", metavar="FILE", type=Path, help=text)
    return parser


def check_options(args: argparse.Namespace) -> None:
    """Raise InputError if an option is out of range."""
    if not 0 <= args.step < 2**63:
        raise InputError(f"--step={args.step} is invalid: it must be at least 0 and below 2^63. Leave it out for 0.")
    check_output_files(None, args.picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    if args.text and re.fullmatch(r"[a-z0-9_.]+=\S*", args.text):  # a setting, if the text is left out
        args.text, args.overrides = None, [args.text, *args.overrides]
    check_options(args)

    from pretrain.tools.explanation import explain, explain_example, find_tokenizer, save_picture, to_text

    run = explain_example if args.text is None else partial(explain, args.text)
    if args.model is None:
        config = load_config(PretrainConfig, args.config, args.overrides)
        explanation = run(find_tokenizer(config), config, args.step, args.backward)
        print(to_text(explanation))
        if args.picture:
            save_picture(explanation, args.picture)
            print(f"\n{args.picture}: picture of the masks written")
        return

    from pretrain.tools.model_explanation import load_model, predict_targets, save_attention

    config, model, tokenizer = load_model(args.model, args.config, args.overrides)
    explanation = run(tokenizer, config, args.step, args.backward)
    print(to_text(explanation, predict_targets(model, explanation)))
    if args.picture:
        save_attention(model, explanation, args.picture)
        print(f"\n{args.picture}: picture of the attention written")


if __name__ == "__main__":
    run_main(main)
