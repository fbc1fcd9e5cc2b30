"""One of the fine-tunings that a benchmark compares: the command that makes it, and what it came to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.processes import REPOSITORY
from finetune.config import FinetuneConfig, task_overrides
from finetune.trainer.finalize import RESULT, finished_seeds
from finetune.trainer.inputs import RunInputs
from finetune.trainer.results import Result
from xlpre.common.job_pool import Command
from xlpre.config.loader import load_config

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
        return (self.seed_folder / RESULT).exists()

    def is_made_of(self, config: str, words: Sequence[str]) -> bool:
        """Whether there is a result of these settings, this text and these weights.

        Raises:
            ValueError: there is one of others.
        """
        if not self.is_made:
            return False
        return self.seed in finished_seeds(RunInputs(load_config(FinetuneConfig, config, words, task_overrides)))

    @property
    def result(self) -> Result:
        """What it came to.

        Raises:
            ValueError: it was not made.
        """
        if not self.is_made:
            raise ValueError(f"{self.folder} has no result: it was stopped; the same command goes on")
        return Result.read(self.seed_folder / RESULT)

    def errand(self, config: str, words: Sequence[str]) -> Command:
        """What makes it: finetune/run.py with a file of settings and more of them."""
        words = [f"seed={self.seed}", f"name={self.folder.name}", f"run_dir={self.folder}", *words]
        script = os.path.relpath(REPOSITORY / "finetune/run.py")
        return Command(
            self.folder, ["python", script, "--config", config, *words], partial(self.is_made_of, config, words)
        )
