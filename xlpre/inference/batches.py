"""Batches of single texts, without an objective: texts with masked tokens or without, and their collation into one batch.

Rows are padded on the left, as in XLNet's fine-tuning, so that <cls> stays the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.batch import FIELD_SPECS, HIDDEN_RANK, Batch, make_batch
from xlpre.common.errors import InputError
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.text import special_tokens
from xlpre.text.tokenizer import integer_row

MAX_TOKENS = 2048  # of a text; attention memory grows with its square
ROW_RULE = "a one-dimensional sequence of integers. Build one batch per text and join them with xlpre.inference.collate"
# all other fields are padded with 0, so padding sees only itself, and its targets have weight 0
PADDING = {"input_ids": special_tokens.PAD, "key_rank": HIDDEN_RANK}


def check_length(n_tokens: int) -> None:
    """Raise InputError if `n_tokens`, including <sep> and <cls>, are too many for a forward pass."""
    if n_tokens > MAX_TOKENS:
        raise InputError(f"a text of {n_tokens:,} tokens is invalid: the limit is {MAX_TOKENS:,}. Shorten it.")


def text_batch(tokens: np.ndarray, query_rank: np.ndarray, key_rank: np.ndarray, positions: np.ndarray) -> Batch:
    """Build a batch of one row.

    Args:
        tokens: (T,) int64 token ids, the last of which are <sep> <cls>.
        query_rank: (T,) ranks as queries.
        key_rank: (T,) ranks as keys.
        positions: (P,) int64 positions of the targets, increasing.
    """
    segment_ids = np.full(len(tokens), SEGMENT_A)
    segment_ids[-1] = SEGMENT_CLS
    return make_batch(
        torch.from_numpy(tokens)[None],
        query_rank=torch.from_numpy(query_rank.astype(np.int32))[None],
        key_rank=torch.from_numpy(key_rank.astype(np.int32))[None],
        target_positions=torch.from_numpy(positions)[None],
        segment_ids=torch.from_numpy(segment_ids)[None],
    )


def masked_batch(
    tokens: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray, two_streams: bool = True
) -> Batch:
    """Build a batch of one row, `[tokens <sep> <cls>]`, with masked targets.

    Args:
        tokens: (T,) token ids.
        positions: (P,) positions to mask and predict.
        two_streams: True for a permutation model, in which no token sees a masked position; False for a denoising model, in which all
            tokens see <mask> there, as in training. `model.backbone.two_streams` is the right value.

    Raises:
        InputError: a position is outside the text or repeated, a token id is negative, or an argument is not a one-dimensional sequence of
            integers.
    """
    tokens, positions = (integer_row(name, x, ROW_RULE) for name, x in (("tokens", tokens), ("positions", positions)))
    if len(tokens) and tokens.min() < 0:
        raise InputError(f"tokens with id {tokens.min()} are invalid: ids must be at least 0.")
    if len(np.unique(positions)) < len(positions) or not all(0 <= position < len(tokens) for position in positions):
        raise InputError(
            f"positions={positions.tolist()} is invalid: positions must be between 0 and {len(tokens) - 1}, each at most once."
        )
    return masked_row(np.concatenate([tokens, [special_tokens.SEP, special_tokens.CLS]]), positions, two_streams)


def unmasked_batch(tokens: Sequence[int] | np.ndarray) -> Batch:
    """Build a batch of one row, `[tokens <sep> <cls>]`, to compute the hidden states of all T + 2 tokens.

    Use it for models that read from the content stream. Every token sees every token.

    Args:
        tokens: (T,) token ids.
    """
    batch = masked_batch(tokens, [])
    positions = torch.arange(batch.input_ids.size(1))[None]
    weights = torch.ones(positions.shape)
    return replace(batch, target_positions=positions, targets=batch.input_ids, target_weights=weights)


def masked_row(tokens: np.ndarray, positions: np.ndarray, two_streams: bool) -> Batch:
    """Build a batch of one row with the token ids `tokens` (T,) int64 and masked targets at `positions` (P,) int64."""
    input_ids, key_rank = tokens.copy(), np.zeros(len(tokens))
    input_ids[positions] = special_tokens.MASK
    key_rank[positions] = int(two_streams)
    batch = text_batch(input_ids, np.ones(len(tokens)), key_rank, positions)
    return replace(batch, targets=torch.from_numpy(tokens)[batch.target_positions])


def collate(batches: Sequence[Batch]) -> Batch:
    """Join batches of different lengths into one. In each row, the padding comes first, then the tokens of its text; likewise for targets.

    Args:
        batches: batches without memory, from `unmasked_batch`, `masked_batch` or `cloze_batch`.

    Returns:
        Batch in which P is the largest number of targets, and T is large enough to hold every text and its padding targets.
        Padding tokens have `key_rank == HIDDEN_RANK`, padding targets have weight 0.

    Raises:
        InputError: there are no batches, or a batch reads or writes memory: padding would come between the memory and the tokens.
    """
    if not batches:
        raise InputError("batches=[] is invalid: there must be at least one batch.")
    if any(batch.reuse_len or bool(batch.visible_mem_len.any()) for batch in batches):
        raise InputError(
            "a batch with reuse_len or visible_mem_len above 0 is invalid here: padding would come between its memory and its "
            "tokens. Run it without `collate`."
        )
    P = max(batch.targets.size(1) for batch in batches)
    # padding targets need padding tokens as positions
    T = max(batch.input_ids.size(1) + P - batch.targets.size(1) for batch in batches)
    rows = [_pad(batch, T, P) for batch in batches]
    return Batch(**{name: torch.cat([row[name] for row in rows]) for name in FIELD_SPECS}, reuse_len=0)


def split_rows(n_tokens: Sequence[int] | np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Split rows into batches, the longest rows first.

    Args:
        n_tokens: (N,) tokens of each row, counted once per stream.
        batch_tokens: largest number of tokens of a batch, with padding. A single row may have more.

    Yields:
        (B,) indices of the rows of a batch.
    """
    rows, start = np.argsort(-np.asarray(n_tokens), kind="stable"), 0
    while start < len(rows):
        end = start + max(1, batch_tokens // n_tokens[rows[start]])
        yield rows[start:end]
        start = end


def _pad(batch: Batch, length: int, n_targets: int) -> dict[str, Tensor]:
    """Return the fields of a batch, padded to `length` tokens and `n_targets` targets."""
    width = {"BT": length, "BP": n_targets}
    fields = {}
    for name, (letters, _) in FIELD_SPECS.items():
        x = getattr(batch, name)
        fields[name] = F.pad(x, (width[letters] - x.size(1), 0), value=PADDING.get(name, 0)) if letters in width else x
    n_padding = n_targets - batch.targets.size(1)
    fields["target_positions"][:, :n_padding] = torch.arange(n_padding, device=batch.targets.device)
    fields["target_positions"][:, n_padding:] += length - batch.input_ids.size(1)
    return fields
