"""Losses of a causal model where each token has a given number of tokens as its context.

cached    The text is read window by window, with cached keys and values. With `attention_span=same_length`, every token attends to
          the same number of keys. Through the layers, it depends on earlier tokens, too.
sliding   Each token is predicted from a window of its own, without a cache, as a model without recurrence must do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xlpre.batch import ALL_MEMORY, Batch, causal_batch
from xlpre.common.errors import InputError
from xlpre.inference.scoring import BATCH_TOKENS
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import BaseMemory


class WindowReader:
    """Reads rows of text window by window, and keeps a cache between windows.

    Args:
        model: causal model.
        text: (B, N) tokens on the device of the model.
        window: tokens per window.
        use_cache: True to cache keys and values, False to cache hidden states.
    """

    def __init__(self, model: LanguageModel, text: Tensor, window: int, use_cache: bool = True) -> None:
        self._model, self._text, self._window, self._position = model, text, window, 0
        memory = model.backbone.initial_memory(len(text))
        self._memory: BaseMemory = model.backbone.to_kv_cache(memory) if use_cache else memory

    def read(self) -> Tensor:
        """Read the next window. Returns losses (B, window): for each token of the window, the loss of predicting the next token."""
        tokens = self._text[:, self._position : self._position + self._window + 1]
        batch = next_token_batch(tokens, tokens.size(1) - 1)
        hidden, self._memory = self._model.backbone(batch, self._memory)
        self._position += self._window
        return self._model.lm_head(hidden, batch.targets)


class SlidingReader:
    """Predicts single tokens, each from a window of its own that is computed without a cache.

    Args:
        model: causal model.
        text: (B, N) tokens on the device of the model.
        span: tokens per window.
    """

    def __init__(self, model: LanguageModel, text: Tensor, span: int) -> None:
        self._model, self._text, self._span = model, text, span
        self._no_memory = model.backbone.to_kv_cache(model.backbone.initial_memory(len(text), 0))

    def read(self, position: int) -> Tensor:
        """Return the losses (B,) of predicting the token after `position` from the `span` tokens that end at `position`."""
        batch = next_token_batch(self._text[:, max(0, position + 1 - self._span) : position + 2], 1)
        hidden, _ = self._model.backbone(batch, self._no_memory)
        return self._model.lm_head(hidden, batch.targets)[:, 0]


def context_losses(
    model: LanguageModel,
    tokens: np.ndarray,
    positions: Sequence[int] | np.ndarray,
    context_len: int,
    batch_tokens: int = 8 * BATCH_TOKENS,
) -> np.ndarray:
    """Compute the losses of single tokens, each given the `context_len` tokens before it and nothing else.

    Args:
        model: causal model, on any device.
        tokens: (N,) token ids of a text.
        positions: positions of S tokens. Each must have `context_len` tokens before it.
        context_len: number of tokens of the context, at least 1.
        batch_tokens: largest number of tokens of a forward pass.

    Returns:
        (S,) float64 losses in nats.

    Raises:
        InputError: a position has too few tokens before it, or the context is empty.
    """
    positions = np.asarray(positions, np.int64)
    if context_len < 1 or (len(positions) and not context_len <= positions.min() <= positions.max() < len(tokens)):
        raise InputError(
            f"context_len={context_len} is invalid: it must be at least 1, and each position must have as many tokens before it. "
            "Set a shorter context, or leave out the first positions."
        )
    losses = np.zeros(len(positions))
    rows = max(1, batch_tokens // context_len)
    with without_dropout(model), torch.no_grad():
        for start in range(0, len(positions), rows):
            part = positions[start : start + rows]
            windows = np.asarray(tokens, np.int64)[part[:, None] + np.arange(-context_len, 1)]
            reader = SlidingReader(model, torch.from_numpy(windows).to(model.backbone.device), context_len)
            losses[start : start + rows] = reader.read(context_len - 1).double().cpu().numpy()
    return losses


def next_token_batch(tokens: Tensor, n_targets: int) -> Batch:
    """Build a batch that predicts the last tokens of a window, each from the tokens before it and all of memory.

    Args:
        tokens: (B, T + 1) token ids.
        n_targets: number of tokens to predict.
    """
    input_ids, targets = tokens[:, :-1], tokens[:, -n_targets:]
    all_memory = tokens.new_full((len(tokens),), ALL_MEMORY)
    return causal_batch(input_ids, n_targets, targets=targets, visible_mem_len=all_memory, reuse_len=input_ids.size(1))
