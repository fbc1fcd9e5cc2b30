"""Pretraining: the training loop, and the Trainer, which holds the components and the state of a run.

A lane is a row of the batch that reads consecutive windows; the memory of a window is that of the previous window of its lane. Window
tokens are the tokens of all windows, in which the overlap of consecutive windows counts twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.config import (
    PretrainConfig,
    describe_changes,
    reason_against_cuda_graphs,
    setting_changes,
    trained_settings,
)
from pretrain.trainer import nonfinite_dump
from pretrain.trainer.config_warnings import backward_text_warning, long_warmup_warning, small_validation_text_warning
from pretrain.trainer.cuda_graphs import use_cuda_graphs
from pretrain.trainer.evaluator import (
    EvalResult,
    Evaluator,
    eval_protocol,
    plateau_warning,
    target_fraction_note,
)
from pretrain.trainer.inputs import RunInputs, checkpoints_dir, model_dir, model_step
from pretrain.trainer.logger import TrainLogger
from pretrain.trainer.samples import Samples
from xlpre.batch import Batch
from xlpre.common.errors import InputError
from xlpre.common.files import FileEntries, hardlink_copy
from xlpre.common.messages import counted
from xlpre.config.cli import NO_EXPLICIT_KEYS, ExplicitKeys
from xlpre.config.loader import save_config
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.data_loader import assign_lanes
from xlpre.model.initialization import build_with_weights
from xlpre.model.kernels.backend import concrete_backend, resolve_backend, run_needed_selfchecks
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory, initial_memory
from xlpre.training import checkpoint
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.deepspeed_engine import build_engine
from xlpre.training.distributed import is_rank_zero, rank, seed_step, world_size
from xlpre.training.metrics_writer import check_wandb_installed
from xlpre.training.optimizer_state import gather_weights, load_state
from xlpre.training.progress import Progress
from xlpre.training.shutdown import ShutdownHandler
from xlpre.training.startup import start_training


class Trainer:
    """A pretraining run. Resumes from its latest checkpoint, if there is one.

    Args:
        config: settings of the run.
        explicit_keys: keys that the user set; see WeightInit.

    Attributes:
        config: settings of the run.
        run_dir: folder of the run.
        context: device, precision and communication of this process.
        model_config: settings of the model.
        store: the token store.
        tokenizer: the vocabulary of the store.
        engine: the DeepSpeed engine.
        memories: recurrent memory of the rows of each micro-step.
        progress: steps and clock of the run.
        writer: checkpoint writer.
        logger: console and metrics files.
        tokens: number of window tokens that all processes have read.

    Raises:
        InputError: settings contradict each other, the store, the vocabulary or the checkpoint.
    """

    _evaluation_due: bool

    def __init__(self, config: PretrainConfig, explicit_keys: ExplicitKeys = NO_EXPLICIT_KEYS) -> None:
        check_wandb_installed(config.train.wandb)
        self.config, self.run_dir = config, Path(config.run_dir)
        self._inputs = RunInputs(config, explicit_keys)
        self.store, self.tokenizer, self._loader = self._inputs.store, self._inputs.tokenizer, self._inputs.loader
        self._resolved = self._inputs.weight_init.resolve_config()
        self.model_config = model = self._inputs.weight_init.model_config

        def check(device: torch.device, dtype: torch.dtype, timeout_seconds: float) -> None:
            run_needed_selfchecks(model.attention_backend, model.head_width, device, [dtype], timeout_seconds)

        self.context = context = start_training(config.train, config.optim, config.deepspeed, check)
        batch = context.batch
        self._lanes = assign_lanes(rank(), world_size(), batch.micro_batch_size, batch.accumulation)
        self._evaluator = Evaluator(config, self.store, self.tokenizer, context.comm)
        self._samples = Samples(config, self.store, self.tokenizer)
        self._lock = context.lock_run_dir(self.run_dir, "training")

        saved = checkpoint.find_latest_valid(checkpoints_dir(config), context.comm)
        precision = {"train.precision": context.precision}
        self._manifest = {**self._inputs.manifest, **precision, "eval": eval_protocol(config)}
        manifest = self._inputs.read_manifest(saved, **precision) if saved else {}
        settings = trained_settings(self._resolved)
        self._manifest |= {"settings": settings, "setting_changes": setting_changes(manifest, settings)}
        self.writer = CheckpointWriter(
            checkpoints_dir(config),
            context.comm,
            config.train.keep_last_checkpoints,
            config.train.keep_checkpoints_every,
            self._publish,
            saved,
            config.train.max_failed_saves,
            keep_old_memory=config.train.save_memory == "all",
        )
        self.tokens: int = manifest.get("tokens", 0)
        self._has_new_eval_protocol = bool(manifest) and manifest["eval"] != self._manifest["eval"]
        self._best_loss: float | None = None if self._has_new_eval_protocol else manifest.get("best_val_loss")
        # a run that a signal stops saves at once; an evaluation that was due then takes place when the run resumes
        self._evaluation_due = manifest.get("evaluation_due", False)
        self.memories: list[Memory] = []
        self._debug_inputs: list[tuple[Batch, Memory]] = []
        self._build(saved, manifest)
        self.progress = Progress(config.train, self.engine, context.comm, ShutdownHandler(), self.writer, manifest)
        context.comm.call_on_rank_zero(lambda: save_config(self._resolved, self.run_dir / "config.yaml"))
        if is_rank_zero():
            print(self._describe(saved, manifest), flush=True)
        self.logger = TrainLogger(
            self._resolved,
            context,
            self.progress,
            list(self.engine.module.auxiliary_heads),
            lambda: (self.tokens, self._loader.wait_seconds),
            self._evaluation_due,
        )

    def train(self) -> None:
        """Run the training loop until the steps or the time are used up, or a signal requests a stop.

        Raises:
            InputError: the gradients, the weights or the validation loss are not finite, or a checkpoint cannot be written.
        """
        config, progress, logger = self.config, self.progress, self.logger
        if progress.step == 0 or self._evaluation_due:
            self.evaluate()
        batches, stopped = self.batches(), False
        while not (progress.is_finished or stopped):
            n_micro_steps = self.begin_step()
            for micro_step in range(n_micro_steps):
                self.engine.set_gradient_accumulation_boundary(micro_step == n_micro_steps - 1)
                batch = next(batches).to(self.context.device)
                loss, memory, *auxiliary_losses = self.engine(batch, self.memories[micro_step])
                self.engine.backward(sum(auxiliary_losses, start=loss))
                logger.record_losses(loss, *auxiliary_losses)
                self.engine.step()  # updates the weights at the boundary only
                self.store_memory(micro_step, batch, memory)
            stopped = self.end_step()
            logger.end_step()
            if progress.step % config.train.log_every == 0 or progress.is_finished or stopped:
                logger.write_metrics()
            self._evaluation_due = progress.step % config.eval.every == 0 or progress.is_finished
            if self._evaluation_due and (progress.is_finished or not stopped):
                self.evaluate()
            if progress.step % config.train.save_every == 0 or progress.is_finished or stopped:
                self.save()
        batches.close()
        self.close()

    def batches(self) -> Generator[Batch, None, None]:
        """Yield the batches of this process, one per micro-step, indefinitely from the current step on."""
        return self._loader.batches(
            self.progress.step, lambda step: self._lanes[: self.context.batch.micro_steps(step)]
        )

    def begin_step(self) -> int:
        """Set the learning rate, the dropout seed and the batch size of a step. Return its number of micro-steps."""
        step, batch = self.progress.step, self.context.batch
        self._debug_inputs.clear()
        self.progress.begin_step(self.config.seed, self.config.schedule, self.config.optim.lr)
        self.engine.set_train_batch_size(batch.rows(step))
        return batch.micro_steps(step)

    def store_memory(self, micro_step: int, batch: Batch, memory: Memory) -> None:
        """Keep the memory after a batch for the next window of its lanes."""
        # if the gradients of this step are not finite either, the run ends and dumps these inputs
        if self.progress.consecutive_skips + 1 >= self.config.train.max_skipped_steps:
            self._debug_inputs.append((batch, self.memories[micro_step]))
        self.memories[micro_step] = memory

    def end_step(self) -> bool:
        """Count a completed step. Return True if a signal requests a stop; see Progress."""
        self.tokens += self.context.batch.rows(self.progress.step) * self.config.data.seq_len
        stopped = self.progress.end_step(self._dump_debug_state)
        if self.progress.consecutive_skips:
            self.memories = [memory.reset_nonfinite_rows() for memory in self.memories]
        return stopped

    def evaluate(self) -> EvalResult:
        """Evaluate on validation text, predict blanks and keep the best weights. Every process must call it.

        Raises:
            InputError: the loss is not finite after the last step of the run.
        """
        with self.logger.paused():
            model, step = self.engine.module, self.progress.step
            result, predictions = self._evaluator.evaluate(model), self._samples.predict(model)
            self.context.comm.call_on_rank_zero(lambda: self._samples.write(step, predictions))
            if step and result.loss < (math.inf if self._best_loss is None else self._best_loss):
                self._best_loss = result.loss
                self.writer.keep_best(step, self.engine)
            self.logger.write_evaluation(result, plateau_warning(self.config, result, step, self.tokens))
        self._evaluation_due = False
        if self.progress.is_finished and not math.isfinite(result.loss):
            self.writer.finish()
            raise InputError(
                f"the validation loss is not finite after the last step ({step:,}): the model is unusable, and the run is not "
                "finished. Lower optim.lr, and start again under another name."
            )
        return result

    def save(self) -> None:
        """Start to write a checkpoint, while training continues. Every process must call it."""
        with self.logger.paused():
            progress = {
                **self.progress.state,
                "tokens": self.tokens,
                "best_val_loss": self._best_loss,
                "evaluation_due": self._evaluation_due,
            }
            memories = [(lanes, x.hidden, x.valid) for lanes, x in zip(self._lanes, self.memories, strict=True)]
            self.writer.begin(
                self.progress.step,
                self.engine,
                [] if self.config.train.save_memory == "none" else memories,
                {**self._manifest, **progress},
                self._write_model,
            )

    def close(self) -> None:
        """Finish the checkpoint in progress, close the log, release the run folder and print the result."""
        self.writer.close()
        self.logger.close()
        self._lock.close()
        if is_rank_zero():
            if self.progress.is_finished:
                if warning := self.progress.unfinished_warmup_warning(self.config.schedule):
                    print(warning)
                print(f"finished at step {self.progress.step:,}: the model is in {model_dir(self.config)}", flush=True)
            else:
                print(f"stopped at step {self.progress.step:,} and saved. The same command resumes.", flush=True)

    def _build(self, saved: Path | None, manifest: dict[str, Any]) -> None:
        """Build model, engine and memories with initial values, or restore them from the checkpoint `saved` and its manifest."""
        config, device, dtype = self.config, self.context.device, self.context.dtype
        torch.manual_seed(config.seed)  # equal initial weights on all processes
        head_width, saved_backend = self.model_config.head_width, manifest.get("attention_backend")
        backend: Any = self.context.comm.call_on_rank_zero(
            lambda: resolve_backend(self.model_config.attention_backend, device, dtype, head_width, saved_backend)
        )
        self._manifest["attention_backend"] = concrete_backend(backend, device, dtype, head_width)
        model_config = dataclasses.replace(self.model_config, attention_backend=backend)
        two_streams, next_sentence = self._inputs.objective.two_streams, config.objective.next_sentence
        build = partial(LanguageModel, model_config, two_streams, next_sentence)
        if saved:  # DeepSpeed sends the weights of rank 0 to the other processes
            weights = load_folder(saved / checkpoint.MODEL_DIR).weights if is_rank_zero() else None
            model = build_with_weights(weights, build)
        else:
            model = self._inputs.weight_init.build_model(build)
        if config.train.activation_checkpointing:
            model.backbone.enable_activation_checkpointing()
        train, zero_stage = config.train, self.context.zero_stage
        on_gpu, concrete = device.type == "cuda", self._manifest["attention_backend"]
        reason = reason_against_cuda_graphs(
            config,
            dataclasses.replace(model_config, attention_backend=concrete),
            on_gpu,
            self.context.precision,
            zero_stage,
            world_size(),
        )
        if not reason:
            use_cuda_graphs(model, torch.compile(model.forward) if train.compile else None)
            train = dataclasses.replace(train, compile=False)
        is_noted = train.cuda_graphs or (on_gpu and train.cuda_graphs is None)
        self._graphs_note = f"note: CUDA graphs are not used: {reason}." if reason and is_noted else ""
        self.engine = build_engine(model, self.context.deepspeed_config, train, config.optim, device)
        initial = partial(initial_memory, self.model_config, initial=config.memory.initial, device=device, dtype=dtype)
        self.memories = [initial(len(lanes)) for lanes in self._lanes]
        if not saved:
            return
        moments = checkpoint.saved_moments(saved, manifest)
        load_state(self.engine, checkpoint.saved_weights(saved), moments, manifest["counters"])
        if checkpoint.has_memory(manifest):
            self._load_memory(saved, manifest)
        else:
            self._rewarm_memory(manifest["step"])
        if is_rank_zero() and model_step(config) != manifest["step"]:
            self._publish(saved)  # the run was killed before it published this checkpoint

    def _load_memory(self, saved: Path, manifest: dict[str, Any]) -> None:
        """Load the memory of the checkpoint `saved`."""
        # In the batch warm-up, a step reads only some of the lanes, and only their memory is loaded. The other lanes keep the initial
        # memory: if the number of micro-steps has changed, they may have been read long before the checkpoint, so that their saved
        # memory would be that of an earlier window than the one before their next window.
        n_micro_steps = self.context.batch.micro_steps(manifest["step"])
        for micro_step, (hidden, valid) in enumerate(
            checkpoint.read_lane_memory(saved, manifest, self._lanes[:n_micro_steps])
        ):
            self.memories[micro_step] = Memory(hidden.to(self.context.device), valid.to(self.context.device))

    def _rewarm_memory(self, step: int) -> None:
        """Fill the memory: read the windows of the last steps before `step` again, as in training, but without updates."""
        first_step = max(0, step - self._n_rewarmed)
        if first_step:  # the memory before the first window is unknown
            self.memories = [Memory(x.hidden, torch.zeros_like(x.valid)) for x in self.memories]
        for past in range(first_step, step):
            seed_step(self.config.seed, past, rank())
            for micro_step, lanes in enumerate(self._lanes[: self.context.batch.micro_steps(past)]):
                batch = self._loader.batch(past, lanes).to(self.context.device)
                with torch.no_grad():
                    _, self.memories[micro_step], *_ = self.engine.module(batch, self.memories[micro_step])

    @property
    def _n_rewarmed(self) -> int:
        """Number of windows whose reused parts fill the memory."""
        return math.ceil(self.model_config.mem_len / self.config.data.reuse_len)

    def _publish(self, saved: Path) -> None:
        """Link the best model and the model of a checkpoint into the run folder. The model comes last: `model_step` relies on its step."""
        if (saved / checkpoint.BEST_DIR).is_dir():
            hardlink_copy(saved / checkpoint.BEST_DIR, self.run_dir / checkpoint.BEST_DIR)
        hardlink_copy(saved / checkpoint.MODEL_DIR, model_dir(self.config))

    def _write_model(self, step: int, path: Path, weights: dict[str, Tensor]) -> FileEntries:
        return save_folder(path, self._model_folder(step, weights))

    def _model_folder(self, step: int, weights: dict[str, Tensor]) -> ModelFolder:
        provenance = {"name": self.config.name, "step": step, "data_fingerprint": self.store.fingerprint}
        return ModelFolder(self.model_config, weights, self.tokenizer, self.config.objective.name, provenance, "xlpre")

    def _dump_debug_state(self) -> str:
        """Dump the inputs of the last step and the weights, and return a message on how to replay it. Every process must call it."""
        step = self.progress.step
        folder = nonfinite_dump.dump_dir(self.run_dir, step)
        weights = gather_weights(self.engine, keep=is_rank_zero())
        model = self._model_folder(step - 1, weights) if is_rank_zero() else None
        metadata = {
            "seed": self.config.seed,
            "step": step - 1,
            "world_size": world_size(),
            "precision": str(self.context.dtype),
        }
        nonfinite_dump.write_rank_dump(folder, rank(), self._debug_inputs, model, metadata)
        self.context.comm.barrier()
        hint = f"Run `python pretrain/replay.py {folder}` to repeat step {step:,} and to find the first value that is not finite. "
        if checkpoint.list_complete(checkpoints_dir(self.config)):
            hint += (
                "The weights in the checkpoints are finite. They are usable if the last validation losses look normal. "
            )
        return hint

    def _describe(self, saved: Path | None, manifest: dict[str, Any]) -> str:
        """Return the opening lines of a run."""
        config, model = self.config, self.model_config
        # in ZeRO-3 the parameter itself is empty
        n_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        steps = f"{config.train.steps:,} steps" + (f" or {config.train.hours} hours" if config.train.hours else "")
        start = self._inputs.weight_init.description
        if saved:
            start = f"resumes from {saved} at step {self.progress.step:,}"
            changes = self._manifest["setting_changes"]
            if len(changes) > len(manifest.get("setting_changes", [])):
                start += f" with other settings: {describe_changes(changes[-1])}"
            if model.mem_len and not checkpoint.has_memory(manifest):
                start += (
                    f", which has no recurrent memory (train.save_memory): to fill it, the last {counted(self._n_rewarmed, 'window')} "
                    "of each batch row were read again, and losses differ slightly from those of a run without the interruption"
                )
        start += checkpoint.describe_incomplete(checkpoints_dir(config), saved)
        if self._has_new_eval_protocol:
            start += "; the eval settings changed: validation losses are not comparable with earlier ones, and best/ starts again"
        notes = [
            f"note: {self.store.upgrade_note}" if self.store.upgrade_note else "",
            *self._inputs.notes,
            target_fraction_note(config),
            small_validation_text_warning(self._resolved, self.store),
            backward_text_warning(config),
            long_warmup_warning(config),
            self._graphs_note,
            self.context.precision_note(),
        ]
        return (
            f"{config.name}: {config.objective.name}, {n_parameters:,} parameters ({model.n_layer} layers, d_model {model.d_model}), "
            f"mem_len {model.mem_len}\n"
            f"{len(self.store.train):,} training tokens, windows of {config.data.seq_len} tokens, {steps}\n"
            f"{self.context.describe()}\n"
            f"{start}; output in {self.run_dir}" + "".join(f"\n{note}" for note in notes if note)
        )
