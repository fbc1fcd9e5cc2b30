"""Folder of Hugging Face's XLNet: config.json, model.safetensors (or pytorch_model.bin), spiece.model.

Source of names and shapes: transformers 5.23, models/xlnet/modeling_xlnet.py.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.safetensors_io import check_finite, write_tensors
from xlpre.config.loader import config_from_mapping
from xlpre.conversion import weight_maps
from xlpre.conversion.torch_pickle import is_state_dict, read_tensors, read_torch_file
from xlpre.conversion.weight_maps import (
    COPY,
    FROM_HEADS,
    SINGLE_ROW,
    TO_HEADS,
    WeightEntry,
    WeightMap,
    to_external,
    to_native,
)
from xlpre.model.config import ModelConfig
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text import special_tokens

UNMAPPED = ("dropatt", "mem_len", "init_scheme")  # settings that config.json does not store exactly
# documents end with <eod>; the tokens with smaller ids are never generated
GENERATION = {
    "bos_token_id": special_tokens.BOS,
    "eos_token_id": special_tokens.EOD,
    "pad_token_id": special_tokens.PAD,
    "suppress_tokens": [*range(special_tokens.EOD)],
}
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu"}  # transformers' "gelu" uses erf, XLNet the tanh approximation
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # names of the same function
# former names of keys, which transformers still accepts
ALIASES = {
    "n_token": "vocab_size",
    "hidden_size": "d_model",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
OBJECTIVE_BY_ATTN_TYPE = {"bi": "permutation", "uni": "causal"}


def weight_map(config: ModelConfig) -> WeightMap:
    """Return the weight map between a native model and XLNetLMHeadModel, in which each layer has its own attention biases."""
    table = [
        WeightEntry("backbone.word_embedding.weight", "transformer.word_embedding.weight"),
        WeightEntry("backbone.mask_embedding", "transformer.mask_emb", SINGLE_ROW),
        WeightEntry("lm_head.bias", "lm_loss.bias"),
    ]
    for i in range(config.n_layer):
        native, external = f"backbone.layers.{i}", f"transformer.layer.{i}"
        for name, kernel in (("query", "q"), ("key", "k"), ("value", "v"), ("terms.position.key", "r")):
            table.append(WeightEntry(f"{native}.attention.{name}.weight", f"{external}.rel_attn.{kernel}", TO_HEADS))
        table.append(WeightEntry(f"{native}.attention.output.weight", f"{external}.rel_attn.o", FROM_HEADS))
        for term, name in (("content", "r_w_bias"), ("position", "r_r_bias"), ("segment", "r_s_bias")):
            bias = f"{native}.attention.terms.{term}.r_bias" if config.untie_r else f"backbone.shared_biases.{term}"
            table.append(WeightEntry(bias, f"{external}.rel_attn.{name}", COPY))
        table.append(WeightEntry(f"{native}.attention.terms.segment.seg_embed", f"{external}.rel_attn.seg_embed"))
        for part in ("weight", "bias"):
            table.append(WeightEntry(f"{native}.attention_norm.{part}", f"{external}.rel_attn.layer_norm.{part}"))
            table.append(WeightEntry(f"{native}.feed_forward_norm.{part}", f"{external}.ff.layer_norm.{part}"))
            table.append(WeightEntry(f"{native}.feed_forward.inner.{part}", f"{external}.ff.layer_1.{part}"))
            table.append(WeightEntry(f"{native}.feed_forward.outer.{part}", f"{external}.ff.layer_2.{part}"))
    return table


def check_expressible(config: ModelConfig) -> None:
    """Raise InputError for a setting that Hugging Face's XLNet cannot represent."""
    weight_maps.check_expressible(
        config, "Hugging Face's XLNet", {"d_head": (Fraction(config.d_model, config.n_head),)}
    )


