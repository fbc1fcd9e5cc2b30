"""What a pretraining stands on, before any process is joined: text, vocabulary, shape, objective, batches, and what must stay the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig, settings_of_run
from pretrain.trainer.weight_init import WeightInit
from xlpre.config.cli import ExplicitKeys
from xlpre.conversion.provenance import read_provenance
from xlpre.data.lanes import Lanes
from xlpre.data.store import TokenStore
from xlpre.data_loader import Loader
from xlpre.model.config import ModelConfig
from xlpre.objectives.registry import build_objective
from xlpre.text.tokenizer import Tokenizer
from xlpre.training import checkpoint
from xlpre.training.run_dir import check_run_dir_writable

FORMAT = 3  # of a checkpoint: names of parameters, what a batch of a step is
# the settings that what is reached depends on, and those among them on which it does not, which a run finds in its text, or, being how
# long it is, which stand in the table
GROUPS = ("data", "objective", "model", "memory", "optim", "schedule", "train", "eval")
FREE = {
    "data": "store_dir num_threads",
    "model": "vocab_size attention_backend",
    "train": "steps hours compile activation_checkpointing log_every save_every keep_last_checkpoints keep_checkpoints_every max_skipped_steps timeout_minutes wandb",
    "eval": "every sentences",
}


class RunInputs:
    """Opened and checked; nothing is written.

    Args:
        config: every setting.
        given: the keys that were set, which Start asks for.

    Attributes:
        store: the text.
        tokenizer: its vocabulary.
        start: where the weights come from.
        objective: what is predicted.
        loader: of training batches.
        facts: what must be the same for a run to go on; the learning rate, its schedule, the length of the run, the number of
            processes and of micro-steps, and settings of DeepSpeed may change.

    Raises:
        ValueError: settings that contradict each other, the store or the vocabulary.
    """

    def __init__(self, config: PretrainConfig, given: ExplicitKeys) -> None:
        self.config = config
        check_run_dir_writable(config.run_dir, checkpoint.CHECKPOINTS_DIR)
        check_begun(config)
        self.store, self.tokenizer = _open(config)
        self.start = WeightInit(config, self.store, self.tokenizer, given)
        self.objective = build_objective(config.objective, config.data, self.tokenizer.starts_word)
        self.loader = Loader(_train_lanes(config, self.store), config.data, self.objective, config.seed)
        self.facts = _facts(config, self.store, self.start.shape)

    def facts_of(self, saved: Path, **more: Any) -> dict[str, Any]:
        """What a checkpoint of this run says.

        Args:
            saved: the checkpoint.
            more: facts besides ours that must be the same.

        Raises:
            ValueError: it was made with another text, or other settings.
        """
        was = checkpoint.read_manifest(saved)
        checkpoint.check_compatible(saved, {"format": was.get("format")}, {"format": FORMAT})
        if was["data"]["store"] != self.store.fingerprint:
            raise ValueError(
                f"{saved} was made with another text than data.store_dir={self.store.path} holds (fingerprints {was['data']['store'][:12]} "
                f"and {self.store.fingerprint[:12]}); put back the data.store_dir of {self.config.run_dir}/config.yaml, or give the run "
                "another name"
            )
        was = {"init_from": self.config.init_from, **was}  # older ones do not say
        checkpoint.check_compatible(saved, was, {**self.facts, **more})
        return was


def checkpoints_of(config: PretrainConfig) -> Path:
    """Where the checkpoints of a run are."""
    return Path(config.run_dir) / checkpoint.CHECKPOINTS_DIR


def model_folder(config: PretrainConfig) -> Path:
    """Where the model of a run is, as of its newest checkpoint."""
    return Path(config.run_dir) / "model"


def step_of_model(config: PretrainConfig) -> int:
    """The step of the model folder; -1 if there is none, or a damaged one, which its checkpoint can make again."""
    try:
        written = read_provenance(model_folder(config)) or {}
    except ValueError:
        return -1
    step = written.get("step")
    return step if isinstance(step, int) else -1


def check_begun(config: PretrainConfig) -> None:
    """Raise ValueError if the checkpoints of a run are gone whose model is there: it would begin anew, and replace that."""
    if step_of_model(config) > 0 and not checkpoint.list_all(checkpoints_of(config)):
        raise ValueError(
            f"{config.run_dir} has the model of step {step_of_model(config):,}, which a run that begins anew would replace, and no "
            "checkpoint to go on from; put its checkpoints/ back, give the run another name, or remove that folder"
        )


def is_finished(config: PretrainConfig, given: ExplicitKeys) -> bool:
    """Whether the run has its last checkpoint, every byte as it was written, and its model folder.

    The checkpoint is read through, which takes as long as loading it; one that is damaged would be passed over by a start.

    Raises:
        ValueError: it has, but was made with other settings than `config`.
    """
    done = checkpoint.list_complete(checkpoints_of(config))
    if not done:
        return False
    last, hours = checkpoint.read_manifest(done[-1]), config.train.hours
    if step_of_model(config) != last["step"]:
        return False  # killed between the two
    if last["step"] < config.train.steps and (hours is None or last["train_seconds"] < hours * 3600):
        return False
    RunInputs(config, given).facts_of(done[-1])
    return checkpoint.is_valid(done[-1])


def other_settings(config: PretrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings on which depends what is reached and which differ from those of the run that is there: by key, before and now.

    Raises:
        ValueError: what the run wrote as its settings cannot be read.
    """
    run_dir = Path(config.run_dir)
    if not (run_dir / "config.yaml").exists():
        return {}
    before, now = _compared(settings_of_run(run_dir)), _compared(config)
    return {key: (before[key], now[key]) for key in before if key in now and before[key] != now[key]}


