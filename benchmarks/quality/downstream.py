r"""Compare pretrained models with randomly initialized ones by fine-tuning them on several tasks.

python benchmarks/quality/downstream.py --models pretrained=runs/wiki_small/model --glue glue_data --squad squad --race RACE \
    --out reports/task_gains
python benchmarks/quality/downstream.py --models permutation=A/model,denoising=B/model --glue glue_data --tasks glue/sst-2 \
    --examples 200,1000,5000 --out reports/objectives

Compares several arms on each task: the models of --models, and `random`, a model of the same shape as the first one with random weights.
Each arm is fine-tuned with each learning rate and seed 1, then with its best rate and the other seeds. --out receives results.jsonl
(one line per run), table.md, table.csv and scores.png. The run folders are in runs/downstream/OUT/. Finished runs are not repeated.
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

from benchmarks.common.finetuning_runs import CONFIG, FinetuningRun
from xlpre.common.cli_main import run_main
from xlpre.common.files import write_text
from xlpre.common.job_pool import run_all
from xlpre.common.plots import new_axes, save_figure
from xlpre.common.tables import to_jsonl, to_markdown, write_table

TASKS = ("glue/sst-2", "glue/cola", "glue/mrpc", "glue/qnli", "squad/1.1", "race/middle")
ALL = "all"
RANDOM = "random"
COLOURS = ("#1f4e9c", "#2e8b57", "#7d4fa3", "#c79a1b", "#3a9fb5")
RANDOM_COLOUR = "#b0542c"
# scores without a model: of the most frequent label on dev; for SQuAD and RACE, of the sliding-window baseline in the paper of the data set
BASELINES = {
    "glue/sst-2": ("most frequent", 0.509),
    "glue/cola": ("most frequent", 0.0),
    "glue/mrpc": ("most frequent", 0.684),
    "glue/qnli": ("most frequent", 0.505),
    "squad/1.1": ("sliding window, whole dev set", 0.202),
    "race/middle": ("sliding window, test", 0.373),
}


@dataclass(frozen=True)
class ArmRun(FinetuningRun):
    """A fine-tuning run of an arm (a pretrained model or random weights).

    Attributes:
        task: name of the task.
        examples: number of training examples, or `all`.
        arm: name of the model, or `random`.
        lr: learning rate, as written on the command line.
    """

    task: str
    examples: str
    arm: str
    lr: str

    def settings(self, args: argparse.Namespace) -> list[str]:
        """Return the settings of the run, which override its config file."""
        settings = [
            f"task={self.task}",
            f"data.dir={getattr(args, self.task.partition('/')[0])}",
            f"optim.lr={self.lr}",
        ]
        if self.examples != ALL:
            settings.append(f"data.max_train_examples={self.examples}")
        if self.arm == RANDOM:
            return [*settings, f"init_from={next(iter(args.models.values()))}", "from_scratch=true", *args.settings]
        return [*settings, f"init_from={args.models[self.arm]}", *args.settings]


def finetune_all(args: argparse.Namespace) -> list[ArmRun]:
    """Start all runs that are not finished, and wait for them. Return the runs with seed 1 and all learning rates, then the other seeds."""

    def make_run(task: str, examples: str, arm: str, lr: str, seed: int) -> ArmRun:
        name = "_".join([task.replace("/", "_"), *([] if examples == ALL else [examples]), arm, lr, str(seed)])
        return ArmRun(seed, args.runs / name, task, examples, arm, lr)

    def finetune(runs: Sequence[ArmRun]) -> None:
        run_all([run.command(args.config, run.settings(args)) for run in runs], args.jobs)

    arms = [(task, n, arm) for task in args.tasks for n in args.examples for arm in (*args.models, RANDOM)]
    sweep = [make_run(*arm, lr, 1) for lr in args.rates for arm in arms]
    finetune(sweep)
    best_lr = {}
    for arm in arms:
        runs_of_arm = [run for run in sweep if (run.task, run.examples, run.arm) == arm]
        best_lr[arm] = max(runs_of_arm, key=lambda run: run.result.score).lr
    other_seeds = [make_run(*arm, lr, seed) for seed in range(2, args.seeds + 1) for arm, lr in best_lr.items()]
    finetune(other_seeds)
    return [*sweep, *other_seeds]


def result_lines(runs: Sequence[ArmRun]) -> list[dict[str, Any]]:
    """Return the lines of results.jsonl, one for each run."""
    lines = []
    for run in runs:
        result = run.result
        lines.append(
            {
                "task": run.task,
                "examples": run.examples,
                "arm": run.arm,
                "lr": float(run.lr),
                "seed": run.seed,
                "metric": result.main_metric,
                "score": result.score,
                "metrics": dict(result.metrics),
                "chance_threshold": result.chance_threshold,
                "steps": result.steps,
                "train_seconds": round(result.train_seconds, 1),
            }
        )
    return lines


def summarize_arms(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a summary for each task, number of examples and arm: the best learning rate for seed 1, and its scores with all seeds."""
    summaries = []
    for key in dict.fromkeys(map(_arm_key, lines)):
        of_arm = [line for line in lines if _arm_key(line) == key]
        lr = max((line for line in of_arm if line["seed"] == 1), key=lambda line: line["score"])["lr"]
        scores = [line["score"] for line in of_arm if line["lr"] == lr]
        task, examples, arm = key
        summaries.append(
            {"task": task, "examples": examples, "arm": arm, "metric": of_arm[0]["metric"], "lr": lr, "scores": scores}
        )
    return summaries


