"""Positions: what attention knows of places, in four schemes (Transformer-XL's attn_type 0 to 3, its Table 6).

    relative     a score by the distance between query and key, from sinusoids (Transformer-XL section 3.3, XLNet)
    shaw         a score by distance, from a learned vector and number for each (Shaw et al. 2018)
    sinusoidal   sinusoids of the place are added to the embedding (Vaswani et al. 2017)
    learned      a learned vector of the place is added to every layer's input (Al-Rfou et al. 2018)

Distances of a window of T tokens and M columns of memory run from K = M + T down to 1 - T; a place is the distance to the window's
last token. A row that reads backward has them negated. Memory is kept without places: they are added anew in each window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.memory import Attended, States
from xlpre.model.score_terms import BiasedTerm, ContentTerm, PlainContentTerm, ScoreTerm


def distance_table(
    n_keys: int, n_tokens: int, width: int, clamp_len: int, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Sinusoids of all distances, for both directions.

    Returns:
        (2, R, D): forward and backward; row r is distance K - r, R = K + T; the first half of D sines, the second cosines.

    Source: Vaswani et al. section 3.5; zihangdai/xlnet modeling.py `relative_positional_encoding`.
    """
    distance = _distances(n_keys, n_tokens, clamp_len, device).float()
    frequency = 10000 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = distance[:, None] * frequency
    sine, cosine = angle.sin(), angle.cos()
    # sin(-x) = -sin(x), cos(-x) = cos(x)
    return torch.stack([torch.cat([sine, cosine], -1), torch.cat([-sine, cosine], -1)]).to(dtype)


def _distances(n_keys: int, n_tokens: int, clamp_len: int, device: torch.device) -> Tensor:
    distance = torch.arange(n_keys, -n_tokens, -1, device=device)
    return distance.clamp(-clamp_len, clamp_len) if clamp_len > 0 else distance


class SinusoidalEncoding(nn.Module):
    """Codes of distances that are sinusoids, computed once a step."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, self.clamp_len = config.d_model, config.clamp_len
        self.dropout = Dropout(config.dropout)

    def forward(self, n_keys: int, n_tokens: int, like: Tensor) -> Tensor:
        """(2, R, D) on the device and of the type of `like`."""
        table = distance_table(n_keys, n_tokens, self.width, self.clamp_len, device=like.device, dtype=like.dtype)
        return self.dropout(table)


class LearnedIndex(nn.Module):
    """Codes of distances that are rows of a table of 2 n - 1 learned vectors, for distances from -(n - 1) to n - 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_positions, self.clamp_len = config.n_positions, config.clamp_len

    def forward(self, n_keys: int, n_tokens: int, like: Tensor) -> Tensor:
        """(2, R) int64 on the device of `like`."""
        # a clamp to c shares the vector of c - 1 among what lies beyond, as Transformer-XL cuts its table to c rows
        reach = min(self.n_positions, self.clamp_len if self.clamp_len > 0 else self.n_positions) - 1
        distance = _distances(n_keys, n_tokens, -1, like.device).clamp(-reach, reach)
        return torch.stack([distance, -distance]) + self.n_positions - 1


class RelativeKeyProjection(nn.Linear):
    """W_r R[distance] of all distances, for both directions.

    With S = W_r [sin; 0] and C = W_r [0; cos] of a distance, its key is C + S, and that of its negative C - S: S and C of distances from 0
    to K are all that is multiplied, a third of a product with the whole table.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.n_head * config.head_width, bias=False)
        self.dropout = config.dropout

    def forward(self, codes: Tensor, n_keys: int) -> Tensor:  # type: ignore[override]
        """(2, R, D) -> (2, R, H*E)."""
        if self.training and self.dropout:  # what was dropped is another for each distance
            return super().forward(codes)
        of_codes, of_weight = (x.unflatten(1, (2, -1)).transpose(0, 1) for x in (codes[0, : n_keys + 1], self.weight))
        sine, cosine = torch.bmm(of_codes, of_weight.transpose(1, 2))  # (K + 1, H*E) each
        positive, negative = cosine + sine, cosine - sine
        # rows of distances 1 to T - 1
        others = torch.arange(n_keys - 1, 2 * n_keys - codes.size(1), -1, device=codes.device)
        return torch.cat([positive, negative[others], negative, positive[others]]).view(2, codes.size(1), -1)


class PositionTerm(BiasedTerm):
    """(q + r_r) . W_r R[distance], the position term of the score."""

    def __init__(self, config: ModelConfig, r_bias: nn.Parameter | None) -> None:
        super().__init__(config.n_head, config.head_width, r_bias)
        self.key = RelativeKeyProjection(config)

    def forward(self, attn_meta: AttentionMeta) -> dict[str, Tensor]:
        """Its bias, and keys of distances."""
        keys = attn_meta.once(self.key, attn_meta.distances, attn_meta.n_keys)  # (2, R, H*E)
        return {"r_r_bias": self.r_bias, "pos_key": keys.view(*keys.shape[:2], self.n_head, self.d_head)}


class ShawTerm(ScoreTerm):
    """q . a[distance] + b[distance]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.n_head, config.head_width)
        n_rows = 2 * config.n_positions - 1
        self.keys = nn.Parameter(torch.empty(n_rows, config.n_head, config.head_width))
        self.offsets = nn.Parameter(torch.empty(n_rows, config.n_head))

    def forward(self, attn_meta: AttentionMeta) -> dict[str, Tensor]:
        """Keys and offsets of distances."""
        return attn_meta.once(self._of, attn_meta.distances)

    def _of(self, distances: Tensor) -> dict[str, Tensor]:
        return {"pos_key": self.keys[distances], "pos_offset": self.offsets[distances]}


