"""Inputs of a run: token store, vocabulary, initial weights, objective and batches. They are read and checked before processes join."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig, changed_settings
from pretrain.trainer.config_warnings import ignored_text_settings, ignored_vocab_size, ineffective_settings
from pretrain.trainer.weight_init import WeightInit
from xlpre.common.errors import InputError
from xlpre.common.messages import as_yaml
from xlpre.config.cli import NO_EXPLICIT_KEYS, ExplicitKeys
from xlpre.conversion.provenance import read_provenance
from xlpre.data.lanes import Lanes
from xlpre.data.store import TokenStore
from xlpre.data_loader import Loader
from xlpre.model.config import ModelConfig
from xlpre.objectives.registry import build_objective
from xlpre.text.load_tokenizer import tokenizer_from_config
from xlpre.text.tokenizer import Tokenizer
from xlpre.training import checkpoint
from xlpre.training.distributed import Comm
from xlpre.training.run_dir import check_run_dir_writable

FORMAT = 5  # version of checkpoints; raised when parameters, manifest entries or the rows of a step change


class RunInputs:
    """Inputs of a run, opened and checked. Nothing is written.

    Args:
        config: settings of the run.
        explicit_keys: keys that the user set, see WeightInit and `ignored_text_settings`.

    Attributes:
        store: the token store.
        tokenizer: the vocabulary of the store.
        weight_init: initial weights, and the shape of the model.
        notes: notes about settings of the command line that have no effect.
        objective: the pretraining objective.
        loader: loader of training batches.
        manifest: settings that must be equal when the run resumes. The learning rate and its schedule, the length of the run, the number of
            processes, the micro-batch size and the settings of DeepSpeed may change.

    Raises:
        InputError: settings contradict each other, the store or the vocabulary.
    """

    def __init__(self, config: PretrainConfig, explicit_keys: ExplicitKeys = NO_EXPLICIT_KEYS) -> None:
        self.config = config
        check_run_dir_writable(config.run_dir, checkpoint.CHECKPOINTS_DIR)
        check_not_overwritten(config)
        _check_format(config)
        self.store, self.tokenizer = _open_store(config)
        self.weight_init = WeightInit(config, self.store, self.tokenizer, explicit_keys)
        notes = (
            *ineffective_settings(config, explicit_keys),
            ignored_vocab_size(config, len(self.tokenizer), explicit_keys),
            ignored_text_settings(config, self.store.text_config, explicit_keys),
        )
        self.notes = [note for note in notes if note]
        self.objective = build_objective(config.objective, config.data, self.tokenizer.starts_word)
        lanes = _train_lanes(config, self.store, self.weight_init.model_config.mem_len)
        self.loader = Loader(lanes, config.data, self.objective, config.seed)
        self.manifest = _manifest(config, self.store, self.weight_init.model_config)

    def read_manifest(self, saved: Path, **more: Any) -> dict[str, Any]:
        """Read the manifest of a checkpoint of this run.

        Args:
            saved: folder of the checkpoint.
            more: entries besides `manifest` that must be equal.

        Raises:
            InputError: the checkpoint was written with another text, or other settings.
        """
        manifest = checkpoint.read_manifest(saved)
        checkpoint.check_compatible(saved, manifest, {"format": FORMAT})
        if (fingerprint := manifest["data_fingerprint"]) != self.store.fingerprint:
            raise InputError(
                f"data.store_dir={self.store.path} is invalid: {saved} was written with another text (fingerprint {fingerprint[:12]}, "
                f"now {self.store.fingerprint[:12]}). Use the data.store_dir of {self.config.run_dir}/config.yaml, or give the run "
                "another name."
            )
        checkpoint.check_compatible(saved, manifest, {**self.manifest, **more})
        return manifest


def checkpoints_dir(config: PretrainConfig) -> Path:
    """Return the folder of the checkpoints of a run."""
    return Path(config.run_dir) / checkpoint.CHECKPOINTS_DIR


def model_dir(config: PretrainConfig) -> Path:
    """Return the model folder of a run, which holds the weights of its latest checkpoint."""
    return Path(config.run_dir) / "model"


def model_step(config: PretrainConfig) -> int:
    """Return the training step of the weights in the model folder of a run; -1 if the folder does not exist or is damaged."""
    try:
        entries = read_provenance(model_dir(config)) or {}
    except InputError:
        return -1
    step = entries.get("step")
    return step if isinstance(step, int) else -1


def check_not_overwritten(config: PretrainConfig) -> None:
    """Raise InputError if the run has a model but no complete checkpoint: it would start at step 0 and overwrite the model."""
    if model_step(config) > 0 and checkpoint.read_newest_manifest(checkpoints_dir(config)) is None:
        raise InputError(
            f"run_dir={config.run_dir} is invalid: it holds the model of step {model_step(config):,}, but no complete checkpoint to resume "
            "from, so a new run would overwrite the model. Restore its checkpoints/, give the run another name, or remove the folder."
        )


def is_finished(
    config: PretrainConfig,
    explicit_keys: ExplicitKeys = NO_EXPLICIT_KEYS,
    join: Callable[[], Comm] | None = None,
) -> bool:
    """Return True if the run has reached its last step or its time limit, and its last checkpoint and its model folder are complete.

    To recognize an unfinished run, two small files are read. For a finished run, the checksums of the checkpoint are computed, which
    takes as long as loading it.

    Args:
        config: settings of the run.
        explicit_keys: keys that the user set, see WeightInit.
        join: function that joins the processes of the job, which then compute the checksums together. It is called only if the run
            seems to be finished. None: this process computes all checksums.

    Raises:
        InputError: the run is finished, but was made with other settings than `config`.
    """
    newest = checkpoint.read_newest_manifest(checkpoints_dir(config))
    if newest is None:
        return False
    path, manifest = newest
    if model_step(config) != manifest["step"]:
        return False  # the run was killed before it wrote the model folder of its last checkpoint
    if not config.train.is_over(manifest["step"], manifest["train_seconds"]):
        return False
    RunInputs(config, explicit_keys).read_manifest(path)
    return checkpoint.is_valid(path, join() if join else None)


def describe_finished(config: PretrainConfig) -> str:
    """Return the message for a finished run. It lists settings that differ from the settings of the run."""
    try:
        changed = [
            f"{key}={as_yaml(saved)} (now {as_yaml(current)})"
            for key, (saved, current) in changed_settings(config).items()
        ]
    except InputError as error:
        changed = [f"unknown settings: {error}"]
    return f"{config.run_dir}: already finished" + (f"; it was made with {', '.join(changed)}" if changed else "")


def _check_format(config: PretrainConfig) -> None:
    """Raise InputError if the checkpoints of the run have another `FORMAT`."""
    if newest := checkpoint.read_newest_manifest(checkpoints_dir(config)):
        checkpoint.check_compatible(*newest, {"format": FORMAT})


def _manifest(config: PretrainConfig, store: TokenStore, model_config: ModelConfig) -> dict[str, Any]:
    """Return the settings that must be equal when a run resumes."""
    data, optim, model = (dataclasses.asdict(group) for group in (config.data, config.optim, model_config))
    del data["store_dir"], data["num_threads"], optim["lr"], optim["matrix_lr"], model["attention_backend"]
    if not config.optim.muon:
        del optim["momentum"]  # only Muon uses it
    return {
        "format": FORMAT,
        "init_from": config.init_from,
        "model": model,
        "data": data,
        "data_fingerprint": store.fingerprint,
        "objective": dataclasses.asdict(config.objective),
        "memory": dataclasses.asdict(config.memory),
        "optim": optim,
        "seed": config.seed,
        "train": {"global_batch_size": config.train.global_batch_size},
    }


def _open_store(config: PretrainConfig) -> tuple[TokenStore, Tokenizer]:
    store = TokenStore(config.data.store_dir)
    if Path(config.tokenizer.path).exists():
        tokenizer = tokenizer_from_config(config.tokenizer)
        store.check_vocabulary(tokenizer, f"tokenizer.path={config.tokenizer.path}")
    return store, store.tokenizer()


def _train_lanes(config: PretrainConfig, store: TokenStore, mem_len: int) -> Lanes:
    return Lanes(
        store.train,
        config.train.global_batch_size,
        stride=config.data.reuse_len,
        lookahead=config.data.lookahead,
        windows_per_run=config.data.windows_per_run,
        bidirectional=config.data.bidirectional,
        seed=config.seed,
        at_document_end=config.memory.at_document_end,
        initial_mem_len=mem_len if config.memory.initial == "zeros" else 0,
        origin=f"the training part of {store.path}",
    )
