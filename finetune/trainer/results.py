"""Results of runs, and what several seeds have in common: median, spread, runs at chance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.common.files import write_text
from xlpre.training.metrics import duration


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        name: of the fine-tuning.
        task: its name.
        seed: of the run.
        score: the name of the score that decides.
        scores: all, of the weights that were kept.
        chance: what `score` must exceed to say that anything was learned.
        kept_step: of the weights that were kept.
        steps: updates made.
        seconds: taken, without the time to start and to conclude.
    """

    name: str
    task: str
    seed: int
    score: str
    scores: Mapping[str, float]
    chance: float
    kept_step: int
    steps: int
    seconds: float

    @property
    def main(self) -> float:
        """The score that decides."""
        return self.scores[self.score]

    @property
    def at_chance(self) -> bool:
        """Whether nothing shows that anything was learned."""
        return self.main <= self.chance

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write it, and the facts that it is a result of."""
        write_text(path, json.dumps({**dataclasses.asdict(self), "facts": facts}, indent=1))

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read what `write` wrote.

        Raises:
            ValueError: it is not that.
        """
        try:
            content = json.loads(path.read_text("utf-8"))
            return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: cannot be read as a result ({error!r}); remove it, and the command that made it makes it again"
            ) from None

    @staticmethod
    def facts(path: Path) -> dict[str, Any]:
        """What `write` was given as facts; nothing, if it has none."""
        found: dict[str, Any] = json.loads(path.read_text("utf-8")).get("facts", {})
        return found


@dataclass(frozen=True)
class Summary:
    """All runs of a fine-tuning.

    Attributes:
        name: of the fine-tuning.
        task: its name.
        score: the name of the score that decides.
        medians: of all scores.
        values: of the score that decides, one for each run.
        chance: see Result.
        n_at_chance: runs that show no sign of having learned anything.
        steps: updates, the median.
        seconds: of a run, the median.
    """

    name: str
    task: str
    score: str
    medians: Mapping[str, float]
    values: Sequence[float]
    chance: float
    n_at_chance: int
    steps: int
    seconds: float

    def sentence(self) -> str:
        """For a terminal."""
        values = np.array(self.values)
        several = (
            f"median {np.median(values):.4f} of {len(values)} runs ({values.min():.4f} to {values.max():.4f}, "
            f"standard deviation {values.std(ddof=1):.4f})"
            if len(values) > 1
            else f"{values[0]:.4f}"
        )
        stayed = (
            f", {self.n_at_chance} of {len(values)} at chance (at most {self.chance:.4f})" if self.n_at_chance else ""
        )
        return f"{self.task}: {self.score} {several}{stayed}"

    def row(self) -> dict[str, Any]:
        """Of a table."""
        values = np.array(self.values)
        others = {name: score for name, score in self.medians.items() if name != self.score}
        return {
            "name": self.name,
            "task": self.task,
            "score": self.score,
            "median": f"{np.median(values):.4f}",
            "lowest": f"{values.min():.4f}",
            "highest": f"{values.max():.4f}",
            "deviation": f"{values.std(ddof=1):.4f}" if len(values) > 1 else "",
            "runs": len(values),
            "at chance": self.n_at_chance,
            "level of chance": f"{self.chance:.4f}",
            "updates": self.steps,
            "time of a run": duration(self.seconds),
            "medians of others": ", ".join(f"{name} {score:.4f}" for name, score in others.items()),
        }


def summarize(results: Sequence[Result]) -> Summary:
    """Put the runs of a fine-tuning together."""
    first = results[0]
    return Summary(
        name=first.name,
        task=first.task,
        score=first.score,
        medians={name: float(np.median([result.scores[name] for result in results])) for name in first.scores},
        values=[result.main for result in results],
        chance=first.chance,
        n_at_chance=sum(result.at_chance for result in results),
        steps=int(np.median([result.steps for result in results])),
        seconds=float(np.median([result.seconds for result in results])),
    )


def read_run(run_dir: Path) -> Summary:
    """The runs in a folder.

    Raises:
        ValueError: there is none with a result.
    """
    found = sorted(run_dir.glob("seed_*/result.json"), key=lambda path: int(path.parent.name.partition("_")[2]))
    if not found:
        raise ValueError(f"{run_dir}: holds no seed_*/result.json; it is not the folder of a finished fine-tuning")
    return summarize([Result.read(path) for path in found])
