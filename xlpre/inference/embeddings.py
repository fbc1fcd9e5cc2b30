"""Embeddings of texts: one vector for each text, from the hidden states of the content stream."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xlpre.batch import Batch, causal_batch
from xlpre.common.errors import InputError, check_minimum
from xlpre.inference.batches import check_length, collate, split_rows, unmasked_batch
from xlpre.inference.scoring import BATCH_TOKENS, encode_texts
from xlpre.model.backbone import Backbone
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES, resolve_objective
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer, check_vocab_size

POOLING = ("mean", "cls")


def embed(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[np.ndarray],
    pooling: str = "mean",
    *,
    objective: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Tensor:
    """Compute a vector for each text from the last hidden states. Texts of similar length share a forward pass.

    Permutation and denoising models read `[text <sep> <cls>]`, and each token sees the whole text. Causal models read `[<eod> text]`, and
    each token sees the tokens before it.

    Args:
        model: language model, on any device.
        tokenizer: its vocabulary.
        texts: texts, or (T,) token ids of each text.
        pooling: `mean`, the mean of the hidden states of all tokens but <eod>; or `cls`, the hidden state of <cls>.
        objective: objective of the model, `ModelFolder.objective`. None: `permutation` if the model has two streams; other models need it.
        batch_tokens: largest number of tokens of a forward pass. A single text may have more.

    Returns:
        (N, D) on the CPU, in the dtype of the model.

    Raises:
        InputError: a text has no tokens or is longer than MAX_TOKENS; `pooling` does not fit the objective; or another argument is invalid.
    """
    is_causal = not OBJECTIVES[resolve_objective(objective, model.backbone.two_streams)].sees_ahead
    if pooling not in POOLING:
        raise InputError(f"pooling={pooling!r} is invalid: it must be one of {', '.join(POOLING)}.")
    if is_causal and pooling == "cls":
        raise InputError("pooling='cls' is invalid: a causal model was not trained with <cls>. Set pooling='mean'.")
    check_minimum("batch_tokens", batch_tokens, 1, f"Leave it out for {BATCH_TOKENS}.")
    ids = encode_texts(tokenizer, texts)
    check_vocab_size(tokenizer, model.config.vocab_size)
    encoder = _content_encoder(model.backbone)
    build = _after_eod_batch if is_causal else unmasked_batch
    vectors = torch.empty(len(ids), encoder.config.d_model, dtype=encoder.mask_embedding.dtype)
    lengths = [len(tokens) + special_tokens.N_SYMBOLS for tokens in ids]
    check_length(max(lengths, default=0))
    with without_dropout(encoder), torch.no_grad():
        for part in split_rows(lengths, batch_tokens):
            batch = collate([build(ids[row]) for row in part]).to(encoder.device)
            hidden, _ = encoder(batch, encoder.initial_memory(len(part), mem_len=0))
            mean_weights = batch.target_weights / batch.target_weights.sum(1, keepdim=True)
            pooled = hidden[:, -1] if pooling == "cls" else torch.einsum("bpd,bp->bd", hidden, mean_weights.to(hidden))
            vectors[part] = pooled.to(vectors)
    return vectors


def _content_encoder(backbone: Backbone) -> Backbone:
    """Return a backbone with the same weights that reads from the content stream."""
    encoder = copy.copy(backbone)
    encoder.two_streams, encoder.n_cls = False, 0
    return encoder


def _after_eod_batch(tokens: np.ndarray) -> Batch:
    """Build a batch of one row, `[<eod> tokens]`, to compute the hidden states of the T tokens, each from the tokens before it."""
    input_ids = torch.from_numpy(np.append(special_tokens.EOD, tokens))[None]
    return causal_batch(input_ids, len(tokens))
