"""Training of a task: the Trainer, whose loop is the same for all tasks."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.config import FinetuneConfig
from finetune.data.batching import LengthBucketSampler, MicroStep
from finetune.data.examples import Example, Outputs
from finetune.trainer.evaluator import compute_metrics, predict_split, resolve_overhead_tokens
from finetune.trainer.final_results import finalize, finalize_run, finished_seeds
from finetune.trainer.inputs import RunInputs
from finetune.trainer.logger import TrainLogger
from finetune.trainer.results import BEST, seed_folder
from finetune.trainer.task_model import TaskModel, resolve_shared_backend
from xlpre.common.files import FileEntries, hardlink_copy
from xlpre.common.messages import counted
from xlpre.config.loader import save_config
from xlpre.conversion.task_model_folder import load_task_model, save_task_model
from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights
from xlpre.model.kernels.backend import concrete_backend, run_needed_selfchecks
from xlpre.training import checkpoint
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.deepspeed_engine import build_engine
from xlpre.training.distributed import Comm, is_rank_zero, rank, world_size
from xlpre.training.lr_schedule import format_lr
from xlpre.training.metrics_writer import check_wandb_installed
from xlpre.training.optimizer_state import load_state
from xlpre.training.progress import Progress
from xlpre.training.shutdown import ShutdownHandler
from xlpre.training.startup import TrainingContext, start_training

MAX_LISTED_LABELS = 10


def finetune(config: FinetuneConfig) -> None:
    """Fine-tune with each seed, and predict with the best run.

    A run that was stopped at any time resumes from its last checkpoint if the function is called again.

    Raises:
        InputError: settings, examples or a folder are invalid, or differ from the run to resume.
    """
    check_wandb_installed(config.train.wandb)
    context: TrainingContext | None = None

    def join(model_config: ModelConfig) -> Comm:
        nonlocal context
        context = _start_training(config, model_config)
        return context.comm

    inputs = RunInputs(config, join if world_size() > 1 else None)
    seeds = range(config.seed, config.seed + config.num_seeds)
    finished_seeds(inputs)  # refuses results of other settings before anything starts
    context = context or _start_training(config, inputs.model_config)
    shutdown = ShutdownHandler()
    lock = context.lock_run_dir(Path(config.run_dir), "fine-tuning")
    finished = context.comm.broadcast(finished_seeds(inputs))
    remaining = [seed for seed in seeds if seed not in finished]
    if is_rank_zero():
        print(_describe(inputs, context, remaining, config.optim.lr is None), flush=True)
    outputs: dict[int, Outputs] = {}
    for seed in remaining:
        trainer = Trainer(inputs, seed, context, shutdown)
        trainer.train()
        if not trainer.is_finished:
            if is_rank_zero():
                print(
                    f"stopped at step {trainer.progress.step:,} of seed {seed} and saved. The same command resumes.",
                    flush=True,
                )
            break
        if is_rank_zero() and not trainer.progress.is_finished:
            print(
                f"seed {seed} stopped early at step {trainer.progress.step:,} of {config.train.steps:,}: no better score in "
                f"{counted(config.eval.early_stopping_patience or 0, 'evaluation')}",
                flush=True,
            )
        outputs[seed] = finalize_run(inputs, seed, trainer.progress.step, trainer.progress.train_seconds, context)
    else:
        finalize(inputs, outputs, context)
    lock.close()


class Trainer:
    """Trains the model of one seed. Resumes from the latest checkpoint of this run, if there is one.

    Args:
        inputs: inputs that the runs of all seeds share.
        seed: seed of this run.
        context: device, precision and communication of this process.
        shutdown: reports a signal to stop.

    Attributes:
        config: settings of the run.
        folder: folder of the run.
        engine: the DeepSpeed engine.
        progress: steps and clock of the run.
        logger: console and metrics files.
        best: best score so far and its step; None before the first evaluation.
    """

    _evaluation_due: bool

    def __init__(self, inputs: RunInputs, seed: int, context: TrainingContext, shutdown: ShutdownHandler) -> None:
        self.config, self.folder = inputs.config, seed_folder(inputs.config.run_dir, seed)
        self.context, self._inputs, self._seed = context, inputs, seed
        config, train = self.config, self.config.train
        self._overhead_tokens = resolve_overhead_tokens(config.data.forward_overhead_tokens, context.device)
        self._sampler = LengthBucketSampler(
            inputs.train.features, inputs.task.padding_side, rank(), world_size(), self._overhead_tokens
        )
        self._manifest = {**inputs.manifest(seed), "train.precision": context.precision}
        checkpoints = self.folder / checkpoint.CHECKPOINTS_DIR
        saved = checkpoint.find_latest_valid(checkpoints, self.context.comm)
        manifest = checkpoint.read_manifest(saved) if saved else {}
        if saved:
            inputs.check_resumable(saved, manifest, self._manifest)
        if is_rank_zero() and checkpoint.list_all(checkpoints):
            start = f"resumes from {saved} at step {manifest['step']:,}" if saved else "starts at step 0"
            print(f"seed {seed}: {start}{checkpoint.describe_incomplete(checkpoints, saved)}", flush=True)
        self._writer = CheckpointWriter(
            checkpoints,
            self.context.comm,
            train.keep_last_checkpoints,
            publish=self._publish,
            resumed=saved,
            max_failed=train.max_failed_saves,
        )
        self.best: tuple[float, int] | None = manifest.get("best") and tuple(manifest["best"])
        self._n_without_improvement: int = manifest.get("evaluations_without_improvement", 0)
        # a run that is asked to stop saves at once; a due evaluation takes place when it resumes
        self._evaluation_due = manifest.get("evaluation_due", False)
        self._build(saved, manifest)
        self.progress = Progress(train, self.engine, self.context.comm, shutdown, self._writer, manifest)
        context.comm.call_on_rank_zero(lambda: save_config(config, Path(config.run_dir) / "config.yaml"))
        self.logger = TrainLogger(config, seed, self.folder, self.progress, self._evaluation_due)

    def train(self) -> None:
        """Run the training loop until the steps or the time are used up, early stopping applies, or a signal requests a stop.

        Raises:
            InputError: gradients or weights are not finite, or a checkpoint cannot be written.
        """
        config, progress, logger = self.config, self.progress, self.logger
        # a resumed run may be finished already, because its time is used up
        if progress.step == 0 or self._evaluation_due or self.is_finished:
            self.evaluate()
        stopped = False
        while not (self.is_finished or stopped):
            micro_steps = self.begin_step()
            for number, micro_step in enumerate(micro_steps):
                self.engine.set_gradient_accumulation_boundary(number == len(micro_steps) - 1)
                loss = self.engine(micro_step.to(self.context.device))
                self.engine.backward(loss)
                self.engine.step()  # updates the weights at the boundary only
                logger.record_losses(loss)
                logger.count_tokens(micro_step)
            stopped = progress.end_step()
            logger.end_step()
            self._evaluation_due = progress.step % config.eval.every == 0 or self.is_finished
            if self._evaluation_due and (self.is_finished or not stopped):
                self.evaluate()
            if progress.step % config.train.log_every == 0 or self.is_finished or stopped:
                logger.write_metrics()
            if (progress.step % config.train.save_every == 0 or stopped) and not self.is_finished:
                self.save()
        self.close()

    @property
    def is_finished(self) -> bool:
        """True if all steps are done, the time is used up, or early stopping applies."""
        patience = self.config.eval.early_stopping_patience
        return self.progress.is_finished or (patience is not None and self._n_without_improvement >= patience)

    def begin_step(self) -> list[MicroStep]:
        """Set the learning rate and the dropout seed. Returns the batches of this process, one per micro-step."""
        self.progress.begin_step(self._seed, self.config.schedule, self.config.optim.peak_lr)
        batch_size, accumulation = self.config.train.global_batch_size, self.context.batch.accumulation
        return self._sampler.micro_steps(self._seed, self.progress.step, batch_size, accumulation)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on all dev splits, keep the best weights, and log. Every process must call this method.

        Returns:
            The metrics, by SPLIT/METRIC.
        """
        with self.logger.paused():
            task, metrics = self._inputs.task, dict[str, float]()
            for split in self._inputs.dev:
                outputs = predict_split(
                    self.engine.module, split, self.config.eval.batch_size, self._overhead_tokens, self.context.comm
                )
                values = compute_metrics(task, split, outputs)
                metrics |= {f"{split.name}/{name}": value for name, value in values.items()}
            if self.progress.step > 0:  # the score of an untrained head may be high by chance
                self._update_best(metrics[f"{self._inputs.dev[0].name}/{task.main_metric}"])
            self.logger.write_evaluation(metrics)
        self._evaluation_due = False
        return metrics

    def save(self) -> None:
        """Start writing a checkpoint while training continues. Every process must call this method."""
        manifest = {
            **self._manifest,
            **self.progress.state,
            "best": self.best,
            "evaluations_without_improvement": self._n_without_improvement,
            "evaluation_due": self._evaluation_due,
        }
        with self.logger.paused():
            self._writer.begin(self.progress.step, self.engine, [], manifest, self._write_model)

    def close(self) -> None:
        """Wait for the last checkpoint, write the final weights if the run is finished, and free the engine."""
        self._writer.close(needs_last=not self.is_finished)
        if self.is_finished:
            if self.config.eval.keep_weights == "last":
                self._writer.keep_best(self.progress.step, self.engine)
            self._writer.write_best(self.folder / BEST, self._write_model)
            self.context.comm.barrier()
        self.logger.close()
        del self.engine, self.progress.engine
        gc.collect()

    def _update_best(self, score: float) -> None:
        if self.best is None or score > self.best[0]:
            self.best, self._n_without_improvement = (score, self.progress.step), 0
            if self.config.eval.keep_weights == "best":
                self._writer.keep_best(self.progress.step, self.engine)
        else:
            self._n_without_improvement += 1

    def _publish(self, saved: Path) -> None:
        """Hard-link the best weights of a written checkpoint into the folder of the run."""
        if (saved / checkpoint.BEST_DIR).is_dir():
            hardlink_copy(saved / checkpoint.BEST_DIR, self.folder / BEST)

    def _write_model(self, step: int, path: Path, weights: dict[str, Tensor]) -> FileEntries:
        provenance = {"name": self.config.name, "step": step, "seed": self._seed, "init_from": self.config.init_from}
        return save_task_model(path, self._inputs.build_model_folder(weights, provenance))

    def _build(self, saved: Path | None, manifest: dict[str, Any]) -> None:
        """Build model and engine with initial weights, or with the state of the checkpoint `saved` and its manifest."""
        config = self.config
        torch.manual_seed(self._seed)  # the same initial weights on every process
        device, dtype = self.context.device, self.context.dtype
        saved_backend = manifest.get("attention_backend")
        model_config = resolve_shared_backend(self._inputs.model_config, dtype, self.context, saved_backend)
        backend = concrete_backend(model_config.attention_backend, device, dtype, model_config.head_width)
        self._manifest["attention_backend"] = backend
        build = partial(TaskModel, model_config, self._inputs.task)
        weights = load_task_model(saved / checkpoint.MODEL_DIR).weights if saved else {}
        model = build_with_weights(weights, build) if saved else build()
        if not saved and not config.from_scratch:  # the head keeps its initial weights
            model.load_available(self._inputs.pretrained.weights)
        if config.train.activation_checkpointing:
            model.backbone.enable_activation_checkpointing()
        self.engine = build_engine(
            model, self.context.deepspeed_config, config.train, config.optim, self.context.device
        )
        if saved:
            load_state(self.engine, weights, checkpoint.saved_moments(saved, manifest), manifest["counters"])


