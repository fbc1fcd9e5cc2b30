"""Show how the model sees a text: tokens, targets, factorization order, and the attention masks of both streams.

python pretrain/explain.py "Your text." --config configs/pretrain/quickstart.yaml
python pretrain/explain.py "Your text." --config configs/pretrain/quickstart.yaml objective.max_span=1 --step 7 --picture it.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pretrain.config import PretrainConfig
from pretrain.tools.explanation import FORMATS, explain, load_tokenizer, save_picture, to_text
from xlpre.common.cli_main import run_main
from xlpre.config.loader import load_config


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="in quotes; each line is a paragraph")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override those of the file")
    parser.add_argument("--config", help="a YAML file, see configs/")
    parser.add_argument("--step", type=int, default=0, help="each step has other targets and another order")
    parser.add_argument("--backward", action="store_true", help="read from right to left")
    parser.add_argument("--picture", type=Path, help=f"draw the masks into this file ({', '.join(FORMATS)})")
    args = parser.parse_intermixed_args(argv)
    if not 0 <= args.step < 2**63:
        raise ValueError(f"--step {args.step} is invalid: it must be at least 0 and below 2^63. Leave it out for 0.")
    for override in args.overrides:
        if "=" not in override:
            raise ValueError(
                f"{override!r} is invalid: it must have the form key=value. If it belongs to the text, put all of the text in quotes."
            )
    config = load_config(PretrainConfig, args.config, args.overrides)
    explanation = explain(args.text, load_tokenizer(config), config, args.step, args.backward)
    print(to_text(explanation))
    if args.picture:
        save_picture(explanation, args.picture)
        print(f"\n{args.picture}: picture of the masks")


if __name__ == "__main__":
    run_main(main)
