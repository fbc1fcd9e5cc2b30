"""A table of several fine-tunings, as Markdown or CSV; and what of them can be submitted to GLUE, as one zip.

python finetune/compare.py runs/cola runs/sst-2 runs/mrpc
python finetune/compare.py runs/* --csv
python finetune/compare.py runs/cola runs/sst-2 ... --submission submission.zip
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.tasks.glue import N_ROWS, zip_files
from finetune.trainer.results import read_run
from xlpre.common.cli_main import run_main
from xlpre.common.tables import as_csv, as_markdown


def gather(runs: Sequence[Path], target: Path) -> list[str]:
    """Put the official files of several runs into one zip. Returns what a whole submission has besides.

    Raises:
        ValueError: a file in two runs, or one that is cut.
    """
    found: dict[str, Path] = {}
    for path in (path for run in runs for path in sorted((run / "predictions").glob("*.tsv"))):
        if path.name in found:
            raise ValueError(f"{path} and {found[path.name]} are of the same task; name one of the runs")
        n_rows = path.read_text("utf-8").count("\n") - 1
        if n_rows != N_ROWS.get(path.name):
            raise ValueError(f"{path} has {n_rows:,} answers; {_wanted(path.name)}")
        found[path.name] = path
    if not found:
        raise ValueError(f"{', '.join(map(str, runs))}: none holds predictions for a test file of GLUE")
    zip_files(list(found.values()), target)
    return sorted(N_ROWS.keys() - found.keys())


def finished(runs: Sequence[Path]) -> list[Path]:
    """Those with a result; of others in the same folder, as `runs/*` names them, a line is said.

    Raises:
        ValueError: one that is not there, or none has a result.
    """
    found = [run for run in runs if not run.exists() or any(run.glob("seed_*/result.json"))]
    if others := [run for run in runs if run not in found and found]:
        print(f"left out, as no run of a fine-tuning is finished there: {', '.join(map(str, others))}", file=sys.stderr)
    return found or list(runs)


def _wanted(name: str) -> str:
    return f"a submission has {N_ROWS[name]:,}" if name in N_ROWS else f"a submission has {', '.join(N_ROWS)} only"


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished fine-tunings")
    parser.add_argument("--csv", action="store_true", help="for a program")
    parser.add_argument("--submission", type=Path, help="a zip to write for gluebenchmark.com, besides")
    words = parser.parse_args(argv)
    runs = finished(words.runs)
    rows = [read_run(run).row() for run in runs]
    print((as_csv if words.csv else as_markdown)(rows), end="")
    if words.submission:
        missing = gather(runs, words.submission)
        print(f"{words.submission}: " + (f"not whole yet, without {', '.join(missing)}" if missing else "whole"))


if __name__ == "__main__":
    run_main(main)
