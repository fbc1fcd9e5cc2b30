"""The backbone: embeddings, memory, L layers; both streams as rows of one pass.

Rows are `[content; query]` (B, T + P, D): queries, attention, feed-forward and norms are computed once over all of them, keys and values
from memory and the content rows only. The last layer computes the rows that are read out and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xlpre.batch import Batch
from xlpre.model.attention_mask import AttentionMeta, build_attention_meta
from xlpre.model.config import ModelConfig
from xlpre.model.dropout import Dropout
from xlpre.model.embedding import build_embedding
from xlpre.model.initialization import initialize
from xlpre.model.kernels.backend import backend_named
from xlpre.model.layer import LAYERS
from xlpre.model.memory import Past, Projection
from xlpre.model.positions import SCHEMES, SharedBiases
from xlpre.model.visibility import reach_of


class Backbone(nn.Module):
    """Transformer-XL with relative positions, memory and relative segments.

    Args:
        config: its shape.
        two_streams: predictions are read from the query stream, which starts from a learned vector instead of the token at its
            place (XLNet section 2.3); else from the content stream.
        reads_cls: <cls>, the last token of a window, is read out too, from the content stream.

    Attributes:
        n_cls: 1 if it is, else 0.
    """

    def __init__(self, config: ModelConfig, two_streams: bool, reads_cls: bool = False) -> None:
        super().__init__()
        self.config, self.two_streams, self.n_cls = config, two_streams, int(reads_cls)
        self.word_embedding = build_embedding(config)
        self.embedding_scale = config.d_model**0.5 if config.scale_embedding else 1.0
        self.mask_embedding = nn.Parameter(torch.empty(config.d_model))
        self.distance_codes = SCHEMES[config.positions].codes(config)
        self.backend = backend_named(config.attention_backend)
        self.shared_biases = nn.ParameterDict()
        names = SCHEMES[config.positions].biases + (("segment",) if config.relative_segments else ())
        if not config.untie_r:
            self.shared_biases.update({name: nn.Parameter(torch.empty(config.n_head, config.head_width)) for name in names})
        biases: SharedBiases = {name: None if config.untie_r else self.shared_biases[name] for name in names}
        layer = LAYERS[config.norm]
        self.layers = nn.ModuleList(layer(config, biases, index) for index in range(config.n_layer))
        self.dropout = Dropout(config.dropout)
        self._run: Callable[..., Tensor] = _run
        initialize(self, config)

    def recompute_layers(self) -> None:
        """Keep nothing of what is computed inside a layer for the backward pass, which then computes it again."""
        self._run = partial(checkpoint, use_reentrant=False)

    def forward(self, batch: Batch, memory: Past, vectors: Tensor | None = None) -> tuple[Tensor, Past]:
        """Read a window.

        Args:
            batch: B windows of T tokens with P targets each.
            memory: what each row read before, M columns; their number is free.
            vectors: (B, T, D) of the tokens, from `embedding`, where they were looked up before, for several batches at once;
                each look-up has a gradient as large as the vocabulary.

        Returns:
            (B, n_cls + P, D) hidden states, that of <cls> if it is read out, then those at the targets; and memory for the next
            window, as long as it was.

        Raises:
            ValueError: memory of another model or of other rows; vectors of other tokens.
        """
        self.check(batch, memory, vectors)
        length = batch.input_ids.size(1)
        everywhere, read_out = self._geometries(batch, memory)
        rows = (self.word_embedding(batch.input_ids) if vectors is None else vectors) * self.embedding_scale
        if self.two_streams:
            queries = self.mask_embedding.to(rows.dtype).expand(*batch.target_positions.shape, -1)
            rows = torch.cat([rows, queries], dim=1)
        rows = self.dropout(rows)
        attended = []
        for index, layer in enumerate(self.layers):
            project = cast(Projection, layer.keys_values)
            attended.append(memory.attended(index, rows[:, :length], project))
            if layer is self.layers[-1]:
                rows, attn_meta = self._rows_read_out(rows, read_out), read_out
            else:
                attn_meta = everywhere
            rows = self._run(layer, rows, attended[-1], attn_meta)
        return self.dropout(rows), memory.extended(attended, batch.reuse_len, batch.visible_mem_len)

    def check(self, batch: Batch, memory: Past, vectors: Tensor | None = None) -> None:
        """Raise ValueError unless they fit together, by shapes and types alone."""
        if not isinstance(batch, Batch) or not isinstance(memory, Past):
            raise ValueError(
                f"a model reads a Batch and a Memory, not {type(batch).__name__} and {type(memory).__name__}; blanks.whole makes a batch "
                "of token ids, first_memory(config, rows=B, mem_len=0) is no memory"
            )
        memory.check(self.config, len(batch.input_ids), self.mask_embedding)
        if vectors is not None and vectors.shape != (*batch.input_ids.shape, self.config.d_model):
            raise ValueError(
                f"vectors {tuple(vectors.shape)} must be those of the batch's input_ids {tuple(batch.input_ids.shape)}, "
                f"{self.config.d_model} wide: embedding(batch.input_ids)"
            )

    def _rows_read_out(self, rows: Tensor, read_out: AttentionMeta) -> Tensor:
        """The last n_cls rows of the content stream and the query stream, or content rows alone."""
        if self.two_streams:
            return rows[:, read_out.n_tokens - self.n_cls :]
        return read_out.of_rows(rows)

    def _geometries(self, batch: Batch, memory: Past) -> tuple[AttentionMeta, AttentionMeta]:
        """The geometry of all rows, and of those that are read out, which is what the last layer computes."""
        length, columns = batch.input_ids.size(1), memory.n_columns
        distances = memory.once(self.distance_codes, columns + length, length, self.mask_embedding)
        reach = reach_of(self.config.attention_span, self.config.mem_len, columns)
        everywhere, read_out = build_attention_meta(
            batch, memory.key_rank(batch.visible_mem_len), distances, reach, self.two_streams, self.n_cls
        )
        ready = self._ready(everywhere, memory)
        return ready, ready if read_out is everywhere else self._ready(read_out, memory)

    def _ready(self, attn_meta: AttentionMeta, memory: Past) -> AttentionMeta:
        weight = self.mask_embedding.new_empty(self.config.head_width, self.config.head_width)
        like_keys = weight[:0] @ weight  # of the type that torch.autocast gives to products
        return replace(attn_meta, once=memory.once, prepared=self.backend.prepare(attn_meta, like_keys))


def _run(layer: nn.Module, *args: object) -> Tensor:
    return layer(*args)
