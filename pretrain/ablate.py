"""Run the rows of an ablation and compare them.

Each row of an ablation file is a pretraining run with a few changed settings, which the file may also evaluate and fine-tune. --run skips
finished runs and resumes stopped runs. Then it writes a comparison to table.md, table.csv, results.jsonl and pictures in runs/NAME, where
NAME is the name of the file without its suffix. With --rows, the names of these files start with subset_. Settings on the command line
apply to the pretraining of every row; settings of a row win over them.

Examples:
  python pretrain/ablate.py configs/ablations/objectives.yaml --print
  python pretrain/ablate.py configs/ablations/objectives.yaml --run --seeds 3
  python pretrain/ablate.py configs/ablations/xlnet_table6.yaml --run --processes 8 --rows k_6,no_memory train.steps=20000
  python pretrain/ablate.py configs/ablations/xlnet_table6.yaml --submit --processes 8 --seeds 5
  python pretrain/ablate.py configs/ablations/objectives.yaml --table

See docs/ablations.md for the format of the file and the columns of the table, and the comments in configs/ablations for what each file
compares.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.config import PretrainConfig
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError, check_minimum, option_name
from xlpre.common.job_pool import Command, run_all
from xlpre.config.cli import SettingsParser

if TYPE_CHECKING:
    from pretrain.tools.ablation.plan import Ablation
    from pretrain.tools.ablation.stages import Stage

SLURM_SCRIPT = "pretrain/slurm.sh"
COMMON = ("data.store_dir", "tokenizer.path", "train.steps", "train.hours", "train.global_batch_size", "eval.every")


def build_parser() -> SettingsParser[PretrainConfig]:
    """Return the parser of the command line."""
    parser = SettingsParser(PretrainConfig, __doc__, COMMON, reads_file=False)
    parser.add_argument("ablation", metavar="FILE", type=Path, help="an ablation, see configs/ablations/")
    parser.add_argument("--print", action="store_true", help="print the commands of the runs, one per line")
    text = "write SLURM scripts: a job array of the pretraining runs, and a job for the stages after them"
    parser.add_argument("--submit", action="store_true", help=text)
    parser.add_argument("--run", action="store_true", help="run the rows, several in parallel, and compare them")
    parser.add_argument(
        "--table", action="store_true", help="compare the runs that have been evaluated so far, and start none"
    )
    parser.add_argument(
        "--rows",
        metavar="A,B,...",
        type=lambda rows: rows.split(","),
        default=[],
        help="names of the rows to include (default: all)",
    )
    text = "leave out evaluation and fine-tuning"
    parser.add_argument("--only-pretraining", action="store_true", help=text)
    text = "number of runs of each row, with the seeds 1 to N (default: num_seeds of the file; in tables, all runs)"
    parser.add_argument("--seeds", metavar="N", type=int, help=text)
    text = "number of runs in parallel (default: number of GPUs, or of CPU cores, divided by --processes)"
    parser.add_argument("--jobs", metavar="N", type=int, help=text)
    parser.add_argument(
        "--processes", metavar="N", type=int, default=1, help="number of processes of each run (default: 1)"
    )
    return parser


def _command(stage: Stage, processes: int) -> Command:
    return Command(
        stage.folder,
        stage.command_line(processes),
        stage.is_finished,
        stage.name,
        stage.describe_result,
        stage.needs,
        stage.prepare,
    )


def _write_jobs(ablation: Ablation, args: argparse.Namespace) -> None:
    """Write the SLURM scripts, and print the command that submits them."""
    from pretrain.tools.job_array import finishing_job, job_array
    from xlpre.common.files import write_text

    if not Path(SLURM_SCRIPT).exists():
        raise InputError(
            f"--submit is invalid in the folder {Path.cwd()}: the jobs start {SLURM_SCRIPT}. Change to the folder of the repository first."
        )
    file, array, finish = str(args.ablation), ablation.folder / "array.sh", ablation.folder / "finish.sh"
    runs = [run.args for run in ablation.runs]
    if runs:
        write_text(array, job_array(file, str(array), ablation.name, runs, args.processes))
    options = ["--run", "--processes", str(args.processes), "--seeds", str(ablation.num_seeds)]
    options += [
        *(["--rows", ",".join(args.rows)] if args.rows else []),
        *["--only-pretraining"] * args.only_pretraining,
    ]
    command = ["python", "pretrain/ablate.py", file, *options, *args.overrides]
    write_text(finish, finishing_job(file, ablation.name, command, args.processes))
    print(f"{len(runs)} pretraining runs and {len(ablation.stages) - len(runs)} stages after them. Submit them with:")
    after = f"--dependency=afterany:$(sbatch --parsable {shlex.quote(str(array))}) " if runs else ""
    print(f"  sbatch {after}{shlex.quote(str(finish))}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse(argv)
    if not (args.print or args.submit or args.run or args.table):
        raise InputError(
            "the command needs --print, --submit, --run or --table, and none of them is set. Add one; see --help."
        )
    for flag in ("jobs", "processes"):
        check_minimum(option_name(flag), getattr(args, flag), 1, "Leave it out for the default.")

    from pretrain.tools.ablation.measures import read_failures, read_measures
    from pretrain.tools.ablation.plan import Ablation
    from pretrain.tools.ablation.table import write_comparison

    ablation = Ablation(args.ablation, args.overrides, args.rows, args.seeds, args.only_pretraining)
    for run in ablation.runs:
        run.check_batch(args.processes)
    compared = ablation
    if args.seeds is None and ablation.last_seed > ablation.num_seeds:  # earlier commands had more seeds
        compared = Ablation(args.ablation, args.overrides, args.rows, ablation.last_seed, args.only_pretraining)
    if not args.print and (note := ablation.ignored_overrides):
        print(note)
    commands = [_command(stage, args.processes) for stage in ablation.stages]
    if args.print:
        print("\n".join(shlex.join(command.argv) for command in commands))
    if args.submit:
        _write_jobs(ablation, args)
    if args.run:
        ablation.check_inputs()
        try:
            run_all(commands, args.jobs, args.processes)
        finally:  # if one run failed, the others are still compared
            if read_measures(compared) or read_failures(compared):
                write_comparison(compared, bool(args.rows))
    elif args.table:
        write_comparison(compared, bool(args.rows))


if __name__ == "__main__":
    run_main(main)
