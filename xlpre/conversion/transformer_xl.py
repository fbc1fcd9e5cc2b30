"""Models of Transformer-XL: the original's PyTorch and TensorFlow files, and folders of Hugging Face's `transfo-xl` classes. Read only.

`model.pt`   The whole model, pickled: the original's `train.py` writes it. Its attributes are the settings.
weights      A state dict (`.pt`, `pytorch_model.bin`), `model.safetensors` or a TensorFlow checkpoint holds no settings. A `config.json`
             beside it holds them, with `model_type` `transfo-xl` and the keys of Hugging Face's `TransfoXLConfig` or of the original's
             constructor.

Not part of the model, and so not read: `tgt_len` and `ext_len` (settings of the data), the vocabulary, and the optimizer.

Source: kimiyoung/transformer-xl pytorch/mem_transformer.py, pytorch/utils/proj_adaptive_softmax.py and tf/model.py; transformers 4.35,
models/transfo_xl/modeling_transfo_xl.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.safetensors_io import check_finite
from xlpre.config.loader import config_from_mapping
from xlpre.conversion.hf import read_arrays
from xlpre.conversion.tf_checkpoint import read_checkpoint
from xlpre.conversion.torch_pickle import (
    Instance,
    StoredTensor,
    is_state_dict,
    is_torch_file,
    named_tensors,
    read_tensors,
    read_torch_file,
)
from xlpre.model.config import MAX_LAYERS, ModelConfig

MODEL_TYPE = "transfo-xl"  # in config.json
MODEL_FILE = "model.pt"
POSITIONS = ["relative", "shaw", "sinusoidal", "learned"]  # attn_type 0 to 3
NORM_EPS = 1e-5  # of torch.nn.LayerNorm
TF_NORM_EPS = 1e-12  # of tf.contrib.layers.layer_norm
# Hugging Face's names of the constructor's arguments
ALIASES = {"vocab_size": "n_token", "tie_word_embeddings": "tie_weight", "layer_norm_epsilon": "norm_eps"}
REQUIRED = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner", "mem_len")
DEFAULTS: dict[str, Any] = {  # of the constructor; its dropout rates have none
    "tie_weight": True,
    "d_embed": None,
    "div_val": 1,
    "tie_projs": [],
    "pre_lnorm": False,
    "cutoffs": [],
    "same_length": False,
    "attn_type": 0,
    "clamp_len": -1,
    "dropout": 0.1,
    "dropatt": 0.0,
    "norm_eps": NORM_EPS,
    "untie_r": False,
}
# names in the TensorFlow checkpoint and in the state dict; matrices are transposed
TF_NAMES = {
    r"r_([wr])_bias": r"r_\1_bias",
    r"adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
    r"adaptive_embed/proj_W": "word_emb.emb_projs.0",
    r"adaptive_embed/cutoff_(\d+)/lookup_table": r"word_emb.emb_layers.\1.weight",
    r"adaptive_embed/cutoff_(\d+)/proj_W": r"word_emb.emb_projs.\1",
    r"adaptive_softmax/bias": "crit.out_layers.0.bias",
    r"adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
    r"adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
    r"adaptive_softmax/cutoff_(\d+)/b": r"crit.out_layers.\1.bias",
    r"adaptive_softmax/cutoff_(\d+)/proj": r"crit.out_projs.\1",
    r"layer_(\d+)/rel_attn/(qkv|r|o)/kernel": r"layers.\1.dec_attn.\2_net.weight",
    r"layer_(\d+)/rel_attn/LayerNorm/gamma": r"layers.\1.dec_attn.layer_norm.weight",
    r"layer_(\d+)/rel_attn/LayerNorm/beta": r"layers.\1.dec_attn.layer_norm.bias",
    r"layer_(\d+)/ff/layer_1/kernel": r"layers.\1.pos_ff.CoreNet.0.weight",
    r"layer_(\d+)/ff/layer_1/bias": r"layers.\1.pos_ff.CoreNet.0.bias",
    r"layer_(\d+)/ff/layer_2/kernel": r"layers.\1.pos_ff.CoreNet.3.weight",
    r"layer_(\d+)/ff/layer_2/bias": r"layers.\1.pos_ff.CoreNet.3.bias",
    r"layer_(\d+)/ff/LayerNorm/gamma": r"layers.\1.pos_ff.layer_norm.weight",
    r"layer_(\d+)/ff/LayerNorm/beta": r"layers.\1.pos_ff.layer_norm.bias",
}
Model = tuple[ModelConfig, dict[str, Tensor]]  # model config, and fp32 native weights


def config_from(arguments: Mapping[str, Any], origin: str = "the model") -> ModelConfig:
    """Return the model config for arguments of the original's constructor, `MemTransformerLM`.

    Args:
        arguments: the constructor's arguments by name. In addition, `max_klen` is the number of learned positions (by default the sum of
            `tgt_len`, `ext_len` and `mem_len`), `untie_r` and `norm_eps` are as in `ModelConfig`, and `attention_span` is the value for
            `same_length` (by default `exclude_self_slot`).
        origin: file that the arguments are from, for error messages.

    Raises:
        InputError: an argument is missing or invalid.
    """
    arguments = {**DEFAULTS, **arguments}
    optional = {"max_klen", "untie_r", "norm_eps"} & arguments.keys()
    for key in (*REQUIRED, *DEFAULTS, *sorted(optional)):
        if key not in arguments or not _is_plain(arguments[key]) or (key == "n_token" and arguments[key] is None):
            problem = "must be a number or a list of numbers" if key in arguments else "is missing"
            raise InputError(f"{origin} is invalid: {key} {problem}. Give all arguments of the model's constructor.")
    try:
        if arguments["attn_type"] not in range(len(POSITIONS)):
            raise InputError(f"{origin}: attn_type={arguments['attn_type']!r} is invalid: it must be 0, 1, 2 or 3.")
        positions = POSITIONS[arguments["attn_type"]]
        n_positions, cutoffs, clamp_len = None, list(arguments["cutoffs"]), arguments["clamp_len"]
        if len(cutoffs) > MAX_LAYERS or arguments["n_layer"] > MAX_LAYERS:
            raise InputError(f"{origin} is invalid: it has more than {MAX_LAYERS} layers or cutoffs.")
        if positions in ("shaw", "learned"):
            n_positions = arguments.get("max_klen") or sum(arguments[key] for key in ("tgt_len", "ext_len", "mem_len"))
        pre_norm = "pre_keys" if positions in ("sinusoidal", "learned") else "pre"
        tie_projections = list(arguments["tie_projs"])
        values = {
            "vocab_size": arguments["n_token"],
            "n_layer": arguments["n_layer"],
            "d_model": arguments["d_model"],
            "n_head": arguments["n_head"],
            "d_head": arguments["d_head"],
            "d_inner": arguments["d_inner"],
            "feed_forward": "relu",
            "norm": pre_norm if arguments["pre_lnorm"] else "post",
            "norm_eps": arguments["norm_eps"],
            "mem_len": arguments["mem_len"],
            "attention_span": arguments.get("attention_span", "exclude_self_slot")
            if arguments["same_length"]
            else "all",
            "positions": positions,
            "n_positions": n_positions,
            # learned absolute positions ignore it in the original
            "clamp_len": None if positions == "learned" or clamp_len < 1 else clamp_len,
            "relative_segments": False,
            "untie_r": arguments["untie_r"] or positions == "shaw",
            "cutoffs": cutoffs,
            "div_value": arguments["div_val"],
            "d_embed": None if arguments["d_embed"] == arguments["d_model"] else arguments["d_embed"],
            "scale_embedding": True,
            "tie_embedding": arguments["tie_weight"],
            "tie_projections": tie_projections if len(tie_projections) == len(cutoffs) + 1 else [],
            "dropout": arguments["dropout"],
            "dropatt": arguments["dropatt"],
        }
    except (KeyError, TypeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else "a setting has the wrong type"
        raise InputError(f"{origin} is invalid: {problem}. Give all arguments of the model's constructor.") from None
    return config_from_mapping(ModelConfig, values, origin)


def _is_plain(value: Any) -> bool:
    """Return True for None, a number, or a list of numbers."""
    values = value if type(value) in (list, tuple) else [value]
    return all(item is None or type(item) in (int, float, bool) for item in values)


def native_weights(config: ModelConfig, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors (weights or gradients) by their names in the state dict of `MemTransformerLM` to native names and shapes.

    Entries without a tensor are skipped. The head's scores of clusters are in the order of the original's PyTorch code.
    """
    native: dict[str, Tensor] = {}

    def take(
        name: str, external: str, transform: Callable[[Tensor], Tensor] = lambda w: w, row: int | None = None
    ) -> None:
        if external in arrays:
            array = arrays[external] if row is None else arrays[external][row]
            native[name] = transform(array).contiguous()

    if config.has_plain_embedding:
        take("backbone.word_embedding.weight", "word_emb.emb_layers.0.weight")
        take("lm_head.bias", "crit.out_layers.0.bias")
    else:
        for i, (low, high, _) in enumerate(config.clusters):
            scores = f"lm_head.clusters.{i}"
            take(f"backbone.word_embedding.clusters.{i}.table", f"word_emb.emb_layers.{i}.weight")
            take(f"backbone.word_embedding.clusters.{i}.projection", f"word_emb.emb_projs.{i}")
            if config.has_embedding_projection and not (config.tie_projections and config.tie_projections[i]):
                take(f"{scores}.projection", f"crit.out_projs.{i}")
            if not config.tie_embedding:
                take(f"{scores}.table", f"crit.out_layers.{i}.weight")
            if config.div_value > 1:
                take(f"{scores}.bias", f"crit.out_layers.{i}.bias")
            else:  # one layer for all clusters
                take(f"{scores}.bias", "crit.out_layers.0.bias", _rows(low, high))
        # the PyTorch code assigns the last entry of the head to the first cluster of rare words
        take("lm_head.clusters.0.cluster_logits.weight", "crit.cluster_weight", lambda w: w.flip(0))
        take("lm_head.clusters.0.cluster_logits.bias", "crit.cluster_bias", lambda w: w.flip(0))
    if not config.untie_r:
        take("backbone.shared_biases.content", "r_w_bias")
        take("backbone.shared_biases.position", "r_r_bias")
    for i in range(config.n_layer):
        layer, external = f"backbone.layers.{i}", f"layers.{i}"
        terms = f"{layer}.attention.terms"
        for n, name in enumerate(("query", "key", "value")):
            take(f"{layer}.attention.{name}.weight", f"{external}.dec_attn.qkv_net.weight", _chunk(n, 3))
        take(f"{layer}.attention.query.weight", f"{external}.dec_attn.q_net.weight")
        take(f"{layer}.attention.key.weight", f"{external}.dec_attn.kv_net.weight", _chunk(0, 2))
        take(f"{layer}.attention.value.weight", f"{external}.dec_attn.kv_net.weight", _chunk(1, 2))
        take(f"{layer}.attention.output.weight", f"{external}.dec_attn.o_net.weight")
        take(f"{terms}.position.key.weight", f"{external}.dec_attn.r_net.weight")
        for norm, scope in (("attention_norm", "dec_attn"), ("feed_forward_norm", "pos_ff")):
            for part in ("weight", "bias"):
                take(f"{layer}.{norm}.{part}", f"{external}.{scope}.layer_norm.{part}")
        for part in ("weight", "bias"):
            take(f"{layer}.feed_forward.inner.{part}", f"{external}.pos_ff.CoreNet.0.{part}")
            take(f"{layer}.feed_forward.outer.{part}", f"{external}.pos_ff.CoreNet.3.{part}")
        if config.untie_r:
            take(f"{terms}.content.r_bias", "r_w_bias", row=i)
            take(f"{terms}.position.r_bias", "r_r_bias", row=i)
        if config.positions == "shaw":
            take(f"{terms}.position.keys", "r_emb", _by_distance, row=i)
            take(f"{terms}.position.offsets", "r_bias", _by_distance, row=i)
        if config.positions == "learned":
            take(f"{layer}.position_embedding.table", "r_emb", lambda w: _by_distance(w.flatten(1)), row=i)
    return native


