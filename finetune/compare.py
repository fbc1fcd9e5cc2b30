"""Compare fine-tuning runs in a Markdown or CSV table, and optionally merge their predictions into one GLUE submission.

python finetune/compare.py runs/cola runs/sst-2 runs/mrpc
python finetune/compare.py runs/* --csv
python finetune/compare.py runs/cola runs/sst-2 ... --submission submission.zip
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.trainer.results import is_finished, merge_glue_submissions, read_run
from xlpre.common.cli_main import run_main
from xlpre.common.tables import to_csv, to_markdown


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished fine-tuning runs")
    parser.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")
    parser.add_argument("--submission", type=Path, help="also write this zip file for gluebenchmark.com")
    args = parser.parse_args(argv)
    run_dirs = _finished_runs(args.runs)
    rows = [read_run(run_dir).to_row() for run_dir in run_dirs]
    print((to_csv if args.csv else to_markdown)(rows), end="")
    if args.submission:
        missing = merge_glue_submissions(run_dirs, args.submission)
        print(f"{args.submission}: " + (f"incomplete, missing {', '.join(missing)}" if missing else "complete"))


def _finished_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders with a result, and print the folders that are skipped, such as pretraining runs in `runs/*`.

    A path that does not exist is also returned, so that reading it fails.
    """
    runs = [path for path in paths if not path.exists() or is_finished(path)]
    if not runs:
        return list(paths)
    if skipped := [path for path in paths if path not in runs]:
        print(f"skipped, not a finished fine-tuning run: {', '.join(map(str, skipped))}", file=sys.stderr)
    return runs


if __name__ == "__main__":
    run_main(main)
