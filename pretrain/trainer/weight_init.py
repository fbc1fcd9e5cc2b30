"""Where a pretraining starts from: `init_from=FOLDER` or values of its own; and the shape of the model, which a folder decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import config_from_mapping
from xlpre.conversion.model_folder import ModelFolder, load_init_from
from xlpre.data.store import META, TokenStore
from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights, load_weights
from xlpre.model.language_model import LanguageModel
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import Tokenizer
from xlpre.training import checkpoint

# what is not in the weights: ours if it is set, else the folder's
FREE = ("mem_len", "attention_span", "clamp_len", "attention_backend", "dropout", "dropatt", "init_scheme", "init_std")


class WeightInit:
    """The start of a run.

    Args:
        config: its settings.
        store: its text.
        tokenizer: the store's vocabulary.
        given: the keys that were set. A word must not contradict the folder; what a file of settings says gives way to it.

    Attributes:
        store: the text.
        shape: of the model.
        about: a sentence on where the weights come from.

    Raises:
        ValueError: the folder cannot be read, has another vocabulary than the store, or another shape than was asked for.
    """

    def __init__(self, config: PretrainConfig, store: TokenStore, tokenizer: Tokenizer, given: ExplicitKeys) -> None:
        model = config.model
        if model.vocab_size not in (0, store.vocab_size):
            raise ValueError(
                f"model.vocab_size ({model.vocab_size}) is not the {store.vocab_size} pieces of data.store_dir={store.path}; "
                "leave it out, it is taken from the store"
            )
        self.store, self._config, self._tokenizer = store, config, tokenizer
        self._folder: ModelFolder | None = None
        self.about = "starts at step 0"
        self.shape = dataclasses.replace(model, vocab_size=store.vocab_size)
        if not config.init_from:
            return
        saved = checkpoint.list_complete(Path(config.run_dir) / checkpoint.CHECKPOINTS_DIR)
        if saved:  # the folder was read when the run began, and may be gone
            has = ModelConfig(**checkpoint.read_manifest(saved[-1])["model"])
        else:
            self._folder = _read(config, tokenizer)
            has = self._folder.config
        self.shape, given_way = _merged(model, has, given, config.init_from)
        self.about = f"starts from the weights of {config.init_from}" + (
            f" ({self._folder.kind})" if self._folder else ""
        )
        if self._folder and not self._folder.provenance:
            self.about += f"; it does not say how its text was prepared, the store's is {tokenizer.preprocess}"
        if self._folder and config.objective.next_sentence and not self._folder.next_sentence:
            self.about += "; it has no head of next-sentence prediction, which starts anew"
        if given_way:
            self.about += f"; the model is that folder's, not as configured: {', '.join(given_way)}"

    def resolved(self) -> PretrainConfig:
        """The settings with what the store and the folder know better: the text, the vocabulary, the model."""
        vocabulary = dataclasses.replace(
            self._config.tokenizer,
            path=str(self.store.path / "vocabulary.model"),
            vocab_size=self.store.vocab_size,
            preprocess=self._tokenizer.preprocess,
        )
        text = config_from_mapping(TextConfig, self.store.meta["source"], str(self.store.path / META))
        return dataclasses.replace(self._config, model=self.shape, text=text, tokenizer=vocabulary)

    def model(self, build: Callable[[], LanguageModel]) -> LanguageModel:
        """What `build` makes, with the folder's weights, if there is one."""
        if not self._folder:
            return build()
        weights = self._folder.weights
        if self._folder.next_sentence or not self._config.objective.next_sentence:
            return build_with_weights(weights, build)
        model = build()  # the head keeps the values it begins with
        load_weights({**weights, **dict(model.auxiliary_heads.named_parameters(prefix="auxiliary_heads"))}, model)
        return model


def _merged(model: ModelConfig, has: ModelConfig, given: ExplicitKeys, init: str) -> tuple[ModelConfig, list[str]]:
    """The shape of a model that starts from one with the shape `has`, and what gave way to it."""
    settings: dict[str, Any] = {}
    given_way = []
    for field in dataclasses.fields(ModelConfig):
        name, theirs, ours = field.name, getattr(has, field.name), getattr(model, field.name)
        in_words, in_file = (f"model.{field.name}" in keys for keys in (given.words, given.file))
        settings[name] = ours if name in FREE and (in_words or in_file) else theirs
        if name in FREE or name == "vocab_size":
            continue
        if name == "d_head":
            theirs, ours = has.head_width, ours or has.d_model // has.n_head
        if in_words and ours != theirs:
            raise ValueError(
                f"model.{name} ({ours}) is {theirs} in init_from={init}; leave it out, it is taken from there"
            )
        if in_file and ours != theirs:
            given_way.append(f"{name}={theirs} ({ours})")
    return ModelConfig(**settings), given_way


def _read(config: PretrainConfig, tokenizer: Tokenizer) -> ModelFolder:
    folder = load_init_from(config.init_from)
    theirs = folder.require_tokenizer(f"init_from={config.init_from}")
    way_out = f"make a store with tokenizer.path={config.init_from}/spiece.model"
    if theirs.sha256 != tokenizer.sha256:
        raise ValueError(
            f"init_from={config.init_from} has the vocabulary (sha256) {theirs.sha256[:12]}, data.store_dir={config.data.store_dir} was made "
            f"with {tokenizer.sha256[:12]}; {way_out}"
        )
    known = "preprocess" in folder.provenance or folder.kind == "tensorflow"
    if known and theirs.preprocess != tokenizer.preprocess:
        raise ValueError(
            f"init_from={config.init_from} was trained on text with tokenizer.preprocess={theirs.preprocess}, data.store_dir="
            f"{config.data.store_dir} was made with {tokenizer.preprocess}; {way_out} tokenizer.preprocess={theirs.preprocess}"
        )
    return folder
