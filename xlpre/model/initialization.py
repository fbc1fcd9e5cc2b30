"""Starting values.

`published`: every matrix, embedding and score bias is normal with `init_std`, norms and layer biases are neutral; the mask embedding is
Glorot uniform (zihangdai/xlnet modeling.py).

`local`: as published, and then each head's position score is raised for the keys around one distance (1, -1, 2, -2, 3, ... head by
head; a positive distance looks back). The model is unchanged and can unlearn it. Small models with published values sit at the unigram
entropy for long, because their first position scores are all but flat; reports/first-pretraining shows both.

A model whose weights are there already is built by `build_with_weights`, which draws none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xlpre.model.config import ModelConfig
from xlpre.model.positions import PositionTerm, sinusoid_table

PEAK = 4.0  # nats by which the favoured distance starts above the far ones
REACH = 64  # distances that the starting score is fitted on
RIDGE = 1e-2  # keeps the fitted weights small
DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)  # what ours and torch's layers begin with

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def initialize(backbone: nn.Module, config: ModelConfig) -> None:
    """Set every parameter of `backbone` to its starting value, from torch's global generator."""
    for name, parameter in backbone.named_parameters():
        if "norm" in name:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif name == "mask_embedding":
            bound = math.sqrt(6 / (1 + config.d_model))  # Glorot of a (1, 1, D) variable: fans 1 and D
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.normal_(parameter, std=config.init_std)
    if config.init_scheme == "local":
        terms = [module for module in backbone.modules() if isinstance(module, PositionTerm)]
        if terms:
            _look_at_neighbours(terms, config)
        for bias in {id(term.r_bias): term.r_bias for term in terms}.values():  # one, where all layers share it
            bias.data += bias.size(1) ** -0.5


def initialize_linear(linear: nn.Module, config: ModelConfig) -> None:
    """The same for a layer of a head."""
    for name, parameter in linear.named_parameters():
        nn.init.zeros_(parameter) if name == "bias" else nn.init.normal_(parameter, std=config.init_std)


def build_with_weights(weights: Mapping[str, Tensor], build: Callable[[], AnyModule]) -> AnyModule:
    """The module that `build` makes, with `weights`; no starting values are drawn, and torch's generator stays as it is.

    Raises:
        ValueError: see put_weights.
    """
    with _Undrawn():
        module = build()
    load_weights(weights, module)
    return module


@torch.no_grad()
def load_weights(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Copy `weights` into every parameter of `module`, by its name; one that is shared has one name.

    Raises:
        ValueError: a parameter without weights, or with some of another shape.
    """
    for name, parameter in module.named_parameters():
        if name not in weights or weights[name].shape != parameter.shape:
            has = tuple(weights[name].shape) if name in weights else "not there"
            raise ValueError(f"the weights of {name} are {has}, the model needs {tuple(parameter.shape)}")
        parameter.copy_(weights[name])


class _Undrawn(TorchFunctionMode):
    """Parameters keep what is in their memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@torch.no_grad()
def _look_at_neighbours(terms: list[PositionTerm], config: ModelConfig) -> None:
    """Add v w^T to each head's position-key matrix; with v added to its bias, v . W_r R[d] is the wanted score of distance d."""
    table = sinusoid_table(REACH, REACH, config.d_model, -1, device=torch.device("cpu"), dtype=torch.float32)[0]
    distance = torch.arange(REACH, -REACH, -1.0)
    n_head, d_head = terms[0].n_head, terms[0].d_head
    direction = torch.full((d_head,), d_head**-0.5)
    for head in range(n_head):
        favourite = (head // 2 + 1) * (1 if head % 2 == 0 else -1)
        wanted = PEAK * torch.exp(-0.5 * (distance - favourite) ** 2 / max(1.0, abs(favourite) / 2) ** 2)
        raised = torch.outer(direction, _ridge(table, wanted)) * d_head**0.5  # scaled() divides by sqrt(E)
        for term in terms:
            term.key.weight.view(n_head, d_head, config.d_model)[head] += raised


def _ridge(table: Tensor, wanted: Tensor) -> Tensor:
    """The w that minimises |table w - (wanted - mean)|^2 + ridge |w|^2: softmax ignores the mean."""
    gram = table.T @ table + RIDGE * len(table) * torch.eye(table.size(1))
    return torch.linalg.solve(gram, table.T @ (wanted - wanted.mean()))
