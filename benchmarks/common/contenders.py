"""Contenders: models of xlpre and of Hugging Face whose training steps are compared, with equal weights and an equal batch.

The name of a contender is `hf`, `hf-compile`, or `xlpre[:attention[:compile]]`, where `attention` is an attention backend and `compile`
is a scope of `Contender.compile`. Functions take the benchmark configuration as `c`, a dictionary with the keys of DEFAULT.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.config import PretrainConfig
from pretrain.planning.flops import batch_shape, flops_per_step
from pretrain.trainer.cuda_graphs import use_cuda_graphs
from xlpre.batch import Batch
from xlpre.common.errors import InputError, check_minimum
from xlpre.conversion import hf
from xlpre.conversion.weight_maps import to_native
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import DataConfig, Windows
from xlpre.data_loader import batch_from_inputs
from xlpre.model.attention_mask import visible
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import Permutation
from xlpre.training.deepspeed_engine import PRECISIONS

DEFAULT: dict[str, Any] = {
    "n_layer": 6,
    "d_model": 256,
    "n_head": 4,
    "d_inner": 1024,
    "vocab_size": 8000,
    "window": 128,
    "mem_len": 96,
    "reuse_len": 64,
    "rows": 8,
    "partial_k": 6,
    "dropout": 0.0,
    "attention": "auto",
    "compile": "",
    "optimizer": False,
    "device": "cpu",
    "dtype": "fp32",
    "threads": 1,
    "seed": 0,
}
SIZES = ("vocab_size", "d_model", "n_layer", "n_head", "d_inner", "dropout")
CUDA_GRAPH_SCOPES = ("graphs", "layers+graphs", "reduce-overhead", "max-autotune")
SCOPES = ("", "whole", "layers", "default", "max-autotune-no-cudagraphs", *CUDA_GRAPH_SCOPES)  # of Contender.compile
KEYS = {"seq_len": "window", "attention_backend": "attention"}  # keys here of settings with other names in training
MINIMUM = {"rows": 1, "threads": 1, "vocab_size": 11, "seed": 0}


def check_config(names: list[str], c: dict[str, Any]) -> None:
    """Raise InputError if a name of a contender or a value of the benchmark configuration is invalid."""
    for name, minimum in MINIMUM.items():
        check_minimum(name, c[name], minimum)
    check_choice("dtype", c["dtype"], tuple(PRECISIONS))
    check_choice("device", c["device"], ("cpu", "cuda"))
    if c["device"] == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda is invalid: torch finds no GPU. Set device=cpu.")
    if any(name.startswith("hf") for name in names):
        require_transformers()
    for name in names:
        config = config_of_contender(name, c)
        check_choice("compile", config["compile"], SCOPES)
        try:
            needed_flops(config)
        except InputError as error:  # it names settings as they are called in training
            message = re.sub(r"\b(?:data|model|objective)\.(\w+)", lambda key: KEYS.get(key[1], key[1]), str(error))
            raise InputError(message) from None


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise InputError if a value is not one of the choices."""
    if value not in choices:
        raise InputError(f"{name}={value} is invalid: it must be one of {', '.join(filter(None, choices))}.")


def _has_backward_rows(rows: int) -> bool:
    """Return True if the second half of the rows is read backward: the batch of Hugging Face's XLNet then has two equal halves."""
    return rows % 2 == 0


