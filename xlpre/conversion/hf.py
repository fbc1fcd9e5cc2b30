"""Hugging Face's XLNet folder: config.json, model.safetensors (or pytorch_model.bin), spiece.model.

Source of names and shapes: transformers 5.23, models/xlnet/modeling_xlnet.py.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from xlpre.common.safetensors_io import check_finite, write_tensors
from xlpre.config.loader import from_mapping
from xlpre.conversion import weight_maps
from xlpre.conversion.weight_maps import COPY, FROM_HEADS, LONE_ROW, TO_HEADS, Weight, to_ours, to_theirs
from xlpre.model.config import ModelConfig
from xlpre.objectives.registry import OBJECTIVES

UNSAID = ("dropatt", "mem_len", "init_scheme")  # settings that their config.json has no word for, or another one
# their "gelu" is erf's, which no XLNet was trained with
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu"}
# how they write the same function: the one they have had for longest, and two of later years
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# names that older files have, and any file may
ALIASES = {
    "n_token": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# their attn_type, and the objective that a model of it is taken to have learned
ATTENTION = {"bi": "permutation", "uni": "causal"}


def weights_of(config: ModelConfig) -> list[Weight]:
    """Every weight of an XLNet and its name in XLNetLMHeadModel, where biases that layers share are each layer's own."""
    table = [
        Weight("backbone.embedding.weight", "transformer.word_embedding.weight"),
        Weight("backbone.mask_embedding", "transformer.mask_emb", LONE_ROW),
        Weight("output.bias", "lm_loss.bias"),
    ]
    for i in range(config.n_layer):
        ours, theirs = f"backbone.layers.{i}", f"transformer.layer.{i}"
        for name, kernel in (("query", "q"), ("key", "k"), ("value", "v"), ("terms.position.key", "r")):
            table.append(Weight(f"{ours}.attention.{name}.weight", f"{theirs}.rel_attn.{kernel}", TO_HEADS))
        table.append(Weight(f"{ours}.attention.output.weight", f"{theirs}.rel_attn.o", FROM_HEADS))
        for term, name in (("content", "r_w_bias"), ("position", "r_r_bias"), ("segment", "r_s_bias")):
            bias = f"{ours}.attention.terms.{term}.r_bias" if config.untie_r else f"backbone.shared.{term}"
            table.append(Weight(bias, f"{theirs}.rel_attn.{name}", COPY))
        table.append(Weight(f"{ours}.attention.terms.segment.same_different", f"{theirs}.rel_attn.seg_embed"))
        for part in ("weight", "bias"):
            table.append(Weight(f"{ours}.attention_norm.{part}", f"{theirs}.rel_attn.layer_norm.{part}"))
            table.append(Weight(f"{ours}.feed_forward_norm.{part}", f"{theirs}.ff.layer_norm.{part}"))
            table.append(Weight(f"{ours}.feed_forward.inner.{part}", f"{theirs}.ff.layer_1.{part}"))
            table.append(Weight(f"{ours}.feed_forward.outer.{part}", f"{theirs}.ff.layer_2.{part}"))
    return table


def check_expressible(config: ModelConfig) -> None:
    """Raise ValueError, by the name of the key, for a model that Hugging Face's XLNet cannot be."""
    weight_maps.check_expressible(
        config, "Hugging Face's XLNet", {"d_head": (Fraction(config.d_model, config.n_head),)}
    )


