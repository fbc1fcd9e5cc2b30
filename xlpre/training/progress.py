"""Step counter, clock and end of a run, shared by pretraining and fine-tuning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from xlpre.common.errors import InputError
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.config import TrainConfig
from xlpre.training.distributed import Comm, rank, seed_step, world_size
from xlpre.training.lr_schedule import ScheduleConfig, learning_rate
from xlpre.training.optimizer import set_lr
from xlpre.training.shutdown import ShutdownHandler


class Progress:
    """Progress of a run: its steps, its training time and its skipped steps.

    Args:
        train: length of the run.
        engine: the DeepSpeed engine.
        comm: collectives for small values.
        shutdown: reports signals to stop.
        writer: checkpoint writer, which `end_step` advances.
        manifest: manifest of the checkpoint to resume from; empty for a new run.

    Attributes:
        step: number of steps done, skipped steps included.
        train_seconds: training time, over all starts of the run.
        skipped_steps: number of steps without an update, because a gradient was not finite.
        consecutive_skips: number of skipped steps in a row at the end; 0 if the last step was not skipped.
    """

    def __init__(
        self,
        train: TrainConfig,
        engine: Any,
        comm: Comm,
        shutdown: ShutdownHandler,
        writer: CheckpointWriter,
        manifest: Mapping[str, Any],
    ) -> None:
        self.train, self.engine, self.comm, self.shutdown, self._writer = train, engine, comm, shutdown, writer
        self.step, self.train_seconds, self.skipped_steps, self.consecutive_skips = 0, 0.0, 0, 0
        if manifest:
            self.step, self.train_seconds = manifest["step"], manifest["train_seconds"]
            self.skipped_steps = manifest["counters"]["skipped_steps"]
            self.consecutive_skips = manifest.get("consecutive_skips", 0)
        self._start_time = time.monotonic() - self.train_seconds
        self._agreement: Callable[[], list[float]]  # waits for the values exchanged since `begin_step`

    @property
    def time_fraction(self) -> float:
        """Fraction of `train.hours` that has passed; 0 without a time budget."""
        return self.train_seconds / (self.train.hours * 3600) if self.train.hours else 0.0

    @property
    def state(self) -> dict[str, Any]:
        """Values that a checkpoint stores for the next start, besides those that CheckpointWriter adds: step and skipped steps."""
        return {"train_seconds": self.train_seconds, "consecutive_skips": self.consecutive_skips}

    @property
    def is_finished(self) -> bool:
        """True after the last step, or when the time budget is spent."""
        return self.train.is_over(self.step, self.train_seconds)

    def unfinished_warmup_warning(self, schedule: ScheduleConfig) -> str:
        """Return a warning if the time budget ended in the warm-up; else an empty string."""
        if self.time_fraction < 1 or not 0 < self.step <= schedule.warmup_steps:
            return ""
        return (
            f"warning: train.hours={self.train.hours:g} ended at step {self.step:,}, in the warm-up "
            f"(schedule.warmup_steps={schedule.warmup_steps}): the learning rate never reached optim.lr. "
            "Raise train.hours or lower schedule.warmup_steps."
        )

    def begin_step(self, seed: int, schedule: ScheduleConfig, peak_lr: float) -> None:
        """Set the learning rate, seed dropout and start to exchange clocks and stop signals. Every process must call it."""
        set_lr(self.engine.optimizer, learning_rate(schedule, peak_lr, self.step, self.train.steps, self.time_fraction))
        seed_step(seed, self.step, rank())
        # `end_step` reads the result, so the exchange runs during the step and no process waits for the network
        self._agreement = self.comm.start_all_reduce_max(
            float(self.shutdown.is_requested), time.monotonic() - self._start_time, float(self._writer.is_writing)
        )

    def end_step(self, on_too_many_skips: Callable[[], str] = lambda: "") -> bool:
        """Count a step and advance the checkpoint in progress. Every process must call it.

        All processes use the values of clock, stop signals and checkpoint state that they exchanged at the start of the step.

        Args:
            on_too_many_skips: called before the error for too many skipped steps; returns a hint for its message.

        Returns:
            True, on all processes, if any process received a signal to stop.

        Raises:
            InputError: `train.max_skipped_steps` steps in a row were skipped, or a checkpoint could not be written.
        """
        stop_requested, self.train_seconds, is_writing = self._agreement()
        self.step += 1
        previous, self.skipped_steps = self.skipped_steps, int(self.engine.skipped_steps)  # equal on all processes
        self.consecutive_skips = self.consecutive_skips + 1 if self.skipped_steps > previous else 0
        if self.consecutive_skips >= self.train.max_skipped_steps:  # more, if a resumed run has a lower limit
            self._writer.finish()
            hint = on_too_many_skips()
            steps = f"{self.consecutive_skips} steps in a row, up to " if self.consecutive_skips > 1 else ""
            raise InputError(
                f"the gradients of {steps}step {self.step:,} were not finite, so the weights were not updated. {hint}Lower optim.lr, in "
                "fine-tuning under another name, or check the weights of init_from."
            )
        if self._writer.in_progress and not is_writing:
            self._writer.advance()
        # a single process stops at once, not after one more step
        return self.shutdown.is_requested if world_size() == 1 else stop_requested > 0
