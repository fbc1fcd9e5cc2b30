"""One row of a batch made from a text, as a reader may want to see it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.config import PretrainConfig
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.data.store import SplitData, TokenStore
from xlpre.data.window_layout import SEGMENT_A, SEGMENT_B, SEGMENT_CLS, DataConfig, build_windows
from xlpre.objectives.registry import build_objective
from xlpre.text.tokenizer import Tokenizer

SEGMENTS = {SEGMENT_A: "A", SEGMENT_B: "B", SEGMENT_CLS: "cls"}
ITSELF, SEEN = 0.5, 1.0  # a token that a row sees only because it is its own; any other that it sees


@dataclass(frozen=True)
class Explanation:
    """One row of a batch, made from a text.

    Attributes:
        title: the objective and what was drawn.
        about: what the objective does, and what a reader should know of this window.
        pieces: T pieces of the text, in the order in which the row has them.
        read: T pieces that the model reads: the same, or what hides a target.
        segments: T names of segments.
        query_rank: (T,) ranks of Examples.
        key_rank: (T,) the same.
        target_positions: (P,) places in the window.
        wanted: P pieces to predict there.
        special_mask: (T,) bool, <sep> and <cls>.
        reuse_len: length of the reused part.
        backward: the row runs from right to left.
        two_streams: a query stream predicts, which does not see the token at its own place.
    """

    title: str
    about: list[str]
    pieces: list[str]
    read: list[str]
    segments: list[str]
    query_rank: np.ndarray
    key_rank: np.ndarray
    target_positions: np.ndarray
    wanted: list[str]
    special_mask: np.ndarray
    reuse_len: int
    backward: bool
    two_streams: bool

    @property
    def streams(self) -> dict[str, np.ndarray]:
        """(T, T) of each stream, rows see columns: SEEN, ITSELF or 0; nan in rows of the query stream that predict nothing."""
        visible = self.query_rank[:, None] > self.key_rank[None, :]
        content = np.where(visible, SEEN, np.eye(len(visible)) * ITSELF)
        if not self.two_streams:
            return {"content stream: reads and predicts": content}
        query = np.where(self.is_target[:, None], visible * SEEN, np.nan)
        return {"content stream: reads": content, "query stream: predicts": query}

    @property
    def is_target(self) -> np.ndarray:
        """(T,) bool, places that predict."""
        return np.isin(np.arange(len(self.pieces)), self.target_positions)

    @property
    def places(self) -> list[int | None]:
        """The place of each token in the factorization order of its part of the window; None for context."""
        if not self.two_streams:
            return [None] * len(self.pieces)
        in_rest = np.arange(len(self.pieces)) >= self.reuse_len
        order = self.key_rank - np.where(in_rest, self.reuse_len + 1, 0)
        placed = self.is_target | self.special_mask
        return [int(place) if has else None for place, has in zip(order, placed, strict=True)]


def explain(
    text: str, tokenizer: Tokenizer, config: PretrainConfig, step: int = 0, backward: bool = False
) -> Explanation:
    """Make one window of `text` and draw its targets and order, as training does.

    Args:
        text: one line a paragraph.
        tokenizer: the vocabulary.
        config: its `data`, `objective`, `text.line_type` and `seed` count; the window shrinks to a text that is shorter.
        step: each draws anew.
        backward: read from right to left.

    Raises:
        ValueError: a text that is too short; settings that do not go together.
    """
    document = [line for line in text.splitlines() if line.strip()]
    if not document:
        raise ValueError("the text is empty; give a sentence or two in quotes")
    ids, sentence_ends = tokenizer.encode_document(document, config.text.line_type)
    if backward:  # the window ends where the text does: the <eod> beyond it is the one before
        ids, sentence_ends = np.roll(ids, 1), np.append(sentence_ends[:-1] + 1, len(ids))
    build_objective(config.objective, config.data, tokenizer.starts_word)  # here a message has the numbers as given
    data = fitted(config.data, len(ids) - 1)
    objective = build_objective(config.objective, data, tokenizer.starts_word)
    whole = DirectedText(SplitData(ids, sentence_ends, np.array([len(ids)])), backward)
    rng = RowRng(config.seed, [int(backward)], step)
    windows = build_windows([WindowLocation(whole, begin=0, visible_mem_len=0)], data, rng)
    row = objective.build_inputs(windows, rng)
    direction = "backward, from right to left" if backward else "forward"
    pieces = tokenizer.pieces
    return Explanation(
        f"{config.objective.name}, {data.seq_len} tokens ({data.reuse_len} reused), {direction}, seed {config.seed}, step {step}",
        [objective.description, *_notes(int(windows.pair_label[0]), data, len(ids) - 1)],
        pieces=[pieces[i] for i in windows.ids[0]],
        read=[pieces[i] for i in row.input_ids[0]],
        segments=[SEGMENTS[i] for i in windows.segments[0]],
        query_rank=row.query_rank[0],
        key_rank=row.key_rank[0],
        target_positions=row.target_positions[0],
        wanted=[pieces[i] for i in row.targets[0]],
        special_mask=windows.special_mask[0],
        reuse_len=data.reuse_len,
        backward=backward,
        two_streams=objective.two_streams,
    )


def fitted(data: DataConfig, n_tokens: int) -> DataConfig:
    """`data` with a window that is no longer than `n_tokens` of text and the symbols, in the same proportions."""
    plain = data.reuse_len == data.seq_len
    least = 2 if plain else 3
    if n_tokens < least:
        raise ValueError(f"the text has {n_tokens} tokens with its <eop>, a window needs {least}; give a longer one")
    window = n_tokens + data.n_symbols
    if window >= data.seq_len:
        return data
    reuse_len = window if plain else max(1, min(window * data.reuse_len // data.seq_len, n_tokens - 2))
    return dataclasses.replace(data, seq_len=window, reuse_len=reuse_len)


def _notes(pair_label: int, data: DataConfig, n_tokens: int) -> list[str]:
    notes = []
    if data.n_symbols == 3:
        origin = (
            "what follows A" if pair_label else "from elsewhere (in training anywhere in the store, here in this text)"
        )
        notes.append(f"Segment B is {origin}.")
    if (room := data.seq_len - data.n_symbols) < n_tokens:
        notes.append(f"The text has {n_tokens:,} tokens; a window of {data.seq_len} holds {room}, the rest is cut off.")
    return notes


def vocabulary(config: PretrainConfig) -> Tokenizer:
    """The vocabulary that `tokenizer.path` names, or else the store's."""
    if Path(config.tokenizer.path).exists():
        return Tokenizer.from_config(config.tokenizer)
    if Path(config.data.store_dir).exists():
        return TokenStore(config.data.store_dir).tokenizer()
    raise ValueError(
        f"there is no vocabulary, neither tokenizer.path={config.tokenizer.path} nor data.store_dir={config.data.store_dir}; "
        "make one with pretrain/train_tokenizer.py and the same settings"
    )
