"""Does pretraining help? Pretrained models and the same model with new weights, fine-tuned on several tasks.

python benchmarks/quality/downstream.py --models pretrained=runs/wiki_small/model --glue glue_data --squad squad --race RACE \
    --out reports/finetuning/tasks
python benchmarks/quality/downstream.py --models permutation=A/model,denoising=B/model --glue glue_data --tasks glue/sst-2 \
    --examples 200,1000,5000 --out reports/finetuning/few

All arms, `random` among them (new weights of the first model's shape), are swept over the same learning rates with seed 1; each goes on
with the other seeds at its own best rate. One JSON line for each run in results.jsonl, then table.md, table.csv and scores.png. What is
done is not done again; everything else of the runs is in `runs/downstream/OUT/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.finetuning_runs import CONFIG, Tuning
from xlpre.common.cli_main import run_main
from xlpre.common.files import write_text
from xlpre.common.job_pool import run_all
from xlpre.common.plots import new_axes, save_figure
from xlpre.common.tables import to_jsonl, to_markdown, write_table

TASKS = ("glue/sst-2", "glue/cola", "glue/mrpc", "glue/qnli", "squad/1.1", "race/middle")
ALL = "all"
RANDOM = "random"
COLOURS = ("#1f4e9c", "#2e8b57", "#7d4fa3", "#c79a1b", "#3a9fb5")
COLOUR_OF_RANDOM = "#b0542c"
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
    """One fine-tuning: of which arm, on what (all examples, or so many), how."""

    task: str
    examples: str
    arm: str
    rate: str

    def words(self, said: argparse.Namespace) -> list[str]:
        """Its settings."""
        words = [f"task={self.task}", f"data.dir={getattr(said, self.task.partition('/')[0])}", f"optim.lr={self.rate}"]
        if self.examples != ALL:
            words.append(f"data.max_train_examples={self.examples}")
        if self.arm == RANDOM:
            return [*words, f"init_from={next(iter(said.models.values()))}", "from_scratch=true", *said.words]
        return [*words, f"init_from={said.models[self.arm]}", *said.words]


def make(said: argparse.Namespace) -> list[Tuned]:
    """Run all that is missing. Returns every run: those of the sweep, then those of other seeds."""

    def tuned(task: str, examples: str, arm: str, rate: str, seed: int) -> Tuned:
        name = "_".join([task.replace("/", "_"), *([] if examples == ALL else [examples]), arm, rate, str(seed)])
        return Tuned(seed, said.runs / name, task, examples, arm, rate)

    def run(wanted: Sequence[Tuned]) -> None:
        run_all([one.errand(said.config, one.words(said)) for one in wanted], said.jobs)

    arms = [(task, n, arm) for task in said.tasks for n in said.examples for arm in (*said.models, RANDOM)]
    sweep = [tuned(*arm, rate, 1) for rate in said.rates for arm in arms]
    run(sweep)
    best = {
        arm: max((one for one in sweep if (one.task, one.examples, one.arm) == arm), key=_score).rate for arm in arms
    }
    others = [tuned(*arm, rate, seed) for seed in range(2, said.seeds + 1) for arm, rate in best.items()]
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
                "examples": one.examples,
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
    """For each task, number of examples and arm: its best learning rate by seed 1, and the scores of all seeds with it."""
    rows = []
    for key in dict.fromkeys(map(_key, lines)):
        mine = [line for line in lines if _key(line) == key]
        rate = max((line for line in mine if line["seed"] == 1), key=lambda line: line["value"])["lr"]
        values = [line["value"] for line in mine if line["lr"] == rate]
        task, examples, arm = key
        rows.append(
            {"task": task, "examples": examples, "arm": arm, "score": mine[0]["score"], "lr": rate, "values": values}
        )
    return rows


def beside(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The arms of a task, with as many examples, in one row of the table."""
    told = []
    for task, examples in dict.fromkeys((row["task"], row["examples"]) for row in rows):
        arms = [row for row in rows if (row["task"], row["examples"]) == (task, examples)]
        random = next(median(row["values"]) for row in arms if row["arm"] == RANDOM)
        cells = {"task": task, "examples": examples, "score": arms[0]["score"]}
        for arm in arms:
            values = ", ".join(f"{100 * value:.1f}" for value in sorted(arm["values"]))
            cells[f"{arm['arm']}: median (all)"] = f"{100 * median(arm['values']):.1f} ({values})"
            cells[f"{arm['arm']}: lr"] = f"{arm['lr']:g}"
            if arm["arm"] != RANDOM:
                cells[f"{arm['arm']}: gain"] = f"{100 * (median(arm['values']) - random):+.1f}"
        name, trivial = TRIVIAL[task]
        cells["without a model"] = f"{100 * trivial:.1f} ({name})"
        told.append(cells)
    return told


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A point for each seed, a bar at the median, a line for what needs no model."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    places = list(dict.fromkeys((row["task"], row["examples"]) for row in rows))
    colours = {arm: COLOUR_OF_RANDOM if arm == RANDOM else COLOURS[k % len(COLOURS)] for k, arm in enumerate(arms)}
    figure, (axes,) = new_axes(3 + 1.5 * len(places), 4)
    width, named = 0.8 / len(arms), set()
    for row in rows:
        x = places.index((row["task"], row["examples"])) + width * (arms.index(row["arm"]) - (len(arms) - 1) / 2)
        colour, label = colours[row["arm"]], None if row["arm"] in named else row["arm"]
        named.add(row["arm"])
        axes.bar(x, 100 * median(row["values"]), 0.9 * width, color=colour, alpha=0.35, label=label)
        points = [100 * value for value in row["values"]]
        axes.plot([x] * len(points), points, "o", color=colour, markersize=4)
    for place, (task, _) in enumerate(places):
        level, label = 100 * TRIVIAL[task][1], None if place else "without a model"
        axes.plot([place - 0.4, place + 0.4], [level, level], "--", color="#4c5866", linewidth=1, label=label)
    scores = {row["task"]: row["score"] for row in rows}
    ticks = [f"{task}\n{scores[task]}" + ("" if n == ALL else f"\n{n} examples") for task, n in places]
    axes.set_xticks(range(len(places)), ticks)
    axes.set_ylabel("score, percent")
    figure.legend(loc="outside upper center", ncols=len(named) + 1, frameon=False)
    save_figure(figure, path)


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["task"], line["examples"], line["arm"]