def _rows(low: int, high: int) -> Callable[[Tensor], Tensor]:
    return lambda w: w[low:high]


def _chunk(index: int, n_chunks: int) -> Callable[[Tensor], Tensor]:
    return lambda w: w.chunk(n_chunks)[index]


def _by_distance(rows: Tensor) -> Tensor:
    """Convert a table (N, ...) whose last row is distance 0 to one that also has rows (zeros) for later keys, which no query sees."""
    return torch.cat([torch.zeros_like(rows[1:]), rows.flip(0)])


def is_saved_model(path: Path) -> bool:
    """Return True if `path` is a file of torch.save, or a folder with a `model.pt` and without a config.json."""
    if path.is_dir():
        return (path / MODEL_FILE).is_file() and not (path / "config.json").exists()
    return path.is_file() and (path.suffix == ".pt" or is_torch_file(path))


def read_saved_model(path: Path, read_settings: Callable[[Path], Mapping[str, Any]]) -> Model:
    """Read a file of torch.save: a whole model, or a state dict with a config.json beside it.

    Args:
        path: the file, or a folder with a `model.pt`.
        read_settings: returns the content of the config.json of a folder.

    Raises:
        InputError: the file is refused by `read_torch_file`, or is not a Transformer-XL.
    """
    file = path / MODEL_FILE if path.is_dir() else path
    content = read_torch_file(file)
    if isinstance(content, Instance):
        arrays = _read(named_tensors(content, file))
        return _convert(file, _read_arguments(file, content), arrays)
    if not is_state_dict(content):
        raise InputError(
            f"{file} is invalid: it is neither a model nor a state dict. Give the model.pt of a Transformer-XL."
        )
    if not (file.parent / "config.json").exists():
        raise InputError(
            f"{file} is invalid: a state dict has no settings. Give model.pt, which has them, or put a config.json with "
            f'"model_type": "{MODEL_TYPE}" and the arguments of the model\'s constructor next to it.'
        )
    settings = read_settings(file.parent)
    if settings.get("model_type") != MODEL_TYPE:
        raise InputError(f"{file.parent}/config.json is invalid: it must hold model_type {MODEL_TYPE!r}.")
    return _with_settings(file, settings, _read(content))


