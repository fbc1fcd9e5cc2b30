"""The course of a run, the same for pretraining and fine-tuning: its updates, its clock, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.deepspeed_engine import TrainConfig
from xlpre.training.distributed import Comm, rank, seed_step
from xlpre.training.lr_schedule import ScheduleConfig, learning_rate
from xlpre.training.optimizer import set_lr
from xlpre.training.shutdown import ShutdownHandler


class Progress:
    """Counts the updates of a run.

    Args:
        train: how long it is.
        engine: DeepSpeed's.
        comm: between the processes.
        stopping: whether someone asked to stop.
        writer: of its checkpoints, which goes on at the end of an update.
        was: what the checkpoint says that the run goes on from; empty at the start.

    Attributes:
        step: updates done, or skipped.
        seconds: spent in all.
        skipped: updates that were not made, because their gradients were not finite,
        skipped_in_a_row: and how many of them came last.
    """

    def __init__(
        self,
        train: TrainConfig,
        engine: Any,
        comm: Comm,
        stopping: ShutdownHandler,
        writer: CheckpointWriter,
        was: Mapping[str, Any],
    ) -> None:
        self.train, self.engine, self.comm, self.stopping, self._writer = train, engine, comm, stopping, writer
        self.step, self.seconds, self.skipped, self.skipped_in_a_row = 0, 0.0, 0, 0
        if was:
            self.step, self.seconds, self.skipped = was["step"], was["train_seconds"], was["counters"]["skipped_steps"]
        self._started = time.monotonic() - self.seconds

    @property
    def time_share(self) -> float:
        """The part of `train.hours` that is spent."""
        return self.seconds / (self.train.hours * 3600) if self.train.hours else 0.0

    @property
    def finished(self) -> bool:
        """Whether the steps or the time are used up."""
        return self.step >= self.train.steps or self.time_share >= 1

    def begin_step(self, seed: int, schedule: ScheduleConfig, lr: float) -> None:
        """Set the learning rate, whose peak is `lr`, and what dropout draws, which `seed` decides."""
        set_lr(self.engine.optimizer, learning_rate(schedule, lr, self.step, self.train.steps, self.time_share))
        seed_step(seed, self.step, rank())

    def end_step(self, on_too_many_skips: Callable[[], str] = lambda: "") -> bool:
        """One update is done. Returns whether any process was asked to stop; all processes get the same answer and clock.

        Args:
            look_back: called where too many were skipped; says what a person can look at.

        Raises:
            ValueError: too many updates in a row were skipped, because their gradients were not finite; a checkpoint could not
                be written.
        """
        self.step += 1
        before, self.skipped = self.skipped, int(self.engine.skipped_steps)  # on all processes or on none
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.skipped > before else 0
        if self.skipped_in_a_row == self.train.max_skipped_steps:
            self._writer.finish()
            hint = on_too_many_skips()
            raise ValueError(
                f"the gradients of {self.skipped_in_a_row} updates in a row, to step {self.step:,}, were not finite, and no update was "
                f"made; {hint}lower optim.lr, or look at the weights that init= gave"
            )
        asked, self.seconds, writing = self.comm.all_reduce_max(
            float(self.stopping.asked), time.monotonic() - self._started, float(self._writer.writing)
        )
        if self._writer.begun and not writing:
            self._writer.advance()
        return asked > 0