def _score(one: Tuned) -> float:
    return one.result.main


def _list(said: str) -> list[str]:
    return said.split(",")


def _models(said: str) -> dict[str, str]:
    models = dict(entry.partition("=")[::2] for entry in said.split(","))
    if RANDOM in models or not all(name and folder for name, folder in models.items()):
        raise argparse.ArgumentTypeError(f"{said!r} is not NAME=FOLDER,NAME=FOLDER with names other than {RANDOM}")
    return models


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_models, required=True, help="NAME=FOLDER,NAME=FOLDER: folders of models")
    for name, about in (("glue", "GLUE"), ("squad", "SQuAD 1.1"), ("race", "RACE")):
        parser.add_argument(f"--{name}", type=Path, help=f"the folder of {about}")
    parser.add_argument("--tasks", type=_list, default=list(TASKS), help=f"some of {','.join(TASKS)}")
    parser.add_argument(
        "--rates", type=_list, default=["1e-4", "3e-4", "1e-3"], help="learning rates that all try: a,b,c"
    )
    parser.add_argument("--examples", type=_list, default=[ALL], help="numbers of training examples: 200,1000,all")
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
    write_text(said.out / "results.jsonl", to_jsonl(lines))
    rows = table(lines)
    write_table(beside(rows), said.out)
    draw(rows, said.out / "scores.png")
    print(to_markdown(beside(rows)), end="")


if __name__ == "__main__":
    run_main(main)