def read_folder(path: Path, settings: Mapping[str, Any]) -> Model:
    """Read a folder with a config.json whose `model_type` is `transfo-xl`.

    The weights are those of Hugging Face's `TransfoXLLMHeadModel` or of the original: `model.safetensors`, `pytorch_model.bin`, or a
    TensorFlow checkpoint.

    Args:
        path: the folder.
        settings: content of its config.json.

    Raises:
        InputError: a setting is missing or invalid, a weight is missing, or a file cannot be read.
    """
    checkpoints = sorted(path.glob("*.index"))
    if len(checkpoints) > 1:
        raise InputError(
            f"{path} is invalid: it has several TensorFlow checkpoints. Put one of them into a folder of its own."
        )
    if checkpoints:
        index = checkpoints[0]
        graph = {"norm_eps": TF_NORM_EPS, "attention_span": "same_length"}  # what the TensorFlow code computes
        return _with_settings(index, {**settings, **graph}, _read_tensorflow(index))
    arrays, origin = read_arrays(path)
    return _with_settings(origin, settings, {name: array.float() for name, array in arrays.items()})


def _read(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    floating = {name: tensor for name, tensor in tensors.items() if tensor.storage.dtype.is_floating_point}
    return {name: tensor.float() for name, tensor in read_tensors(floating).items()}


def _read_arguments(file: Path, model: Instance) -> dict[str, Any]:
    """Return the constructor's arguments from the attributes of a model."""

    def get(path: str, name: str) -> Any:
        module: Any = model
        for part in path.split(".") if path else ():
            module = module.attributes["_modules"][part]
        return module.attributes[name]

    try:
        names = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "mem_len", "max_klen", "attn_type")
        arguments = {name: get("", name) for name in (*names, "same_length", "clamp_len")} | {
            "d_inner": get("layers.0.pos_ff", "d_inner"),
            "pre_lnorm": get("layers.0.pos_ff", "pre_lnorm"),
            "dropout": get("drop", "p"),
            "dropatt": get("layers.0.dec_attn.dropatt", "p"),
            "cutoffs": get("word_emb", "cutoffs")[:-1],  # the last is the size of the vocabulary
            "div_val": get("word_emb", "div_val"),
        }
    except (KeyError, TypeError, AttributeError, IndexError):
        raise InputError(
            f"{file} is invalid: {model.of} is not a MemTransformerLM with an adaptive or plain softmax. "
            "Give the model.pt of a Transformer-XL."
        ) from None
    if isinstance(ext_len := model.attributes.get("ext_len"), int) and ext_len:
        warnings.warn(f"{file}: ext_len={ext_len} is a setting of the data and was left out", stacklevel=2)
    return arguments