def _start_training(config: FinetuneConfig, model_config: ModelConfig) -> TrainingContext:
    """Join the other processes; see `start_training`."""

    def check(device: torch.device, dtype: torch.dtype, timeout_seconds: float) -> None:
        dtypes = {dtype, torch.float32}  # predictions are computed in fp32
        run_needed_selfchecks(model_config.attention_backend, model_config.head_width, device, dtypes, timeout_seconds)

    return start_training(config.train, config.optim, config.deepspeed, check)


def _describe(inputs: RunInputs, context: TrainingContext, remaining: Sequence[int], is_lr_derived: bool) -> str:
    """Return the lines that the command prints first.

    Args:
        inputs: inputs of the runs.
        context: device, precision and batch size.
        remaining: seeds of the runs that are not finished.
        is_lr_derived: True if `optim.lr` is not set.
    """
    config, model_config = inputs.config, inputs.model_config
    examples = ", ".join(f"{len(split.examples):,} {split.name}" for split in (inputs.train, *inputs.dev, *inputs.test))
    source = "new weights with the shape of" if config.from_scratch else "weights of"
    epochs = config.train.steps * config.train.global_batch_size / len(inputs.train.features)
    seeds = f"seed {', '.join(map(str, remaining))}" if remaining else "none, all seeds are finished"
    if 0 < len(remaining) < config.num_seeds:
        seeds += f" (the other {config.num_seeds - len(remaining)} finished)"
    lr = f"optim.lr={format_lr(config.optim.peak_lr)}" + f" derived from d_model={model_config.d_model}" * is_lr_derived
    return (
        f"{config.name}: task {config.task}; examples: {examples}\n"
        f"{_describe_labels(inputs.task.label_names, inputs.train.examples)}"
        f"{_describe_overlap(inputs) if config.data.train else ''}"
        f"model: {source} {config.init_from} ({model_config.n_layer} layers, d_model {model_config.d_model})\n"
        f"training: {seeds}; {config.train.steps:,} steps ({epochs:.1f} epochs), {lr}\n"
        f"{context.describe()}\n"
        f"output: {config.run_dir}"
    )


