"""Show how the model sees a text: tokens, targets, factorization order, and the attention masks of both streams.

The command needs a vocabulary, but no model and no token store. Settings select the window, the objective and the memory.

Examples:
  python pretrain/explain.py "Your text." --config configs/pretrain/quickstart.yaml
  python pretrain/explain.py "Your text." --config configs/pretrain/quickstart.yaml objective.max_span=1 --step 7 --picture masks.png

See docs/objectives.md, which explains the output line by line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.config.cli import SettingsParser

COMMON = (
    "seed",
    "tokenizer.path",
    "data.seq_len",
    "data.reuse_len",
    "data.pairs",
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
    parser.add_argument("text", help="text in quotes; each line is a paragraph")
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        default=0,
        help="training step; each step draws other targets and another order (default: 0)",
    )
    parser.add_argument("--backward", action="store_true", help="read from right to left")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the masks into a .png, .svg or .pdf file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    config, _, args = build_parser().parse_config(argv)
    if not 0 <= args.step < 2**63:
        raise ValueError(f"--step {args.step} is invalid: it must be at least 0 and below 2^63. Leave it out for 0.")

    from pretrain.tools.explanation import explain, load_tokenizer, save_picture, to_text

    explanation = explain(args.text, load_tokenizer(config), config, args.step, args.backward)
    print(to_text(explanation))
    if args.picture:
        save_picture(explanation, args.picture)
        print(f"\n{args.picture}: picture of the masks written")


if __name__ == "__main__":
    run_main(main)
