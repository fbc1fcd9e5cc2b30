"""The original's TensorFlow release: xlnet_config.json, xlnet_model.ckpt.*, spiece.model; read and written without TensorFlow.

Source of names and shapes: zihangdai/xlnet modeling.py; of the settings: its xlnet.py, XLNetConfig; of the files: its README, "Released
Models". The release's xlnet_model.ckpt.meta, a graph, is not written: neither tf.train.load_checkpoint nor init_from_checkpoint opens it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xlpre.config.loader import from_mapping
from xlpre.conversion import weight_maps
from xlpre.conversion.tf_checkpoint import read_bundle, write_bundle
from xlpre.conversion.weight_maps import FROM_HEADS, LONE_ROW, TO_HEADS, TRANSPOSED, Weight, to_ours, to_theirs
from xlpre.model.config import ModelConfig

CONFIG = "xlnet_config.json"
CHECKPOINT = "xlnet_model.ckpt"
# their name of a setting, ours
SETTINGS = {
    "d_model": "d_model",
    "d_head": "d_head",
    "d_inner": "d_inner",
    "n_head": "n_head",
    "n_layer": "n_layer",
    "n_token": "vocab_size",
    "untie_r": "untie_r",
    "ff_activation": "feed_forward",
}
# settings that it has no word for: flags of the original's commands, and where it started
UNSAID = ("mem_len", "clamp_len", "dropout", "dropatt", "init_scheme", "init_std")
NORM_EPS = 1e-12  # of tf.contrib.layers.layer_norm
SEGMENTS = ("model/transformer/seg_embed", "model/transformer/r_s_bias")  # variables of the relative segment encoding


def weights_of(config: ModelConfig) -> list[Weight]:
    """Every weight of an XLNet and the TensorFlow variable that holds it."""
    root = "model/transformer"
    table = [
        Weight("backbone.embedding.weight", f"{root}/word_embedding/lookup_table"),
        Weight("backbone.mask_embedding", f"{root}/mask_emb/mask_emb", LONE_ROW),
        Weight("output.bias", "model/lm_loss/bias"),
    ]
    biases = {"content": "r_w_bias", "position": "r_r_bias", "segment": "r_s_bias"}
    if not config.relative_segments:
        del biases["segment"]
    if not config.untie_r:
        table += [Weight(f"backbone.shared.{term}", f"{root}/{name}") for term, name in biases.items()]
    for i in range(config.n_layer):
        ours, theirs = f"backbone.layers.{i}", f"{root}/layer_{i}"
        for name, kernel in (("query", "q"), ("key", "k"), ("value", "v"), ("terms.position.key", "r")):
            table.append(Weight(f"{ours}.attention.{name}.weight", f"{theirs}/rel_attn/{kernel}/kernel", TO_HEADS))
        table.append(Weight(f"{ours}.attention.output.weight", f"{theirs}/rel_attn/o/kernel", FROM_HEADS))
        for norm, scope in (("attention_norm", "rel_attn"), ("feed_forward_norm", "ff")):
            table.append(Weight(f"{ours}.{norm}.weight", f"{theirs}/{scope}/LayerNorm/gamma"))
            table.append(Weight(f"{ours}.{norm}.bias", f"{theirs}/{scope}/LayerNorm/beta"))
        for name, dense in (("inner", "layer_1"), ("outer", "layer_2")):
            table.append(Weight(f"{ours}.feed_forward.{name}.weight", f"{theirs}/ff/{dense}/kernel", TRANSPOSED))
            table.append(Weight(f"{ours}.feed_forward.{name}.bias", f"{theirs}/ff/{dense}/bias"))
        if config.relative_segments:
            table.append(Weight(f"{ours}.attention.terms.segment.same_different", f"{root}/seg_embed", row=i))
        if config.untie_r:
            table += [
                Weight(f"{ours}.attention.terms.{term}.r_bias", f"{root}/{name}", row=i)
                for term, name in biases.items()
            ]
    return table


def from_arrays(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Our weights from TensorFlow variables by their names."""
    return to_ours(weights_of(config), {name: torch.from_numpy(np.asarray(a)) for name, a in arrays.items()})


def check_expressible(config: ModelConfig) -> None:
    """Raise ValueError, by the name of the key, for a model that the original cannot be."""
    only = {"norm_eps": (NORM_EPS,), "relative_segments": (True, False)}
    weight_maps.check_expressible(config, "the original's TensorFlow code", only)


def write_release(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write config and checkpoint of a model that `check_expressible` has passed into the folder `path`."""
    arrays = to_theirs(weights_of(config), weights, config)
    write_bundle(path / CHECKPOINT, {name: array.numpy() for name, array in arrays.items()})
    settings = {theirs: getattr(config, ours) for theirs, ours in SETTINGS.items()} | {"d_head": config.head_width}
    (path / CONFIG).write_text(json.dumps(settings, indent=4, sort_keys=True), encoding="utf-8")


def is_release(path: Path) -> bool:
    """Whether `path` is a folder of the TensorFlow release."""
    return (path / CONFIG).is_file()


def read_release(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and weights of a release folder; optimizer slots and the step counter are passed over.

    Raises:
        ValueError: a file that is missing, cut or damaged, a setting that is not known, a variable that is not there.
    """
    config = _config(path / CONFIG)
    wanted = {entry.theirs for entry in weights_of(config)}
    arrays = read_bundle(path / CHECKPOINT, lambda name: name in wanted)
    if not arrays.keys() & set(SEGMENTS):
        config = dataclasses.replace(config, relative_segments=False)
    table = weights_of(config)
    wanted = {entry.theirs for entry in table}
    if missing := sorted(wanted - arrays.keys()):
        raise ValueError(f"{path / CHECKPOINT}.index: the variable {missing[0]} of an XLNet is not in it")
    for entry in table:
        if entry.row is not None and len(arrays[entry.theirs]) != config.n_layer:
            raise ValueError(
                f"{path / CHECKPOINT}.index: {entry.theirs} has {len(arrays[entry.theirs])} rows, {CONFIG} says "
                f"{config.n_layer} layers"
            )
    return config, from_arrays(config, arrays)


def _config(path: Path) -> ModelConfig:
    try:
        given = json.loads(path.read_text("utf-8"))
        settings = {ours: given[theirs] for theirs, ours in SETTINGS.items()}
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path}: has no key {error}; is it the xlnet_config.json of a release?") from None
    if settings["feed_forward"] not in ("gelu", "relu"):
        raise ValueError(f"{path}: ff_activation ({settings['feed_forward']!r}) must be gelu or relu")
    return from_mapping(ModelConfig, settings, str(path))
