"""Log-likelihood of texts, computed in batches of similar length.

A mode defines the context of each token:

    any-order   Chain rule in a factorization order (XLNet, section 2.2): each token, given the tokens before it in the order. The first
                order runs from left to right, the others are random. For permutation models. It is exact: in each order, the
                probabilities of all texts of T tokens sum to 1.
    pll         Pseudo-log-likelihood (Salazar et al. 2020, arXiv:1910.14659): each token, given all others. For permutation and
                denoising models. It is not the logarithm of a probability.
    causal      Chain rule from left to right, for causal models. It is exact, too.

The layouts follow the training windows. Permutation and denoising models read `[text <sep> <cls>]`. Every token sees `<sep>` and `<cls>`,
and so knows where the text ends. `<sep>` and `<cls>` see no token of the text in any-order mode, so that they reveal none. Causal models
read `<eod>` before the text, as between two documents.

A text of more than `window` tokens is split into windows, which recurrent memory connects. The chain rule stays exact: the order runs
through the windows from left to right, and the model sees the last `mem_len` tokens before a window. In pll, a token sees the other tokens
of its window and the memory, but no later window.

In any-order mode, one batch row computes a whole order, with T content and T query rows. Pll needs a batch row per token: in a shared row,
the content states of the other tokens would have seen the token to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from xlpre.batch import ALL_MEMORY, HIDDEN_RANK, Batch, make_batch
from xlpre.common.errors import InputError, check_minimum
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.inference.batches import unmasked_batch
from xlpre.inference.modes import SCORE_MODES, resolve_mode
from xlpre.model.dropout import without_dropout
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import BaseMemory
from xlpre.objectives.registry import resolve_objective
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer, as_token_ids, check_list, check_vocab_size

N_ORDERS = 4
WINDOW = 512  # tokens; attention memory grows with its square
BATCH_TOKENS = 1024  # content and query rows of a forward pass
MAX_LOGITS = 1 << 21  # logits computed at a time, 8 MB; larger buffers are returned to the system after each use

ReportProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class TextScore:
    """Log-likelihood of a text in nats.

    Attributes:
        text: the text.
        tokens: (T,) int64 token ids.
        token_log_likelihoods: (S, T) float64, log-probability of each token in each of S orders. S is 1 unless the mode is any-order.
    """

    text: str
    tokens: np.ndarray
    token_log_likelihoods: np.ndarray

    @cached_property
    def by_order(self) -> np.ndarray:
        """(S,) log-likelihood of the text in each order. The first order runs from left to right."""
        return self.token_log_likelihoods.sum(1)

    @property
    def log_likelihood(self) -> float:
        """Mean over the orders of the log-likelihood of the text."""
        return float(self.by_order.mean())

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the log-likelihood over the orders. None with a single order."""
        return float(self.by_order.std(ddof=1)) if len(self.by_order) > 1 else None

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def n_unknown(self) -> int:
        """Number of tokens that are <unk>. They are scored as <unk>, whatever their characters are."""
        return int((self.tokens == special_tokens.UNK).sum())


@dataclass(frozen=True)
class OrderConsistency:
    """Spread of the log-likelihood of texts over factorization orders.

    With consistent conditional probabilities, all orders would give the same log-likelihood, and the spread would be 0.

    Attributes:
        std_per_token: sum over the texts of the standard deviation over the orders, divided by the number of tokens; nats per token.
        log_likelihood_per_token: mean over the orders; nats per token.
        n_orders: number of orders, including the one from left to right.
        n_tokens: number of tokens of all texts.
    """

    std_per_token: float
    log_likelihood_per_token: float
    n_orders: int
    n_tokens: int