def table_rows(summaries: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return a table row for each task and number of examples, with columns for each arm: scores, learning rate, and gain over `random`."""
    rows = []
    for task, examples in dict.fromkeys((summary["task"], summary["examples"]) for summary in summaries):
        arms = [summary for summary in summaries if (summary["task"], summary["examples"]) == (task, examples)]
        random_median = next(median(arm["scores"]) for arm in arms if arm["arm"] == RANDOM)
        row = {"task": task, "examples": examples, "metric": arms[0]["metric"]}
        for arm in arms:
            scores = ", ".join(f"{100 * score:.1f}" for score in sorted(arm["scores"]))
            row[f"{arm['arm']}: median (all)"] = f"{100 * median(arm['scores']):.1f} ({scores})"
            row[f"{arm['arm']}: lr"] = f"{arm['lr']:g}"
            if arm["arm"] != RANDOM:
                row[f"{arm['arm']}: gain"] = f"{100 * (median(arm['scores']) - random_median):+.1f}"
        name, baseline = BASELINES[task]
        row["without a model"] = f"{100 * baseline:.1f} ({name})"
        rows.append(row)
    return rows


def plot(summaries: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the scores of each arm: a point per seed and a bar for their median. A dashed line is the score without a model."""
    arms = list(dict.fromkeys(summary["arm"] for summary in summaries))
    groups = list(dict.fromkeys((summary["task"], summary["examples"]) for summary in summaries))
    colours = {arm: RANDOM_COLOUR if arm == RANDOM else COLOURS[k % len(COLOURS)] for k, arm in enumerate(arms)}
    figure, (axes,) = new_axes(3 + 1.5 * len(groups), 4)
    width, labelled = 0.8 / len(arms), set()
    for summary in summaries:
        arm = summary["arm"]
        x = groups.index((summary["task"], summary["examples"])) + width * (arms.index(arm) - (len(arms) - 1) / 2)
        label = None if arm in labelled else arm
        labelled.add(arm)
        axes.bar(x, 100 * median(summary["scores"]), 0.9 * width, color=colours[arm], alpha=0.35, label=label)
        points = [100 * score for score in summary["scores"]]
        axes.plot([x] * len(points), points, "o", color=colours[arm], markersize=4)
    for number, (task, _) in enumerate(groups):
        level, label = 100 * BASELINES[task][1], None if number else "without a model"
        axes.plot([number - 0.4, number + 0.4], [level, level], "--", color="#4c5866", linewidth=1, label=label)
    metrics = {summary["task"]: summary["metric"] for summary in summaries}
    ticks = [f"{task}\n{metrics[task]}" + ("" if n == ALL else f"\n{n} examples") for task, n in groups]
    axes.set_xticks(range(len(groups)), ticks)
    axes.set_ylabel("score, percent")
    figure.legend(loc="outside upper center", ncols=len(labelled) + 1, frameon=False)
    save_figure(figure, path)


def _arm_key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["task"], line["examples"], line["arm"]


def _parse_list(text: str) -> list[str]:
    return text.split(",")


def _parse_models(text: str) -> dict[str, str]:
    models = dict(entry.partition("=")[::2] for entry in text.split(","))
    if RANDOM in models or not all(name and folder for name, folder in models.items()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is invalid: it must be NAME=FOLDER,NAME=FOLDER, and no name may be {RANDOM}"
        )
    return models


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_parse_models, required=True, help="model folders: NAME=FOLDER,NAME=FOLDER")
    for name, data_set in (("glue", "GLUE"), ("squad", "SQuAD 1.1"), ("race", "RACE")):
        parser.add_argument(f"--{name}", type=Path, help=f"folder of {data_set}")
    parser.add_argument(
        "--tasks",
        type=_parse_list,
        default=list(TASKS),
        help=f"tasks, separated by commas (default: {','.join(TASKS)})",
    )
    parser.add_argument("--rates", type=_parse_list, default=["1e-4", "3e-4", "1e-3"], help="learning rates: A,B,C")
    parser.add_argument(
        "--examples", type=_parse_list, default=[ALL], help="numbers of training examples: 200,1000,all"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--config", default=CONFIG, help="config file of every run")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per GPU or core)")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.jsonl, the tables and scores.png")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of every run")
    args = parser.parse_intermixed_args(argv)
    for task in args.tasks:
        if task not in TASKS:
            raise ValueError(f"--tasks={task} is invalid: it must be one of {', '.join(TASKS)}.")
        family = task.partition("/")[0]
        if getattr(args, family) is None:
            raise ValueError(
                f"--tasks={task} is invalid: the folder of its data set is not given. Set --{family}=FOLDER."
            )
    args.runs = Path("runs/downstream") / args.out.name
    lines = result_lines(finetune_all(args))
    write_text(args.out / "results.jsonl", to_jsonl(lines))
    summaries = summarize_arms(lines)
    write_table(table_rows(summaries), args.out)
    plot(summaries, args.out / "scores.png")
    print(to_markdown(table_rows(summaries)), end="")


if __name__ == "__main__":
    run_main(main)
