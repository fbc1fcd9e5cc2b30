"""Write the HTML report of a pretraining run: loss, learning rate, speed, and predictions for blanks.

The report is one file, report.html in the folder of the run. The run may still be training. For a fine-tuning run or an ablation, the
report contains its table and its plots.

Examples:
  python pretrain/report.py runs/quickstart
  python pretrain/report.py runs/quickstart --against runs/no_memory runs/no_spans
  python pretrain/report.py runs/mrpc

See docs/small_data.md for the losses to expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.config.cli import CommandParser


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run, such as runs/quickstart")
    text = "folders of other runs to draw in the same figure"
    parser.add_argument("--against", metavar="RUN", type=Path, nargs="*", default=[], help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)

    from pretrain.tools.report_page import write_report

    print(write_report(args.run, args.against))


if __name__ == "__main__":
    run_main(main)
