"""Run the rows of an ablation, and compare them.

python pretrain/ablate.py configs/ablations/FILE.yaml --print      the commands, a line each
python pretrain/ablate.py configs/ablations/FILE.yaml --run        all of them, several side by side; what is done is not done again
python pretrain/ablate.py configs/ablations/FILE.yaml --table      what was reached, in runs/FILE: table.md, table.csv, curves.png

With `--rows a,b` the files of these are some_table.md and so on. `key=value` words change every row. Stopped at any time, the same
command goes on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pretrain.tools.ablation import Ablation, Run, outcomes, table
from pretrain.trainer.inputs import RunInputs, is_finished
from xlpre.common.cli_main import run_main
from xlpre.common.job_pool import Command, run_all
from xlpre.common.plots import COLOURS, legend_label, new_axes, save_figure
from xlpre.common.tables import to_markdown, write_table


def errand_of(run: Run, processes: int) -> Command:
    """What makes a run."""
    script = [os.path.relpath(Path(__file__).with_name("run.py")), *run.words]
    launcher = ["python"] if processes == 1 else ["torchrun", "--standalone", "--nproc_per_node", str(processes)]
    return Command(run.folder, [*launcher, *script], partial(_is_made, run))


def _is_made(run: Run) -> bool:
    if not is_finished(run.config, run.given):
        return False
    run.check_made()
    return True


def check(ablation: Ablation) -> None:
    """Raise ValueError for a row that no run could begin with: its text, its vocabulary, its shape."""
    for run in ablation.runs:
        if run.seed != 1:  # differs in its seed alone
            continue
        try:
            RunInputs(run.config, run.given)
        except ValueError as error:
            raise ValueError(f"row {run.row}: {error}") from None


def _check_shares(run: Run, processes: int) -> None:
    """Raise ValueError if so many processes cannot share the batch of a run."""
    train = run.config.train
    try:
        train.batch_schedule(processes)
    except ValueError as error:
        raise ValueError(f"row {run.row} with --processes {processes}: {error}") from None


def compare(ablation: Ablation, some: bool = False) -> None:
    """Write table.md, table.csv and curves.png into the ablation's folder, and print the table; of `some` rows beside those of all."""
    rows, kind = table(ablation), "some_" * some
    write_table(rows, ablation.folder, f"{kind}table")
    save_figure(_curves(ablation), ablation.folder / f"{kind}curves.png")
    print(to_markdown(rows), end="")


def _curves(ablation: Ablation) -> Any:
    """Held-out loss against tokens, a colour for each row, a line for each run."""
    figure, (axes,) = new_axes(9, 5)
    found = outcomes(ablation)
    for (row, several), colour in zip(found.items(), itertools.cycle(COLOURS), strict=False):
        for outcome in several:
            told = [x for x in outcome.measured if x["val_loss"] is not None and x["step"]]
            axes.plot(
                [x["tokens"] / 1e6 for x in told],
                [x["val_loss"] for x in told],
                color=colour,
                linewidth=1.3,
                label=legend_label(row) if outcome is several[0] else None,
            )
    levels = {round(outcome.last["val_unigram_loss"], 4) for several in found.values() for outcome in several}
    for number, level in enumerate(sorted(levels)):
        label = None if number else "word frequencies alone"
        axes.axhline(level, color="#b4442c", linestyle="--", linewidth=1, label=label)
    lowest = min(outcome.loss for several in found.values() for outcome in several)
    axes.set_ylim(min(lowest, *levels) - 0.1, max(levels) + 0.6)
    axes.set(xlabel="window tokens read, millions", ylabel="held-out loss, nats a target")
    axes.grid(axis="y", color="#e3e7ee")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ablation", type=Path, help="a file in configs/ablations")
    for flag, about in (("print", "the commands"), ("run", "run them"), ("table", "compare them")):
        parser.add_argument(f"--{flag}", action="store_true", help=about)
    parser.add_argument("--rows", type=lambda said: said.split(","), default=[], help="these only: a,b,c")
    parser.add_argument("--seeds", type=int, help="runs of each row")
    parser.add_argument(
        "--jobs", type=int, help="runs side by side (default: the GPUs, or the cores, over --processes)"
    )
    parser.add_argument("--processes", type=int, default=1, help="of a run")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of every row")
    said = parser.parse_intermixed_args(argv)
    if not (said.print or said.run or said.table):
        parser.error("say what to do: --print, --run or --table")
    for flag in ("jobs", "processes"):
        if (number := getattr(said, flag)) is not None and number < 1:
            raise ValueError(f"--{flag} ({number}) must be at least 1")
    ablation = Ablation(said.ablation, said.words, said.rows, said.seeds)
    for run in ablation.runs:
        _check_shares(run, said.processes)
    errands = [errand_of(run, said.processes) for run in ablation.runs]
    if said.print:
        print("\n".join(shlex.join(errand.argv) for errand in errands))
    if said.run:
        check(ablation)
        try:
            run_all(errands, said.jobs, said.processes)
        finally:  # what others reached counts, too
            if outcomes(ablation):
                compare(ablation, bool(said.rows))
    elif said.table:
        compare(ablation, bool(said.rows))


if __name__ == "__main__":
    run_main(main)
