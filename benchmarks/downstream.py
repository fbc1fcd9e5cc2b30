"""Does pretraining help? A pretrained model and the same model with new weights, fine-tuned on several tasks.

python benchmarks/downstream.py runs/wiki_small/model --glue glue_data --squad squad --race RACE --out reports/finetuning/tasks

Both arms are swept over the same learning rates with seed 1; each goes on with the other seeds at its own best rate. One JSON line
for each run in results.jsonl, then table.md, table.csv and scores.png. What is done is not done again; everything else of the runs is in
`runs/downstream/OUT/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from tunings import CONFIG, Tuning

from xlpre.atomic import new_file
from xlpre.command import run_command
from xlpre.side_by_side import run_all
from xlpre.tables import as_markdown, write_table

TASKS = ("glue/sst-2", "glue/cola", "glue/mrpc", "glue/qnli", "squad/1.1", "race/middle")
ARMS = {"pretrained": [], "random": ["from_scratch=true"]}
COLOURS = {"pretrained": "#1f4e9c", "random": "#b0542c"}
# what needs no model: the most frequent answer on dev; for SQuAD and RACE, the sliding window of the papers that brought them
TRIVIAL = {
    "glue/sst-2": ("most frequent", 0.509),
    "glue/cola": ("most frequent", 0.0),
    "glue/mrpc": ("most frequent", 0.684),
    "glue/qnli": ("most frequent", 0.505),
    "squad/1.1": ("sliding window, whole dev set", 0.202),
    "race/middle": ("sliding window, test", 0.373),
}


@dataclass(frozen=True)
class Tuned(Tuning):
    """One fine-tuning: of which arm, on what, how."""

    task: str
    arm: str
    rate: str

    def words(self, said: argparse.Namespace) -> list[str]:
        """Its settings."""
        words = [f"task={self.task}", f"init={said.model}", f"data.dir={getattr(said, self.task.partition('/')[0])}"]
        return [*words, f"optim.lr={self.rate}", *ARMS[self.arm], *said.words]


def make(said: argparse.Namespace) -> list[Tuned]:
    """Run all that is missing. Returns every run: those of the sweep, then those of other seeds."""

    def tuned(task: str, arm: str, rate: str, seed: int) -> Tuned:
        return Tuned(seed, said.runs / f"{task.replace('/', '_')}_{arm}_{rate}_{seed}", task, arm, rate)

    def run(wanted: Sequence[Tuned]) -> None:
        run_all([one.errand(said.config, one.words(said)) for one in wanted], said.jobs)

    sweep = [tuned(task, arm, rate, 1) for task in said.tasks for rate in said.rates for arm in ARMS]
    run(sweep)
    best = {
        (task, arm): max((one for one in sweep if (one.task, one.arm) == (task, arm)), key=_score).rate
        for task in said.tasks
        for arm in ARMS
    }
    others = [tuned(task, arm, rate, seed) for seed in range(2, said.seeds + 1) for (task, arm), rate in best.items()]
    run(others)
    return [*sweep, *others]


def lines_of(made: Sequence[Tuned]) -> list[dict[str, Any]]:
    """What is kept of the runs."""
    lines = []
    for one in made:
        result = one.result
        lines.append(
            {
                "task": one.task,
                "arm": one.arm,
                "lr": float(one.rate),
                "seed": one.seed,
                "score": result.score,
                "value": result.main,
                "scores": dict(result.scores),
                "level_of_chance": result.chance,
                "updates": result.steps,
                "seconds": round(result.seconds, 1),
            }
        )
    return lines


def table(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each task and arm: its best learning rate by seed 1, and the scores of all seeds with it."""
    rows = []
    for task in dict.fromkeys(line["task"] for line in lines):
        for arm in ARMS:
            mine = [line for line in lines if (line["task"], line["arm"]) == (task, arm)]
            rate = max((line for line in mine if line["seed"] == 1), key=lambda line: line["value"])["lr"]
            values = [line["value"] for line in mine if line["lr"] == rate]
            first = mine[0]
            rows.append({"task": task, "arm": arm, "score": first["score"], "lr": rate, "values": values})
    return rows


def beside(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Both arms of a task in one row of the table."""
    told = []
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        name, trivial = TRIVIAL[ours["task"]]
        cells = {"task": ours["task"], "score": ours["score"]}
        for arm in (ours, theirs):
            values = ", ".join(f"{100 * value:.1f}" for value in sorted(arm["values"]))
            cells[f"{arm['arm']}: median (all)"] = f"{100 * median(arm['values']):.1f} ({values})"
            cells[f"{arm['arm']}: lr"] = f"{arm['lr']:g}"
        cells["difference"] = f"{100 * (median(ours['values']) - median(theirs['values'])):+.1f}"
        cells["without a model"] = f"{100 * trivial:.1f} ({name})"
        told.append(cells)
    return told


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A point for each seed, a bar at the median, a line for what needs no model."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for row in rows:
        x = tasks.index(row["task"]) + (-0.18 if row["arm"] == "pretrained" else 0.18)
        first = row["task"] == tasks[0]
        axes.bar(
            x,
            100 * median(row["values"]),
            0.32,
            color=COLOURS[row["arm"]],
            alpha=0.35,
            label=row["arm"] if first else None,
        )
        axes.plot(
            [x] * len(row["values"]),
            [100 * value for value in row["values"]],
            "o",
            color=COLOURS[row["arm"]],
            markersize=4,
        )
    for place, task in enumerate(tasks):
        level = 100 * TRIVIAL[task][1]
        axes.plot(
            [place - 0.4, place + 0.4],
            [level, level],
            "--",
            color="#4c5866",
            linewidth=1,
            label=None if place else "without a model",
        )
    axes.set_xticks(
        range(len(tasks)), [f"{task}\n{next(row['score'] for row in rows if row['task'] == task)}" for task in tasks]
    )
    axes.set_ylabel("score, percent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with new_file(path) as partly:
        figure.savefig(partly, format="png", dpi=150)


def _score(one: Tuned) -> float:
    return one.result.main


def _list(said: str) -> list[str]:
    return said.split(",")


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    for name, about in (("glue", "GLUE"), ("squad", "SQuAD 1.1"), ("race", "RACE")):
        parser.add_argument(f"--{name}", type=Path, help=f"the folder of {about}")
    parser.add_argument("--tasks", type=_list, default=list(TASKS), help=f"some of {','.join(TASKS)}")
    parser.add_argument(
        "--rates", type=_list, default=["1e-4", "3e-4", "1e-3"], help="learning rates that both try: a,b,c"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--jobs", type=int, help="runs side by side (default: one for each GPU or core)")
    parser.add_argument("--out", type=Path, required=True, help="where results.jsonl, table.md and scores.png go")
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of every run")
    said = parser.parse_intermixed_args(argv)
    for task in said.tasks:
        if task not in TASKS:
            raise ValueError(f"--tasks {task} is not one of {', '.join(TASKS)}")
        family = task.partition("/")[0]
        if getattr(said, family) is None:
            raise ValueError(f"--tasks {task} needs --{family}, the folder of its files")
    said.runs = Path("runs/downstream") / said.out.name
    lines = lines_of(make(said))
    said.out.mkdir(parents=True, exist_ok=True)
    with new_file(said.out / "results.jsonl") as partly:
        partly.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = table(lines)
    write_table(beside(rows), said.out)
    draw(rows, said.out / "scores.png")
    print(as_markdown(beside(rows)), end="")


if __name__ == "__main__":
    run_command(main)
