"""Compare ways to read texts longer than a window (`data.long_text`): truncation, recurrent memory, and pooled windows.

python benchmarks/quality/long_documents.py runs/wiki_small/model --race RACE --out reports/long_texts

The task is to tell RACE articles of middle schools from those of high schools. Both classes have equally many articles of each length
(in bins of 50 words), so that length does not reveal the class. All ways use the same seeds, articles and number of steps, and windows
of --max-len tokens. --out receives results.jsonl (one line per run), table.md and table.csv. The run folders are in runs/long/OUT/.
Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.processes import REPOSITORY
from finetune.config import load_finetune_config
from finetune.trainer.final_results import finished_seeds
from finetune.trainer.inputs import RunInputs
from finetune.trainer.results import RESULT, Result, seed_folder
from xlpre.common.cli_main import run_main
from xlpre.common.errors import InputError
from xlpre.common.files import write_text
from xlpre.common.job_pool import Command, run_all
from xlpre.common.tables import to_jsonl, to_markdown, write_table
from xlpre.conversion.model_folder import load_folder

CONFIG = str(REPOSITORY / "configs/finetune/small.yaml")
LEVELS = ("middle", "high")
WAYS = {
    "truncate": ["data.long_text=truncate"],
    "memory": ["data.long_text=memory"],
    "windows, mean": ["data.long_text=windows", "data.window_pooling=mean"],
    "windows, max": ["data.long_text=windows", "data.window_pooling=max"],
}
WORDS_PER_BIN = 50


def read_articles(race: Path, split: str, n_pairs: int) -> list[dict[str, str]]:
    """Return at most `n_pairs` pairs of articles of similar length, one of each level. The split is the seed of their order.

    Raises:
        InputError: a level has no articles.
    """
    by_length: dict[str, dict[int, list[str]]] = {level: {} for level in LEVELS}
    for level in LEVELS:
        paths = sorted((race / split / level).glob("*.txt"))
        if not paths:
            raise InputError(
                f"--race={race} is invalid: the folder has no {split}/{level}/*.txt. Name the folder with train, dev and test of RACE."
            )
        for path in paths:
            text = json.loads(path.read_text("utf-8"))["article"]
            by_length[level].setdefault(len(text.split()) // WORDS_PER_BIN, []).append(text)
    rng, pairs = random.Random(split), []
    for length in sorted(by_length["middle"].keys() & by_length["high"].keys()):
        of_length = [by_length[level][length] for level in LEVELS]
        for texts in of_length:
            rng.shuffle(texts)
        pairs += list(zip(*of_length, strict=False))
    rng.shuffle(pairs)
    return [
        {"text": text, "label": level} for pair in pairs[:n_pairs] for text, level in zip(pair, LEVELS, strict=True)
    ]


def write_articles(args: argparse.Namespace) -> None:
    """Write the articles to fine-tune and to evaluate on as train.jsonl and dev.jsonl, into the folder of the runs."""
    for split, n_articles in (("train", args.train), ("dev", args.dev)):
        write_text(args.runs / f"{split}.jsonl", to_jsonl(read_articles(args.race, split, n_articles // 2)))


@dataclass(frozen=True)
class WayRun:
    """A fine-tuning run with one way to read long texts and one seed, in its own folder.

    Attributes:
        way: the way, a key of WAYS.
        seed: seed of the run.
        folder: run folder.
        config: config file.
        overrides: settings that override the file, besides seed and folder.
    """

    way: str
    seed: int
    folder: Path
    config: str
    overrides: Sequence[str]

    @property
    def seed_folder(self) -> Path:
        """Folder inside the run folder with the output of the seed."""
        return seed_folder(self.folder, self.seed)

    @property
    def settings(self) -> list[str]:
        """All settings that override the file."""
        return [f"seed={self.seed}", f"name={self.folder.name}", f"run_dir={self.folder}", *self.overrides]

    def is_finished(self) -> bool:
        """Return True if the folder has a result of the current settings, examples and weights.

        Raises:
            InputError: the folder has a result of others.
        """
        if not (self.seed_folder / RESULT).exists():
            return False
        return self.seed in finished_seeds(RunInputs(load_finetune_config(self.config, self.settings)))

    def command(self) -> Command:
        """Return the command that starts or resumes the run."""
        script = os.path.relpath(REPOSITORY / "finetune/run.py")
        return Command(self.folder, ["python", script, "--config", self.config, *self.settings], self.is_finished)

    def result_line(self, labels: Sequence[str], lengths: Sequence[int], max_len: int) -> dict[str, Any]:
        """Return the line of results.jsonl: accuracy on all articles, on articles that fit into a window, and on longer articles.

        Args:
            labels: correct label of each article to evaluate on.
            lengths: number of tokens of each article.
            max_len: tokens per window.
        """
        if not (self.seed_folder / RESULT).exists():
            raise InputError(f"{self.folder} has no result: the run was stopped. Run the same command again to resume.")
        result = Result.read(self.seed_folder / RESULT)
        predictions = map(json.loads, (self.seed_folder / "dev.jsonl").read_text("utf-8").split("\n")[:-1])
        is_correct = [line["prediction"] == label for line, label in zip(predictions, labels, strict=True)]
        return {
            "way": self.way,
            "seed": self.seed,
            "accuracy": mean(is_correct),
            "fitting": mean(correct for correct, n in zip(is_correct, lengths, strict=True) if n <= max_len),
            "longer": mean(correct for correct, n in zip(is_correct, lengths, strict=True) if n > max_len),
            "steps": result.steps,
            "train_seconds": round(result.train_seconds, 1),
        }


def table_rows(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield a table row for each way to read long texts, with medians over seeds."""
    for way in dict.fromkeys(line["way"] for line in lines):
        of_way = [line for line in lines if line["way"] == way]
        values = ", ".join(f"{100 * line['accuracy']:.1f}" for line in of_way)
        yield {
            "data.long_text": way,
            "accuracy: median (all)": f"{100 * median(line['accuracy'] for line in of_way):.1f} ({values})",
            "fit into a window": f"{100 * median(line['fitting'] for line in of_way):.1f}",
            "longer": f"{100 * median(line['longer'] for line in of_way):.1f}",
            "seconds": f"{median(line['train_seconds'] for line in of_way):.0f}",
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--race", type=Path, required=True, help="folder with train, dev and test of RACE")
    parser.add_argument("--train", type=int, default=4000, help="number of training articles")
    parser.add_argument("--dev", type=int, default=700, help="number of articles to evaluate on")
    parser.add_argument("--max-len", type=int, default=128, help="tokens per window")
    parser.add_argument("--steps", type=int, default=375, help="optimizer steps of a run, with 16 articles each")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--config", default=CONFIG, help="config file of every run")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per GPU or core)")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.jsonl and the tables")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of every run")
    args = parser.parse_intermixed_args(argv)
    args.runs = Path("runs/long") / args.out.name
    steps = [f"train.steps={args.steps}", f"eval.every={args.steps}", "train.global_batch_size=16"]
    common = ["task=classify", f"init_from={args.model}", f"data.dir={args.runs}", "data.train=[train.jsonl]"]
    common += ["data.dev=[dev.jsonl]", "data.text=[text]", f"data.max_seq_len={args.max_len}"]
    write_articles(args)
    runs = []
    for seed, (way, settings) in itertools.product(range(1, args.seeds + 1), WAYS.items()):
        folder = args.runs / f"{way.replace(', ', '_')}_{seed}"
        runs.append(WayRun(way, seed, folder, args.config, [*common, *settings, *steps, *args.settings]))
    run_all([run.command() for run in runs], args.jobs)
    dev = [json.loads(line) for line in (args.runs / "dev.jsonl").read_text("utf-8").split("\n")[:-1]]
    tokenizer = load_folder(args.model).tokenizer
    lengths = [len(tokenizer.encode(article["text"])) + 2 for article in dev]
    lines = [run.result_line([article["label"] for article in dev], lengths, args.max_len) for run in runs]
    write_text(args.out / "results.jsonl", to_jsonl(lines))
    rows = list(table_rows(lines))
    write_table(rows, args.out)
    print(
        f"evaluated on {len(dev)} articles; {sum(n > args.max_len for n in lengths)} of them are longer than a window"
    )
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    run_main(main)
