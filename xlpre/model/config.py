"""The `model` settings, which define the weights and are saved with them, and the `memory` settings."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from xlpre.common.errors import InputError, check_minimum
from xlpre.common.messages import as_yaml
from xlpre.config.schema_docs import check_choices

MAX_LAYERS = 1000  # a damaged file must not make the computer build billions
MINIMUM = {
    "n_layer": 1,
    "d_model": 1,
    "n_head": 1,
    "d_inner": 1,
    "mem_len": 0,
    "vocab_size": 1,
    "d_head": 1,
    "d_embed": 1,
    "clamp_len": 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. Defaults are XLNet-Base.

    Attributes:
        vocab_size: V, size of the vocabulary. null: size of the store's vocabulary.
        n_layer: L, number of layers.
        d_model: D, width of the model.
        n_head: H, number of attention heads.
        d_head: E, width of a head. null: d_model / n_head.
        d_inner: F, width of the feed-forward layer.
        feed_forward: activation of the feed-forward layer, `gelu` (tanh approximation) or `relu`; or a gated variant, `glu`, `reglu`,
            `geglu` or `swiglu`, with two thirds of `d_inner`, which keeps the number of parameters.
        norm: position of the normalization. `post`: after each sum, as published. `pre`: before attention and feed-forward.
            `pre_keys`: like `pre`, but queries are computed from states that are not normalized, as in Transformer-XL's code for absolute
            positions.
        final_norm: normalize the output of the last layer. Pre-norm layers leave it unnormalized, as in Transformer-XL's code.
        qk_norm: normalize the queries and keys of each head before the score (Dehghani et al. 2023, arXiv:2302.05442), which keeps scores
            small at high learning rates. XLNet does not.
        norm_eps: epsilon that the normalization adds to the variance.
        mem_len: M, number of earlier tokens that memory holds. 0 trains without memory.
        attention_span: limit on the keys that a query can see. `all`: no limit. `same_length`: itself and the M keys before it, so that
            every query can see the same number. `exclude_self_slot`: itself and the M - 1 keys before it, as in Transformer-XL's
            PyTorch code.
        positions: `relative` (Transformer-XL, XLNet), `shaw` (learned, relative), `sinusoidal` or `learned` (absolute).
        n_positions: n, number of distances in each direction that have a learned vector (`shaw`, `learned`): 0 to n - 1. Larger distances
            use the vector of n - 1. null for `relative` and `sinusoidal`.
        clamp_len: maximum distance between two tokens; larger distances are clamped to it (with `shaw`, to
            `clamp_len` - 1, as in Transformer-XL's code). null: no maximum.
        relative_segments: use the relative segment encoding. Otherwise the model cannot distinguish segments.
        untie_r: each layer has its own biases of the attention score. Otherwise all layers share them.
        cutoffs: token ids, in order of frequency, at which the vocabulary is split into the clusters of the adaptive softmax and
            embedding. [] uses a plain softmax.
        div_value: factor by which the embedding of each cluster is narrower than the embedding of the previous cluster.
        d_embed: width of the embedding, or of the first cluster's embedding if there are cutoffs. null: d_model.
        scale_embedding: multiply embeddings by the square root of d_model, as Transformer-XL does.
        tie_embedding: the softmax uses the weights of the embedding.
        tie_projections: one value per cluster: true if the softmax also uses the projection of the embedding. [] means false for all
            clusters.
        attention_backend: implementation of attention (model/kernels). All give the same results up to rounding. `auto`: `cpu` on a CPU
            where possible, `triton` on a GPU where its self-check finds it correct and fast, otherwise `sdpa`. `reference`: slow
            and simple. `sdpa`: PyTorch's attention. `cpu`: C++ kernels for fp32, fp64 and bf16. `triton`: GPU kernels, also for the
            operations between matrix products (add-norm, and GELU with dropout).
        dropout: dropout of embeddings, position encodings, attention output, feed-forward and final output.
        dropatt: dropout of attention probabilities.
        init_scheme: initialization of new weights. `published`: every matrix is normal with `init_std`. `local`: in addition, each
            head initially attends to a neighbor (model/initialization.py). It differs from the paper and lets small models learn early.
        init_std: standard deviation of the normal distribution.
    """

    vocab_size: int | None = None
    n_layer: int = 12
    d_model: int = 768
    n_head: int = 12
    d_head: int | None = None
    d_inner: int = 3072
    feed_forward: Literal["gelu", "relu", "glu", "reglu", "geglu", "swiglu"] = "gelu"
    norm: Literal["post", "pre", "pre_keys"] = "post"
    final_norm: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-12
    mem_len: int = 384
    attention_span: Literal["all", "same_length", "exclude_self_slot"] = "all"
    positions: Literal["relative", "shaw", "sinusoidal", "learned"] = "relative"
    n_positions: int | None = None
    clamp_len: int | None = None
    relative_segments: bool = True
    untie_r: bool = True
    cutoffs: list[int] = field(default_factory=list)
    div_value: int = 1
    d_embed: int | None = None
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
        for name, minimum in MINIMUM.items():
            optional = "Or set null." if type(self).__dataclass_fields__[name].default is None else ""
            check_minimum(f"model.{name}", getattr(self, name), minimum, optional)
        if self.n_layer > MAX_LAYERS:
            raise InputError(
                f"model.n_layer={self.n_layer} is invalid: it must be at most {MAX_LAYERS}. Set fewer layers."
            )
        for name in ("norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise InputError(f"model.{name}={getattr(self, name)} is invalid: it must be positive.")
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)} is invalid: it must be at least 0 and below 1.")
        if self.d_model % 2:
            raise InputError(f"model.d_model={self.d_model} is invalid: it must be even. Set an even width.")
        if not self.d_head and self.d_model % self.n_head:
            raise InputError(
                f"model.d_model={self.d_model} is invalid: it must be a multiple of model.n_head={self.n_head}. "
                "Change one of them, or set model.d_head."
            )
        if self.attention_span == "exclude_self_slot" and self.mem_len == 0:
            raise InputError(
                "model.attention_span=exclude_self_slot is invalid with model.mem_len=0: no key would be visible. "
                "Set model.attention_span=all."
            )
        if self.final_norm and self.norm == "post":
            raise InputError(
                "model.final_norm=true is invalid with model.norm=post: its layers normalize their output. "
                "Set model.norm=pre, or model.final_norm=false."
            )
        self._check_positions()
        self._check_clusters()

    def _check_positions(self) -> None:
        is_learned = self.positions in ("shaw", "learned")
        if is_learned != (self.n_positions is not None) or (self.n_positions is not None and self.n_positions < 1):
            remedy = "seq_len + mem_len" if is_learned else "null"
            raise InputError(
                f"model.n_positions={as_yaml(self.n_positions)} is invalid with model.positions={self.positions}: it must be at least 1 "
                f"with model.positions=shaw or learned, and null otherwise. Set model.n_positions={remedy}."
            )
        if self.clamp_len is not None and self.positions == "learned":
            raise InputError(
                f"model.clamp_len={self.clamp_len} is invalid with model.positions=learned: model.n_positions already limits the "
                "distance. Set model.clamp_len=null."
            )
        if self.init_scheme == "local" and self.positions != "relative":
            raise InputError(
                f"model.init_scheme=local is invalid with model.positions={self.positions}: it needs model.positions=relative. "
                "Set model.init_scheme=published."
            )

    def _check_clusters(self) -> None:
        if self.div_value < 1 or (self.div_value > 1 and not self.cutoffs):
            raise InputError(
                f"model.div_value={self.div_value} is invalid: it must be at least 1, and exactly 1 without model.cutoffs. "
                "Set model.div_value=1 or model.cutoffs."
            )
        bounds = [0, *self.cutoffs, self.vocab_size or max(self.cutoffs, default=0) + 1]
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            vocabulary = (
                f"the vocabulary size {self.vocab_size}" if self.vocab_size else "the vocabulary size of the store"
            )
            raise InputError(
                f"model.cutoffs={self.cutoffs} is invalid: the values must increase and lie between 0 and {vocabulary}."
            )
        if self.embedding_width // self.div_value ** len(self.cutoffs) < 1:
            raise InputError(
                f"model.div_value={self.div_value} is invalid: the last of {len(self.cutoffs) + 1} clusters would have width 0. "
                f"The first has width {self.embedding_width}. Decrease model.div_value or increase model.d_embed."
            )
        if len(self.tie_projections) not in (0, len(self.cutoffs) + 1):
            raise InputError(
                f"model.tie_projections={self.tie_projections} is invalid: it must be [] or have one value for each of the "
                f"{len(self.cutoffs) + 1} clusters of model.cutoffs."
            )

    @property
    def has_absolute_positions(self) -> bool:
        """True if the embeddings hold positions in the window, so that states of earlier windows have other positions."""
        return self.positions in ("sinusoidal", "learned")

    @property
    def embedding_width(self) -> int:
        """Width of the embedding of the first cluster."""
        return self.d_embed or self.d_model

    @property
    def clusters(self) -> list[tuple[int, int, int]]:
        """First token id, last token id + 1 and embedding width of each cluster."""
        assert self.vocab_size is not None, "the store or the model folder sets the vocabulary size"
        bounds = [0, *self.cutoffs, self.vocab_size]
        widths = [self.embedding_width // self.div_value**i for i in range(len(bounds) - 1)]
        return [(low, high, width) for low, high, width in zip(bounds, bounds[1:], widths, strict=False)]

    @property
    def has_embedding_projection(self) -> bool:
        """True if embeddings are projected to the model width D: if clusters differ in width, or if the embedding is not D wide."""
        return self.div_value > 1 or self.embedding_width != self.d_model

    @property
    def has_plain_embedding(self) -> bool:
        """True if there is one table as wide as the model, which the softmax shares."""
        return not self.cutoffs and self.embedding_width == self.d_model and self.tie_embedding

    @property
    def head_width(self) -> int:
        """E, width of a head."""
        return self.d_head or self.d_model // self.n_head


@dataclass(frozen=True)
class MemoryConfig:
    """Recurrent memory of earlier windows.

    Attributes:
        initial: memory before the first window of a lane (the text that one batch row reads, step after step). `empty`: no query sees
            it. `zeros`: queries attend to M zero vectors, as in the original.
        at_document_end: memory at the end of a document. `carry`: memory continues into the next document, as in the
            original. `cut`: a window sees no memory from before the document of its first token.
    """

    initial: Literal["empty", "zeros"] = "empty"
    at_document_end: Literal["carry", "cut"] = "carry"