def _describe_overlap(inputs: RunInputs) -> str:
    """Return a warning for each dev split that has texts of training examples."""
    texts, lines = {example.texts for example in inputs.train.examples}, ""
    for split in inputs.dev:
        if n_common := sum(example.texts in texts for example in split.examples):
            lines += f"warning: {n_common:,} of {len(split.examples):,} {split.name} examples have the text of a training example\n"
    return lines


def _describe_labels(names: Sequence[str], examples: Sequence[Example]) -> str:
    """Return a line with the number of examples of each label, most first, and a warning for labels that differ only in case.

    Args:
        names: the labels; without any, the result is empty.
        examples: the training examples.
    """
    if not names:
        return ""
    counts = Counter(dict.fromkeys(names, 0))
    counts.update(names[example.label] for example in examples)
    listed = [f"{name} {count:,}" for name, count in counts.most_common(MAX_LISTED_LABELS)]
    if len(names) > MAX_LISTED_LABELS:
        listed.append(f"and {counted(len(names) - MAX_LISTED_LABELS, 'other')}")
    lines = f"labels: {', '.join(listed)}\n"
    variants: dict[str, list[str]] = {}
    for name in counts:
        variants.setdefault(name.casefold(), []).append(name)
    if same := [" and ".join(group) for group in variants.values() if len(group) > 1]:
        lines += f"warning: labels that differ only in case are different labels: {'; '.join(same)}.\n"
    return lines
