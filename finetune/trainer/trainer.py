"""One run of a fine-tuning: everything the loop needs, built once, and what a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.data.batching import LengthBucketSampler, MicroStep
from finetune.trainer.evaluator import answer, device_pass_tokens, measure
from finetune.trainer.inputs import RunInputs
from finetune.trainer.task_model import TaskModel
from xlpre.conversion.task_model import load_task_model, save_task_model
from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights
from xlpre.model.kernels.backend import resolve_backend
from xlpre.training import checkpoint
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.deepspeed_engine import PRECISIONS, build_deepspeed_config, build_engine, resolve_precision
from xlpre.training.distributed import Comm, is_rank_zero, rank, seed_everything, world_size
from xlpre.training.optimizer_state import load_state
from xlpre.training.progress import Progress
from xlpre.training.shutdown import ShutdownHandler

KEPT = "kept"


class Trainer:
    """What the loop reads.

    Args:
        foundation: what the runs share.
        seed: of this one.
        folder: where it goes.
        comm: between the processes.
        device: of this process.
        stopping: whether someone asked to stop.

    Attributes:
        engine: DeepSpeed's.
        course: its updates and its clock.
        best: the best score so far, and the step that had it.
    """

    def __init__(
        self,
        foundation: RunInputs,
        seed: int,
        folder: Path,
        comm: Comm,
        device: torch.device,
        stopping: ShutdownHandler,
    ) -> None:
        self.foundation, self.config, self.seed, self.folder = foundation, foundation.config, seed, folder
        self.comm, self.device = comm, device
        config = self.config
        self.pass_tokens = device_pass_tokens(config.data.forward_overhead_tokens, device)
        side = foundation.task.padding_side
        self._dealer = LengthBucketSampler(foundation.train.features, side, rank(), world_size(), self.pass_tokens)
        self._dtype = PRECISIONS[resolve_precision(device, config.train.precision)]
        self._facts = {**foundation.facts(seed), "precision": str(self._dtype)}
        checkpoints, train = folder / checkpoint.CHECKPOINTS_DIR, config.train
        saved = checkpoint.find_resume_checkpoint(checkpoints, comm)
        was = checkpoint.read_manifest(saved, self._facts) if saved else {}
        self._writer = CheckpointWriter(
            checkpoints, comm, train.keep_last_checkpoints, train.keep_checkpoints_every, resumed=saved
        )
        self.best: tuple[float, int] | None = was.get("best") and tuple(was["best"])
        self._without_better: int = was.get("without_better", 0)
        self._start(saved, was)
        self.course = Progress(train, self.engine, comm, stopping, self._writer, was)

    @property
    def finished(self) -> bool:
        """Whether the steps are done, the time is used up, or nothing got better for long."""
        patience = self.config.eval.early_stopping_patience
        return self.course.finished or (patience is not None and self._without_better >= patience)

    def begin_step(self) -> list[MicroStep]:
        """Set the learning rate and what dropout draws; returns what this process reads, one for each micro-step."""
        self.course.begin_step(self.seed, self.config.schedule, self.config.optim.lr)
        train = self.config.train
        return self._dealer.micro_steps(self.seed, self.course.step, train.global_batch_size, train.batch_schedule(world_size()).accumulation)

    def measure(self) -> dict[str, float]:
        """Scores on all that is measured on, as SPLIT/SCORE; the best weights are kept. Every process must call it."""
        task = self.foundation.task
        found: dict[str, float] = {}
        for split in self.foundation.dev:
            outputs = answer(self.engine.module, split, self.config.eval.batch_size, self.pass_tokens, self.comm)
            found |= {f"{split.name}/{name}": score for name, score in measure(task, split, outputs).items()}
        score = found[f"{self.foundation.dev[0].name}/{task.main_metric}"]
        if self.course.step == 0:  # a head that knows nothing may be lucky
            return found
        if self.best is None or score > self.best[0]:
            self.best, self._without_better = (score, self.course.step), 0
            if self.config.eval.keep_weights == "best":
                self._keep()
        else:
            self._without_better += 1
        return found

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on; every process must call it."""
        step, seconds = self.course.step, self.course.seconds
        facts = {**self._facts, "train_seconds": seconds, "best": self.best, "without_better": self._without_better}
        self._writer.begin(step, self.engine, [], facts, partial(self._write, step))

    def close(self) -> None:
        """Finish what was begun; keep the last weights if they are the result; give the engine's memory back."""
        self._writer.close()
        if self.finished and self.config.eval.keep_weights == "last":
            self._keep()
        del self.engine, self.course.engine
        gc.collect()

    @property
    def result(self) -> Path:
        """The folder of the model that is the result."""
        return self.folder / KEPT

    def _keep(self) -> None:
        weights = self._writer.weights(self.course.step, self.engine)
        if is_rank_zero():
            self._write(self.course.step, self.result, weights)
        self.comm.barrier()

    def _write(self, step: int, path: Path, weights: dict[str, Tensor]) -> None:
        facts = {"name": self.config.name, "step": step, "seed": self.seed, "init_from": self.config.init_from}
        save_task_model(path, self.foundation.model(weights, facts))

    def _start(self, saved: Path | None, was: dict[str, Any]) -> None:
        """Build model and engine, at the start or as the checkpoint `saved` has them; `was` is what it says."""
        config = self.config
        seed_everything(self.seed)  # the same starting values on every process
        shape = in_agreement(self.foundation.shape, self.device, self._dtype, self.comm)
        build = partial(TaskModel, shape, self.foundation.task)
        weights = load_task_model(saved / checkpoint.MODEL_DIR).weights if saved else {}
        model = build_with_weights(weights, build) if saved else build()
        if not saved and not config.from_scratch:  # the head keeps the values that it begins with
            model.put(self.foundation.folder.weights)
        if config.train.activation_checkpointing:
            model.backbone.recompute_layers()
        settings = build_deepspeed_config(config.train, config.optim, self.device, world_size(), config.deepspeed)
        self.engine = build_engine(model, settings, config.train, config.optim, self.device)
        if saved:
            load_state(self.engine, weights, checkpoint.SavedMoments(saved), was["counters"])


def in_agreement(shape: ModelConfig, device: torch.device, dtype: torch.dtype, comm: Comm) -> ModelConfig:
    """A shape with the attention that process 0 finds fastest on its GPU, which the others take."""
    found = resolve_backend(shape.attention_backend, device, dtype, shape.head_width) if is_rank_zero() else ""
    attention: Any = comm.broadcast(found)
    return dataclasses.replace(shape, attention_backend=attention)
