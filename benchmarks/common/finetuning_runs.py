"""The command and the result of a fine-tuning run. Benchmarks start several and compare their results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.processes import REPOSITORY
from finetune.config import FinetuneConfig, task_overrides
from finetune.trainer.final_results import finished_seeds
from finetune.trainer.inputs import RunInputs
from finetune.trainer.results import RESULT, Result, seed_folder
from xlpre.common.errors import InputError
from xlpre.common.job_pool import Command
from xlpre.config.loader import load_config

CONFIG = str(REPOSITORY / "configs/finetune/small.yaml")


@dataclass(frozen=True)
class FinetuningRun:
    """A fine-tuning run with one seed, in its own folder.

    Attributes:
        seed: seed of the run.
        folder: run folder, which contains a folder for the seed.
    """

    seed: int
    folder: Path

    @property
    def seed_folder(self) -> Path:
        """Folder inside the run folder with the output of the seed."""
        return seed_folder(self.folder, self.seed)

    @property
    def is_finished(self) -> bool:
        """True if the folder has a result, whatever its settings."""
        return (self.seed_folder / RESULT).exists()

    def is_finished_with(self, config: str, settings: Sequence[str]) -> bool:
        """True if the folder has a result of this config file and these settings, with the current examples and weights.

        Raises:
            InputError: the folder has a result with other settings, examples or weights.
        """
        if not self.is_finished:
            return False
        return self.seed in finished_seeds(RunInputs(load_config(FinetuneConfig, config, settings, task_overrides)))

    @property
    def result(self) -> Result:
        """Result of the run.

        Raises:
            InputError: the run is not finished.
        """
        if not self.is_finished:
            raise InputError(f"{self.folder} has no result: the run was stopped. Run the same command again to resume.")
        return Result.read(self.seed_folder / RESULT)

    def command(self, config: str, settings: Sequence[str]) -> Command:
        """Return the command that starts or resumes the run: finetune/run.py with a config file and settings that override it."""
        settings = [f"seed={self.seed}", f"name={self.folder.name}", f"run_dir={self.folder}", *settings]
        script = os.path.relpath(REPOSITORY / "finetune/run.py")
        args = ["python", script, "--config", config, *settings]
        return Command(self.folder, args, partial(self.is_finished_with, config, settings))
