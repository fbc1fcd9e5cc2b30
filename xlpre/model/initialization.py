"""Initialization of weights.

`published`: every matrix, embedding and score bias is normal with `init_std`. Norms start with weight 1, biases of norms and linear
layers with 0. The mask embedding is Glorot uniform (zihangdai/xlnet modeling.py).

`local`: in addition, each head starts with a higher position score for keys around one distance. The heads take the distances 1, -1, 2,
-2, 3, ... in turn; a key at a positive distance is before the query. The architecture is unchanged, and training can undo the preference.
The loss of small models that start with `published` stays at the unigram entropy for a long time, because their initial position scores
are almost flat. reports/initialization compares both schemes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from xlpre.common.errors import InputError
from xlpre.model.config import ModelConfig
from xlpre.model.positions import PositionTerm, sinusoid_table

PEAK = 4.0  # nats by which the score of the preferred distance exceeds the scores of keys far from it
MAX_DISTANCE = 64  # largest distance of the least-squares fit
RIDGE = 1e-2  # regularization of the least-squares fit

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def initialize(backbone: nn.Module, config: ModelConfig) -> None:
    """Initialize all parameters of `backbone` from torch's global generator. Parameters on the meta device have no values."""
    if any(parameter.is_meta for parameter in backbone.parameters()):
        return
    for name, parameter in backbone.named_parameters():
        if "norm" in name:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif name == "mask_embedding":
            bound = math.sqrt(6 / (1 + config.d_model))  # Glorot for a (1, 1, D) variable: fan-in 1, fan-out D
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.normal_(parameter, std=config.init_std)
    if config.init_scheme == "local":
        terms = [module for module in backbone.modules() if isinstance(module, PositionTerm)]
        if terms:
            _prefer_neighbors(terms, config)
        # a bias that all layers share is changed once
        for bias in {id(term.r_bias): term.r_bias for term in terms}.values():
            bias.data += bias.size(1) ** -0.5


def initialize_linear(linear: nn.Module, config: ModelConfig) -> None:
    """Initialize a linear layer of a head: normal weights, zero bias."""
    for name, parameter in linear.named_parameters():
        nn.init.zeros_(parameter) if name == "bias" else nn.init.normal_(parameter, std=config.init_std)


def build_with_weights(weights: Mapping[str, Tensor] | None, build: Callable[[], AnyModule]) -> AnyModule:
    """Build a module on the CPU and load its weights. No initial values are drawn, and torch's generator is unchanged.

    Args:
        weights: see `load_weights`. None leaves the parameters uninitialized, for values that another process sends.
        build: returns the module.

    Raises:
        InputError: see `load_weights`.
    """
    with torch.device("meta"):
        module = build()
    for parameter in module.parameters():
        # in place: a parameter that is shared (embedding and softmax, score biases of all layers) stays one object
        swap_tensors(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad))
    if weights is not None:
        load_weights(weights, module)
    return module


@torch.no_grad()
def load_weights(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Copy weights into all parameters of `module`.

    Args:
        weights: tensors by the names of `module.named_parameters()`. A shared parameter has one name.
        module: module to load into.

    Raises:
        InputError: the weights of a parameter are missing or have another shape.
    """
    for name, parameter in module.named_parameters():
        if name not in weights:
            raise InputError(
                f"the weights of {name} are missing: the model needs shape {tuple(parameter.shape)}. Use weights of this config."
            )
        if weights[name].shape != parameter.shape:
            raise InputError(
                f"the weights of {name} with shape {tuple(weights[name].shape)} are invalid: the model needs {tuple(parameter.shape)}. "
                "Use weights of this config."
            )
        parameter.copy_(weights[name])


@torch.no_grad()
def _prefer_neighbors(terms: list[PositionTerm], config: ModelConfig) -> None:
    """Let each head prefer keys at one distance.

    v w^T is added to the position-key matrix W_r of the head, where v is a unit vector. `initialize` adds v to the bias r_r. The position
    score of distance d then increases by v . v w^T R[d] = w . R[d], and w is fitted so that this has a peak at the preferred distance.
    """
    table = sinusoid_table(
        MAX_DISTANCE, MAX_DISTANCE, config.d_model, None, device=torch.device("cpu"), dtype=torch.float32
    )[0]
    distance = torch.arange(MAX_DISTANCE, -MAX_DISTANCE, -1.0)
    n_head, d_head = terms[0].n_head, terms[0].d_head
    direction = torch.full((d_head,), d_head**-0.5)
    for head in range(n_head):
        preferred = (head // 2 + 1) * (1 if head % 2 == 0 else -1)
        target = PEAK * torch.exp(-0.5 * (distance - preferred) ** 2 / max(1.0, abs(preferred) / 2) ** 2)
        update = torch.outer(direction, _fit_ridge(table, target)) * d_head**0.5  # attention divides scores by sqrt(E)
        for term in terms:
            term.key.weight.view(n_head, d_head, config.d_model)[head] += update


def _fit_ridge(table: Tensor, target: Tensor) -> Tensor:
    """Return the w that minimizes |table w - (target - mean)|^2 + ridge |w|^2. The mean is subtracted because softmax ignores it."""
    gram = table.T @ table + RIDGE * len(table) * torch.eye(table.size(1))
    return torch.linalg.solve(gram, table.T @ (target - target.mean()))