def write_model(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    objective: str,
    more: Mapping[str, Any] | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors of a model that `check_expressible` has passed into the folder `path`.

    With a `head` (their weights of it, and `more` of their settings), the softmax is left out.
    """
    theirs = to_theirs(weights_of(config), weights, config)
    if head is not None:
        theirs = {name: weight for name, weight in theirs.items() if name.startswith("transformer.")} | dict(head)
    write_tensors(path / "model.safetensors", theirs, {"format": "pt"})
    settings = {
        "architectures": ["XLNetLMHeadModel"],
        "model_type": "xlnet",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "d_head": config.head_width,
        "d_inner": config.d_inner,
        "ff_activation": ACTIVATIONS[config.feed_forward],
        "attn_type": "bi" if OBJECTIVES[objective].sees_ahead else "uni",
        "untie_r": True,
        "initializer_range": config.init_std,
        "layer_norm_eps": config.norm_eps,
        "dropout": config.dropout,
        "mem_len": config.mem_len or None,
        "use_mems_eval": config.mem_len > 0,  # with no length given they keep all states
        "use_mems_train": False,
        "reuse_len": None,
        "bi_data": False,
        "clamp_len": config.clamp_len,
        "same_length": False,
        "tie_word_embeddings": True,
        "pad_token_id": 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        **(more or {}),
    }
    (path / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def read_model(path: Path, settings: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Shape, weights and objective of a folder whose config.json holds `settings`; heads of downstream tasks are passed over.

    Raises:
        ValueError: a setting that is not known, weights that are missing or of another shape, a file that cannot be read.
    """
    config = _config(path / "config.json", settings)
    found, origin = _tensors(path)
    if not any(name.startswith("transformer.") for name in found):
        found = {f"transformer.{name}": tensor for name, tensor in found.items()}  # a bare XLNetModel
    table = weights_of(config)
    if "lm_loss.bias" not in found:
        warnings.warn(f"{origin} has no lm_loss.bias; the softmax starts with a bias of zero", stacklevel=2)
        found["lm_loss.bias"] = torch.zeros(config.vocab_size)
    if missing := {entry.theirs for entry in table} - found.keys():
        raise ValueError(f"{origin}: the weight {sorted(missing)[0]} of an XLNet is not in it")
    check_finite(origin, found)
    embedding = found["transformer.word_embedding.weight"]
    if not torch.equal(found.get("lm_loss.weight", embedding), embedding):
        raise ValueError(f"{origin}: lm_loss.weight is not the word embedding; an XLNet shares them")
    known = {entry.theirs for entry in table}
    if heads := sorted({name.partition(".")[0] for name in found} - {"transformer", "lm_loss"}):
        warnings.warn(f"{origin}: its task head ({', '.join(heads)}) is not read", stacklevel=2)
    if odd := sorted(name for name in found if name.startswith("transformer.") and name not in known):
        raise ValueError(f"{origin}: holds {odd[0]}, which {config.n_layer} layers of an XLNet do not have")
    weights = {name: tensor.float() for name, tensor in to_ours(table, found).items()}
    return config, weights, ATTENTION[settings.get("attn_type", "bi")]


def _config(path: Path, given: Mapping[str, Any]) -> ModelConfig:
    settings = {ALIASES.get(key, key): value for key, value in given.items()}
    activation = settings.get("ff_activation", "gelu")
    if activation not in ("gelu", *TANH_GELU, "relu"):
        raise ValueError(f"{path}: ff_activation ({activation!r}) must be gelu_new, gelu or relu")
    if settings.get("attn_type", "bi") not in list(ATTENTION):  # it may be no text
        raise ValueError(f"{path}: attn_type ({settings['attn_type']!r}) must be bi or uni")
    if settings.get("same_length") and settings.get("attn_type") == "uni":
        raise ValueError(f"{path}: same_length=true is not read; set it to false, and model.attention_span here")
    if activation == "gelu":
        warnings.warn(
            f"{path}: ff_activation=gelu is taken as gelu_new, the tanh approximation that XLNet was trained with",
            stacklevel=2,
        )
    clamp_len = settings.get("clamp_len", -1)
    try:
        found = {
            "vocab_size": settings["vocab_size"],
            "d_model": settings["d_model"],
            "n_layer": settings["n_layer"],
            "n_head": settings["n_head"],
            "d_inner": settings["d_inner"],
            "feed_forward": "relu" if activation == "relu" else "gelu",
            "norm_eps": settings.get("layer_norm_eps", 1e-12),
            "mem_len": settings.get("mem_len") or ModelConfig.mem_len,
            "clamp_len": -1 if isinstance(clamp_len, int) and clamp_len <= 0 else clamp_len,
            "dropout": settings.get("dropout", 0.1),
            "dropatt": settings.get("dropout", 0.1),
            "init_std": settings.get("initializer_range", 0.02),
        }
    except KeyError as error:
        raise ValueError(f"{path}: has no key {error}; is it the config.json of an XLNet?") from None
    return from_mapping(ModelConfig, found, str(path))


def _tensors(path: Path) -> tuple[dict[str, Tensor], Path]:
    """All tensors of a folder by name, and the file they are in. Nothing is ever unpickled but plain tensors."""
    single, index, pickled = (
        path / name for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    )
    try:
        if single.exists():
            return safetensors.torch.load_file(single), single
        if index.exists():
            shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            if outside := [shard for shard in shards if Path(shard).name != shard]:
                raise ValueError(f"{outside[0]} lies outside of the folder")
            found: dict[str, Tensor] = {}
            for shard in shards:
                found |= safetensors.torch.load_file(path / shard)
            return found, index
        if pickled.exists():
            found = torch.load(pickled, map_location="cpu", weights_only=True)
            if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()):
                raise ValueError("it holds more than tensors by name")
            return found, pickled
    except pickle.UnpicklingError:
        raise ValueError(
            f"{pickled}: holds code or objects besides tensors, and was refused; nothing was loaded"
        ) from None
    except Exception as error:  # noqa: BLE001 - whatever a damaged or hostile file makes a library raise
        raise ValueError(
            f"{path}: its weights cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:200]}); nothing was loaded"
        ) from None
    if (path / f"{pickled.name}.index.json").exists():
        raise ValueError(
            f"{path}: shards of {pickled.name} are not read; write the model as safetensors, with its save_pretrained of transformers"
        )
    raise ValueError(f"{path}: there is no model.safetensors and no pytorch_model.bin in it")
