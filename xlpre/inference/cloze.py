"""Text with blanks as a batch: each blank is a target that sees all of the text and no other blank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_CLS
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer

BLANK = "____"
ANY_BLANK = "_{3,}"  # two are part of a name in many a program, as in __init__
MAX_TOKENS = 2048  # attention takes memory by the square of it


def has_blank(text: str) -> bool:
    """Whether there is something to fill in."""
    return re.search(ANY_BLANK, text) is not None


def blanks_batch(text: str, tokenizer: Tokenizer) -> Batch:
    """One row `[text <sep> <cls>]` with a target at each blank, one piece wide.

    Args:
        text: with one or more blanks of three or more underscores.
        tokenizer: its vocabulary.

    Returns:
        A batch with B = 1; `targets` are <mask>, nothing is known about them.

    Raises:
        ValueError: no text; no blank in it; too long; the name of the symbol that stands for a blank here.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"the text must be one str, not {text!r:.60}; of several texts each has a batch of its own, and xlpre.inference.collate "
            "makes them one"
        )
    as_blank = special_tokens.SPECIAL_TOKENS[special_tokens.EOP]  # a piece of its own
    if as_blank in text:
        raise ValueError(f"{text!r} has {as_blank}, which is no text but a symbol; leave it out")
    ids = tokenizer.encode(re.sub(rf"\s*{ANY_BLANK}", as_blank, text.strip()))
    # the space before a blank belongs to the word that is missing
    space = tokenizer.pieces.index(special_tokens.WORD_BOUNDARY) if special_tokens.WORD_BOUNDARY in tokenizer.pieces else None
    ids = [
        i for i, after in zip(ids, [*ids[1:], None], strict=False) if not (i == space and after == special_tokens.EOP)
    ]
    tokens = np.array([*ids, special_tokens.SEP, special_tokens.CLS])
    positions = np.flatnonzero(tokens == special_tokens.EOP)
    if not len(positions):
        raise ValueError(f"{text!r} has no blank; mark one with {BLANK}")
    if len(tokens) > MAX_TOKENS:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, at most {MAX_TOKENS:,} are read at once; leave some of it out"
        )
    return batch_of(tokens, positions)


def hide(tokens: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray) -> Batch:
    """The same for token ids (T,) of a text, hidden at `positions` (P,).

    Raises:
        ValueError: a position that is none of the text's, or one twice; anything but a row of whole numbers.
    """
    tokens, positions = _row("tokens", tokens), _row("positions", positions)
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"tokens have the id {tokens.min()}; ids of pieces begin with 0")
    if len(np.unique(positions)) < len(positions) or not all(0 <= place < len(tokens) for place in positions):
        raise ValueError(
            f"positions ({positions.tolist()}) must be places in the text, 0 to {len(tokens) - 1}, none of them twice"
        )
    return batch_of(np.concatenate([tokens, [special_tokens.SEP, special_tokens.CLS]]), positions)


def whole(tokens: Sequence[int] | np.ndarray) -> Batch:
    """The same with nothing hidden: each of the T + 2 tokens is read out and sees all; for a model that reads from its content stream."""
    batch = hide(tokens, [])
    positions = torch.arange(batch.input_ids.size(1))[None]
    weights = torch.ones(positions.shape)
    return replace(batch, target_positions=positions, targets=batch.input_ids, target_weights=weights)


def _row(name: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Whole numbers (N,) as int64."""
    try:
        row = np.asarray(values)
    except (ValueError, TypeError):  # lists of several lengths
        row = np.empty((0, 0))
    if row.ndim != 1 or (row.dtype.kind not in "iu" and len(row)):
        raise ValueError(
            f"{name} must be one row of whole numbers, not {values!r:.60}; of several texts each has a batch of its own, and "
            "xlpre.inference.collate makes them one"
        )
    return row.astype(np.int64)


def batch_of(tokens: np.ndarray, positions: np.ndarray) -> Batch:
    """A batch of one row (T,) int64 with targets at `positions` (P,) int64."""
    hidden = tokens.copy()
    hidden[positions] = special_tokens.MASK
    segments = np.full(len(tokens), SEGMENT_A)
    segments[-1] = SEGMENT_CLS
    key_rank = np.zeros(len(tokens), np.int32)
    key_rank[positions] = 1
    row = torch.from_numpy
    return Batch(
        input_ids=row(hidden)[None],
        segment_ids=row(segments)[None],
        query_rank=torch.ones(1, len(tokens), dtype=torch.int32),
        key_rank=row(key_rank)[None],
        target_positions=row(positions)[None],
        targets=row(tokens[positions])[None],
        target_weights=torch.ones(1, len(positions)),
        backward=torch.tensor([False]),
        visible_mem_len=torch.tensor([0]),
        pair_label=torch.tensor([1]),
        reuse_len=0,
    )