class NoPositionEmbedding(nn.Module):
    """Inputs of a layer as they are: positions enter by the scores."""

    def forward(self, rows: Tensor, attended: Attended, attn_meta: AttentionMeta) -> tuple[Tensor, Attended]:
        """Rows (B, N, D) and what they attend to, unchanged."""
        return rows, attended


class SinusoidalPositionEmbedding(nn.Module):
    """Sinusoids of the place are added to content, memory and rows."""

    def vectors(self, attn_meta: AttentionMeta) -> Tensor:
        """(B, K, D), one for each key."""
        return attn_meta.places()[attn_meta.direction]

    def forward(self, rows: Tensor, attended: States, attn_meta: AttentionMeta) -> tuple[Tensor, States]:
        """Rows (B, N, D) and the hidden states that they attend to, each with its places."""
        memory, content = attended.memory, attended.content
        of_memory, of_content = self.vectors(attn_meta).split([memory.size(1), content.size(1)], dim=1)
        return rows + attn_meta.of_rows(of_content), States(memory + of_memory, content + of_content)


class LearnedPositionEmbedding(SinusoidalPositionEmbedding):
    """A learned vector of the place is added instead."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(2 * config.n_positions - 1, config.d_model))

    def vectors(self, attn_meta: AttentionMeta) -> Tensor:
        """(B, K, D), one for each key."""
        return self.table[attn_meta.places()[attn_meta.direction]]


SharedBiases = dict[str, nn.Parameter | None]  # by the name of their term, where all layers share them


@dataclass(frozen=True)
class Scheme:
    """What a scheme is made of.

    Attributes:
        codes: what it needs to know of every distance.
        terms: terms of a layer's score, by name, content first.
        places: what adds places to the input of a layer, by the layer's index.
        biases: names of the terms that have a bias of their own.
    """

    codes: Callable[[ModelConfig], nn.Module]
    terms: Callable[[ModelConfig, SharedBiases], dict[str, ScoreTerm]]
    places: Callable[[ModelConfig, int], nn.Module] = lambda config, layer: NoPositionEmbedding()
    biases: tuple[str, ...] = ()


def _relative(config: ModelConfig, shared: SharedBiases) -> dict[str, ScoreTerm]:
    content = ContentTerm(config.n_head, config.head_width, shared["content"])
    return {"content": content, "position": PositionTerm(config, shared["position"])}


def _shaw(config: ModelConfig, shared: SharedBiases) -> dict[str, ScoreTerm]:
    return {"content": ContentTerm(config.n_head, config.head_width, shared["content"]), "position": ShawTerm(config)}


def _absolute(config: ModelConfig, shared: SharedBiases) -> dict[str, ScoreTerm]:
    return {"content": PlainContentTerm(config.n_head, config.head_width)}


SCHEMES = {
    "relative": Scheme(SinusoidalEncoding, _relative, biases=("content", "position")),
    "shaw": Scheme(LearnedIndex, _shaw, biases=("content",)),
    "sinusoidal": Scheme(
        SinusoidalEncoding,
        _absolute,
        lambda config, layer: NoPositionEmbedding() if layer else SinusoidalPositionEmbedding(),
    ),
    "learned": Scheme(LearnedIndex, _absolute, lambda config, layer: LearnedPositionEmbedding(config)),
}
