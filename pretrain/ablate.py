"""Run the rows of an ablation and compare them.

python pretrain/ablate.py configs/ablations/FILE.yaml --print      print the commands, one per line
python pretrain/ablate.py configs/ablations/FILE.yaml --run        run them, several in parallel; finished runs are skipped
python pretrain/ablate.py configs/ablations/FILE.yaml --table      compare the runs; writes table.md, table.csv and
                                                                   curves.png into runs/FILE

With `--rows a,b` the files are named subset_table.md and so on. Overrides (key=value) apply to every row. If interrupted,
start the same command again: it resumes.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from pretrain.tools.ablation import Ablation, Run, read_results, write_comparison
from xlpre.common.cli_main import run_main
from xlpre.common.job_pool import Command, run_all


def _command(run: Run, processes: int) -> Command:
    script = [os.path.relpath(Path(__file__).with_name("run.py")), *run.args]
    launcher = ["python"] if processes == 1 else ["torchrun", "--standalone", "--nproc_per_node", str(processes)]
    return Command(run.folder, [*launcher, *script], run.is_finished)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ablation", type=Path, help="a file in configs/ablations")
    for flag, help_text in (("print", "print the commands"), ("run", "run them"), ("table", "compare the runs")):
        parser.add_argument(f"--{flag}", action="store_true", help=help_text)
    parser.add_argument("--rows", type=lambda rows: rows.split(","), default=[], help="only these rows: a,b,c")
    parser.add_argument("--seeds", type=int, help="runs of each row (default: num_seeds of the file)")
    parser.add_argument("--jobs", type=int, help="runs in parallel (default: GPUs, or cores, divided by --processes)")
    parser.add_argument("--processes", type=int, default=1, help="processes of each run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every row")
    args = parser.parse_intermixed_args(argv)
    if not (args.print or args.run or args.table):
        parser.error("nothing to do: give --print, --run or --table")
    for flag in ("jobs", "processes"):
        if (number := getattr(args, flag)) is not None and number < 1:
            raise ValueError(f"--{flag} {number} is invalid: it must be at least 1. Leave it out for the default.")
    ablation = Ablation(args.ablation, args.overrides, args.rows, args.seeds)
    for run in ablation.runs:
        run.check_batch(args.processes)
    commands = [_command(run, args.processes) for run in ablation.runs]
    if args.print:
        print("\n".join(shlex.join(command.argv) for command in commands))
    if args.run:
        for run in ablation.runs[: len(ablation.rows)]:  # runs of other seeds have the same inputs
            run.check_inputs()
        try:
            run_all(commands, args.jobs, args.processes)
        finally:  # also compare the other runs if one failed
            if read_results(ablation):
                write_comparison(ablation, bool(args.rows))
    elif args.table:
        write_comparison(ablation, bool(args.rows))


if __name__ == "__main__":
    run_main(main)