def finished(config: PretrainConfig) -> str:
    """What is said of a run that is finished, also that its settings were others."""
    try:
        others = [f"{key}={before} (now {now})" for key, (before, now) in other_settings(config).items()]
    except ValueError as error:
        others = [f"settings that are not known any more: {error}"]
    return f"{config.run_dir}: finished already" + (f"; it was made with {', '.join(others)}" if others else "")


def _compared(config: PretrainConfig) -> dict[str, Any]:
    """What two runs of a row must have the same, by key."""
    found: dict[str, Any] = {"init_from": config.init_from}
    for group in GROUPS:
        if group == "model" and config.init_from:  # the folder that a run begins with says its shape
            continue
        settings = dataclasses.asdict(getattr(config, group))
        free = FREE.get(group, "").split()
        found |= {f"{group}.{key}": value for key, value in settings.items() if key not in free}
    return found


def _facts(config: PretrainConfig, store: TokenStore, shape: ModelConfig) -> dict[str, Any]:
    data, optim, model = (dataclasses.asdict(group) for group in (config.data, config.optim, shape))
    del data["num_threads"], optim["lr"], optim["matrix_lr"], model["attention_backend"]
    momentum, name = optim.pop("momentum"), optim.pop("name")
    optim["muon"] = name == "muon" and {"momentum": momentum}  # False in what was written before there was a choice
    return {
        "format": FORMAT,
        "init_from": config.init_from,
        "model": model,
        "data": {**data, "store_dir": store.fingerprint},
        "objective": dataclasses.asdict(config.objective),
        "memory": dataclasses.asdict(config.memory),
        "optim": optim,
        "seed": config.seed,
        "train": {"global_batch_size": config.train.global_batch_size},
    }


def _open(config: PretrainConfig) -> tuple[TokenStore, Tokenizer]:
    store = TokenStore(config.data.store_dir)
    if Path(config.tokenizer.path).exists():
        tokenizer = Tokenizer.named_in(config.tokenizer)
        store.check_vocabulary(tokenizer, f"tokenizer.path={config.tokenizer.path}")
    return store, store.tokenizer()


def _train_lanes(config: PretrainConfig, store: TokenStore) -> Lanes:
    return Lanes(
        store.train,
        config.train.global_batch_size,
        stride=config.data.reuse_len,
        lookahead=config.data.lookahead,
        windows_per_run=config.data.windows_per_run,
        bidirectional=config.data.bidirectional,
        seed=config.seed,
        at_document_end=config.memory.at_document_end,
        origin=f"the training part of {store.path}",
    )
