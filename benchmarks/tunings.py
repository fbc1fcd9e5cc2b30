"""One of the fine-tunings that a benchmark compares: the command that makes it, and what it came to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.results import Result
from xlpre.side_by_side import Errand

REPOSITORY = Path(__file__).parents[1]
CONFIG = str(REPOSITORY / "configs/finetune/small.yaml")


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning with one seed, in a folder of its own."""

    seed: int
    folder: Path

    @property
    def seed_folder(self) -> Path:
        """Where what it made is."""
        return self.folder / f"seed_{self.seed}"

    @property
    def is_made(self) -> bool:
        """Whether there is a result."""
        return (self.seed_folder / "result.json").exists()

    @property
    def result(self) -> Result:
        """What it came to.

        Raises:
            ValueError: it was not made.
        """
        if not self.is_made:
            raise ValueError(f"{self.folder} has no result: it was stopped; the same command goes on")
        return Result.read(self.seed_folder / "result.json")

    def errand(self, config: str, words: Sequence[str]) -> Errand:
        """What makes it: finetune/run.py with a file of settings and more of them."""
        ours = [f"seed={self.seed}", f"name={self.folder.name}", f"run_dir={self.folder}"]
        script = os.path.relpath(REPOSITORY / "finetune/run.py")
        return Errand(self.folder, ["python", script, "--config", config, *ours, *words], lambda: self.is_made)