def score(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[np.ndarray],
    mode: str | None = None,
    *,
    objective: str | None = None,
    prefix: str | np.ndarray = "",
    n_orders: int = N_ORDERS,
    seed: int = 1,
    window: int = WINDOW,
    mem_len: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report_progress: ReportProgress | None = None,
) -> list[TextScore]:
    """Compute the log-likelihood of texts. The score of a text does not depend on the other texts, except for rounding.

    Args:
        model: language model, on any device.
        tokenizer: its vocabulary.
        texts: texts, or (T,) token ids of each text.
        mode: `any-order`, `pll` or `causal`, see the module. None: `pll` for permutation and denoising models, `causal` for causal models.
        objective: objective of the model, `ModelFolder.objective`. None: `permutation` if the model has two streams; other models need it.
        prefix: text, or its token ids, that comes before each text. It is read, but not scored: the scores are conditional on it. In
            any-order mode, it comes first in every order.
        n_orders: S, number of orders in any-order mode. 1: only from left to right.
        seed: seed of the random orders. Texts of T tokens have the same orders.
        window: longest window in tokens.
        mem_len: tokens of memory for texts longer than a window. None: `model.config.mem_len`.
        batch_tokens: largest number of content and query rows of a forward pass. A single text may have more.
        report_progress: called after each forward pass with the number of scored rows and the number of all rows.

    Returns:
        One score per text, in order.

    Raises:
        InputError: a text has no tokens; the mode does not fit the objective; or another argument is invalid.
    """
    mode = resolve_mode(mode, resolve_objective(objective, model.backbone.two_streams), SCORE_MODES)
    for name, value in (("n_orders", n_orders), ("window", window), ("batch_tokens", batch_tokens)):
        check_minimum(name, value, 1)
    check_minimum("seed", seed, 0)
    if not len(texts):
        return []
    ids = encode_texts(tokenizer, texts)
    prefix_ids = np.empty(0, np.int64)
    if len(prefix):
        (prefix_ids,) = encode_texts(tokenizer, cast(Any, [prefix]), lambda _: "prefix")
    check_vocab_size(tokenizer, model.config.vocab_size)
    slots: dict[bytes, int] = {}  # equal texts are scored once, so that they tie exactly
    slot_of_text = [slots.setdefault(tokens.tobytes(), len(slots)) for tokens in ids]
    unique, n_prefix = [np.concatenate([prefix_ids, np.frombuffer(key, np.int64)]) for key in slots], len(prefix_ids)
    scorer = _Scorer(model, window, mem_len, batch_tokens, report_progress or _ignore_progress)
    with without_dropout(model), torch.no_grad():
        losses = (
            scorer.pll(unique, n_prefix) if mode == "pll" else scorer.chain_rule(unique, mode, n_orders, seed, n_prefix)
        )
    return [
        TextScore(text if isinstance(text, str) else tokenizer.decode(tokens), tokens, -losses[slot])
        for text, tokens, slot in zip(texts, ids, slot_of_text, strict=True)
    ]


def order_consistency(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[np.ndarray],
    n_orders: int = N_ORDERS,
    *,
    seed: int = 1,
    window: int = WINDOW,
    mem_len: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report_progress: ReportProgress | None = None,
) -> OrderConsistency:
    """Measure the spread of the log-likelihood of texts over factorization orders.

    Args:
        model: permutation model.
        tokenizer: its vocabulary.
        texts: texts, or (T,) token ids of each text.
        n_orders: number of orders, including the one from left to right; at least 2.
        seed: see `score`, also for the arguments below.
        window: longest window.
        mem_len: tokens of memory.
        batch_tokens: size of a forward pass.
        report_progress: callback.

    Raises:
        InputError: see `score`; there are no texts; or there are fewer than 2 orders.
    """
    if n_orders < 2:
        raise InputError(f"n_orders={n_orders} is invalid: a spread needs at least 2 orders.")
    if not len(texts):
        raise InputError("texts=[] is invalid: there must be at least one text.")
    scores = score(
        model,
        tokenizer,
        texts,
        "any-order",
        n_orders=n_orders,
        seed=seed,
        window=window,
        mem_len=mem_len,
        batch_tokens=batch_tokens,
        report_progress=report_progress,
    )
    n_tokens = sum(text.n_tokens for text in scores)
    return OrderConsistency(
        sum(text.std or 0.0 for text in scores) / n_tokens,
        sum(text.log_likelihood for text in scores) / n_tokens,
        n_orders,
        n_tokens,
    )


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[np.ndarray],
    name_of_text: Callable[[int], str] = "texts[{}]".format,
) -> list[np.ndarray]:
    """Return the (T,) int64 token ids of each text.

    Args:
        tokenizer: vocabulary.
        texts: texts, or their token ids.
        name_of_text: returns the name of a text in error messages from its index.

    Raises:
        InputError: a text has no tokens, or cannot be encoded.
    """
    check_list("texts", texts)
    encoded = []
    for index, text in enumerate(texts):
        name = name_of_text(index)
        ids = (
            np.array(tokenizer.encode(text), np.int64) if isinstance(text, str) else as_token_ids(name, text, tokenizer)
        )
        if not ids.size:
            raise InputError(f"{name}={text!r:.60} is invalid: a text needs at least one token. Correct or remove it.")
        encoded.append(ids)
    return encoded


