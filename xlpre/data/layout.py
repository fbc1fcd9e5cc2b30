"""From a place in the text to a window: [reused | A | sep | B | sep | cls], segment ids, pair label.

Source: XLNet section 2.4-2.5; zihangdai/xlnet data_utils.py `_split_a_and_b` (SPEC of the row). The reused part is read again: it was
A and B of the last window, or their neighbours, and is what enters memory. The next window starts where it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xlpre.data.lanes import Place, Text
from xlpre.text import symbols

SEGMENT_A, SEGMENT_B, SEGMENT_CLS = 0, 1, 2


@dataclass(frozen=True)
class DataConfig:
    """How text becomes rows.

    Attributes:
        store: the token store's folder.
        window: T, tokens of a window, symbols included.
        reuse_len: how many first tokens of a window enter memory; also how far a lane advances a step. Equal to `window`,
            the window is plain text (no symbols, no pairs), as in Transformer-XL.
        pairs: two segments A and B, half of the time from different places; else A alone.
        bidirectional: every second lane reads from right to left.
        run_windows: a lane reads so many windows in a row before it moves to another place of the text.
        workers: threads that prepare batches ahead.
    """

    store: str = "stores/${name}"
    window: int = 512
    reuse_len: int = 256
    pairs: bool = True
    bidirectional: bool = True
    run_windows: int = 128
    workers: int = 1

    def __post_init__(self) -> None:
        new = self.window - self.reuse_len
        if self.window < 2 or self.reuse_len < 1 or (new != 0 and new < 2 + self.n_symbols):
            raise ValueError(
                f"data.reuse_len ({self.reuse_len}) must be at least 1 and leave room in data.window ({self.window}) for "
                f"{self.n_symbols} symbols and 2 tokens; set data.reuse_len={max(self.window // 2, 1)}, "
                f"or data.reuse_len={self.window} for plain text without symbols"
            )
        if self.run_windows < 1 or self.workers < 1:
            raise ValueError(
                f"data.run_windows ({self.run_windows}) and data.workers ({self.workers}) must be at least 1"
            )

    @property
    def n_symbols(self) -> int:
        """<sep> and <cls> of a window."""
        return 0 if self.reuse_len == self.window else 3 if self.pairs else 2

    @property
    def reach(self) -> int:
        """Tokens of text that a window reads from its first one on, and the one after the last."""
        return self.window - self.n_symbols + 1


@dataclass(frozen=True)
class Window:
    """One row, in the order the model reads it.

    Attributes:
        ids: (T,) int64.
        segments: (T,) int64.
        functional: (T,) bool, <sep> and <cls> put there by the layout: never targets.
        following: the id after the last token of a plain window, which its last position predicts in a causal model.
        backward: the row runs from right to left.
        continues: the lane's last window ended where this one begins.
        pair_label: 1 if B follows A.
        reuse_len: length of the reused part.
    """

    ids: np.ndarray
    segments: np.ndarray
    functional: np.ndarray
    following: int
    backward: bool
    continues: bool
    pair_label: int
    reuse_len: int


def lay_out(text: Text, place: Place, config: DataConfig, rng: np.random.Generator) -> Window:
    """The window at `place` of `text`; `rng` draws where A ends and B begins."""
    middle = place.begin + config.reuse_len
    reused = text.tokens(place.begin, middle)
    parts: list[tuple[np.ndarray, int, bool]] = [(reused, SEGMENT_A, False)]
    label = 1
    sep, cls = np.array([symbols.SEP]), np.array([symbols.CLS])
    n_new = config.window - config.reuse_len - config.n_symbols
    if config.n_symbols == 3:
        (a_begin, a_end), (b_begin, b_end), label = split_pair(text, middle, n_new, rng)
        parts += [(text.tokens(a_begin, a_end), SEGMENT_A, False), (sep, SEGMENT_A, True)]
        parts += [(text.tokens(b_begin, b_end), SEGMENT_B, False), (sep, SEGMENT_B, True), (cls, SEGMENT_CLS, True)]
    elif config.n_symbols == 2:
        parts += [
            (text.tokens(middle, middle + n_new), SEGMENT_A, False),
            (sep, SEGMENT_A, True),
            (cls, SEGMENT_CLS, True),
        ]
    following = text.tokens(middle, middle + 1)
    return Window(
        ids=np.concatenate([ids for ids, _, _ in parts]).astype(np.int64),
        segments=np.concatenate([np.full(len(ids), segment) for ids, segment, _ in parts]),
        functional=np.concatenate([np.full(len(ids), functional) for ids, _, functional in parts]),
        following=int(following[0]) if len(following) else symbols.EOD,
        backward=place.backward,
        continues=place.continues,
        pair_label=label,
        reuse_len=config.reuse_len,
    )


def split_pair(
    text: Text, begin: int, total: int, rng: np.random.Generator
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Segments A and B of `total` tokens together, A from `begin` on.

    Half of the time B is what follows A (label 1), else a sentence from anywhere (label 0). Both are then cut on their right,
    the longer first.

    Returns:
        (begin, end) of A, (begin, end) of B, label.

    Source: zihangdai/xlnet data_utils.py, `_split_a_and_b`.
    """
    end = text.boundary_after(begin + total)
    cuts = text.boundaries(begin, end)
    cuts = cuts[cuts < end]
    follows = len(cuts) > 0 and rng.random() >= 0.5
    a_end = int(cuts[rng.integers(len(cuts))]) if len(cuts) else end
    if follows:
        b_begin, b_end = a_end, end
    else:
        b_len = max(1, total - (a_end - begin))
        at = int(rng.integers(len(text) - b_len))
        b_begin = text.boundary_before(at)
        b_end = min(text.boundary_after(at + b_len), len(text) - 1)  # as the original, which leaves the last token out
    a_len, b_len = a_end - begin, b_end - b_begin
    excess = a_len + b_len - total
    a_cut = min(excess, max(0, a_len - b_len))  # the longer one down to the other's length,
    b_cut = min(excess, max(0, b_len - a_len))
    rest = excess - a_cut - b_cut  # then in turn, B first
    a_cut, b_cut = a_cut + rest // 2, b_cut + rest - rest // 2
    return (begin, a_end - a_cut), (b_begin, b_end - b_cut), int(follows)
