"""One run of a fine-tuning: everything the loop needs, built once, and what a checkpoint keeps of it."""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.batches import Dealer, Parts
from finetune.evaluation import answer, device_pass_tokens, measure
from finetune.foundation import Foundation
from finetune.model import TaskModel
from xlpre.exchange.fine_tuned import load_fine_tuned, save_fine_tuned
from xlpre.training import checkpoint
from xlpre.training.distributed import Talk, is_main, n_processes, process, seed_everything, seed_step
from xlpre.training.engine import build_engine, settings_for
from xlpre.training.optim import set_lr
from xlpre.training.schedule import learning_rate
from xlpre.training.state import put_state, weights_of
from xlpre.training.stopping import Stopping

KEPT = "kept"


class Job:
    """What the loop reads.

    Args:
        foundation: what the runs share.
        seed: of this one.
        folder: where it goes.
        talk: between the processes.
        device: of this process.
        stopping: whether someone asked to stop.

    Attributes:
        engine: DeepSpeed's.
        step: updates done, or skipped.
        best: the best score so far, and the step that had it.
        seconds: spent in all.
    """

    def __init__(
        self, foundation: Foundation, seed: int, folder: Path, talk: Talk, device: torch.device, stopping: Stopping
    ) -> None:
        self.foundation, self.config, self.seed, self.folder = foundation, foundation.config, seed, folder
        self.talk, self.device, self._stopping = talk, device, stopping
        config = self.config
        self.pass_tokens = device_pass_tokens(config.data.pass_tokens, device)
        side = foundation.task.padding
        self._dealer = Dealer(foundation.train.items, side, process(), n_processes(), self.pass_tokens)
        self._facts = foundation.facts(seed)
        checkpoints = folder / "checkpoints"
        self.resumed_from = checkpoint.newest(checkpoints, talk)
        self._writer = checkpoint.CheckpointWriter(checkpoints, talk, config.train.keep_last, config.train.keep_every)
        self.step, self.seconds, self.skipped, self._skipped_in_a_row = 0, 0.0, 0, 0
        self.best: tuple[float, int] | None = None
        self._without_better = 0
        self._start()
        self._started = time.monotonic() - self.seconds

    @property
    def finished(self) -> bool:
        """Whether the steps are done, the time is used up, or nothing got better for long."""
        patience = self.config.eval.patience
        tired = patience is not None and self._without_better >= patience
        return self.step >= self.config.train.steps or self._time_share >= 1 or tired

    @property
    def lr(self) -> float:
        """The learning rate of the update being made."""
        config = self.config
        return learning_rate(config.schedule, config.optim.lr, self.step, config.train.steps, self._time_share)

    def begin_update(self) -> list[Parts]:
        """Set the learning rate and what dropout draws; returns what this process reads, one for each micro-step."""
        seed_step(self.seed, self.step, process())
        set_lr(self.engine.optimizer, self.lr)
        train = self.config.train
        return self._dealer.update(self.seed, self.step, train.batch_size, train.accumulation)

    def end_update(self) -> bool:
        """One update is done. Returns whether any process was asked to stop; all processes get the same answer and clock.

        Raises:
            ValueError: too many updates in a row were skipped, because their gradients were not finite.
        """
        self.step += 1
        was, self.skipped = self.skipped, int(self.engine.skipped_steps)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.skipped > was else 0
        if self._skipped_in_a_row == self.config.train.max_skipped:
            raise ValueError(
                f"the gradients of {self._skipped_in_a_row} updates in a row, to step {self.step:,}, were not finite, and no update was "
                "made; lower optim.lr, or look at the weights that init= gave"
            )
        asked, self.seconds, writing = self.talk.largest(
            float(self._stopping.asked), time.monotonic() - self._started, float(self._writer.writing)
        )
        if self._writer.begun and not writing:
            self._writer.advance()
        return asked > 0

    def measure(self) -> dict[str, float]:
        """Scores on all that is measured on, as SPLIT/SCORE; the best weights are kept. Every process must call it."""
        task = self.foundation.task
        found: dict[str, float] = {}
        for split in self.foundation.dev:
            outputs = answer(self.engine.module, split, self.config.eval.rows, self.pass_tokens, self.talk)
            found |= {f"{split.name}/{name}": score for name, score in measure(task, split, outputs).items()}
        score = found[f"{self.foundation.dev[0].name}/{task.score}"]
        if self.step == 0:  # a head that knows nothing may be lucky
            return found
        if self.best is None or score > self.best[0]:
            self.best, self._without_better = (score, self.step), 0
            if self.config.eval.keep == "best":
                self._keep()
        else:
            self._without_better += 1
        return found

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on; every process must call it."""
        self._writer.finish()
        state = {"seconds": self.seconds, "best": self.best, "without_better": self._without_better}
        facts = {**self._facts, "precision": self._precision, **state}
        self._writer.begin(self.step, self.engine, [], facts, partial(self._write, self.step))

    def close(self) -> None:
        """Finish what was begun; keep the last weights if they are the result; give the engine's memory back."""
        self._writer.finish()
        self._writer.close()
        if self.finished and self.config.eval.keep == "last":
            self._keep()
        del self.engine
        gc.collect()

    @property
    def result(self) -> Path:
        """The folder of the model that is the result."""
        return self.folder / KEPT

    def _keep(self) -> None:
        weights = weights_of(self.engine, keep=is_main())
        if is_main():
            self._write(self.step, self.result, weights)
        self.talk.barrier()

    def _write(self, step: int, path: Path, weights: dict[str, Tensor]) -> None:
        facts = {"name": self.config.name, "step": step, "seed": self.seed, "init": self.config.init}
        save_fine_tuned(path, self.foundation.model(weights, facts))

    @property
    def _time_share(self) -> float:
        hours = self.config.train.hours
        return self.seconds / (hours * 3600) if hours else 0.0

    def _start(self) -> None:
        """Build model and engine, at the start or as the checkpoint has them."""
        config, saved = self.config, self.resumed_from
        if saved:
            check_facts(saved, checkpoint.facts_of(saved), self._facts)
        seed_everything(self.seed)  # the same starting values on every process
        model = TaskModel(self.foundation.shape, self.foundation.task)
        if config.train.activation_checkpointing:
            model.backbone.recompute_layers()
        weights = load_fine_tuned(saved / checkpoint.MODEL).weights if saved else self.foundation.folder.weights
        if saved or not config.from_scratch:
            model.put(weights)
        settings = settings_for(config.train, config.optim, self.device, n_processes(), config.deepspeed)
        self.engine = build_engine(model, settings, config.train, config.optim, self.device)
        self._precision = str(model.backbone.mask_embedding.dtype)
        if saved:
            was = checkpoint.facts_of(saved)
            check_facts(saved, was, {"precision": self._precision})
            put_state(self.engine, weights, checkpoint.Moments(saved), was["counters"])
            self.step, self.seconds, self.skipped = was["step"], was["seconds"], was["counters"]["skipped"]
            self.best, self._without_better = was["best"] and tuple(was["best"]), was["without_better"]


def check_facts(saved: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError if what was written in `saved` was made with other facts than `now`."""
    for key, value in now.items():
        before = was.get(key)
        if before == value:
            continue
        if isinstance(value, dict):
            name = next(name for name in value if (before or {}).get(name) != value[name])
            key, before, value = f"{key}.{name}", (before or {}).get(name), value[name]
        raise ValueError(
            f"{saved} was made with {key}={before}, now it is {value}; put it back, or give the run another name"
        )
