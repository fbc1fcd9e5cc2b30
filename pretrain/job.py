"""A pretraining job: everything the loop needs, built once, and what a checkpoint keeps of it."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig
from pretrain.held_out import Evaluation, Measure, held_out_lanes
from pretrain.samples import Samples
from pretrain.start import Start
from xlpre.atomic import exclusive
from xlpre.batch import Batch
from xlpre.config import dump
from xlpre.data.lanes import Lanes
from xlpre.data.store import TokenStore
from xlpre.exchange import passport
from xlpre.exchange.folder import ModelFolder, save_folder
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory, first_memory
from xlpre.objectives.build import build_objective
from xlpre.objectives.loader import Loader, lanes_of
from xlpre.text.tokenizer import Tokenizer
from xlpre.training import checkpoint
from xlpre.training.distributed import (
    Talk,
    is_main,
    limit_waiting,
    n_processes,
    process,
    seed_everything,
    set_defaults,
    use_device,
)
from xlpre.training.engine import build_engine, full_weights, start_processes
from xlpre.training.schedule import learning_rate

FORMAT = 2  # of a checkpoint: names of parameters, what a batch of a step is


class Job:
    """What the loop reads: `engine`, `memories` (one for each micro-step), `step`, `seconds`, `skipped` updates, `resolved` settings."""

    def __init__(self, config: PretrainConfig, typed: Collection[str] = ()) -> None:
        """Build, and go on from the newest checkpoint if there is one.

        Args:
            config: every setting.
            typed: keys that were given as words: what a folder to start from has otherwise, is then refused.

        Raises:
            ValueError: settings that contradict each other, the store, the vocabulary or the checkpoint.
        """
        self.config, self.run_dir = config, Path(config.run_dir)
        self.store, self.tokenizer = _open(config)
        start = Start(config, self.store, self.tokenizer, typed)
        self.resolved, self.shape, self._about_start = start.resolved(), start.shape, start.about
        self.objective = build_objective(config.objective, config.data, self.tokenizer.starts_word)
        self._loader = Loader(_train_lanes(config, self.store), config.data, self.objective, config.seed)
        set_defaults()
        self.device = use_device()
        limit_waiting(config.train.patience_minutes)
        start_processes(self.device)
        self.talk = Talk()
        self._evaluation = Evaluation(config, self.store, self.tokenizer.starts_word, self.talk)
        self._samples = Samples(config, self.store, self.tokenizer)
        seed_everything(config.seed)  # the same starting values on every process
        model = LanguageModel(self.shape, self.objective.two_streams)
        start.put_weights(model)
        self.engine = build_engine(model, config.train, config.optim, self.device, n_processes(), config.deepspeed)
        seed_everything(config.seed + 1 + process())  # but another dropout
        self._groups = lanes_of(process(), n_processes(), config.train.batch_size, config.train.accumulation)
        dtype = model.backbone.mask_embedding.dtype
        self.memories = [
            first_memory(self.shape, len(group), initial=config.memory.initial, device=self.device, dtype=dtype)
            for group in self._groups
        ]
        self.step, self.seconds = 0, 0.0
        self.skipped = self._skipped_in_a_row = 0
        self._facts = {**_facts(config, self.store, self.shape), "precision": str(dtype)}
        self._resume()
        self._started = time.monotonic() - self.seconds
        self._stop_asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
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
        return self._loader.batches(self.step, self._groups)

    @property
    def waited_seconds(self) -> float:
        """Seconds that this process has waited for batches, in all."""
        return self._loader.waited_seconds

    def count_step(self) -> bool:
        """One update is done. Returns whether any process was asked to stop; all processes get the same answer and clock.

        Raises:
            ValueError: too many updates in a row were skipped, because their gradients were not finite.
        """
        self.step += 1
        was, self.skipped = self.skipped, self._n_skipped()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.skipped > was else 0
        if self._skipped_in_a_row >= self.config.train.max_skipped:
            raise ValueError(
                f"the gradients of {self._skipped_in_a_row} updates in a row, to step {self.step:,}, were not finite, and no update was "
                "made; the last checkpoint is from before: lower optim.lr, or look at the weights that init= gave"
            )
        asked, self.seconds = self.talk.largest(float(self._stop_asked), time.monotonic() - self._started)
        return asked > 0

    def measure(self) -> Measure:
        """Held-out loss and filled-in blanks; every process must call it."""
        model = self.engine.module
        measured, filled = self._evaluation(model), self._samples.fill(model)
        if is_main():
            self._samples.write(self.step, filled)
        return measured

    def save(self) -> None:
        """Write a checkpoint, then the model folder; every process must call it."""
        checkpoint.save(
            self.run_dir / "checkpoints",
            self.engine,
            self.talk,
            self.step,
            [(memory.hidden, memory.valid) for memory in self.memories],
            {**self._facts, "seconds": self.seconds},
            self.config.train.keep_last,
            self.config.train.keep_every,
        )
        self._write_model()

    def _n_skipped(self) -> int:
        return int(self.engine.skipped_steps)  # DeepSpeed skips an update on all processes or on none

    def _write_model(self) -> None:
        weights = full_weights(self.engine, keep=is_main())
        if is_main():
            facts = {"name": self.config.name, "step": self.step, "data_fingerprint": self.store.fingerprint}
            objective = self.config.objective.name
            folder = ModelFolder(self.shape, weights, self.tokenizer, objective, facts, "xlpre")
            save_folder(model_folder(self.config), folder)
        self.talk.barrier()

    @property
    def _time_share(self) -> float:
        hours = self.config.train.hours
        return self.seconds / (hours * 3600) if hours else 0.0

    def _resume(self) -> None:
        if is_main():
            self._lock = exclusive(self.run_dir, "another training goes on in it; wait for it, or stop it")
        self._resumed_from = checkpoint.newest(self.run_dir / "checkpoints", self.talk)
        if self._resumed_from is None:
            return
        was = checkpoint.facts_of(self._resumed_from)
        _check_same(self._resumed_from, was, self._facts)
        self.memories = [Memory(*tensors) for tensors in checkpoint.load(self._resumed_from, self.engine, self.device)]
        self.step, self.seconds = was["step"], was["seconds"]
        self.skipped = self._n_skipped()
        if self.talk.from_main(str(_step_of_model(self.config))) != str(self.step):
            self._write_model()  # killed between the checkpoint and its model

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self._stop_asked = True

    def _opening(self) -> str:
        config, shape = self.config, self.shape
        n_parameters = sum(p.numel() for p in self.engine.module.parameters())
        steps = f"{config.train.steps:,} steps" + (f" or {config.train.hours} hours" if config.train.hours else "")
        start = self._about_start
        if self._resumed_from:
            start = f"goes on from {self._resumed_from} at step {self.step:,}"
        if unfinished := checkpoint.unfinished(self.run_dir / "checkpoints", self._resumed_from):
            start += f" (passed over, because a file is missing, cut or damaged: {', '.join(path.name for path in unfinished)})"
        return (
            f"{config.name}: {config.objective.name}, {n_parameters:,} parameters ({shape.n_layer} layers, d {shape.d_model}), "
            f"memory {shape.mem_len}\n"
            f"{len(self.store.train):,} training tokens, {config.train.batch_size} rows of {config.data.window} tokens a step, {steps}, "
            f"{n_processes()} process(es) on {self.device.type}, {self.engine.module.backbone.mask_embedding.dtype}\n"
            f"{start}; everything goes to {self.run_dir}"
        )


def model_folder(config: PretrainConfig) -> Path:
    """Where the model of a run is, as of its newest checkpoint."""
    return Path(config.run_dir) / "model"


def is_finished(config: PretrainConfig, typed: Collection[str] = ()) -> bool:
    """Whether the run has its last checkpoint and its model folder.

    Raises:
        ValueError: it has, but was made with other settings than `config`.
    """
    done = checkpoint.complete(Path(config.run_dir) / "checkpoints")
    if not done:
        return False
    last, hours = checkpoint.facts_of(done[-1]), config.train.hours
    if _step_of_model(config) != last["step"]:
        return False  # killed between the two
    if last["step"] < config.train.steps and (hours is None or last["seconds"] < hours * 3600):
        return False
    store, tokenizer = _open(config)
    _check_same(done[-1], last, _facts(config, store, Start(config, store, tokenizer, typed).shape))
    return True


def rehearse(config: PretrainConfig, typed: Collection[str] = ()) -> tuple[Start, Path | None]:
    """Open and check what a Job does before it joins the other processes; write nothing.

    Returns:
        The start, and the checkpoint to go on from, if there is one.

    Raises:
        ValueError: as Job.
    """
    store, tokenizer = _open(config)
    start = Start(config, store, tokenizer, typed)
    build_objective(config.objective, config.data, tokenizer.starts_word)
    _train_lanes(config, store)
    held_out_lanes(config, store)
    lanes_of(process(), n_processes(), config.train.batch_size, config.train.accumulation)
    saved = checkpoint.complete(Path(config.run_dir) / "checkpoints")
    if not saved:
        return start, None
    _check_same(saved[-1], checkpoint.facts_of(saved[-1]), _facts(config, store, start.shape))
    return start, saved[-1]


def _step_of_model(config: PretrainConfig) -> int:
    """The step of the model folder; -1 if there is none."""
    written = passport.read(model_folder(config))
    return written["step"] if written else -1


def _facts(config: PretrainConfig, store: TokenStore, shape: ModelConfig) -> dict[str, Any]:
    """What must be the same for a run to go on; the learning rate, its schedule and the length of the run may change."""
    data, optim = dataclasses.asdict(config.data), dataclasses.asdict(config.optim)
    del data["workers"], optim["lr"]
    return {
        "format": FORMAT,
        "model": dataclasses.asdict(shape),
        "data": {**data, "store": store.fingerprint},
        "objective": dataclasses.asdict(config.objective),
        "memory": dataclasses.asdict(config.memory),
        "optim": optim,
        "seed": config.seed,
        "train": {"batch_size": config.train.batch_size, "accumulation": config.train.accumulation},
    }


def _open(config: PretrainConfig) -> tuple[TokenStore, Tokenizer]:
    store = TokenStore(config.data.store)
    if Path(config.tokenizer.path).exists():
        tokenizer = Tokenizer.load(config.tokenizer.path, config.tokenizer.preprocess)
        store.check_vocabulary(tokenizer, f"tokenizer.path={config.tokenizer.path}")
    return store, store.tokenizer()


def _train_lanes(config: PretrainConfig, store: TokenStore) -> Lanes:
    return Lanes(
        store.train,
        config.train.batch_size,
        stride=config.data.reuse_len,
        reach=config.data.reach,
        run_windows=config.data.run_windows,
        bidirectional=config.data.bidirectional,
        seed=config.seed,
        at_document_end=config.memory.at_document_end,
        origin=f"the training part of {store.path}",
    )


def _check_same(where: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    if was.get("format") != FORMAT:
        raise ValueError(
            f"{where} was written by another version of xlpre; go on with that one, or give the run another name"
        )
    for key, value in now.items():
        before = was.get(key)
        if before != value:
            if isinstance(value, dict):
                name = next(name for name in value if (before or {}).get(name) != value[name])
                key, before, value = f"{key}.{name}", (before or {}).get(name), value[name]
            raise ValueError(
                f"{where} was made with {key}={before}, now it is {value}; put it back, or give the run another name"
            )