class _Scorer:
    """Computes the losses of texts in batches, the longest texts first. For the arguments, see `score`."""

    def __init__(
        self,
        model: LanguageModel,
        window: int,
        mem_len: int | None,
        batch_tokens: int,
        report_progress: ReportProgress,
    ) -> None:
        self._model, self._window, self._batch_tokens = model, window, batch_tokens
        self._mem_len = model.config.mem_len if mem_len is None else mem_len
        self._report_progress = report_progress

    def chain_rule(
        self, texts: list[np.ndarray], mode: str, n_orders: int, seed: int, n_prefix: int
    ) -> list[np.ndarray]:
        """Return the losses of each text without its first `n_prefix` tokens, (S, T - n_prefix): one row in causal mode, one per order in
        any-order mode. The first tokens come first in every order.
        """
        config = self._model.config
        # memory would widen the attention span, or have other positions
        is_cacheable = config.attention_span == "all" and not config.has_absolute_positions
        if mode == "causal" and n_prefix and is_cacheable and all(len(text) <= self._window for text in texts):
            return self._causal_after_prefix(texts, n_prefix)
        n_orders, row_cost = (1, 1) if mode == "causal" else (n_orders, 2)
        lengths = np.repeat(_lengths(texts), n_orders)  # of the rows: text by text, order by order
        losses = [np.empty((n_orders, len(tokens))) for tokens in texts]
        n_done = 0
        for rows in self._split_rows(lengths, row_cost):
            tokens, is_text = _pad([texts[row // n_orders] for row in rows])
            if mode == "causal":
                inputs = _pad([np.append(special_tokens.EOD, texts[row][:-1]) for row in rows])[0]
                scored = self._score_windows(_causal_batch, tokens, inputs, is_text)
            else:
                orders = [sample_order(int(lengths[row]), row % n_orders, seed, self._window, n_prefix) for row in rows]
                scored = self._score_windows(_any_order_batch, tokens, _pad(orders)[0], is_text)
            for row, row_losses, row_is_text in zip(rows, scored, is_text, strict=True):
                losses[row // n_orders][row % n_orders] = row_losses[row_is_text]
            n_done += len(rows)
            self._report_progress(n_done, len(lengths))
        return [text_losses[:, n_prefix:] for text_losses in losses]

    def _causal_after_prefix(self, texts: list[np.ndarray], n_prefix: int) -> list[np.ndarray]:
        """Return the (1, T - n_prefix) losses of texts of one window without their first tokens, which are equal and are read once."""
        prefix, backbone = texts[0][None, :n_prefix], self._model.backbone
        inputs = np.append(special_tokens.EOD, prefix[0, :-1])[None]
        batch = _with_memory(_causal_batch(prefix, inputs, np.ones_like(inputs, bool)), n_prefix)
        memory = backbone.to_kv_cache(backbone.initial_memory(1, n_prefix))
        memory = backbone(batch.to(backbone.device), memory)[1]
        lengths, losses, n_done = _lengths(texts) - n_prefix, [np.empty((1, 0))] * len(texts), 0
        for length in np.unique(lengths):  # without padding, which would come between the prefix and the text
            of_length = np.flatnonzero(lengths == length)
            for index in self._split_rows(lengths[of_length], 1):
                rows = of_length[index]
                tokens = np.stack([texts[row][n_prefix - 1 :] for row in rows])
                batch = _causal_batch(tokens[:, 1:], tokens[:, :-1], np.ones_like(tokens[:, 1:], bool))
                of_rows = self._losses(_with_memory(batch), memory.expand(len(rows)))[0]
                for row, row_losses in zip(rows, of_rows, strict=True):
                    losses[row] = row_losses[None]
                n_done += len(rows)
                self._report_progress(n_done, len(texts))
        return losses

    def pll(self, texts: list[np.ndarray], n_prefix: int) -> list[np.ndarray]:
        """Return the (1, T - n_prefix) losses of each text without its first tokens, where each token is predicted from all others."""
        lengths = _lengths(texts)
        starts = np.concatenate([[0], lengths.cumsum()])  # row of the first token of each text
        text_of_row = np.repeat(np.arange(len(texts)), lengths)
        position_of_row = np.arange(starts[-1]) - starts[text_of_row]
        losses, n_done, n_rows = np.empty(starts[-1]), 0, int((lengths - n_prefix).sum())
        is_long = lengths > self._window
        short = np.flatnonzero(~is_long[text_of_row] & (position_of_row >= n_prefix))
        for index in self._split_rows(lengths[text_of_row[short]], 1):
            rows = short[index]
            tokens, is_text = _pad([texts[text] for text in text_of_row[rows]])
            columns = position_of_row[rows] + is_text.argmax(1)
            batch = self._pll_batch(tokens, is_text, columns)
            losses[rows] = self._losses(batch, self._model.backbone.initial_memory(len(rows), 0))[0][:, 0]
            n_done += len(rows)
            self._report_progress(n_done, n_rows)
        for text in np.flatnonzero(is_long):
            losses[starts[text] + n_prefix : starts[text + 1]] = self._pll_of_long_text(texts[text], n_prefix)
            n_done += int(lengths[text]) - n_prefix
            self._report_progress(n_done, n_rows)
        return [losses[start + n_prefix : end][None] for start, end in zip(starts, starts[1:], strict=False)]

    def _score_windows(
        self, build: Callable[..., Batch], tokens: np.ndarray, inputs: np.ndarray, is_text: np.ndarray
    ) -> np.ndarray:
        """Return the (B, T) losses of texts of one window, or of longer texts of T tokens each.

        Args:
            build: function that builds the batch of a window from a part of the next three arguments.
            tokens: (B, T) token ids.
            inputs: (B, T) previous tokens in causal mode, orders in any-order mode.
            is_text: (B, T) bool, False at padding.
        """
        losses = np.empty(tokens.shape)
        is_long = tokens.shape[1] > self._window
        initial = self._model.backbone.initial_memory(len(tokens), self._mem_len if is_long else 0)
        memory = self._model.backbone.to_kv_cache(initial) if is_long else initial
        for start in range(0, tokens.shape[1], self._window):
            columns = slice(start, start + self._window)
            batch = build(tokens[:, columns], inputs[:, columns], is_text[:, columns])
            batch = _with_memory(batch, batch.targets.size(1) if is_long else 0)
            losses[:, columns], memory = self._losses(batch, memory)
        return losses

    def _pll_of_long_text(self, text: np.ndarray, n_prefix: int) -> np.ndarray:
        """Return the (T - n_prefix,) losses of a text of several windows without its first tokens."""
        losses, memory = [], self._model.backbone.initial_memory(1, self._mem_len)
        for start in range(0, len(text), self._window):
            tokens = text[start : start + self._window]
            scored = np.arange(max(n_prefix - start, 0), len(tokens))
            for index in self._split_rows(np.full(len(scored), len(tokens)), 1):  # in order: the rows are equally long
                positions, B = scored[index], len(index)
                batch = self._pll_batch(np.tile(tokens, (B, 1)), np.ones((B, len(tokens)), bool), positions)
                losses.append(self._losses(_with_memory(batch), memory.expand(B))[0][:, 0])
            content = _with_memory(unmasked_batch(tokens), len(tokens)).to(memory.hidden.device)
            memory = self._model.backbone(content, memory)[1]
        return np.concatenate(losses)

    def _pll_batch(self, tokens: np.ndarray, is_text: np.ndarray, columns: np.ndarray) -> Batch:
        """Build a batch in which each row predicts the token in one column (B,) from all others.

        As in training, other tokens do not see this column in a permutation model; in a denoising model, they see <mask> there.
        """
        ids, segment_ids, is_padding = _with_symbols(tokens, is_text)
        row = np.arange(len(ids))
        ids[row, columns] = special_tokens.MASK
        key_rank = np.where(is_padding, HIDDEN_RANK, 0)
        key_rank[row, columns] = 1 if self._model.backbone.two_streams else 0
        return _to_batch(
            ids, np.ones_like(key_rank), key_rank, columns[:, None], tokens[row, columns][:, None], segment_ids
        )

    def _losses(self, batch: Batch, memory: BaseMemory) -> tuple[np.ndarray, BaseMemory]:
        """Return the losses (B, P) of a batch, 0 where the target weight is 0, and the memory for the next window."""
        backbone = self._model.backbone
        batch = batch.to(backbone.device)
        hidden, memory = backbone(batch, memory)
        is_target = batch.target_weights > 0
        parts = max(1, MAX_LOGITS // self._model.config.clusters[-1][1])
        hidden, targets = hidden[:, backbone.n_cls :][is_target].split(parts), batch.targets[is_target].split(parts)
        flat = [self._model.lm_head(h[None], t[None])[0] for h, t in zip(hidden, targets, strict=True)]
        losses = np.zeros(is_target.shape)
        losses[is_target.cpu().numpy()] = torch.cat(flat).double().cpu().numpy()
        return losses, memory

    def _split_rows(self, lengths: np.ndarray, row_cost: int) -> Iterator[np.ndarray]:
        """Split rows into batches, the longest first. Texts of several windows share a batch only if they have the same length, because
        padding would come between memory and the tokens after it.

        Args:
            lengths: (N,) tokens of each row.
            row_cost: number of content and query rows per token.

        Yields:
            Indices of the rows of a batch.
        """
        rows = np.argsort(-lengths, kind="stable")
        sorted_lengths = lengths[rows]
        start = 0
        while start < len(rows):
            longest = int(sorted_lengths[start])
            n_columns = min(longest, self._window) + special_tokens.N_SYMBOLS
            end = start + max(1, self._batch_tokens // (n_columns * row_cost))
            shortest = longest if longest > self._window else 1
            end = min(end, int(np.searchsorted(-sorted_lengths, -shortest, side="right")))
            yield rows[start:end]
            start = end


def sample_order(n_tokens: int, index: int, seed: int, window: int, n_prefix: int = 0) -> np.ndarray:
    """Return the place of each token in a factorization order of its window, (T,) int64. The windows are read from left to right.

    Args:
        n_tokens: T.
        index: number of the order. Order 0 runs from left to right, the others are random.
        seed: seed of the random orders.
        window: longest window in tokens.
        n_prefix: number of tokens at the start that come first, from left to right.
    """
    places = np.arange(n_tokens) % window
    if index:
        rng = np.random.default_rng([seed, index, n_tokens - n_prefix])
        for start in range(0, n_tokens, window):
            free = places[max(start, n_prefix) : start + window]
            free[:] = free[rng.permutation(len(free))]
    return places


def _any_order_batch(tokens: np.ndarray, order: np.ndarray, is_text: np.ndarray) -> Batch:
    """Build a batch in which every token is a target, predicted from `<sep>`, `<cls>` and the tokens before it in the order."""
    ids, segment_ids, is_padding = _with_symbols(tokens, is_text)
    rank = np.pad(np.where(is_text, order + 1, 0), ((0, 0), (0, special_tokens.N_SYMBOLS)))
    key_rank = np.where(is_padding, HIDDEN_RANK, rank)
    rank[:, -special_tokens.N_SYMBOLS :] = 1  # as queries, <sep> and <cls> see each other
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    return _to_batch(ids, rank, key_rank, positions, tokens, segment_ids, is_text)


def _causal_batch(tokens: np.ndarray, previous: np.ndarray, is_text: np.ndarray) -> Batch:
    """Build a batch that reads the token before each token of the text, and predicts the text."""
    positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    key_rank = np.where(is_text, positions, HIDDEN_RANK)
    return _to_batch(previous, positions + 1, key_rank, positions, tokens, np.zeros_like(tokens), is_text)


def _with_symbols(tokens: np.ndarray, is_text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Append `<sep> <cls>` to each text. Return token ids, segment ids and the mask of padding, (B, T + 2) each."""
    width = ((0, 0), (0, special_tokens.N_SYMBOLS))
    ids, is_padding = np.pad(tokens, width), np.pad(~is_text, width)
    ids[:, -special_tokens.N_SYMBOLS :] = special_tokens.SEP, special_tokens.CLS
    segment_ids = np.full(ids.shape, SEGMENT_A)
    segment_ids[:, -1] = SEGMENT_CLS
    return ids, segment_ids, is_padding


def _to_batch(
    ids: np.ndarray,
    query_rank: np.ndarray,
    key_rank: np.ndarray,
    positions: np.ndarray,
    targets: np.ndarray,
    segment_ids: np.ndarray,
    is_target: np.ndarray | None = None,
) -> Batch:
    """Build a Batch from arrays."""
    return make_batch(
        torch.from_numpy(ids),
        torch.from_numpy(query_rank.astype(np.int32)),
        torch.from_numpy(key_rank.astype(np.int32)),
        torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segment_ids),
        targets=torch.from_numpy(np.ascontiguousarray(targets)),
        target_weights=None if is_target is None else torch.from_numpy(is_target.astype(np.float32)),
    )


def _with_memory(batch: Batch, reuse_len: int = 0) -> Batch:
    """Return the batch of a window that sees all of memory and puts `reuse_len` tokens into it."""
    return replace(batch, visible_mem_len=torch.full_like(batch.visible_mem_len, ALL_MEMORY), reuse_len=reuse_len)


def _lengths(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the number of tokens of each text, (N,) int64."""
    return np.array([len(tokens) for tokens in texts], np.int64)


def _pad(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of integers as one array, padded on the left like `collate`, and a mask of what is not padding."""
    lengths = _lengths(rows)
    is_text = np.arange(lengths.max(), 0, -1) <= lengths[:, None]
    padded = np.full(is_text.shape, special_tokens.PAD)
    padded[is_text] = np.concatenate(rows)
    return padded, is_text


def _ignore_progress(done: int, total: int) -> None:
    """Report nothing."""
