"""Where a pretraining starts from: the weights of another folder (`init=FOLDER`), and the shape of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from pretrain.config import PretrainConfig
from xlpre.data.store import TokenStore
from xlpre.exchange.folder import ModelFolder, load_folder
from xlpre.model.config import ModelConfig
from xlpre.text.tokenizer import Tokenizer

# what may differ from the folder that training starts from: it is not in the weights
FREE = ("vocab_size", "mem_len", "attention_length", "clamp_len", "dropout", "dropatt", "init", "init_std")


def start_of(config: PretrainConfig, tokenizer: Tokenizer) -> ModelFolder | None:
    """The folder that `config.init` names, None if it names none.

    Raises:
        ValueError: it cannot be read, or has another vocabulary than the store.
    """
    if not config.init:
        return None
    folder = load_folder(config.init)
    if folder.tokenizer is None:
        raise ValueError(
            f"init={config.init} has no spiece.model; put the vocabulary that its model was trained with there"
        )
    for what, theirs, ours in (
        ("vocabulary (sha256)", folder.tokenizer.sha256[:12], tokenizer.sha256[:12]),
        ("preprocess", folder.tokenizer.preprocess, tokenizer.preprocess),
    ):
        if theirs != ours:
            raise ValueError(
                f"init={config.init} has the {what} {theirs} and data.store={config.data.store} was made with {ours}; make a store with "
                f"tokenizer.path={config.init}/spiece.model tokenizer.preprocess={folder.tokenizer.preprocess}"
            )
    return folder


def shape_of(config: PretrainConfig, store: TokenStore, start: ModelFolder | None) -> ModelConfig:
    """The shape of the model: of `config`, with the vocabulary of the store; what the weights of `start` decide is taken from there.

    Raises:
        ValueError: `config` asks for another vocabulary, or sets what `start` has otherwise.
    """
    model = config.model
    if model.vocab_size not in (0, store.vocab_size):
        raise ValueError(
            f"model.vocab_size ({model.vocab_size}) is not the {store.vocab_size} pieces of data.store={store.path}; "
            "leave it out, it is taken from the store"
        )
    fixed: dict[str, Any] = {"vocab_size": store.vocab_size}
    if start:
        for field in dataclasses.fields(ModelConfig):
            wanted, has = getattr(model, field.name), getattr(start.config, field.name)
            if field.name in FREE:
                continue
            if wanted not in (has, getattr(ModelConfig(), field.name)):
                raise ValueError(
                    f"model.{field.name} ({wanted}) is {has} in init={config.init}; leave it out, it is taken from there"
                )
            fixed[field.name] = has
        if model.init == "local":
            fixed["init"] = start.config.init
    return dataclasses.replace(model, **fixed)
