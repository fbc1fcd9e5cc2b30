"""A pretraining job: everything the loop needs, built once, and what a checkpoint keeps of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
from functools import partial
from pathlib import Path

from torch import Tensor

from pretrain import not_finite
from pretrain.config import PretrainConfig
from pretrain.foundation import Foundation, checkpoints_of, model_folder, step_of_model
from pretrain.held_out import Evaluation, Measure
from pretrain.samples import Samples
from xlpre.atomic import exclusive, linked_copy
from xlpre.batch import Batch
from xlpre.config import dump
from xlpre.exchange.folder import ModelFolder, load_folder, put_weights, save_folder
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory, first_memory
from xlpre.objectives.loader import lanes_of
from xlpre.training import checkpoint
from xlpre.training.distributed import (
    Talk,
    check_shared,
    is_main,
    limit_waiting,
    n_processes,
    process,
    seed_everything,
    seed_step,
    set_defaults,
    use_device,
)
from xlpre.training.engine import build_engine, settings_for, start_processes
from xlpre.training.optim import set_lr
from xlpre.training.schedule import learning_rate
from xlpre.training.state import put_state, weights_of
from xlpre.training.stopping import Stopping


class Job:
    """What the loop reads.

    Attributes:
        resolved: every setting, with what the store knows better.
        engine: DeepSpeed's.
        memories: one for each micro-step.
        step: updates done, or skipped.
        tokens: window tokens read by all processes.
        seconds: spent in all.
        skipped: updates that were not made, because their gradients were not finite.
    """

    def __init__(self, config: PretrainConfig, typed: Collection[str] = ()) -> None:
        """Build, and go on from the newest checkpoint if there is one.

        Args:
            config: every setting.
            typed: keys that were given as words: what a folder to start from has otherwise, is then refused.

        Raises:
            ValueError: settings that contradict each other, the store, the vocabulary or the checkpoint.
        """
        self.config, self.run_dir = config, Path(config.run_dir)
        self._foundation = Foundation(config, typed)
        self.store, self.tokenizer, start = self._foundation.store, self._foundation.tokenizer, self._foundation.start
        self.resolved, self.shape, self._loader = start.resolved(), start.shape, self._foundation.loader
        set_defaults()
        self._groups = lanes_of(process(), n_processes(), config.train.batch_size, config.train.accumulation)
        self.device = use_device()
        limit_waiting(config.train.patience_minutes)
        start_processes(self.device)
        self.talk = Talk()
        self._settings = settings_for(config.train, config.optim, self.device, n_processes(), config.deepspeed)
        self._evaluation = Evaluation(config, self.store, self.tokenizer.starts_word, self.talk)
        self._samples = Samples(config, self.store, self.tokenizer)
        if is_main():
            self._lock = exclusive(self.run_dir, "another training goes on in it; wait for it, or stop it")
        check_shared(self.run_dir, self.talk)
        folder, train = checkpoints_of(config), config.train
        self._resumed_from = checkpoint.newest(folder, self.talk)
        self._writer = checkpoint.CheckpointWriter(folder, self.talk, train.keep_last, train.keep_every, self._publish)
        self.step, self.tokens, self.seconds, self._best_loss = 0, 0, 0.0, None  # type: int, int, float, float | None
        self.skipped = self._skipped_in_a_row = 0
        self.memories: list[Memory] = []
        self._met: list[tuple[Batch, Memory]] = []
        self._start()
        self._started = time.monotonic() - self.seconds
        self._stopping = Stopping()
        if is_main():
            dump(self.resolved, self.run_dir / "config.yaml")
            print(self._opening(), flush=True)

    @property
    def finished(self) -> bool:
        """Whether the steps or the time are used up."""
        return self.step >= self.config.train.steps or self._time_share >= 1

    @property
    def lr(self) -> float:
        """The learning rate of the update being made."""
        config = self.config
        return learning_rate(config.schedule, config.optim.lr, self.step, config.train.steps, self._time_share)

    def batches(self) -> Generator[Batch, None, None]:
        """Endless micro-batches of this process, from the present step on."""
        return self._loader.batches(self.step, lambda step: self._groups[: self.config.train.micro_steps(step)])

    @property
    def waited_seconds(self) -> float:
        """Seconds that this process has waited for batches, in all."""
        return self._loader.waited_seconds

    def begin_update(self) -> int:
        """Set the learning rate, what dropout draws, and the number of micro-steps, which is returned."""
        train = self.config.train
        self._met.clear()
        seed_step(self.config.seed, self.step, process())
        set_lr(self.engine.optimizer, self.lr)
        self.engine.set_train_batch_size(train.rows_of(self.step))
        return train.micro_steps(self.step)

    def carry(self, micro: int, batch: Batch, memory: Memory) -> None:
        """Keep the memory that a batch left for the next window of its lanes."""
        # if this update is skipped too, what it met will be looked at
        if self._skipped_in_a_row + 1 == self.config.train.max_skipped:
            self._met.append((batch, self.memories[micro]))
        self.memories[micro] = memory

    def end_update(self) -> bool:
        """One update is done. Returns whether any process was asked to stop; all processes get the same answer and clock.

        Raises:
            ValueError: too many updates in a row were skipped, because their gradients were not finite; a checkpoint could not
                be written.
        """
        train = self.config.train
        made = self.step
        self.tokens += train.rows_of(self.step) * self.config.data.window
        self.step += 1
        was, self.skipped = self.skipped, int(self.engine.skipped_steps)  # DeepSpeed skips on all processes or on none
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.skipped > was else 0
        if self._skipped_in_a_row:
            self.memories = [memory.restarted_where_not_finite() for memory in self.memories]
        if self._skipped_in_a_row == train.max_skipped:
            self.finish_saving()
            dump = self._dump_met(made)
            raise ValueError(
                f"the gradients of {self._skipped_in_a_row} updates in a row, to step {self.step:,}, were not finite, and no update was "
                f"made; `python pretrain/replay.py {dump}` makes the last one again and looks for where it begins; the checkpoints are "
                "good: lower optim.lr, or look at the weights that init= gave"
            )
        asked, self.seconds, writing = self.talk.largest(
            float(self._stopping.asked), time.monotonic() - self._started, float(self._writer.writing)
        )
        if self._writer.begun and not writing:
            self._writer.advance()
        return asked > 0

    def measure(self) -> Measure:
        """Held-out loss and filled-in blanks; every process must call it."""
        model = self.engine.module
        measured, filled = self._evaluation(model), self._samples.fill(model)
        if is_main():
            self._samples.write(self.step, filled)
        if self.step and (self._best_loss is None or measured.loss < self._best_loss):
            self._best_loss = measured.loss
            weights = weights_of(self.engine, keep=is_main())
            if is_main():
                self._write_model(self.step, self.run_dir / "best", weights)
        return measured

    def save(self) -> None:
        """Begin a checkpoint, which is written while training goes on; every process must call it."""
        self.finish_saving()
        clock = {"seconds": self.seconds, "tokens": self.tokens, "best_held_out_loss": self._best_loss}
        self._writer.begin(
            self.step,
            self.engine,
            [(lanes, memory.hidden, memory.valid) for lanes, memory in zip(self._groups, self.memories, strict=True)],
            {**self._foundation.facts, "precision": self._precision, **clock},
            partial(self._write_model, self.step),
        )

    @property
    def saving(self) -> bool:
        """Whether a checkpoint was begun that is not one yet."""
        return self._writer.begun

    def close(self) -> None:
        """Finish what was begun, and let go of the run folder."""
        self.finish_saving()
        self._writer.close()
        if is_main():
            self._lock.close()

    def finish_saving(self) -> None:
        """Wait for the checkpoint that was begun, if one was; every process must call it."""
        self._writer.finish()

    def _dump_met(self, step: int) -> Path:
        """Leave what the update of `step` met, in every process, for a person to look at."""
        dump = not_finite.folder_of(self.run_dir, step)
        weights = weights_of(self.engine, keep=is_main())
        about = {
            "seed": self.config.seed,
            "step": step,
            "n_processes": n_processes(),
            "precision": self._precision,
        }
        model = self._model(step, weights) if is_main() else None
        not_finite.write(dump, process(), self._met, model, about)
        self.talk.barrier()
        return dump

    def _write_model(self, step: int, path: Path, weights: dict[str, Tensor]) -> None:
        save_folder(path, self._model(step, weights))

    def _model(self, step: int, weights: dict[str, Tensor]) -> ModelFolder:
        facts = {"name": self.config.name, "step": step, "data_fingerprint": self.store.fingerprint}
        return ModelFolder(self.shape, weights, self.tokenizer, self.config.objective.name, facts, "xlpre")

    def _publish(self, saved: Path) -> None:
        """Make the model of a checkpoint the model of the run."""
        linked_copy(saved / checkpoint.MODEL, model_folder(self.config))

    @property
    def _time_share(self) -> float:
        hours = self.config.train.hours
        return self.seconds / (hours * 3600) if hours else 0.0

    def _start(self) -> None:
        """Build model, engine and memories, at the start or as the checkpoint has them."""
        config, saved = self.config, self._resumed_from
        if saved:
            self._foundation.check_saved(saved)
        seed_everything(config.seed)  # the same starting values on every process
        model = LanguageModel(self.shape, self._foundation.objective.two_streams)
        if config.train.activation_checkpointing:
            model.backbone.recompute_layers()
        weights = load_folder(saved / checkpoint.MODEL).weights if saved else {}
        if saved:
            put_weights(weights, model)
        else:
            self._foundation.start.put_weights(model)
        self.engine = build_engine(model, self._settings, config.train, config.optim, self.device)
        dtype = model.backbone.mask_embedding.dtype
        self._precision = str(dtype)
        if not saved:
            self.memories = [
                first_memory(self.shape, len(group), initial=config.memory.initial, device=self.device, dtype=dtype)
                for group in self._groups
            ]
            return
        was = self._foundation.check_saved(saved, precision=self._precision)
        put_state(self.engine, weights, checkpoint.Moments(saved), was["counters"])
        stored = (checkpoint.memory_of(saved, group) for group in self._groups)
        self.memories = [Memory(hidden.to(self.device), valid.to(self.device)) for hidden, valid in stored]
        self.step, self.tokens, self.seconds = was["step"], was["tokens"], was["seconds"]
        self._best_loss, self.skipped = was["best_held_out_loss"], was["counters"]["skipped"]
        if is_main() and step_of_model(config) != self.step:
            self._publish(saved)  # killed between the checkpoint and its model

    def _opening(self) -> str:
        config, shape = self.config, self.shape
        n_parameters = sum(p.numel() for p in self.engine.module.parameters())
        steps = f"{config.train.steps:,} steps" + (f" or {config.train.hours} hours" if config.train.hours else "")
        start = self._foundation.start.about
        if self._resumed_from:
            start = f"goes on from {self._resumed_from} at step {self.step:,}"
        if unfinished := checkpoint.unfinished(checkpoints_of(config), self._resumed_from):
            start += f" (passed over, because a file is missing, cut or damaged: {', '.join(path.name for path in unfinished)})"
        return (
            f"{config.name}: {config.objective.name}, {n_parameters:,} parameters ({shape.n_layer} layers, d {shape.d_model}), "
            f"memory {shape.mem_len}\n"
            f"{len(self.store.train):,} training tokens, {config.train.batch_size} rows of {config.data.window} tokens a step, {steps}, "
            f"{n_processes()} process(es) on {self.device.type}, {self.engine.module.backbone.mask_embedding.dtype}\n"
            f"{start}; everything goes to {self.run_dir}"
        )
