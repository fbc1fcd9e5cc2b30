"""Write the HTML report of a pretraining run: loss, learning rate, speed, predictions for blanks.

python pretrain/report.py runs/quickstart
python pretrain/report.py runs/quickstart --against runs/no_memory
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pretrain.tools.report_page import write_report
from xlpre.common.cli_main import run_main


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run, such as runs/quickstart")
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="folders of other runs to draw in the same figure"
    )
    args = parser.parse_args(argv)
    print(write_report(args.run, args.against))


if __name__ == "__main__":
    run_main(main)