def _with_settings(origin: Path, settings: Mapping[str, Any], arrays: dict[str, Tensor]) -> Model:
    """Return config and weights from the content of a config.json and the arrays of Hugging Face or of the original."""
    arguments = {ALIASES.get(key, key): value for key, value in settings.items()}
    arrays = _from_huggingface(arrays)
    arguments["untie_r"] = arguments.get("attn_type", 0) == 0 and "r_w_bias" in arrays and arrays["r_w_bias"].dim() == 3
    if "r_emb" in arrays:
        arguments["max_klen"] = arrays["r_emb"].shape[1]
    return _convert(origin, arguments, arrays)


def _from_huggingface(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays of `TransfoXLLMHeadModel` by the names of the original. Other arrays are returned unchanged."""
    prefix = "transformer."
    if not any(name.startswith(prefix) for name in arrays):
        return arrays
    arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    for bias in ("r_w_bias", "r_r_bias"):  # of all layers, or of each layer
        names = [f"layers.{i}.dec_attn.{bias}" for i in range(MAX_LAYERS)]
        if bias not in arrays and names[0] in arrays:
            arrays[bias] = torch.stack([arrays[name] for name in names if name in arrays])
    return _in_pytorch_order(arrays)


def _in_pytorch_order(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reverse the scores of clusters, which TensorFlow's and Hugging Face's code have in the order of the clusters."""
    clusters = {name: arrays[name].flip(0) for name in ("crit.cluster_weight", "crit.cluster_bias") if name in arrays}
    return arrays | clusters


def _read_tensorflow(index: Path) -> dict[str, Tensor]:
    """Return the variables of a TensorFlow checkpoint by the names of the original's PyTorch code; optimizer slots are skipped."""
    renamed: dict[str, str] = {}

    def select(name: str) -> bool:
        for pattern, replacement in TF_NAMES.items():
            if match := re.fullmatch(f"transformer/{pattern}", name):
                renamed[name] = match.expand(replacement)
        return name in renamed

    arrays = {}
    for name, array in read_checkpoint(index.with_suffix(""), select).items():
        is_matrix = name.endswith(("kernel", "proj", "proj_W"))
        arrays[renamed[name]] = torch.from_numpy(array.T if is_matrix else array).float()
    if (
        "word_emb.emb_layers.1.weight" not in arrays
    ):  # clusters of one width: the PyTorch code has one bias for all tokens
        names = [f"crit.out_layers.{i}.bias" for i in range(1 + len(arrays.get("crit.cluster_bias", ())))]
        if biases := [arrays.pop(name) for name in names if name in arrays]:
            arrays[names[0]] = torch.cat(biases)
    return _in_pytorch_order(arrays)


def _convert(origin: Path, arguments: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> Model:
    """Return config and native weights for the constructor's arguments and the arrays of a model.

    Layers and clusters are counted before a model of the stated size is described.
    """
    config = config_from({**arguments, **_ties(origin, arrays)}, str(origin))
    n_layer = len({name.split(".")[1] for name in arrays if name.startswith("layers.")})
    if n_layer != config.n_layer or _n_cutoffs(arrays) != len(config.cutoffs):
        raise InputError(
            f"{origin} is invalid: it has {n_layer} layers and {_n_cutoffs(arrays)} cutoffs, but its settings state {config.n_layer} and "
            f"{len(config.cutoffs)}. Give the settings of this model."
        )
    check_finite(origin, arrays)
    weights = native_weights(config, arrays)
    # causal models do not use it
    weights["backbone.mask_embedding"] = torch.zeros_like(weights["backbone.layers.0.attention_norm.bias"])
    return config, weights


def _n_cutoffs(arrays: Mapping[str, Tensor]) -> int:
    return len(arrays["crit.cluster_bias"]) if "crit.cluster_bias" in arrays else 0


def _ties(origin: Path, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments `tie_weight` and `tie_projs`. The softmax shares what is equal to the embedding's, or not stored twice."""

    def is_shared(name: str, other: str) -> bool:
        return name in arrays and (other not in arrays or torch.equal(arrays[name], arrays[other]))

    clusters = range(_n_cutoffs(arrays) + 1)
    tables = [i for i in clusters if i == 0 or f"word_emb.emb_layers.{i}.weight" in arrays]
    tied = {is_shared(f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight") for i in tables}
    if len(tied) > 1:
        raise InputError(f"{origin} is invalid: only some clusters share the weights of embedding and softmax.")
    source = [i if len(tables) > 1 else 0 for i in clusters]  # clusters of one width have one projection
    return {
        "tie_weight": tied == {True},
        "tie_projs": [is_shared(f"word_emb.emb_projs.{source[i]}", f"crit.out_projs.{i}") for i in clusters],
    }