def write_model(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    objective: str,
    extra_settings: Mapping[str, Any] | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors into the folder `path`.

    Args:
        path: the folder.
        config: model config that `check_expressible` accepts.
        weights: native weights.
        objective: name of the pretraining objective.
        extra_settings: more settings for config.json, which override the usual settings.
        head: weights of a task head by their names in transformers. They replace the LM head.
    """
    arrays = to_external(weight_map(config), weights, config)
    if head is not None:
        arrays = {name: array for name, array in arrays.items() if name.startswith("transformer.")} | dict(head)
    write_tensors(path / "model.safetensors", arrays, {"format": "pt"})
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
        "use_mems_eval": False,  # pipelines expect no memory in the output, and `generate` would forget tokens before it
        "use_mems_train": False,
        "reuse_len": None,
        "bi_data": False,
        "clamp_len": config.clamp_len or -1,
        "same_length": False,
        "tie_word_embeddings": True,
        "pad_token_id": special_tokens.PAD,
        "bos_token_id": special_tokens.BOS,
        "eos_token_id": special_tokens.EOS,
        "dtype": "float32",
        **(extra_settings or {}),
    }
    (path / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    if head is None:
        (path / "generation_config.json").write_text(json.dumps(GENERATION, indent=1), encoding="utf-8")


def read_model(path: Path, settings: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Read a folder of Hugging Face's XLNet; task heads are skipped with a warning.

    Args:
        path: folder of the model.
        settings: content of its config.json.

    Returns:
        Model config, fp32 native weights, and name of the objective.

    Raises:
        InputError: an unknown setting, weights that are missing or have a wrong shape, or a file that cannot be read.
    """
    config = _config_from(path / "config.json", settings)
    arrays, origin = read_arrays(path)
    if not any(name.startswith("transformer.") for name in arrays):
        arrays = {f"transformer.{name}": array for name, array in arrays.items()}  # saved from a bare XLNetModel
    table = weight_map(config)
    names = {entry.external for entry in table}
    if "lm_loss.bias" not in arrays:
        warnings.warn(f"{origin} has no lm_loss.bias; the bias of the LM head starts at zero", stacklevel=2)
        arrays["lm_loss.bias"] = torch.zeros(config.clusters[-1][1])
    if missing := names - arrays.keys():
        raise InputError(
            f"{origin} is invalid: the weight {min(missing)} is missing. Save the model again with transformers."
        )
    check_finite(origin, arrays)
    embedding = arrays["transformer.word_embedding.weight"]
    if not torch.equal(arrays.get("lm_loss.weight", embedding), embedding):
        raise InputError(
            f"{origin} is invalid: lm_loss.weight differs from the word embedding, which an XLNet shares with it. "
            "Set tie_word_embeddings to true and save the model again with transformers."
        )
    if heads := sorted({name.partition(".")[0] for name in arrays} - {"transformer", "lm_loss"}):
        warnings.warn(f"{origin}: its task head ({', '.join(heads)}) is ignored", stacklevel=2)
    if unknown := sorted(name for name in arrays if name.startswith("transformer.") and name not in names):
        raise InputError(
            f"{origin} is invalid: an XLNet of {config.n_layer} layers has no weight {unknown[0]}. "
            "Correct n_layer in config.json, or save the model again with transformers."
        )
    weights = {name: weight.float() for name, weight in to_native(table, arrays).items()}
    objective = OBJECTIVE_BY_ATTN_TYPE[settings.get("attn_type", "bi")]
    if objective == "permutation" and settings.get("pretraining_objective") == "denoising":
        objective = "denoising"  # written by save_huggingface
    return config, weights, objective


def _config_from(path: Path, content: Mapping[str, Any]) -> ModelConfig:
    """Return the model config for the `content` of config.json."""
    settings = {ALIASES.get(key, key): value for key, value in content.items()}
    activation = settings.get("ff_activation", "gelu")
    if activation not in ("gelu", *TANH_GELU, "relu"):
        raise InputError(f"{path}: ff_activation={activation!r} is invalid: it must be gelu_new, gelu or relu.")
    if settings.get("attn_type", "bi") not in list(OBJECTIVE_BY_ATTN_TYPE):  # a list: the value may be unhashable
        raise InputError(f"{path}: attn_type={settings['attn_type']!r} is invalid: it must be bi or uni.")
    if settings.get("same_length") and settings.get("attn_type") == "uni":
        raise InputError(
            f"{path}: same_length=true is invalid: xlpre does not read it. Set it to false, and set model.attention_span in xlpre."
        )
    if activation == "gelu":
        warnings.warn(
            f"{path}: ff_activation=gelu is read as gelu_new, the tanh approximation that XLNet was trained with",
            stacklevel=2,
        )
    clamp_len = settings.get("clamp_len", -1)
    try:
        values = {
            "vocab_size": settings["vocab_size"],
            "d_model": settings["d_model"],
            "n_layer": settings["n_layer"],
            "n_head": settings["n_head"],
            "d_inner": settings["d_inner"],
            "feed_forward": "relu" if activation == "relu" else "gelu",
            "norm_eps": settings.get("layer_norm_eps", 1e-12),
            "mem_len": settings.get("mem_len") or ModelConfig.mem_len,
            "clamp_len": None if isinstance(clamp_len, int) and clamp_len <= 0 else clamp_len,
            "dropout": settings.get("dropout", 0.1),
            "dropatt": settings.get("dropout", 0.1),
            "init_std": settings.get("initializer_range", 0.02),
        }
    except KeyError as error:
        raise InputError(f"{path} is invalid: the key {error} is missing. Give the config.json of an XLNet.") from None
    if values["vocab_size"] is None:
        raise InputError(f"{path}: vocab_size=null is invalid: it must be a number. Correct it.")
    return config_from_mapping(ModelConfig, values, str(path))


def read_arrays(path: Path) -> tuple[dict[str, Tensor], Path]:
    """Return the tensors of a folder by name, and the file that holds or lists them. Pickles are not executed."""
    single, index, pickled = (
        path / name for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    )
    try:
        if single.exists():
            return safetensors.torch.load_file(single), single
        if index.exists():
            shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            if outside := [shard for shard in shards if Path(shard).name != shard]:
                raise InputError(f"{outside[0]} is outside of the folder")
            arrays: dict[str, Tensor] = {}
            for shard in shards:
                arrays |= safetensors.torch.load_file(path / shard)
            return arrays, index
    except Exception as error:  # noqa: BLE001 - a damaged or hostile file may raise any error inside a library
        raise InputError(
            f"{path}: the weights cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:200]}). "
            "Copy the folder again. Nothing was loaded."
        ) from None
    if pickled.exists():
        content = read_torch_file(pickled)
        if not is_state_dict(content):
            raise InputError(
                f"{pickled} is refused: it must hold only tensors by name. Save the model as safetensors. Nothing was loaded."
            )
        return read_tensors(content), pickled
    if (path / f"{pickled.name}.index.json").exists():
        raise InputError(
            f"{path} is invalid: sharded {pickled.name} files are not supported. Save the model as safetensors with transformers."
        )
    saved = next(iter(sorted(path.glob("*.pt"))), None)
    remedy = f"For a Transformer-XL, name the file: {saved}." if saved else "Copy the whole folder."
    raise InputError(f"{path} is invalid: it has neither model.safetensors nor pytorch_model.bin. {remedy}")
