"""Position schemes: attn_type 0 to 3 of Transformer-XL, in this order (see Table 6 of its paper).

    relative     a score by the distance between query and key, from sinusoids (Transformer-XL, section 3.3; XLNet)
    shaw         a score by distance, from a learned vector and a learned number per distance (Shaw et al. 2018)
    sinusoidal   sinusoids of the position are added to the embedding (Vaswani et al. 2017)
    learned      a learned vector of the position is added to the input of every layer (Al-Rfou et al. 2018)

With T tokens in the window and M in memory, distances run from K = M + T down to 1 - T. An absolute position is the distance to the last
token of the window. All distances are negated in batch rows that are read from right to left. Memory is stored without positions, and each
window adds them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.memory import HiddenContext, LayerContext
from xlpre.model.score_terms import BiasedTerm, ContentTerm, ScoreTerm


def sinusoid_table(
    n_keys: int, n_tokens: int, width: int, clamp_len: int | None, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the sinusoids of all distances.

    Args:
        n_keys: K.
        n_tokens: T.
        width: D. The first half of a row are sines, the second half cosines.
        clamp_len: distances are clamped to [-clamp_len, clamp_len]. None disables clamping.
        device: device of the result.
        dtype: dtype of the result. Sinusoids are computed in float32.

    Returns:
        (2, R, D) for R = K + T distances, forward and backward. Row r encodes distance K - r.

    Source: Vaswani et al., section 3.5; zihangdai/xlnet modeling.py `relative_positional_encoding`.
    """
    distance = _distances(n_keys, n_tokens, clamp_len, device).float()
    frequency = 10000 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = distance[:, None] * frequency
    sine, cosine = angle.sin(), angle.cos()
    # sin(-x) = -sin(x), cos(-x) = cos(x)
    return torch.stack([torch.cat([sine, cosine], -1), torch.cat([-sine, cosine], -1)]).to(dtype)


def _distances(n_keys: int, n_tokens: int, clamp_len: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(n_keys, -n_tokens, -1, device=device)
    return distance if clamp_len is None else distance.clamp(-clamp_len, clamp_len)


class SinusoidalEncoding(nn.Module):
    """Sinusoids of distances."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width, self.clamp_len = config.d_model, config.clamp_len
        self.dropout = Dropout(config.dropout)

    def forward(self, n_keys: int, n_tokens: int, like: Tensor) -> Tensor:
        """Return (2, R, D) with the device and dtype of `like`."""
        table = sinusoid_table(n_keys, n_tokens, self.width, self.clamp_len, device=like.device, dtype=like.dtype)
        return self.dropout(table)


class LearnedIndex(nn.Module):
    """Map distances to rows of a table of 2 n - 1 learned vectors, where n is `n_positions`. Distances are clamped to [-(n - 1), n - 1]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.n_positions is not None
        self.n_positions, self.clamp_len = config.n_positions, config.clamp_len

    def forward(self, n_keys: int, n_tokens: int, like: Tensor) -> Tensor:
        """Return (2, R) int64 on the device of `like`."""
        # distances of clamp_len or more use the vector of distance clamp_len - 1, because Transformer-XL cuts its table to clamp_len rows
        largest = min(self.n_positions, self.clamp_len or self.n_positions) - 1
        distance = _distances(n_keys, n_tokens, None, like.device).clamp(-largest, largest)
        return torch.stack([distance, -distance]) + self.n_positions - 1


class RelativeKeyProjection(nn.Linear):
    """W_r R[distance] for all distances, forward and backward.

    For a distance, let S = W_r [sin; 0] and C = W_r [0; cos]. The key of the distance is C + S, and the key of the negated distance is
    C - S. So W_r is multiplied only with the encodings of the distances 0 to K, which takes about a third of the operations of the
    whole product.

    On a CPU without dropout, this saves 7 % of a training step at T = 512, M = 384, D = 768 and batch size 2, and 1 % at T = M = 128,
    D = 256 and batch size 8. Dropout of the encoding needs the whole product.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.n_head * config.head_width, bias=False)
        self.dropout = config.dropout

    def forward(self, pos_encoding: Tensor, n_keys: int) -> Tensor:  # type: ignore[override]
        """(2, R, D) -> (2, R, H*E)."""
        if self.training and self.dropout:  # dropout draws different masks for a distance and its negative
            return super().forward(pos_encoding)
        halves, weights = (
            x.unflatten(1, (2, -1)).transpose(0, 1) for x in (pos_encoding[0, : n_keys + 1], self.weight)
        )
        sine, cosine = torch.bmm(halves, weights.transpose(1, 2))  # (K + 1, H*E) each
        positive, negative = cosine + sine, cosine - sine
        # indices into `positive` and `negative` of the distances 1 to T - 1
        others = torch.arange(n_keys - 1, 2 * n_keys - pos_encoding.size(1), -1, device=pos_encoding.device)
        return torch.cat([positive, negative[others], negative, positive[others]]).view(2, pos_encoding.size(1), -1)


class PositionTerm(BiasedTerm):
    """(q + r_r) . W_r R[distance], the position term of the score."""

    def __init__(self, config: ModelConfig, r_bias: nn.Parameter | None) -> None:
        super().__init__(config.n_head, config.head_width, r_bias)
        self.key = RelativeKeyProjection(config)

    def forward(self, pos_encoding: Tensor, n_keys: int) -> dict[str, Tensor]:
        """Return the bias and the keys of all distances."""
        keys = self.key(pos_encoding, n_keys)
        return {"r_r_bias": self.r_bias, "pos_key": keys.view(*keys.shape[:2], self.n_head, self.d_head)}


class ShawTerm(ScoreTerm):
    """q . a[distance] + b[distance], with a learned vector a and a learned number b per distance and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.n_head, config.head_width)
        assert config.n_positions is not None
        n_rows = 2 * config.n_positions - 1
        self.keys = nn.Parameter(torch.empty(n_rows, config.n_head, config.head_width))
        self.offsets = nn.Parameter(torch.empty(n_rows, config.n_head))

    def forward(self, pos_encoding: Tensor, n_keys: int) -> dict[str, Tensor]:
        """Return keys and offsets of all distances."""
        return {"pos_key": self.keys[pos_encoding], "pos_offset": self.offsets[pos_encoding]}


