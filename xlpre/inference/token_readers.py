"""Next-token logits with cached keys and values. The time per token is constant: it does not grow with the text.

`CausalReader` reads the prompt window by window, then one token at a time. A token sees the M tokens before it, in
memory.

`PermutationReader` uses both streams. The known text is context: its tokens see each other, as tokens that are not
targets do in training. A query row predicts the next token, at the first free position after the context. A generated
token is read by a content row that sees the text up to itself. So generated tokens are targets in a factorization order
from left to right. After F tokens, they become context, too, and all of it is read again. With F = 1, this
happens for every token.

The context of a window has at most C tokens. If there are more, the first half of the window is read into memory on its
own, like the reused part of a training window.

No query sees a free position, so their number would only matter if `<sep> <cls>` followed them in view. In training, a
target sees `<sep> <cls>` if they come before it in the random order. Here they come last, so no token sees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from xlpre.batch import ALL_MEMORY, Batch, causal_batch, make_batch
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import BaseMemory
from xlpre.text import special_tokens


class TokenReader(ABC):
    """Base class of readers of B rows of text of the same length.

    Args:
        model: language model in evaluation mode.
        mem_len: M, tokens of memory.
    """

    def __init__(self, model: LanguageModel, mem_len: int) -> None:
        self._model, self._mem_len = model, mem_len

    @abstractmethod
    def start(self, prompts: Tensor) -> Tensor:
        """Read prompts (B, n) of at least one token. Return the logits of the next token, (B, V)."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Read the next token of each row, (B,). Return the logits of the token after it, (B, V)."""

    @abstractmethod
    def continuation_logits(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Read prompts (B, n), then all tokens (B, T) of their continuations from left to right.

        Returns:
            (B, T, V) logits of each token, given the prompt and the tokens before it.
        """

    def _empty_cache(self, rows: int, n_columns: int) -> BaseMemory:
        backbone = self._model.backbone
        return backbone.to_kv_cache(backbone.initial_memory(rows, n_columns))


class CausalReader(TokenReader):
    """Reader for causal models.

    Args:
        model: causal model in evaluation mode.
        mem_len: M.
        window: longest window in which the prompt is read.
    """

    def __init__(self, model: LanguageModel, mem_len: int, window: int) -> None:
        super().__init__(model, mem_len)
        self._window = window

    def start(self, prompts: Tensor) -> Tensor:
        """Read prompts, see TokenReader."""
        self._cache = self._empty_cache(len(prompts), self._mem_len)
        *_, logits = (self._read(window) for window in prompts.split(self._window, dim=1))
        return logits[:, 0]

    def step(self, tokens: Tensor) -> Tensor:
        """Read a token, see TokenReader."""
        return self._read(tokens[:, None])[:, 0]

    def continuation_logits(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Read continuations, see TokenReader."""
        logits = [self.start(prompts)[:, None]]
        windows = tokens[:, :-1].split(self._window, dim=1) if tokens.size(1) > 1 else ()
        return torch.cat([*logits, *(self._read(window, window.size(1)) for window in windows)], dim=1)

    def _read(self, tokens: Tensor, n_targets: int = 1) -> Tensor:
        """Read a window (B, T). Return the logits of the tokens after its last `n_targets` positions, (B, n_targets, V)."""
        all_memory = torch.full_like(tokens[:, 0], ALL_MEMORY)
        batch = causal_batch(tokens, n_targets, visible_mem_len=all_memory, reuse_len=tokens.size(1))
        logits, self._cache, *_ = self._model.logits(batch, self._cache)
        return logits


class PermutationReader(TokenReader):
    """Reader for permutation models.

    Args:
        model: permutation model in evaluation mode.
        mem_len: M, memory before the context.
        context_len: C, longest context of a window; at least 2.
        free_len: F, tokens that are generated between two readings of the context.
    """

    _tokens: Tensor  # (B, n) tokens that are not in memory

    def __init__(self, model: LanguageModel, mem_len: int, context_len: int, free_len: int) -> None:
        super().__init__(model, mem_len)
        self._context_len, self._free_len = context_len, free_len

    def start(self, prompts: Tensor) -> Tensor:
        """Read prompts, see TokenReader."""
        self._begin(prompts)
        return self._read_context()

    def step(self, tokens: Tensor) -> Tensor:
        """Read a token, see TokenReader."""
        self._tokens = torch.cat([self._tokens, tokens[:, None]], dim=1)
        self._n_unread -= 1
        if self._n_unread == 0:
            self._shorten_context()
            return self._read_context()
        return self._read(tokens[:, None], self._cache)

    def continuation_logits(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Read continuations, see TokenReader. The context is read only once, whatever F is.

        `<sep> <cls>` follow the continuations, because it is known where they end (scoring.py).
        """
        self._begin(prompts)
        batch = _with_symbols(_order_batch(self._tokens, tokens, self._mem_len))
        logits, *_ = self._model.logits(batch, self._memory)
        return logits

    def _begin(self, prompts: Tensor) -> None:
        """Start with empty memory, and move all but the context of the prompts into it."""
        # a window sees the last M columns, a token that is read after it also the context and the generated tokens before it
        n_columns = self._mem_len + (self._context_len + self._free_len if self._free_len > 1 else 0)
        self._memory, self._tokens = self._empty_cache(len(prompts), n_columns), prompts
        self._shorten_context()

    def _shorten_context(self) -> None:
        """Move tokens into memory, half a window at a time, until the context has at most C tokens."""
        while self._tokens.size(1) > self._context_len:
            window, self._tokens = self._tokens.tensor_split([self._context_len // 2], dim=1)
            batch = _order_batch(window, _unknown_token(window), self._mem_len)
            _, self._memory = self._model.backbone(batch, self._memory)

    def _read_context(self) -> Tensor:
        """Read all tokens that are not in memory as context. Return the logits of the next token."""
        self._n_visible, self._n_unread = self._mem_len, self._free_len
        return self._read(self._tokens, self._memory)

    def _read(self, tokens: Tensor, memory: BaseMemory) -> Tensor:
        """Read tokens (B, T) that see each other. Return the logits of the next token."""
        batch = _order_batch(tokens, _unknown_token(tokens), self._n_visible)
        logits, self._cache, *_ = self._model.logits(batch, memory)
        self._n_visible += tokens.size(1)
        return logits[:, 0]


def _unknown_token(tokens: Tensor) -> Tensor:
    """Return a column (B, 1) for the token after `tokens`. No query sees its content."""
    return torch.full_like(tokens[:, :1], special_tokens.MASK)


def _order_batch(context: Tensor, targets: Tensor, n_visible: int) -> Batch:
    """Build a batch of context (B, n), whose tokens see each other, and targets (B, P) in order from left to right.

    The context sees no target. It enters memory, and up to `n_visible` tokens of memory are visible.
    """
    n_targets = targets.size(1)
    order = torch.arange(1 - context.size(1), n_targets + 1, dtype=torch.int32, device=context.device)
    rank = order.clamp(min=0).repeat(len(context), 1)  # 0 in the context, then 1, 2, ...
    return make_batch(
        torch.cat([context, targets], dim=1),
        rank.clamp(min=1),
        rank,
        torch.arange(context.size(1), rank.size(1), device=context.device).repeat(len(context), 1),
        visible_mem_len=torch.full_like(context[:, 0], n_visible),
        reuse_len=context.size(1),
    )


def _with_symbols(batch: Batch) -> Batch:
    """Append `<sep> <cls>`, which every query sees."""
    symbols = {
        "input_ids": [special_tokens.SEP, special_tokens.CLS],
        "segment_ids": [SEGMENT_A, SEGMENT_CLS],
        "query_rank": [1, 1],
        "key_rank": [0, 0],
    }

    def appended(name: str) -> Tensor:
        x: Tensor = getattr(batch, name)
        return torch.cat([x, x.new_tensor(symbols[name]).expand(len(x), -1)], dim=1)

    return replace(batch, **{name: appended(name) for name in symbols})  # type: ignore[arg-type]
