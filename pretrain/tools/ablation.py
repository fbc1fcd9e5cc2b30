"""An ablation: a file of settings, rows of words that change them, and what the runs of each row have reached."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pretrain.config import PretrainConfig, changed_settings
from xlpre.config.cli import ExplicitKeys, read_explicit_keys
from xlpre.config.loader import load_config
from xlpre.training.metrics import read_metrics

OURS = ("name", "run_dir", "seed")  # of a run, decided by its row
BELOW = 0.1  # nats by which a model must beat word frequencies to have learned from context


@dataclass(frozen=True)
class AblationConfig:
    """A comparison of pretrainings.

    Attributes:
        base: a file of settings, beside this one.
        common: words that change it for every row.
        seeds: runs of each row, with the seeds 1, 2, ...
        rows: by name, words that change it. The first is what the others are compared with.
    """

    base: str = ""
    common: list[str] = field(default_factory=list)
    seeds: int = 1
    rows: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base or not self.rows or self.seeds < 1:
            raise ValueError(
                "an ablation needs `base:` (a file), `rows:` (names with lists of words) and at least 1 in `seeds:`"
            )
        for row, words in self.rows.items():
            if row in ("", ".", "..") or "/" in row:
                raise ValueError(
                    f"row {row!r}: its name is that of a folder and must not be empty, . or .., or hold a slash"
                )
            for word in [*self.common, *words]:
                if word.partition("=")[0] in OURS:
                    raise ValueError(f"row {row}: {word} is decided by the row's name and number; leave it out")


@dataclass(frozen=True)
class Run:
    """One run of a row.

    Attributes:
        row: its name.
        seed: of the run.
        words: all that stands on its command line.
        config: what they come to.
    """

    row: str
    seed: int
    words: Sequence[str]
    config: PretrainConfig

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.run_dir)

    @property
    def given(self) -> ExplicitKeys:
        """The keys that its command line sets."""
        return read_explicit_keys({}, self.words)

    def check_made(self) -> None:
        """Raise ValueError if what is in the folder was made with other settings than the row says now."""
        for key, (before, now) in changed_settings(self.config).items():
            raise ValueError(
                f"{self.folder} was made with {key}={before}, row {self.row} says {now} now; put it back, "
                "rename the row, or remove that folder"
            )


class Ablation:
    """All runs of a file, each checked.

    Args:
        path: the file.
        words: more settings, for every row.
        rows: which rows; all if empty.
        seeds: in place of the file's.

    Attributes:
        name: of the file, and of the folder in `runs/` that holds everything.
        rows: the words of each row, by name.
        runs: seed by seed, and in each row by row.

    Raises:
        ValueError: a file that is not an ablation, a row that does not exist, a setting that is wrong.
    """

    def __init__(
        self, path: Path, words: Sequence[str] = (), rows: Sequence[str] = (), seeds: int | None = None
    ) -> None:
        config = load_config(AblationConfig, path)
        for row in rows:
            if row not in config.rows:
                raise ValueError(f"{path} has no row {row!r}; it has {', '.join(config.rows)}")
        self.name, self.base = path.stem, Path(os.path.normpath(path.parent / config.base))
        self.rows = {row: changes for row, changes in config.rows.items() if row in (rows or config.rows)}
        common = [*config.common, *words]
        n_seeds = config.seeds if seeds is None else seeds
        if n_seeds < 1:
            raise ValueError(f"--seeds ({n_seeds}) must be at least 1")
        self.runs = [self._run(row, seed, common) for seed in range(1, n_seeds + 1) for row in self.rows]

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return Path("runs") / self.name

    def _run(self, row: str, seed: int, common: Sequence[str]) -> Run:
        changes = [*common, *self.rows[row]]
        try:
            said = load_config(PretrainConfig, self.base, changes)
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from None
        name, folder = f"{self.name}_{row}_{seed}", self.folder / row / f"seed_{seed}"
        # the name of a run decides where its text and vocabulary are looked for, unless that is set
        inputs = [f"data.store_dir={said.data.store_dir}", f"tokenizer.path={said.tokenizer.path}"]
        words = ["--config", str(self.base), *inputs, *changes]
        words += [f"name={name}", f"run_dir={folder}", f"seed={seed}"]
        return Run(row, seed, words, load_config(PretrainConfig, self.base, words[2:]))


@dataclass(frozen=True)
class Outcome:
    """What a run has reached.

    Attributes:
        seed: of the run.
        measured: the lines of its metrics that have a held-out loss.
    """

    seed: int
    measured: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, run: Run) -> Outcome | None:
        """None if it was not measured yet.

        Raises:
            ValueError: it was made with other settings than its row says now.
        """
        run.check_made()
        measured = [line for line in read_metrics(run.folder) if "val_loss" in line]
        return cls(run.seed, measured) if measured else None

    @property
    def last(self) -> dict[str, Any]:
        """The last measurement."""
        return self.measured[-1]

    @property
    def loss(self) -> float:
        """The last held-out loss, in nats; infinite if it was not finite."""
        return _number(self.last["val_loss"])

    @property
    def losses(self) -> dict[int, float]:
        """Held-out losses by the number of window tokens read."""
        return {line["tokens"]: _number(line["val_loss"]) for line in self.measured}

    @property
    def left_at(self) -> float:
        """Millions of window tokens read when it was first measured clearly below the loss of word frequencies; infinite: never."""
        below = (x for x in self.measured if _number(x["val_loss"]) < x["val_unigram_loss"] - BELOW)
        return next((line["tokens"] / 1e6 for line in below), math.inf)


def outcomes(ablation: Ablation) -> dict[str, list[Outcome]]:
    """Of each row that has any."""
    found: dict[str, list[Outcome]] = {row: [] for row in ablation.rows}
    for run in ablation.runs:
        if outcome := Outcome.of(run):
            found[run.row].append(outcome)
    return {row: several for row, several in found.items() if several}


def table(ablation: Ablation) -> list[dict[str, str]]:
    """A line for each row that was measured. It is set against the first of them at the end of both, and after as many tokens: the
    last number of them that all their runs were measured at.
    """
    found = outcomes(ablation)
    if not found:
        raise ValueError(f"{ablation.folder} holds no measured run; start it with --run")
    (baseline, first), *_ = found.items()
    against = "against " + (
        "the first" if baseline == next(iter(ablation.rows)) else baseline
    )  # the first was not measured yet
    targets = first[0].last["val_unigram_loss"]
    lines = []
    for row, several in found.items():
        losses, lasts = sorted(outcome.loss for outcome in several), [outcome.last for outcome in several]
        left = [outcome.left_at for outcome in several]
        same = abs(lasts[0]["val_unigram_loss"] - targets) < 1e-6
        then = max(set.intersection(*(set(outcome.losses) for outcome in (*several, *first))))
        at_the_end = median(losses) - median(outcome.loss for outcome in first)
        ours, theirs = (median(outcome.losses[then] for outcome in runs) for runs in (several, first))
        lines.append(
            {
                "row": row,
                "changes": " ".join(ablation.rows[row]) or "none",
                "runs": str(len(several)),
                "tokens, M": f"{median(x['tokens'] for x in lasts) / 1e6:.2f}",
                "minutes": f"{median(x['seconds'] for x in lasts) / 60:.1f}",
                "held-out loss": f"{median(losses):.3f}",
                "lowest to highest": f"{losses[0]:.3f} to {losses[-1]:.3f}" if len(losses) > 1 else "",
                against: f"{at_the_end:+.3f}" if same else "other targets",
                "after as many tokens": f"{ours - theirs:+.3f} ({then / 1e6:.2f} M)" if same else "",
                "word frequencies": f"{lasts[0]['val_unigram_loss']:.3f}",
                "below them from, M": _span([x for x in left if x < math.inf], len(left)),
                "bits a byte": f"{median(_number(x['val_bpb']) for x in lasts):.3f}",
                "targets right": f"{median(x['val_accuracy'] for x in lasts):.1%}",
            }
        )
    return lines


def _span(values: Sequence[float], among: int) -> str:
    if not values:
        return "never"
    told = f"{min(values):.2f}" + (f" to {max(values):.2f}" if max(values) > min(values) else "")
    return told if len(values) == among else f"{told} ({among - len(values)} never)"


def _number(value: float | None) -> float:
    return math.inf if value is None else value
