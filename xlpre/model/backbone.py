"""Backbone: embedding, memory and L layers. One pass computes the content and the query stream (model/two_stream.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xlpre.batch import Batch
from xlpre.common.errors import InputError
from xlpre.model.attention_mask import AttentionMeta, max_key_distance
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.embedding import build_embedding
from xlpre.model.initialization import initialize
from xlpre.model.kernels.backend import check_backend, prepare_backend
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.layer import LAYERS
from xlpre.model.memory import (
    MAX_WINDOW_SIZES,
    BaseMemory,
    KeyValue,
    KVCache,
    Memory,
    Projection,
    WindowTerms,
    initial_memory,
)
from xlpre.model.norm import layer_norm
from xlpre.model.positions import SCHEMES, SharedBiases
from xlpre.model.two_stream import build_attention_meta, build_rows, select_output_rows


class Backbone(nn.Module):
    """Transformer-XL with relative positions, memory and relative segments.

    Args:
        config: shape of the model.
        two_streams: read predictions from the query stream (XLNet, section 2.3). If False, read them from the content
            stream.
        reads_cls: also return the hidden state of <cls>, the last token of the window, from the content stream.

    Attributes:
        n_cls: 1 if the hidden state of <cls> is returned, otherwise 0.
    """

    def __init__(self, config: ModelConfig, two_streams: bool, reads_cls: bool = False) -> None:
        super().__init__()
        self.config, self.two_streams, self.n_cls = config, two_streams, int(reads_cls)
        self.word_embedding = build_embedding(config)
        self.embedding_scale = config.d_model**0.5 if config.scale_embedding else 1.0
        self.mask_embedding = nn.Parameter(torch.empty(config.d_model))
        self.pos_encoding = SCHEMES[config.positions].encoding(config)
        check_backend(config.attention_backend)
        self.shared_biases = nn.ParameterDict()
        names = SCHEMES[config.positions].biases + (("segment",) if config.relative_segments else ())
        if not config.untie_r:
            shape = (config.n_head, config.head_width)
            self.shared_biases.update({name: nn.Parameter(torch.empty(shape)) for name in names})
        biases: SharedBiases = {name: None if config.untie_r else self.shared_biases[name] for name in names}
        layer = LAYERS[config.norm]
        self.layers = nn.ModuleList(layer(config, biases, index) for index in range(config.n_layer))
        self.final_norm = layer_norm(config) if config.final_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self._run_layer: Callable[..., Tensor] = _call
        initialize(self, config)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.mask_embedding.device

    def initial_memory(self, rows: int, mem_len: int | None = None) -> Memory:
        """Return empty memory for the first window of `rows` batch rows, on the device and in the dtype of the weights.

        Args:
            rows: B.
            mem_len: M. None uses `config.mem_len`. 0 disables memory.
        """
        like = self.mask_embedding
        return initial_memory(self.config, rows, mem_len=mem_len, device=like.device, dtype=like.dtype)

    def enable_activation_checkpointing(self) -> None:
        """Recompute the activations of each layer in the backward pass instead of storing them."""
        self._run_layer = partial(checkpoint, use_reentrant=False)

    def forward(self, batch: Batch, memory: BaseMemory, embeddings: Tensor | None = None) -> tuple[Tensor, BaseMemory]:
        """Read one window.

        Args:
            batch: B windows of T tokens with P targets each.
            memory: memory of M tokens before the window of each batch row. M may differ from `config.mem_len`.
            embeddings: (B, T, D) result of `word_embedding(batch.input_ids)`. Pass it to share one look-up between several
                calls, because the gradient of every look-up is as large as the embedding table.

        Returns:
            Hidden states (B, n_cls + P, D), that of <cls> first if `reads_cls` is set, and memory of M tokens for the next window.

        Raises:
            InputError: memory or embeddings do not fit the model or the batch.
        """
        self.check_inputs(batch, memory, embeddings)
        length = batch.input_ids.size(1)
        terms = self._window_terms(memory, length)
        backend, output_backend = self._prepare_attention(batch, memory, terms.pos_encoding)
        content = (self.word_embedding(batch.input_ids) if embeddings is None else embeddings) * self.embedding_scale
        rows = self.dropout(build_rows(content, self.mask_embedding, batch) if self.two_streams else content)
        contexts = []
        for index, layer in enumerate(self.layers):
            context = memory.context_for_layer(index, rows[:, :length], cast(Projection, layer.keys_values))
            if layer is self.layers[-1]:
                rows = select_output_rows(rows, output_backend.attn_meta, self.two_streams, self.n_cls)
                backend = output_backend
            rows = self._run_layer(layer, rows, context, backend, terms.score_terms[index])
            contexts.append(context)
        return self.dropout(self.final_norm(rows)), memory.updated(contexts, batch.reuse_len, batch.visible_mem_len)

    def check_inputs(self, batch: Batch, memory: BaseMemory, embeddings: Tensor | None = None) -> None:
        """Check shapes and dtypes of the inputs of `forward`.

        Raises:
            InputError: memory or embeddings do not fit the model or the batch.
        """
        if not isinstance(batch, Batch) or not isinstance(memory, BaseMemory):
            raise InputError(
                f"inputs of type {type(batch).__name__} and {type(memory).__name__} are invalid: a model reads a Batch and a Memory. "
                "Build them with xlpre.inference.unmasked_batch(token_ids) and backbone.initial_memory(rows=B, mem_len=0)."
            )
        memory.check(self.config, len(batch.input_ids), self.mask_embedding)
        expected = (*batch.input_ids.shape, self.config.d_model)
        if embeddings is not None and embeddings.shape != expected:
            raise InputError(
                f"embeddings of shape {tuple(embeddings.shape)} are invalid: the shape must be {expected}. "
                "Pass word_embedding(batch.input_ids)."
            )

    def to_kv_cache(self, memory: Memory) -> BaseMemory:
        """Convert memory to a KVCache, which gives the same results in evaluation and is faster.

        Keys and values of memory are then projected once, instead of again for every window. The score terms of all distances are computed
        once per window size and kept for the last few sizes.

        Args:
            memory: memory to start from.

        Returns:
            A KVCache, or `memory` itself if the position scheme adds positions to hidden states (sinusoidal, learned). With such a
            scheme, the keys of memory change from window to window and cannot be stored.

        Raises:
            InputError: the model is in training mode, gradients are enabled, or `memory` is not a Memory of this model.
        """
        if not isinstance(memory, Memory):
            raise InputError(
                f"memory of type {type(memory).__name__} is invalid: a KVCache is made from a Memory. "
                "Pass backbone.initial_memory(rows=B)."
            )
        if self.training or torch.is_grad_enabled():
            raise InputError(
                "a KVCache is available in evaluation only. Call model.eval() and run under torch.no_grad()."
            )
        memory.check(self.config, len(memory.valid), self.mask_embedding)
        if self.config.has_absolute_positions:
            return memory
        layers: Any = self.layers
        projected = [KeyValue(*layer.keys_values(hidden)) for layer, hidden in zip(layers, memory.hidden, strict=True)]
        return KVCache(projected, memory.valid)

    def _window_terms(self, memory: BaseMemory, n_tokens: int) -> WindowTerms:
        """Encode all distances. With a KVCache, also compute the score terms, and store both for the next windows of this size."""
        n_keys = memory.mem_len + n_tokens
        if not isinstance(memory, KVCache):
            return WindowTerms(self.pos_encoding(n_keys, n_tokens, self.mask_embedding), [None] * len(self.layers))
        cached = memory.window_terms
        if (n_keys, n_tokens) not in cached:
            pos_encoding = self.pos_encoding(n_keys, n_tokens, self.mask_embedding)
            layers: Any = self.layers
            score_terms = [layer.attention.score_terms(pos_encoding, n_keys) for layer in layers]
            if len(cached) == MAX_WINDOW_SIZES:
                del cached[next(iter(cached))]  # the terms that were stored first
            cached[n_keys, n_tokens] = WindowTerms(pos_encoding, score_terms)
        return cached[n_keys, n_tokens]

    def _prepare_attention(
        self, batch: Batch, memory: BaseMemory, pos_encoding: Tensor
    ) -> tuple[AttentionBackend, AttentionBackend]:
        """Prepare the attention backend for all query rows, and for the query rows that the last layer computes."""
        max_distance = max_key_distance(self.config.attention_span, self.config.mem_len, memory.mem_len)
        memory_rank = memory.key_rank(batch.visible_mem_len)
        all_rows, output_rows = build_attention_meta(
            batch, memory_rank, pos_encoding, max_distance, self.two_streams, self.n_cls
        )
        prepared = self._prepare(all_rows)
        return prepared, prepared if output_rows is all_rows else self._prepare(output_rows)

    def _prepare(self, attn_meta: AttentionMeta) -> AttentionBackend:
        head_width = self.config.head_width
        weight = self.mask_embedding.new_empty(head_width, head_width)
        dtype = (weight[:0] @ weight).dtype  # dtype of matrix products, which torch.autocast changes
        return prepare_backend(self.config.attention_backend, attn_meta, dtype, head_width)


def _call(layer: nn.Module, *args: object) -> Tensor:
    return layer(*args)
