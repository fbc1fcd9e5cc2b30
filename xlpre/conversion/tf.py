"""The original TensorFlow release: xlnet_config.json, xlnet_model.ckpt.*, spiece.model; read and written without TensorFlow.

Source: zihangdai/xlnet modeling.py (names and shapes), xlnet.py `XLNetConfig` (settings), and README, "Released Models" (files).

The graph of the release, xlnet_model.ckpt.meta, is not written: tf.train.load_checkpoint and init_from_checkpoint do not open it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.config.loader import config_from_mapping
from xlpre.conversion import weight_maps
from xlpre.conversion.tf_checkpoint import read_checkpoint, write_checkpoint
from xlpre.conversion.weight_maps import (
    FROM_HEADS,
    SINGLE_ROW,
    TO_HEADS,
    TRANSPOSED,
    WeightEntry,
    WeightMap,
    to_external,
    to_native,
)
from xlpre.model.config import ModelConfig

CONFIG_FILE = "xlnet_config.json"
CHECKPOINT = "xlnet_model.ckpt"
# keys of xlnet_config.json and the native settings
CONFIG_KEYS = {
    "d_model": "d_model",
    "d_head": "d_head",
    "d_inner": "d_inner",
    "n_head": "n_head",
    "n_layer": "n_layer",
    "n_token": "vocab_size",
    "untie_r": "untie_r",
    "ff_activation": "feed_forward",
}
# settings that xlnet_config.json does not store; in the original, they are flags of the commands, or concern initialization
UNMAPPED = ("mem_len", "clamp_len", "dropout", "dropatt", "init_scheme", "init_std")
NORM_EPS = 1e-12  # of tf.contrib.layers.layer_norm
SEGMENT_VARIABLES = ("model/transformer/seg_embed", "model/transformer/r_s_bias")


def weight_map(config: ModelConfig) -> WeightMap:
    """Return the weight map between a native model and the variables of the TensorFlow release."""
    root = "model/transformer"
    table = [
        WeightEntry("backbone.word_embedding.weight", f"{root}/word_embedding/lookup_table"),
        WeightEntry("backbone.mask_embedding", f"{root}/mask_emb/mask_emb", SINGLE_ROW),
        WeightEntry("lm_head.bias", "model/lm_loss/bias"),
    ]
    biases = {"content": "r_w_bias", "position": "r_r_bias", "segment": "r_s_bias"}
    if not config.relative_segments:
        del biases["segment"]
    if not config.untie_r:
        table += [WeightEntry(f"backbone.shared_biases.{term}", f"{root}/{name}") for term, name in biases.items()]
    for i in range(config.n_layer):
        native, external = f"backbone.layers.{i}", f"{root}/layer_{i}"
        for name, kernel in (("query", "q"), ("key", "k"), ("value", "v"), ("terms.position.key", "r")):
            table.append(
                WeightEntry(f"{native}.attention.{name}.weight", f"{external}/rel_attn/{kernel}/kernel", TO_HEADS)
            )
        table.append(WeightEntry(f"{native}.attention.output.weight", f"{external}/rel_attn/o/kernel", FROM_HEADS))
        for norm, scope in (("attention_norm", "rel_attn"), ("feed_forward_norm", "ff")):
            table.append(WeightEntry(f"{native}.{norm}.weight", f"{external}/{scope}/LayerNorm/gamma"))
            table.append(WeightEntry(f"{native}.{norm}.bias", f"{external}/{scope}/LayerNorm/beta"))
        for name, dense in (("inner", "layer_1"), ("outer", "layer_2")):
            table.append(
                WeightEntry(f"{native}.feed_forward.{name}.weight", f"{external}/ff/{dense}/kernel", TRANSPOSED)
            )
            table.append(WeightEntry(f"{native}.feed_forward.{name}.bias", f"{external}/ff/{dense}/bias"))
        if config.relative_segments:
            table.append(WeightEntry(f"{native}.attention.terms.segment.seg_embed", f"{root}/seg_embed", row=i))
        if config.untie_r:
            table += [
                WeightEntry(f"{native}.attention.terms.{term}.r_bias", f"{root}/{name}", row=i)
                for term, name in biases.items()
            ]
    return table


def from_arrays(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Convert TensorFlow variables by name to native weights."""
    tensors = {name: torch.from_numpy(np.asarray(array)).float() for name, array in arrays.items()}
    return to_native(weight_map(config), tensors)


def check_expressible(config: ModelConfig) -> None:
    """Raise InputError for a setting that the original implementation cannot represent."""
    allowed = {"norm_eps": (NORM_EPS,), "relative_segments": (True, False)}
    weight_maps.check_expressible(config, "the original's TensorFlow code", allowed)


def write_model(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write config and checkpoint into the folder `path`; `check_expressible` must accept `config`."""
    arrays = to_external(weight_map(config), weights, config)
    write_checkpoint(path / CHECKPOINT, {name: array.numpy() for name, array in arrays.items()})
    settings = {key: getattr(config, native) for key, native in CONFIG_KEYS.items()} | {"d_head": config.head_width}
    (path / CONFIG_FILE).write_text(json.dumps(settings, indent=4, sort_keys=True), encoding="utf-8")


def is_release(path: Path) -> bool:
    """Return True if `path` is a folder of the TensorFlow release."""
    return (path / CONFIG_FILE).is_file()


def read_model(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a release folder; optimizer slots and the step counter are skipped.

    Returns:
        Model config and fp32 native weights.

    Raises:
        InputError: a file is missing, truncated or damaged; a setting is unknown; or a variable is missing.
    """
    config = _read_config(path / CONFIG_FILE)
    index = f"{path / CHECKPOINT}.index"
    names = {entry.external for entry in weight_map(config)}
    arrays = read_checkpoint(path / CHECKPOINT, lambda name: name in names)
    if not arrays.keys() & set(SEGMENT_VARIABLES):
        config = dataclasses.replace(config, relative_segments=False)
    table = weight_map(config)
    if missing := {entry.external for entry in table} - arrays.keys():
        raise InputError(f"{index} is invalid: the variable {min(missing)} is missing. Download the release again.")
    for entry in table:
        if entry.row is not None and (n_rows := len(arrays[entry.external])) != config.n_layer:
            raise InputError(
                f"{index} is invalid: {entry.external} has {n_rows} rows, one per layer, but {CONFIG_FILE} has n_layer={config.n_layer}. "
                "Put the config of this checkpoint there."
            )
    return config, from_arrays(config, arrays)


def _read_config(path: Path) -> ModelConfig:
    try:
        content = json.loads(path.read_text("utf-8"))
        settings = {native: content[key] for key, native in CONFIG_KEYS.items()}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error}. Download the release again.") from None
    except KeyError as error:
        raise InputError(
            f"{path} is invalid: the key {error} is missing. Give the {CONFIG_FILE} of a release."
        ) from None
    if settings["feed_forward"] not in ("gelu", "relu"):
        raise InputError(f"{path}: ff_activation={settings['feed_forward']!r} is invalid: it must be gelu or relu.")
    return config_from_mapping(ModelConfig, settings, str(path))
