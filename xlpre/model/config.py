"""ModelConfig: what belongs to the weights and is saved with them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from xlpre.config.schema_docs import check_choices

LEAST = {
    "n_layer": 1,
    "d_model": 1,
    "n_head": 1,
    "d_inner": 1,
    "mem_len": 0,
    "vocab_size": 0,
    "d_head": 0,
    "d_embed": 0,
}


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
        feed_forward: its activation, `gelu` (the tanh approximation) or `relu`; or gated (GLU variants): `glu`, `reglu`,
            `geglu`, `swiglu`, which take two thirds of `d_inner`, so that the number of parameters stays.
        norm: `post`: after each sum, as published. `pre`: before attention and feed-forward. `pre_keys`: as `pre`, but queries
            are not normalised, as Transformer-XL's code has it for absolute positions.
        norm_eps: added to the variance.
        mem_len: M, columns of memory; 0 trains without.
        attention_span: keys that a query may look back to: `all`; `same_length`: itself and the M before, the same
            number for every query; `exclude_self_slot`: one fewer, Transformer-XL's rule in PyTorch.
        positions: `relative` (Transformer-XL, XLNet), `shaw` (learned, relative), `sinusoidal` or `learned` (absolute).
        n_positions: distances with a learned vector of their own (`shaw`, `learned`); those beyond share the last.
        clamp_len: distances beyond it count as it; -1 does not clamp.
        relative_segments: the relative segment encoding; without it segments are not told apart.
        untie_r: the biases of the scores are one per layer, else shared by all.
        cutoffs: pieces by frequency are cut here into clusters of the adaptive softmax and embedding; [] is the plain softmax.
        div_value: each cluster's embedding is so many times narrower than the one before.
        d_embed: width of the first cluster's embedding; 0 is d_model.
        scale_embedding: multiply embeddings by the root of d_model, as Transformer-XL does.
        tie_embedding: the softmax uses the embedding's own weights.
        tie_projections: for each cluster, whether the softmax also uses the embedding's projection to its width; [] is none.
        attention_backend: who computes it (model/kernels), with the same numbers: `auto`, `cpu` on processors where it can be, `triton` on GPUs
            where a trial finds it right and fast, else `sdpa`; `reference`, slow and plain; `sdpa`, torch's; `cpu`, for fp32 on
            processors; `triton`, for GPUs, also for what stands between products.
        dropout: of embeddings, position embedding, attention output, feed-forward and final output.
        dropatt: of attention probabilities.
        init_scheme: `published`: every matrix normal with `init_std`. `local`: the same, and each head starts out looking at a
            neighbour (model/initialization.py); a departure from the paper that lets small models learn early.
        init_std: standard deviation of the normal.
    """

    vocab_size: int = 0
    n_layer: int = 12
    d_model: int = 768
    n_head: int = 12
    d_head: int = 0
    d_inner: int = 3072
    feed_forward: Literal["gelu", "relu", "glu", "reglu", "geglu", "swiglu"] = "gelu"
    norm: Literal["post", "pre", "pre_keys"] = "post"
    norm_eps: float = 1e-12
    mem_len: int = 384
    attention_span: Literal["all", "same_length", "exclude_self_slot"] = "all"
    positions: Literal["relative", "shaw", "sinusoidal", "learned"] = "relative"
    n_positions: int = 0
    clamp_len: int = -1
    relative_segments: bool = True
    untie_r: bool = True
    cutoffs: list[int] = field(default_factory=list)
    div_value: int = 1
    d_embed: int = 0
    scale_embedding: bool = False
    tie_embedding: bool = True
    tie_projections: list[bool] = field(default_factory=list)
    attention_backend: Literal["auto", "reference", "sdpa", "cpu", "triton"] = "auto"
    dropout: float = 0.1
    dropatt: float = 0.1
    init_scheme: Literal["published", "local"] = "published"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_choices(self, "model.")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"model.{name} ({getattr(self, name)}) must be at least {least}")
        for name in ("norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name} ({getattr(self, name)}) must be positive")
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
        if self.attention_span == "exclude_self_slot" and self.mem_len == 0:
            raise ValueError(
                "model.attention_span=exclude_self_slot sees model.mem_len keys, none with model.mem_len=0; set same_length"
            )
        self._check_positions()
        self._check_clusters()

    def _check_positions(self) -> None:
        learned = self.positions in ("shaw", "learned")
        if learned != (self.n_positions > 0) or self.n_positions < 0:
            raise ValueError(
                f"model.n_positions ({self.n_positions}) counts the learned vectors of model.positions=shaw and learned, which need "
                f"at least 1; model.positions is {self.positions}, set model.n_positions={'window + mem_len' if learned else 0}"
            )
        if self.clamp_len == 0 or self.clamp_len < -1:
            raise ValueError(f"model.clamp_len ({self.clamp_len}) must be at least 1, or -1 not to clamp")
        if self.clamp_len > 0 and self.positions == "learned":
            raise ValueError(
                f"model.clamp_len ({self.clamp_len}) does not act on model.positions=learned; set model.n_positions"
            )
        if self.init_scheme == "local" and self.positions != "relative":
            raise ValueError(
                f"model.init_scheme=local shapes the scores of model.positions=relative, not {self.positions}; set model.init_scheme=published"
            )

    def _check_clusters(self) -> None:
        if self.div_value < 1 or (self.div_value > 1 and not self.cutoffs):
            raise ValueError(
                f"model.div_value ({self.div_value}) must be at least 1, and is 1 without model.cutoffs, which it divides by"
            )
        inner = [0, *self.cutoffs, self.vocab_size or max(self.cutoffs, default=0) + 1]
        if any(low >= high for low, high in itertools.pairwise(inner)):
            raise ValueError(
                f"model.cutoffs ({self.cutoffs}) must increase, between 0 and the vocabulary ({self.vocab_size or 'of the store'})"
            )
        if self.embedding_width // self.div_value ** len(self.cutoffs) < 1:
            raise ValueError(
                f"model.div_value ({self.div_value}) must leave the last of {len(self.cutoffs) + 1} clusters a width; "
                f"model.d_embed or d_model is {self.embedding_width}"
            )
        if len(self.tie_projections) not in (0, len(self.cutoffs) + 1):
            raise ValueError(
                f"model.tie_projections ({self.tie_projections}) must be [] or hold one value for each of the "
                f"{len(self.cutoffs) + 1} clusters of model.cutoffs"
            )

    @property
    def embedding_width(self) -> int:
        """The width of the (first) embedding."""
        return self.d_embed or self.d_model

    @property
    def clusters(self) -> list[tuple[int, int, int]]:
        """First id, end, and embedding width of each cluster of pieces."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        widths = [self.embedding_width // self.div_value**i for i in range(len(bounds) - 1)]
        return [(low, high, width) for low, high, width in zip(bounds, bounds[1:], widths, strict=False)]

    @property
    def has_embedding_projection(self) -> bool:
        """Whether embeddings are projected to the model's width: with one width for all only where it is another, else always."""
        return self.div_value > 1 or self.embedding_width != self.d_model

    @property
    def plain_embedding(self) -> bool:
        """One table as wide as the model, which the softmax shares."""
        return not self.cutoffs and self.embedding_width == self.d_model and self.tie_embedding

    @property
    def head_width(self) -> int:
        """E."""
        return self.d_head or self.d_model // self.n_head
