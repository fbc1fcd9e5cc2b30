"""A pretraining job: everything the loop needs, built once, and what a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pretrain.config import PretrainConfig
from pretrain.tools import nan_dump
from pretrain.trainer.evaluator import EvalResult, Evaluator, eval_protocol
from pretrain.trainer.inputs import RunInputs, checkpoints_of, model_folder, step_of_model
from pretrain.trainer.samples import Samples
from xlpre.batch import Batch
from xlpre.common.files import hardlink_copy, lock_dir
from xlpre.config.cli import NO_EXPLICIT_KEYS, ExplicitKeys
from xlpre.config.loader import save_config
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.data_loader import assign_lanes
from xlpre.model.initialization import build_with_weights
from xlpre.model.kernels.backend import resolve_backend
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory, initial_memory
from xlpre.training import checkpoint
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.deepspeed_engine import (
    PRECISIONS,
    build_deepspeed_config,
    build_engine,
    resolve_precision,
    init_process_group,
)
from xlpre.training.distributed import (
    Comm,
    check_shared_filesystem,
    init_env,
    is_rank_zero,
    rank,
    seed_everything,
    set_timeout,
    use_device,
    world_size,
)
from xlpre.training.optimizer_state import load_state, gather_weights
from xlpre.training.progress import Progress
from xlpre.training.shutdown import ShutdownHandler


class Trainer:
    """What the loop reads.

    Attributes:
        resolved: every setting, with what the store knows better.
        dtype: that the model computes in.
        engine: DeepSpeed's.
        memories: one for each micro-step.
        course: its updates and its clock.
        writer: of its checkpoints.
        tokens: window tokens read by all processes.
    """

    def __init__(self, config: PretrainConfig, given: ExplicitKeys = NO_EXPLICIT_KEYS) -> None:
        """Build, and go on from the newest checkpoint if there is one.

        Args:
            config: every setting.
            given: the keys that were set, which Start asks for.

        Raises:
            ValueError: settings that contradict each other, the store, the vocabulary or the checkpoint.
        """
        self.config, self.run_dir = config, Path(config.run_dir)
        self._foundation = RunInputs(config, given)
        self.store, self.tokenizer, start = self._foundation.store, self._foundation.tokenizer, self._foundation.start
        self.resolved, self.shape, self._loader = start.resolved(), start.shape, self._foundation.loader
        init_env()
        batch = self._batch = config.train.batch_schedule(world_size())
        self._groups = assign_lanes(rank(), world_size(), batch.micro_batch_size, batch.accumulation)
        self.device = use_device()
        set_timeout(config.train.timeout_minutes)
        init_process_group(self.device)
        self.comm = Comm()
        self._settings = build_deepspeed_config(config.train, config.optim, self.device, world_size(), config.deepspeed)
        self.dtype = PRECISIONS[resolve_precision(self.device, config.train.precision)]
        self._facts = {**self._foundation.facts, "precision": str(self.dtype), "eval": eval_protocol(config)}
        self._evaluation = Evaluator(config, self.store, self.tokenizer, self.comm)
        self._samples = Samples(config, self.store, self.tokenizer)
        if is_rank_zero():
            self._lock = lock_dir(self.run_dir, "another training goes on in it; wait for it, or stop it")
        check_shared_filesystem(self.run_dir, self.comm)
        folder, train = checkpoints_of(config), config.train
        saved = checkpoint.find_resume_checkpoint(folder, self.comm)
        was = self._foundation.facts_of(saved, precision=str(self.dtype)) if saved else {}
        self.writer = CheckpointWriter(
            folder, self.comm, train.keep_last_checkpoints, train.keep_checkpoints_every, self._publish, saved
        )
        self.tokens: int = was.get("tokens", 0)
        self._measured_anew = was.get("eval", self._facts["eval"]) != self._facts["eval"]  # older ones do not say
        self._best_loss: float | None = None if self._measured_anew else was.get("best_val_loss")
        self.memories: list[Memory] = []
        self._met: list[tuple[Batch, Memory]] = []
        self._start(saved, was)
        self.course = Progress(train, self.engine, self.comm, ShutdownHandler(), self.writer, was)
        if is_rank_zero():
            save_config(self.resolved, self.run_dir / "config.yaml")
            print(self._opening(saved), flush=True)

    def batches(self) -> Generator[Batch, None, None]:
        """Endless micro-batches of this process, from the present step on."""
        return self._loader.batches(self.course.step, lambda step: self._groups[: self._batch.micro_steps(step)])

    @property
    def waited_seconds(self) -> float:
        """Seconds that this process has waited for batches, in all."""
        return self._loader.waited_seconds

    def begin_step(self) -> int:
        """Set the learning rate, what dropout draws, and the number of micro-steps, which is returned."""
        step = self.course.step
        self._met.clear()
        self.course.begin_step(self.config.seed, self.config.schedule, self.config.optim.lr)
        self.engine.set_train_batch_size(self._batch.rows(step))
        return self._batch.micro_steps(step)

    def carry(self, micro: int, batch: Batch, memory: Memory) -> None:
        """Keep the memory that a batch left for the next window of its lanes."""
        # if this update is skipped too, what it met will be looked at
        if self.course.skipped_in_a_row + 1 == self.config.train.max_skipped_steps:
            self._met.append((batch, self.memories[micro]))
        self.memories[micro] = memory

    def end_step(self) -> bool:
        """One update is done; see Course."""
        self.tokens += self._batch.rows(self.course.step) * self.config.data.seq_len
        asked = self.course.end_step(self._leave_what_was_met)
        if self.course.skipped_in_a_row:
            self.memories = [memory.reset_nonfinite_rows() for memory in self.memories]
        return asked

    def measure(self) -> EvalResult:
        """Held-out loss and filled-in blanks; every process must call it."""
        model, step = self.engine.module, self.course.step
        measured, filled = self._evaluation(model), self._samples.fill(model)
        if is_rank_zero():
            self._samples.write(step, filled)
        if step and measured.loss < (math.inf if self._best_loss is None else self._best_loss):
            self._best_loss = measured.loss
            weights = self.writer.weights(step, self.engine)
            if is_rank_zero():
                self._write_model(step, self.run_dir / "best", weights)
        return measured

    def check_result(self, measured: EvalResult) -> None:
        """Raise ValueError if what was `measured` last is not finite; every process must call it."""
        if not math.isfinite(measured.loss):
            self.writer.finish()
            raise ValueError(
                f"the held-out loss is not finite after the last step ({self.course.step:,}), so that the model is of no use and the run "
                "is not finished; begin under another name with a lower optim.lr"
            )

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on; every process must call it."""
        step, seconds = self.course.step, self.course.seconds
        self.writer.begin(
            step,
            self.engine,
            [(lanes, memory.hidden, memory.valid) for lanes, memory in zip(self._groups, self.memories, strict=True)],
            {**self._facts, "train_seconds": seconds, "tokens": self.tokens, "best_val_loss": self._best_loss},
            partial(self._write_model, step),
        )

    def close(self) -> None:
        """Finish what was begun, and let go of the run folder."""
        self.writer.close()
        if is_rank_zero():
            self._lock.close()

    def _leave_what_was_met(self) -> str:
        """Leave what the last update met, in every process, for a person to look at; says how."""
        step = self.course.step - 1
        folder = nan_dump.folder_of(self.run_dir, step)
        weights = gather_weights(self.engine, keep=is_rank_zero())
        about = {"seed": self.config.seed, "step": step, "world_size": world_size(), "precision": str(self.dtype)}
        nan_dump.write(folder, rank(), self._met, self._model(step, weights) if is_rank_zero() else None, about)
        self.comm.barrier()
        return (
            f"`python pretrain/replay.py {folder}` makes the last one again and looks for where it begins; the weights in the "
            "checkpoints are finite, and good if the last held-out losses were: "
        )

    def _write_model(self, step: int, path: Path, weights: dict[str, Tensor]) -> None:
        save_folder(path, self._model(step, weights))

    def _model(self, step: int, weights: dict[str, Tensor]) -> ModelFolder:
        facts = {"name": self.config.name, "step": step, "data_fingerprint": self.store.fingerprint}
        return ModelFolder(self.shape, weights, self.tokenizer, self.config.objective.name, facts, "xlpre")

    def _publish(self, saved: Path) -> None:
        """Make the model of a checkpoint the model of the run."""
        hardlink_copy(saved / checkpoint.MODEL_DIR, model_folder(self.config))

    def _start(self, saved: Path | None, was: dict[str, Any]) -> None:
        """Build model, engine and memories, at the start or as the checkpoint `saved` has them; `was` is what it says."""
        config = self.config
        seed_everything(config.seed)  # the same starting values on every process
        shape = dataclasses.replace(self.shape, attention_backend=self._attention())
        two_streams, next_sentence = self._foundation.objective.two_streams, config.objective.next_sentence
        build = partial(LanguageModel, shape, two_streams, next_sentence)
        weights = load_folder(saved / checkpoint.MODEL_DIR).weights if saved else {}
        model = build_with_weights(weights, build) if saved else self._foundation.start.model(build)
        if config.train.activation_checkpointing:
            model.backbone.recompute_layers()
        self.engine = build_engine(model, self._settings, config.train, config.optim, self.device)
        if not saved:
            self.memories = [
                initial_memory(
                    self.shape, len(group), initial=config.memory.initial, device=self.device, dtype=self.dtype
                )
                for group in self._groups
            ]
            return
        load_state(self.engine, weights, checkpoint.SavedMoments(saved), was["counters"])
        stored = (checkpoint.read_lane_memory(saved, group) for group in self._groups)
        self.memories = [Memory(hidden.to(self.device), valid.to(self.device)) for hidden, valid in stored]
        if is_rank_zero() and step_of_model(config) != was["step"]:
            self._publish(saved)  # killed between the checkpoint and its model

    def _attention(self) -> Any:
        """What process 0 finds fastest on its GPU, which the others take."""
        shape = self.shape
        found = (
            resolve_backend(shape.attention_backend, self.device, self.dtype, shape.head_width)
            if is_rank_zero()
            else ""
        )
        return self.comm.broadcast(found)

    def _opening(self, saved: Path | None) -> str:
        config, shape = self.config, self.shape
        # ZeRO-3 leaves an empty tensor of each
        n_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        steps = f"{config.train.steps:,} steps" + (f" or {config.train.hours} hours" if config.train.hours else "")
        start = self._foundation.start.about
        if saved:
            start = f"goes on from {saved} at step {self.course.step:,}"
        if unfinished := checkpoint.list_incomplete(checkpoints_of(config), saved):
            start += f" (passed over, because a file is missing, cut or damaged: {', '.join(path.name for path in unfinished)})"
        if self._measured_anew:
            start += "; eval is not as it was, so that held-out losses do not compare with those before, and best/ begins anew"
        return (
            f"{config.name}: {config.objective.name}, {n_parameters:,} parameters ({shape.n_layer} layers, d {shape.d_model}), "
            f"memory {shape.mem_len}\n"
            f"{len(self.store.train):,} training tokens, {config.train.global_batch_size} rows of {config.data.seq_len} tokens a step, {steps}, "
            f"{world_size()} process(es) on {self.device.type}, {self.dtype}, ZeRO stage {self._settings['zero_optimization']['stage']}\n"
            f"{start}; everything goes to {self.run_dir}"
        )
