"""From places in the text to windows: [reused | A | sep | B | sep | cls], segment ids, pair label.

Source: XLNet section 2.4-2.5; zihangdai/xlnet data_utils.py `_split_a_and_b` (SPEC of the row). The reused part is read again: it was
A and B of the last window, or their neighbours, and is what enters memory. The next window starts where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.text import special_tokens

SEGMENT_A, SEGMENT_B, SEGMENT_CLS = 0, 1, 2


@dataclass(frozen=True)
class DataConfig:
    """How text becomes rows.

    Attributes:
        store_dir: the token store's folder.
        seq_len: T, tokens of a window, symbols included.
        reuse_len: how many first tokens of a window enter memory; also how far a lane advances a step. Equal to `seq_len`,
            the window is plain text (no symbols, no pairs), as in Transformer-XL.
        pairs: two segments A and B, half of the time from different places; else A alone.
        bidirectional: every second lane reads from right to left.
        windows_per_run: a lane reads so many windows in a row before it moves to another place of the text.
        num_threads: threads that prepare batches ahead.
    """

    store_dir: str = "stores/${name}"
    seq_len: int = 512
    reuse_len: int = 256
    pairs: bool = True
    bidirectional: bool = True
    windows_per_run: int = 128
    num_threads: int = 1

    def __post_init__(self) -> None:
        new = self.seq_len - self.reuse_len
        if self.seq_len < 2 or self.reuse_len < 1 or (new != 0 and new < 2 + self.n_symbols):
            window = max(self.seq_len, 2 * (2 + self.n_symbols))
            plain = max(self.seq_len, 2)
            raise ValueError(
                f"data.reuse_len ({self.reuse_len}) must be at least 1 and leave room in data.seq_len ({self.seq_len}) for "
                f"{self.n_symbols} symbols and 2 tokens; set data.reuse_len={window // 2} data.seq_len={window}, or "
                f"data.reuse_len={plain} data.seq_len={plain} for plain text without symbols"
            )
        if self.windows_per_run < 1 or self.num_threads < 1:
            raise ValueError(
                f"data.windows_per_run ({self.windows_per_run}) and data.num_threads ({self.num_threads}) must be at least 1"
            )

    @property
    def has_pairs(self) -> bool:
        """Whether windows have a segment B; plain text has none."""
        return self.pairs and self.reuse_len != self.seq_len

    @property
    def n_symbols(self) -> int:
        """<sep> and <cls> of a window."""
        return 3 if self.has_pairs else 0 if self.reuse_len == self.seq_len else 2

    @property
    def lookahead(self) -> int:
        """Tokens of text that a window reads from its first one on, and the one after the last."""
        return self.seq_len - self.n_symbols + 1


@dataclass(frozen=True)
class Windows:
    """B rows, in the order the model reads them.

    Attributes:
        ids: (B, T) int64.
        segments: (B, T) int64.
        special_mask: (B, T) bool, <sep> and <cls> put there by the layout: never targets.
        following: (B,) int64, the id after the last token of a plain window, which its last position predicts in a causal model.
        backward: (B,) bool, the row runs from right to left.
        remembers: (B,) int64, how many tokens before the window its memory may show.
        pair_label: (B,) int64, 1 if B follows A.
        reuse_len: length of the reused part.
    """

    ids: np.ndarray
    segments: np.ndarray
    special_mask: np.ndarray
    following: np.ndarray
    backward: np.ndarray
    visible_mem_len: np.ndarray
    pair_label: np.ndarray
    reuse_len: int


def build_windows(places: Sequence[WindowLocation], config: DataConfig, rng: RowRng) -> Windows:
    """The windows at `places`; `rng` decide where A ends and B begins."""
    shape = (len(places), config.seq_len)
    windows = Windows(
        ids=np.full(shape, special_tokens.SEP, np.int64),
        segments=np.full(shape, SEGMENT_A, np.int64),
        special_mask=np.zeros(shape, bool),
        following=np.full(len(places), special_tokens.EOD, np.int64),
        backward=np.array([place.text.backward for place in places]),
        visible_mem_len=np.array([place.visible_mem_len for place in places], np.int64),
        pair_label=np.ones(len(places), np.int64),
        reuse_len=config.reuse_len,
    )
    if config.has_pairs:
        _put_pairs(windows, places, rng)
    else:
        _put_plain(windows, places, config.seq_len - config.n_symbols)
    if config.n_symbols:
        windows.ids[:, -1], windows.segments[:, -1] = special_tokens.CLS, SEGMENT_CLS
        windows.special_mask[:, -2:] = True
    return windows


def _put_plain(windows: Windows, places: Sequence[WindowLocation], n_tokens: int) -> None:
    for row, place in enumerate(places):
        read = place.text.tokens(place.begin, place.begin + n_tokens + 1)
        windows.ids[row, :n_tokens], windows.following[row] = read[:-1], read[-1]


def _put_pairs(windows: Windows, places: Sequence[WindowLocation], rng: RowRng) -> None:
    n_new = windows.ids.shape[1] - windows.reuse_len - 3
    for row, (place, drawn) in enumerate(zip(places, rng.uniform(3).tolist(), strict=True)):
        pair = split_pair(place.text, place.begin + windows.reuse_len, n_new, *drawn)
        sep = pair.a_end - place.begin  # A follows the reused part in the text
        windows.ids[row, :sep] = place.text.tokens(place.begin, pair.a_end)
        windows.ids[row, sep + 1 : -2] = place.text.tokens(pair.b_begin, pair.b_end)
        windows.segments[row, sep + 1 :] = SEGMENT_B
        windows.special_mask[row, sep] = True
        windows.pair_label[row] = pair.label


class Pair(NamedTuple):
    """Where A ends, where B begins and ends; label 1 if B follows A."""

    a_end: int
    b_begin: int
    b_end: int
    label: int


def split_pair(text: DirectedText, begin: int, total: int, coin: float, cut: float, elsewhere: float) -> Pair:
    """Segments A and B of `total` tokens together, A from `begin` on.

    Half of the time B is what follows A (label 1), else a sentence from anywhere (label 0). Both are then cut on their right,
    the longer first.

    Args:
        text: to read from.
        begin: the first token of A.
        total: tokens of both.
        coin: uniform from 0 to 1 as `cut` and `elsewhere`; decides whether B follows A.
        cut: which of the sentence ends A ends at.
        elsewhere: in which place of the text B is, where it does not follow A.

    Source: zihangdai/xlnet data_utils.py, `_split_a_and_b`.
    """
    sentences = text.sentences
    first, last = sentences.first_from(begin + 1), sentences.first_from(begin + total)
    n_cuts = last - first  # ends of sentences in between, where A may end
    end = sentences[last]
    a_end = sentences[first + int(cut * n_cuts)] if n_cuts else end
    follows = n_cuts > 0 and coin >= 0.5
    if follows:
        b_begin, b_end = a_end, end
    else:
        b_len = max(1, total - (a_end - begin))
        at = int(elsewhere * (len(text) - b_len))
        b_begin = sentences[sentences.last_until(at)]
        b_end = min(
            sentences[sentences.first_from(at + b_len)], len(text) - 1
        )  # the original leaves the last token out
    a_len, b_len = a_end - begin, b_end - b_begin
    excess = a_len + b_len - total
    a_cut = min(excess, max(0, a_len - b_len))  # the longer one down to the other's length,
    b_cut = min(excess, max(0, b_len - a_len))
    rest = excess - a_cut - b_cut  # then in turn, B first
    a_cut, b_cut = a_cut + rest // 2, b_cut + rest - rest // 2
    return Pair(a_end - a_cut, b_begin, b_end - b_cut, int(follows))