class NoPositionEmbedding(nn.Module):
    """Identity: positions enter through the scores."""

    def forward(self, rows: Tensor, context: LayerContext, attn_meta: AttentionMeta) -> tuple[Tensor, LayerContext]:
        """Return query rows (B, N, D) and context unchanged."""
        return rows, context


class SinusoidalPositionEmbedding(nn.Module):
    """Add sinusoids of the positions to content, memory and query rows."""

    def vectors(self, attn_meta: AttentionMeta) -> Tensor:
        """Return (B, K, D), one vector per key."""
        return attn_meta.key_encoding()[attn_meta.direction]

    def forward(self, rows: Tensor, context: HiddenContext, attn_meta: AttentionMeta) -> tuple[Tensor, HiddenContext]:
        """Return query rows (B, N, D) and context, with their positions added."""
        memory, content = context.memory, context.content
        in_memory, in_content = self.vectors(attn_meta).split([memory.size(1), content.size(1)], dim=1)
        return rows + attn_meta.take_rows(in_content), HiddenContext(memory + in_memory, content + in_content)


class LearnedPositionEmbedding(SinusoidalPositionEmbedding):
    """Add a learned vector of each position to content, memory and query rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.n_positions is not None
        self.table = nn.Parameter(torch.empty(2 * config.n_positions - 1, config.d_model))

    def vectors(self, attn_meta: AttentionMeta) -> Tensor:
        """Return (B, K, D), one vector per key."""
        return self.table[attn_meta.key_encoding()[attn_meta.direction]]


SharedBiases = dict[str, nn.Parameter | None]  # by name of the term; None if each layer has its own


@dataclass(frozen=True)
class PositionScheme:
    """Modules of a position scheme.

    Attributes:
        encoding: builds the module that encodes all distances.
        terms: builds the score terms of a layer, by name. Without any, the score is the product of query and key.
        embedding: builds the module that adds positions to the input of a layer, given the layer's index.
        biases: names of the score terms with a learned bias.
    """

    encoding: Callable[[ModelConfig], nn.Module]
    terms: Callable[[ModelConfig, SharedBiases], dict[str, ScoreTerm]]
    embedding: Callable[[ModelConfig, int], nn.Module] = lambda config, layer: NoPositionEmbedding()
    biases: tuple[str, ...] = ()


def _relative_terms(config: ModelConfig, shared: SharedBiases) -> dict[str, ScoreTerm]:
    content = ContentTerm(config.n_head, config.head_width, shared["content"])
    return {"content": content, "position": PositionTerm(config, shared["position"])}


def _shaw_terms(config: ModelConfig, shared: SharedBiases) -> dict[str, ScoreTerm]:
    return {"content": ContentTerm(config.n_head, config.head_width, shared["content"]), "position": ShawTerm(config)}


def _no_terms(config: ModelConfig, shared: SharedBiases) -> dict[str, ScoreTerm]:
    return {}


SCHEMES = {
    "relative": PositionScheme(SinusoidalEncoding, _relative_terms, biases=("content", "position")),
    "shaw": PositionScheme(LearnedIndex, _shaw_terms, biases=("content",)),
    "sinusoidal": PositionScheme(
        SinusoidalEncoding,
        _no_terms,
        lambda config, layer: NoPositionEmbedding() if layer else SinusoidalPositionEmbedding(),
    ),
    "learned": PositionScheme(LearnedIndex, _no_terms, lambda config, layer: LearnedPositionEmbedding(config)),
}
