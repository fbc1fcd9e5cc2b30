"""Show the contents of a token store, and the target spans that the default objective draws from it.

Examples:
  python pretrain/inspect_store.py stores/quickstart
  python pretrain/inspect_store.py stores/quickstart --samples 10 --picture store.png --verify

See docs/data.md for what a token store contains and how it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.common.errors import check_minimum
from xlpre.config.cli import CommandParser, check_output_files
from xlpre.data.store import TokenStore


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("store", metavar="STORE", help="folder of a token store, such as stores/quickstart")
    text = "number of random documents whose beginning is shown (default: 3)"
    parser.add_argument("--samples", metavar="N", type=int, default=3, help=text)
    text = "draw histograms of the lengths of documents and spans (.png, .svg, .pdf)"
    parser.add_argument("--picture", metavar="FILE", type=Path, help=text)
    parser.add_argument("--verify", action="store_true", help="read every byte and verify the checksums")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    check_minimum("--samples", args.samples, 0, "Leave it out for 3.")
    check_output_files(None, args.picture)

    from pretrain.tools.store_statistics import StoreStatistics, describe, draw

    store = TokenStore(args.store)
    if args.verify:
        store.verify()
        print(f"{args.store}: all checksums are correct")
    tokenizer = store.tokenizer()
    statistics = StoreStatistics.compute(store, tokenizer)
    print(describe(statistics, store, tokenizer, args.samples))
    if args.picture:
        draw(statistics, args.picture)
        print(f"\n{args.picture}: written")


if __name__ == "__main__":
    run_main(main)
