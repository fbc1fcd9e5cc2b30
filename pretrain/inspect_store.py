"""Show the contents of a token store, and the target spans that the default objective draws from it.

python pretrain/inspect_store.py stores/quickstart
python pretrain/inspect_store.py stores/wiki --picture wiki.png --verify
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pretrain.tools.store_statistics import StoreStatistics, describe, draw
from xlpre.common.cli_main import run_main
from xlpre.data.store import TokenStore


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="the folder of a store, such as stores/quickstart")
    parser.add_argument("--samples", type=int, default=3, help="number of random documents to show the beginning of")
    parser.add_argument("--picture", type=Path, help="a .png to draw lengths of documents and spans into")
    parser.add_argument("--verify", action="store_true", help="read every byte and verify checksums")
    args = parser.parse_args(argv)
    if args.samples < 0:
        raise ValueError(f"--samples {args.samples} is invalid: it must be at least 0. Leave it out for 3.")
    if args.picture and args.picture.suffix != ".png":
        raise ValueError(f"--picture {args.picture} is invalid: it must end in .png. Rename it.")
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
