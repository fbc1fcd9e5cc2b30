"""Embeddings of texts: one vector for each text, from the hidden states of the content stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xlpre.inference.cloze import check_length, unmasked_batch
from xlpre.inference.collate import collate
from xlpre.inference.scoring import BATCH_TOKENS, encode_texts
from xlpre.model.backbone import Backbone
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.text.tokenizer import Tokenizer

POOLING = ("mean", "cls")


def embed(
    model: LanguageModel | Backbone,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[np.ndarray],
    pooling: str = "mean",
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """Compute a vector for each text. Texts of similar length share a forward pass.

    Each token sees the whole text, so use a permutation or denoising model. A causal model was not trained this way.

    Args:
        model: language model or encoder (`ModelFolder.encoder()`), on any device.
        tokenizer: its vocabulary.
        texts: texts, or (T,) token ids of each text.
        pooling: `mean`, the mean of the hidden states of all tokens, including <sep> and <cls>; or `cls`, the hidden state of <cls>.
        batch_tokens: largest number of tokens of a forward pass. A single text may have more.

    Returns:
        (N, D) on the CPU, in the dtype of the model.

    Raises:
        ValueError: a text has no tokens or is longer than MAX_TOKENS, or `pooling` or `batch_tokens` is invalid.
    """
    if pooling not in POOLING:
        raise ValueError(f"pooling={pooling!r} is invalid: it must be one of {', '.join(POOLING)}.")
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens} is invalid: it must be at least 1.")
    encoder = _content_encoder(model)
    ids = encode_texts(tokenizer, texts)
    weight = encoder.mask_embedding
    vectors = torch.empty(len(ids), encoder.config.d_model, dtype=weight.dtype)
    rows = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    start = 0
    with without_dropout(encoder), torch.no_grad():
        while start < len(rows):
            length = len(ids[rows[start]]) + 2
            check_length(length)
            part = rows[start : start + max(1, batch_tokens // length)]
            start += len(part)
            batch = collate([unmasked_batch(ids[row]) for row in part]).to(weight.device)
            memory = initial_memory(encoder.config, len(part), mem_len=0, device=weight.device, dtype=weight.dtype)
            hidden, _ = encoder(batch, memory)
            mean_weights = batch.target_weights / batch.target_weights.sum(1, keepdim=True)
            pooled = hidden[:, -1] if pooling == "cls" else torch.einsum("bpd,bp->bd", hidden, mean_weights.to(hidden))
            vectors[part] = pooled.to(vectors)
    return vectors


def _content_encoder(model: LanguageModel | Backbone) -> Backbone:
    """Return a backbone with the weights of `model` that reads from the content stream."""
    encoder = copy.copy(model.backbone if isinstance(model, LanguageModel) else model)
    encoder.two_streams, encoder.n_cls = False, 0
    return encoder