def random_batch(c: dict[str, Any]) -> Batch:
    """Return a batch of random tokens. The second half of an even number of rows is read backward, as Hugging Face's XLNet does."""
    rng = np.random.default_rng(c["seed"])
    B, T = c["rows"], c["window"]
    first_separator = min(c["reuse_len"] + 5, T - 3)
    special_mask = np.zeros((B, T), bool)
    special_mask[:, [first_separator, T - 2, T - 1]] = True
    segments = np.where(np.arange(T) <= first_separator, 0, 1)
    segments[-1] = 2
    windows = Windows(
        ids=rng.integers(10, c["vocab_size"], (B, T)),
        segments=np.tile(segments, (B, 1)),
        special_mask=special_mask,
        following=np.full(B, 10),
        backward=(np.arange(B) >= B // 2) & _has_backward_rows(B),
        visible_mem_len=np.full(B, 10**6),
        pair_label=np.ones(B, np.int64),
        reuse_len=c["reuse_len"],
    )
    words = np.ones(c["vocab_size"], bool)
    objective = Permutation(ObjectiveConfig(partial_k=c["partial_k"]), words)
    return batch_from_inputs(windows, objective.build_inputs(windows, RowRng(c["seed"], range(B), 0)))


def shape_of(c: dict[str, Any]) -> ModelConfig:
    """Return the configuration of xlpre's model with the sizes of a benchmark configuration."""
    sizes = {name: c[name] for name in SIZES}
    return ModelConfig(**sizes, dropatt=c["dropout"], mem_len=c["mem_len"], attention_backend=c["attention"])


def needed_flops(c: dict[str, Any]) -> float:
    """Return the FLOPs that a step needs, as MFU counts them; see pretrain/planning/flops.py."""
    data = DataConfig(seq_len=c["window"], reuse_len=c["reuse_len"])
    config = PretrainConfig(data=data, objective=ObjectiveConfig(partial_k=c["partial_k"]), model=shape_of(c))
    return flops_per_step(config.model, batch_shape(config, c["rows"]))


class Contender:
    """A model whose training step can be timed.

    Args:
        model: the model; it is moved to the device of the configuration.
        c: benchmark configuration.

    Attributes:
        model: the model.
        has_cuda_graphs: True if steps replay CUDA graphs.
    """

    def __init__(self, model: nn.Module, c: dict[str, Any]) -> None:
        self.model = model.to(c["device"])
        self.has_cuda_graphs = False
        self._run: Callable[..., Any] = self.model
        self._has_optimizer: bool = c["optimizer"]
        self._optimizer: torch.optim.Optimizer | None = None

    def set_inputs(self, c: dict[str, Any], batch: Batch, hidden: Tensor) -> None:
        """Use this batch and these hidden states of memory (L, B, M, D) from now on."""
        raise NotImplementedError

    def loss(self) -> Tensor:
        """Return the mean loss of the targets."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by xlpre's parameter names, without parameters that have none."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def compile(self, scope: str) -> None:
        """Compile the model.

        Args:
            scope: one of SCOPES. `whole`: one graph for the model. `layers`: one graph that all layers share; the rest stays eager. An
                empty string: no compilation. `graphs`, `layers+graphs`: record CUDA graphs (xlpre only). Others: a mode of torch.compile.
        """
        self.has_cuda_graphs = scope in CUDA_GRAPH_SCOPES
        if scope in ("graphs", "layers+graphs"):
            use_cuda_graphs(self.model)
            scope = scope.removesuffix("graphs").removesuffix("+")
        if scope == "layers":
            for layer in self.model.backbone.layers:
                layer.compile(dynamic=False)
        elif scope:
            self._run = torch.compile(self.model, dynamic=False, mode=None if scope == "whole" else scope)

    def train(self, dtype: torch.dtype) -> None:
        """Switch to training mode with weights and gradients in `dtype`. Create AdamW if the configuration has an optimizer."""
        self.model.to(dtype).train()
        if self._has_optimizer:
            self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self) -> Tensor:
        """Run a forward and a backward pass, and the update if there is an optimizer. Returns the loss."""
        torch.compiler.cudagraph_mark_step_begin()
        loss = self.loss()
        loss.backward()
        if self._optimizer:
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def require_transformers() -> None:
    """Raise InputError if the package transformers is not installed."""
    if find_spec("transformers") is None:
        raise InputError(
            "the package transformers is missing, which the comparison with Hugging Face needs. Run "
            "`pip install -c constraints.txt transformers`."
        )


class HuggingFace(Contender):
    """Hugging Face's XLNetLMHeadModel."""

    def __init__(self, c: dict[str, Any]) -> None:
        require_transformers()
        from transformers import XLNetConfig, XLNetLMHeadModel

        torch.manual_seed(c["seed"])
        sizes = {name: c[name] for name in SIZES}
        memory = {"mem_len": c["mem_len"], "reuse_len": c["reuse_len"]}
        model = XLNetLMHeadModel(XLNetConfig(**sizes, ff_activation="gelu_new", bi_data=True, **memory))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")):
                    parameter.normal_(0, 0.2)  # not zero, so that each term of the attention score has an effect
        super().__init__(model, c)
        self._shape = shape_of(c)

    def set_inputs(self, c: dict[str, Any], batch: Batch, hidden: Tensor) -> None:
        """Use this batch and memory from now on."""
        dtype = hidden.dtype
        self.model.transformer.bi_data = _has_backward_rows(c["rows"])  # type: ignore[union-attr, assignment]
        self._inputs = {
            "input_ids": batch.input_ids,
            "perm_mask": (~visible(batch.query_rank, batch.key_rank)).to(dtype),
            "target_mapping": nn.functional.one_hot(batch.target_positions, c["window"]).to(dtype),
            "token_type_ids": batch.segment_ids,
            "labels": batch.targets,
            "mems": list(hidden.transpose(1, 2)) if c["mem_len"] else None,
            "use_mems": True,
        }

    def train(self, dtype: torch.dtype) -> None:
        """Switch to training mode. Cast the position encodings, which Hugging Face computes in fp32, to `dtype`."""
        super().train(dtype)
        transformer = self.model.transformer
        encode = transformer.relative_positional_encoding
        transformer.relative_positional_encoding = lambda *args, **kwargs: encode(*args, **kwargs).to(dtype)

    def loss(self) -> Tensor:
        """Return the mean loss of the targets."""
        return self._run(**self._inputs).loss

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by xlpre's parameter names."""
        return to_native(hf.weight_map(self._shape), super().gradients())


class Xlpre(Contender):
    """xlpre's language model.

    Args:
        c: benchmark configuration.
        weights: weights by parameter name; if empty, the weights are initialized at random.
    """

    def __init__(self, c: dict[str, Any], weights: dict[str, Tensor]) -> None:
        torch.manual_seed(c["seed"])
        model = LanguageModel(shape_of(c), two_streams=True)
        if weights:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
        super().__init__(model, c)

    def set_inputs(self, c: dict[str, Any], batch: Batch, hidden: Tensor) -> None:
        """Use this batch and memory from now on."""
        valid = torch.full((batch.input_ids.size(0),), c["mem_len"], device=hidden.device)
        self._inputs = (batch, Memory(hidden, valid))

    def loss(self) -> Tensor:
        """Return the mean loss of the targets."""
        return self._run(*self._inputs)[0]


def config_of_contender(name: str, c: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the configuration `c` with the settings in the name of a contender, such as `xlpre:sdpa:layers` or `hf-compile`.

    Raises:
        InputError: the name is not that of a contender.
    """
    impl, *more = name.split(":")
    if impl not in ("xlpre", "hf", "hf-compile") or (more and impl != "xlpre") or len(more) > 2:
        raise InputError(f"contender={name} is invalid: it must be hf, hf-compile, or xlpre[:attention[:compile]].")
    named = dict(zip(("attention", "compile"), more, strict=False))
    hf_compile = {"hf": {"compile": ""}, "hf-compile": {"compile": "whole"}}
    return {**c, **named, **hf_compile.get(impl, {})}


def make_inputs(c: dict[str, Any], dtype: torch.dtype) -> tuple[Batch, Tensor]:
    """Return a random batch and random hidden states of memory (L, B, M, D)."""
    generator = torch.Generator().manual_seed(c["seed"])
    hidden = torch.randn(c["n_layer"], c["rows"], c["mem_len"], c["d_model"], generator=generator)
    return random_batch(c).to(c["device"]), hidden.to(c["device"], dtype)


def native_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face model by xlpre's parameter names."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)  # type: ignore[operator]
        settings = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        return dict(hf.read_model(Path(folder), settings)[1])


def make_contenders(names: list[str], c: dict[str, Any]) -> dict[str, Contender]:
    """Build contenders, all with equal weights and inputs. They are not compiled yet, and are in fp32 and evaluation mode."""
    torch.set_num_threads(c["threads"])
    hf_contenders = [HuggingFace(c) for name in names if name.startswith("hf")]
    weights = native_weights(hf_contenders[0].model) if hf_contenders else {}
    remaining = iter(hf_contenders)
    contenders: dict[str, Contender] = {}
    for name in names:
        is_hf = name.startswith("hf")
        contenders[name] = next(remaining) if is_hf else Xlpre(config_of_contender(name, c), weights)
    inputs = make_inputs(c, torch.float32)
    for contender in contenders.values():
        contender.model.eval()
        contender.set_inputs(c, *inputs)
    return contenders
