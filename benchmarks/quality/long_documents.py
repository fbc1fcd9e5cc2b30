"""Texts longer than a window: cut, read in memory, or as windows that are pooled (`data.long_text`), on texts as long as film reviews.

python benchmarks/quality/long_documents.py runs/wiki_small/model --race RACE --out reports/finetuning/long

The task: was an article of RACE set in a middle or in a high school? Both levels have as many articles of each length (of 50 words), so
that the length tells nothing. Each way is fine-tuned with the same seeds on the same articles, with the same number of updates, with
windows of --max-len tokens. One JSON line for each run in results.jsonl, then table.md and table.csv; everything else is in
runs/long/OUT, and what is done is not done again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.finetuning_runs import CONFIG, Tuning
from xlpre.common.cli_main import run_main
from xlpre.common.files import write_text
from xlpre.common.job_pool import run_all
from xlpre.common.tables import to_jsonl, to_markdown, write_table
from xlpre.conversion.model_folder import load_folder

LEVELS = ("middle", "high")
WAYS = {
    "cut": ["data.long_text=cut"],
    "memory": ["data.long_text=memory"],
    "windows, mean": ["data.long_text=windows", "data.window_pooling=mean"],
    "windows, max": ["data.long_text=windows", "data.window_pooling=max"],
}
SHORT = 50  # words


def articles(race: Path, split: str, limit: int) -> list[dict[str, str]]:
    """At most `limit` of each level, as many of each length, in an order that the split decides.

    Raises:
        ValueError: there are none.
    """
    by_length: dict[str, dict[int, list[str]]] = {level: {} for level in LEVELS}
    for level in LEVELS:
        found = sorted((race / split / level).glob("*.txt"))
        if not found:
            raise ValueError(
                f"--race {race} has no {split}/{level}/*.txt; it is the folder that holds train, dev and test"
            )
        for path in found:
            text = json.loads(path.read_text("utf-8"))["article"]
            by_length[level].setdefault(len(text.split()) // SHORT, []).append(text)
    rng, pairs = random.Random(split), []
    for length in sorted(by_length["middle"].keys() & by_length["high"].keys()):
        both = [by_length[level][length] for level in LEVELS]
        for texts in both:
            rng.shuffle(texts)
        pairs += list(zip(*both, strict=False))
    rng.shuffle(pairs)
    return [{"text": text, "label": level} for pair in pairs[:limit] for text, level in zip(pair, LEVELS, strict=True)]


def write_articles(said: argparse.Namespace) -> None:
    """train.jsonl and dev.jsonl, in the runs' folder."""
    for split, limit in (("train", said.train), ("dev", said.dev)):
        write_text(said.runs / f"{split}.jsonl", to_jsonl(articles(said.race, split, limit // 2)))


@dataclass(frozen=True)
class Tuned(Tuning):
    """A fine-tuning, and the way it reads."""

    way: str

    def words(self, said: argparse.Namespace) -> list[str]:
        """Its settings."""
        words = ["task=classify", f"init_from={said.model}", f"data.dir={said.runs}"]
        words += ["data.train=[train.jsonl]", "data.dev=[dev.jsonl]", "data.text=[text]"]
        return [*words, *WAYS[self.way], *said.words]

    def line(self, truths: Sequence[str], lengths: Sequence[int], max_len: int) -> dict[str, Any]:
        """What is kept of it: accuracy, also of articles that fit into a window and of those that do not."""
        result = self.result
        told = map(json.loads, (self.seed_folder / "dev.jsonl").read_text("utf-8").split("\n")[:-1])
        right = [one["prediction"] == truth for one, truth in zip(told, truths, strict=True)]
        return {
            "way": self.way,
            "seed": self.seed,
            "accuracy": mean(right),
            "fitting": mean(hit for hit, n in zip(right, lengths, strict=True) if n <= max_len),
            "longer": mean(hit for hit, n in zip(right, lengths, strict=True) if n > max_len),
            "updates": result.steps,
            "seconds": round(result.seconds, 1),
        }


def rows_of(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Of the table: medians of seeds."""
    for way in dict.fromkeys(line["way"] for line in lines):
        mine = [line for line in lines if line["way"] == way]
        values = ", ".join(f"{100 * line['accuracy']:.1f}" for line in mine)
        yield {
            "data.long_text": way,
            "accuracy: median (all)": f"{100 * median(line['accuracy'] for line in mine):.1f} ({values})",
            "that fit into a window": f"{100 * median(line['fitting'] for line in mine):.1f}",
            "longer": f"{100 * median(line['longer'] for line in mine):.1f}",
            "seconds": f"{median(line['seconds'] for line in mine):.0f}",
        }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--race", type=Path, required=True, help="the folder that holds train, dev and test of RACE")
    parser.add_argument("--train", type=int, default=4000, help="articles to learn from")
    parser.add_argument("--dev", type=int, default=700, help="articles to measure on")
    parser.add_argument("--max-len", type=int, default=128, help="tokens of a window")
    parser.add_argument("--updates", type=int, default=375, help="of a run, 16 rows each")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--jobs", type=int, help="runs side by side (default: one for each GPU or core)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of every run")
    said = parser.parse_intermixed_args(argv)
    said.runs = Path("runs/long") / said.out.name
    steps = [f"train.steps={said.updates}", f"eval.every={said.updates}", "train.global_batch_size=16"]
    said.words = [f"data.max_seq_len={said.max_len}", *steps, *said.words]
    write_articles(said)
    tuned = [
        Tuned(seed, said.runs / f"{way.replace(', ', '_')}_{seed}", way)
        for seed in range(1, said.seeds + 1)
        for way in WAYS
    ]
    run_all([one.errand(said.config, one.words(said)) for one in tuned], said.jobs)
    dev = [json.loads(line) for line in (said.runs / "dev.jsonl").read_text("utf-8").split("\n")[:-1]]
    tokenizer = load_folder(said.model).tokenizer
    lengths = [len(tokenizer.encode(one["text"])) + 2 for one in dev]
    lines = [one.line([each["label"] for each in dev], lengths, said.max_len) for one in tuned]
    write_text(said.out / "results.jsonl", to_jsonl(lines))
    rows = list(rows_of(lines))
    write_table(rows, said.out)
    print(
        f"{len(dev)} articles measured on, of which {sum(n > said.max_len for n in lengths)} are longer than a window"
    )
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    run_main(main)
