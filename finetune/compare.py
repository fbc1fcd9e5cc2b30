"""Compare fine-tuning runs in a Markdown or CSV table, and optionally merge their predictions into one GLUE submission.

Folders without a finished fine-tuning run are skipped.

Examples:
  python finetune/compare.py runs/cola runs/sst-2 runs/mrpc
  python finetune/compare.py runs/* --csv > scores.csv
  python finetune/compare.py runs/cola runs/sst-2 runs/mrpc --submission submission.zip

See docs/finetuning.md for the scores of each task.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from xlpre.common.cli_main import run_main
from xlpre.common.tables import to_csv, to_markdown
from xlpre.config.cli import CommandParser


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folder of a finished fine-tuning run")
    parser.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")
    text = "also write the predictions of GLUE test files to this zip file, for gluebenchmark.com"
    parser.add_argument("--submission", metavar="FILE", type=Path, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)

    from finetune.trainer.results import merge_glue_submissions, read_run

    run_dirs = _finished_runs(args.runs)
    rows = [read_run(run_dir).to_row() for run_dir in run_dirs]
    print((to_csv if args.csv else to_markdown)(rows), end="")
    if args.submission:
        missing = merge_glue_submissions(run_dirs, args.submission)
        state = f"incomplete, missing {', '.join(missing)}" if missing else "complete"
        print(f"{args.submission}: {state}", file=sys.stderr)


def _finished_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders with a result, and print the folders that are skipped, such as pretraining runs in `runs/*`.

    A path that does not exist is also returned, so that reading it raises. If no folder has a result, all paths are returned.
    """
    from finetune.trainer.results import is_finished

    runs = [path for path in paths if not path.exists() or is_finished(path)]
    if not runs:
        return list(paths)
    if skipped := [path for path in paths if path not in runs]:
        print(f"skipped, not a finished fine-tuning run: {', '.join(map(str, skipped))}", file=sys.stderr)
    return runs


if __name__ == "__main__":
    run_main(main)
