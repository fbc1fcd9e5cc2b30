"""Layout of windows: [reused | A | <sep> | B | <sep> | <cls>], segment ids and pair labels.

The reused part enters memory, and the next window starts at its end. So the next window begins with the text of the segment A before it.

Source: XLNet, sections 2.4 and 2.5; zihangdai/xlnet data_utils.py, `_split_a_and_b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xlpre.common.errors import InputError, check_minimum
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.text import special_tokens

SEGMENT_A, SEGMENT_B, SEGMENT_CLS = 0, 1, 2


@dataclass(frozen=True)
class DataConfig:
    """Windows of text and their order.

    Attributes:
        store_dir: folder of the token store.
        seq_len: T, tokens of a window, including `<sep>` and `<cls>`.
        reuse_len: number of tokens at the start of a window that enter memory. The next window of the same lane (batch row) starts after
            them. If it equals `seq_len`, a window is plain text without `<sep>`, `<cls>` and pairs, as in Transformer-XL.
        pairs: whether a window has two segments, A and B. In half of the windows, B follows A; in the other half, B is from another
            position of the text. false: a window has only segment A.
        bidirectional: whether every second lane (batch row) reads from right to left. Set false for causal models.
        windows_per_run: number of consecutive windows that a lane (batch row) reads before it moves to another position of the text. Short
            training runs and small batches need a small number, such as 4.
        num_threads: threads that prepare batches in advance.
    """

    store_dir: str = "stores/${name}"
    seq_len: int = 512
    reuse_len: int = 256
    pairs: bool = True
    bidirectional: bool = True
    windows_per_run: int = 128
    num_threads: int = 1

    def __post_init__(self) -> None:
        n_new = self.seq_len - self.reuse_len
        if self.seq_len < 2 or self.reuse_len < 1 or (n_new != 0 and n_new < 2 + self.n_symbols):
            seq_len = max(self.seq_len, 2 * (2 + self.n_symbols))
            plain_len = max(self.seq_len, 2)
            raise InputError(
                f"data.reuse_len={self.reuse_len} is invalid: it must be at least 1, and data.seq_len={self.seq_len} must be larger by at "
                f"least {2 + self.n_symbols}, for 2 tokens of text and {self.n_symbols} of <sep> and <cls>. Set "
                f"data.reuse_len={seq_len // 2} data.seq_len={seq_len}, or for plain text data.reuse_len={plain_len} "
                f"data.seq_len={plain_len}."
            )
        for name in ("windows_per_run", "num_threads"):
            check_minimum(f"data.{name}", getattr(self, name), 1, f"Set data.{name}=1.")

    @property
    def has_pairs(self) -> bool:
        """True if windows have a segment B. Plain text has none."""
        return self.pairs and self.reuse_len != self.seq_len

    @property
    def n_symbols(self) -> int:
        """Number of <sep> and <cls> in a window."""
        return 3 if self.has_pairs else 0 if self.reuse_len == self.seq_len else 2

    @property
    def lookahead(self) -> int:
        """Number of text tokens that a window reads, including the token after its last one."""
        return self.seq_len - self.n_symbols + 1


@dataclass(frozen=True)
class Windows:
    """B windows, in the order in which the model reads them.

    Attributes:
        ids: (B, T) int64 token ids.
        segments: (B, T) int64 segment ids.
        special_mask: (B, T) bool, True for <sep> and <cls> of the layout, which are never targets.
        following: (B,) int64, token that follows a plain window in the text. A causal model predicts it at the last position.
        backward: (B,) bool, True if the row is read from right to left.
        visible_mem_len: (B,) int64, number of tokens before the window that are visible in memory.
        pair_label: (B,) int64, 1 if segment B follows segment A in the text, else 0.
        reuse_len: number of tokens in the reused part.
    """

    ids: np.ndarray
    segments: np.ndarray
    special_mask: np.ndarray
    following: np.ndarray
    backward: np.ndarray
    visible_mem_len: np.ndarray
    pair_label: np.ndarray
    reuse_len: int


class Pair(NamedTuple):
    """Segments A and B of a window.

    Attributes:
        a_end: position after the last token of A.
        b_begin: position of the first token of B.
        b_end: position after the last token of B.
        label: 1 if B follows A in the text, else 0.
    """

    a_end: int
    b_begin: int
    b_end: int
    label: int


def build_windows(locations: Sequence[WindowLocation], config: DataConfig, rng: RowRng) -> Windows:
    """Lay out the windows at `locations`.

    Args:
        locations: location of each of the B windows.
        config: layout of a window.
        rng: random numbers that select the ends of A and the positions of B.
    """
    shape = (len(locations), config.seq_len)
    windows = Windows(
        ids=np.full(shape, special_tokens.SEP, np.int64),
        segments=np.full(shape, SEGMENT_A, np.int64),
        special_mask=np.zeros(shape, bool),
        following=np.full(len(locations), special_tokens.EOD, np.int64),
        backward=np.array([location.text.backward for location in locations]),
        visible_mem_len=np.array([location.visible_mem_len for location in locations], np.int64),
        pair_label=np.ones(len(locations), np.int64),
        reuse_len=config.reuse_len,
    )
    if config.has_pairs:
        _fill_pairs(windows, locations, rng)
    else:
        _fill_single_segment(windows, locations, config.seq_len - config.n_symbols)
    if config.n_symbols:
        windows.ids[:, -1], windows.segments[:, -1] = special_tokens.CLS, SEGMENT_CLS
        windows.special_mask[:, -2:] = True
    return windows


def split_pair(text: DirectedText, begin: int, total: int, coin: float, cut: float, elsewhere: float) -> Pair:
    """Choose segments A and B with `total` tokens together.

    With probability 1/2, B follows A (label 1). Otherwise B starts with a sentence at a random position (label 0). Both segments are then
    truncated at their right ends, the longer one first.

    Args:
        text: text of both segments.
        begin: position of the first token of A.
        total: number of tokens of A and B.
        coin: uniform in [0, 1); selects whether B follows A.
        cut: uniform in [0, 1); selects the sentence end at which A ends.
        elsewhere: uniform in [0, 1); selects the position of B if it does not follow A.

    Source: zihangdai/xlnet data_utils.py, `_split_a_and_b`.
    """
    sentences = text.sentences
    first, last = sentences.first_from(begin + 1), sentences.first_from(begin + total)
    n_cuts = last - first  # sentence ends where A may end
    end = sentences[last]
    a_end = sentences[first + int(cut * n_cuts)] if n_cuts else end
    b_follows = n_cuts > 0 and coin >= 0.5
    if b_follows:
        b_begin, b_end = a_end, end
    else:
        b_len = max(1, total - (a_end - begin))
        position = int(elsewhere * (len(text) - b_len))
        b_begin = sentences[sentences.last_until(position)]
        # the original leaves out the last token of the text
        b_end = min(sentences[sentences.first_from(position + b_len)], len(text) - 1)
    a_len, b_len = a_end - begin, b_end - b_begin
    excess = a_len + b_len - total
    # the longer segment is truncated to the length of the shorter one, then both lose a token in turn, B first
    a_cut = min(excess, max(0, a_len - b_len))
    b_cut = min(excess, max(0, b_len - a_len))
    rest = excess - a_cut - b_cut
    a_cut, b_cut = a_cut + rest // 2, b_cut + rest - rest // 2
    return Pair(a_end - a_cut, b_begin, b_end - b_cut, int(b_follows))


def _fill_single_segment(windows: Windows, locations: Sequence[WindowLocation], n_tokens: int) -> None:
    for row, location in enumerate(locations):
        tokens = location.text.tokens(location.begin, location.begin + n_tokens + 1)
        windows.ids[row, :n_tokens], windows.following[row] = tokens[:-1], tokens[-1]


def _fill_pairs(windows: Windows, locations: Sequence[WindowLocation], rng: RowRng) -> None:
    n_new = windows.ids.shape[1] - windows.reuse_len - 3
    for row, (location, numbers) in enumerate(zip(locations, rng.uniform(3).tolist(), strict=True)):
        pair = split_pair(location.text, location.begin + windows.reuse_len, n_new, *numbers)
        sep = pair.a_end - location.begin  # A follows the reused part in the text
        windows.ids[row, :sep] = location.text.tokens(location.begin, pair.a_end)
        windows.ids[row, sep + 1 : -2] = location.text.tokens(pair.b_begin, pair.b_end)
        windows.segments[row, sep + 1 :] = SEGMENT_B
        windows.special_mask[row, sep] = True
        windows.pair_label[row] = pair.label
