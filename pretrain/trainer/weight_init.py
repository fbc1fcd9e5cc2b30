"""Initial weights of a run, new or from `init_from`, and the resulting shape of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrain.config import PretrainConfig
from xlpre.common.errors import InputError
from xlpre.config.cli import ExplicitKeys
from xlpre.conversion.model_folder import ModelFolder, load_init_from, resolve_model_dir
from xlpre.data.store import TokenStore
from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights, load_weights
from xlpre.model.language_model import LanguageModel
from xlpre.text.tokenizer import Tokenizer
from xlpre.training import checkpoint

# model settings that do not change the weights: if the user set them, they override the settings of the folder `init_from`
WEIGHT_INDEPENDENT = {
    "mem_len",
    "attention_span",
    "clamp_len",
    "attention_backend",
    "dropout",
    "dropatt",
    "init_scheme",
    "init_std",
}


class WeightInit:
    """Initial weights of a run.

    Args:
        config: settings of the run.
        store: the token store.
        tokenizer: the vocabulary of the store.
        explicit_keys: keys that the user set. A model setting on the command line must agree with `init_from`. A model
            setting in the config file is replaced by the setting of `init_from`.

    Attributes:
        store: the token store.
        model_config: settings of the model, with the vocabulary size.
        description: one sentence about the origin of the weights.

    Raises:
        InputError: `init_from` cannot be read, has another vocabulary than the store, or contradicts a setting.
    """

    def __init__(
        self, config: PretrainConfig, store: TokenStore, tokenizer: Tokenizer, explicit_keys: ExplicitKeys
    ) -> None:
        model = config.model
        if model.vocab_size not in (None, store.vocab_size):
            raise InputError(
                f"model.vocab_size={model.vocab_size} is invalid: the vocabulary of data.store_dir={store.path} has {store.vocab_size} "
                "pieces. Leave it out; it is taken from the store."
            )
        self._store, self._config, self._tokenizer = store, config, tokenizer
        self._folder: ModelFolder | None = None
        self.description = "starts at step 0"
        self.model_config = dataclasses.replace(model, vocab_size=store.vocab_size)
        if not config.init_from:
            return
        newest = checkpoint.read_newest_manifest(Path(config.run_dir) / checkpoint.CHECKPOINTS_DIR)
        if newest:  # the run resumes; the folder init_from may be gone
            initial_shape = ModelConfig(**newest[1]["model"])
        else:
            self._folder = _load_folder(config.init_from, config.data.store_dir, tokenizer)
            initial_shape = self._folder.config
        self.model_config, replaced = _merge_shapes(model, initial_shape, explicit_keys, config.init_from)
        self.description = self._describe(config.init_from, replaced)

    def resolve_config(self) -> PretrainConfig:
        """Return the resolved settings: text, vocabulary and model are taken from the store and `init_from`."""
        vocabulary = dataclasses.replace(
            self._config.tokenizer,
            kind=self._tokenizer.kind,
            path=str(self._store.path / "vocabulary.model"),
            vocab_size=self._store.vocab_size,
            preprocess=self._tokenizer.preprocess,
        )
        return dataclasses.replace(
            self._config, model=self.model_config, text=self._store.text_config, tokenizer=vocabulary
        )

    def build_model(self, build: Callable[[], LanguageModel]) -> LanguageModel:
        """Return the model that `build` makes, with the weights of `init_from` if it is set."""
        if not self._folder:
            return build()
        weights = self._folder.weights
        if self._folder.next_sentence or not self._config.objective.next_sentence:
            return build_with_weights(weights, build)
        model = build()  # the head of next-sentence prediction keeps its new weights
        load_weights({**weights, **dict(model.auxiliary_heads.named_parameters(prefix="auxiliary_heads"))}, model)
        return model

    def _describe(self, init_from: str, replaced: list[str]) -> str:
        parts = [f"starts from the weights of {init_from}"]
        if self._folder:
            parts[0] += f" ({self._folder.kind})"
            if not self._folder.provenance:
                parts.append(
                    f"its text preprocessing is unknown; the store was prepared with {self._tokenizer.preprocess}"
                )
            if self._config.objective.next_sentence and not self._folder.next_sentence:
                parts.append("it has no head of next-sentence prediction, so that head gets new weights")
        if replaced:
            parts.append(f"model settings of that folder instead of the configured ones: {', '.join(replaced)}")
        return "; ".join(parts)


def _merge_shapes(
    model: ModelConfig, initial: ModelConfig, explicit_keys: ExplicitKeys, init_from: str
) -> tuple[ModelConfig, list[str]]:
    """Merge the configured model settings into the settings of the initial weights.

    Returns:
        The merged settings, and the replaced settings of the config file, as `NAME=NEW (OLD)`.
    """
    settings: dict[str, Any] = {}
    replaced = []
    for field in dataclasses.fields(ModelConfig):
        name, initial_value, value = field.name, getattr(initial, field.name), getattr(model, field.name)
        in_args, in_file = (f"model.{field.name}" in keys for keys in (explicit_keys.args, explicit_keys.file))
        settings[name] = value if name in WEIGHT_INDEPENDENT and (in_args or in_file) else initial_value
        if name in WEIGHT_INDEPENDENT or name == "vocab_size":
            continue
        if name == "d_head":
            initial_value, value = initial.head_width, value or initial.d_model // initial.n_head
        if in_args and value != initial_value:
            raise InputError(
                f"model.{name}={value} is invalid: init_from={init_from} has model.{name}={initial_value}. "
                "Leave it out; it is taken from that folder."
            )
        if in_file and value != initial_value:
            replaced.append(f"{name}={initial_value} ({value})")
    return ModelConfig(**settings), replaced


def _load_folder(init_from: str, store_dir: str, tokenizer: Tokenizer) -> ModelFolder:
    """Load the folder `init_from` and check that it has the vocabulary of the store."""
    folder = load_init_from(init_from)
    initial = folder.require_tokenizer(f"init_from={init_from}")
    remedy = f"Build a store with tokenizer.path={resolve_model_dir(init_from)}/{initial.file_name}"
    if initial.sha256 != tokenizer.sha256:
        raise InputError(
            f"init_from={init_from} is invalid: its vocabulary (sha256 {initial.sha256[:12]}) differs from the vocabulary of "
            f"data.store_dir={store_dir} ({tokenizer.sha256[:12]}). {remedy}."
        )
    is_known = "preprocess" in folder.provenance or folder.kind == "tensorflow"
    if is_known and initial.preprocess != tokenizer.preprocess:
        raise InputError(
            f"init_from={init_from} is invalid: it was trained with tokenizer.preprocess={initial.preprocess}, but "
            f"data.store_dir={store_dir} was built with tokenizer.preprocess={tokenizer.preprocess}. "
            f"{remedy} tokenizer.preprocess={initial.preprocess}."
        )
    return folder
