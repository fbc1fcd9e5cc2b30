"""ModelConfig: what belongs to the weights and is saved with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. Defaults are XLNet-Base.

    Attributes:
        vocab_size: V, pieces of the vocabulary; 0 takes it from the store.
        n_layer: L, layers.
        d_model: D, the width of the model.
        n_head: H, heads of attention.
        d_head: E, the width of a head; 0 is d_model / n_head.
        d_inner: F, the width of the feed-forward layer.
        feed_forward: its activation, `gelu` (the tanh approximation) or `relu`.
        mem_len: M, columns of memory; 0 trains without.
        clamp_len: distances beyond it count as it; -1 does not clamp.
        relative_segments: the relative segment encoding; without it segments are not told apart.
        untie_r: the biases of the scores are one per layer, else shared by all.
        dropout: of embeddings, position embedding, attention output, feed-forward and final output.
        dropatt: of attention probabilities.
        init: `published`: every matrix normal with `init_std`. `local`: the same, and each head starts out looking at a
            neighbour (model/initialization.py); a departure from the paper that lets small models learn early.
        init_std: standard deviation of the normal.
    """

    vocab_size: int = 0
    n_layer: int = 12
    d_model: int = 768
    n_head: int = 12
    d_head: int = 0
    d_inner: int = 3072
    feed_forward: Literal["gelu", "relu"] = "gelu"
    mem_len: int = 384
    clamp_len: int = -1
    relative_segments: bool = True
    untie_r: bool = True
    dropout: float = 0.1
    dropatt: float = 0.1
    init: Literal["published", "local"] = "published"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if (
            min(self.n_layer, self.d_model, self.n_head, self.d_inner) < 1
            or min(self.mem_len, self.vocab_size, self.d_head) < 0
        ):
            raise ValueError(
                "model: n_layer, d_model, n_head and d_inner must be at least 1; mem_len, vocab_size and d_head at least 0"
            )
        if self.d_model % 2:
            raise ValueError(f"model.d_model ({self.d_model}) must be even: half of it is sines, half cosines")
        if not self.d_head and self.d_model % self.n_head:
            raise ValueError(
                f"model.d_model ({self.d_model}) must be a multiple of model.n_head ({self.n_head}), or set model.d_head"
            )
        if not (0 <= self.dropout < 1 and 0 <= self.dropatt < 1):
            raise ValueError(
                f"model.dropout ({self.dropout}) and model.dropatt ({self.dropatt}) must be at least 0 and below 1"
            )

    @property
    def head_width(self) -> int:
        """E."""
        return self.d_head or self.d_model // self.n_head
