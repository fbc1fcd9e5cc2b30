"""Statistics of a token store: counts, document lengths, and lengths of the spans that an objective draws from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xlpre.common.plots import new_axes, save_figure, set_log_scale
from xlpre.data.lanes import Lanes
from xlpre.data.store import SPLITS, SplitData, TokenStore
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer

MAX_TOKENS = 2_000_000  # number of tokens of a split from which rates are computed
N_WINDOWS = 400  # number of windows in which span lengths are counted
N_LONGEST = 5  # number of longest documents to list
SEED = 1


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of a split. Rates are those of its first `MAX_TOKENS` tokens.

    Attributes:
        n_documents: number of documents.
        n_sentences: number of sentences.
        n_tokens: number of tokens.
        pieces_per_word: mean number of pieces per word.
        tokens_per_sentence: mean number of tokens per sentence.
        unknown_fraction: fraction of <unk> among the tokens.
        longest: (number of tokens, index) of each of the `N_LONGEST` longest documents.
        document_lengths: (documents,) number of tokens of each document.
    """

    n_documents: int
    n_sentences: int
    n_tokens: int
    pieces_per_word: float
    tokens_per_sentence: float
    unknown_fraction: float
    longest: list[tuple[int, int]]
    document_lengths: np.ndarray


def split_statistics(split: SplitData, starts_word: np.ndarray) -> SplitStatistics:
    """Compute the statistics of a split.

    Args:
        split: tokens of the split.
        starts_word: (V,) bool, True for pieces that start a word.
    """
    lengths = np.diff(split.document_ends, prepend=0)
    ids = np.asarray(split.tokens[:MAX_TOKENS])
    text_ids = ids[ids > special_tokens.EOP]
    longest = np.argsort(lengths)[::-1][:N_LONGEST]
    return SplitStatistics(
        n_documents=len(lengths),
        n_sentences=len(split.sentence_ends),
        n_tokens=len(split),
        pieces_per_word=len(text_ids) / max(int(starts_word[text_ids].sum()), 1),
        tokens_per_sentence=len(split) / len(split.sentence_ends),
        unknown_fraction=float((ids == special_tokens.UNK).mean()),
        longest=[(int(lengths[i]), int(i)) for i in longest],
        document_lengths=lengths,
    )


def count_span_lengths(
    store: TokenStore, tokenizer: Tokenizer, data: DataConfig, objective: ObjectiveConfig
) -> np.ndarray:
    """Count the target spans in `N_WINDOWS` windows by their length in words.

    Returns:
        (4 * max_span + 1,) int64; entry n counts spans of n words, and the last entry also longer spans. Adjacent spans count as one.
    """
    lanes = Lanes(
        store.train,
        1,
        stride=data.reuse_len,
        lookahead=data.lookahead,
        windows_per_run=1,
        bidirectional=False,
        seed=SEED,
        origin=f"the training part of {store.path}",
    )
    loader = Loader(lanes, data, build_objective(objective, data, tokenizer.starts_word), SEED)
    counts = np.zeros(4 * objective.max_span + 1, np.int64)
    for step in range(N_WINDOWS):
        batch = loader.batch(step, [0])
        positions, ids = batch.target_positions[0].numpy(), batch.input_ids[0].numpy()
        for span in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
            n_words = int(tokenizer.starts_word[ids[span]].sum())
            counts[min(max(n_words, 1), len(counts) - 1)] += 1
    return counts


def span_probabilities(max_span: int) -> np.ndarray:
    """Return (max_span + 1,) probabilities: entry n is that of a span of n words, proportional to 1/n; entry 0 is 0."""
    weights = 1 / np.arange(1, max_span + 1)
    return np.concatenate([[0.0], weights / weights.sum()])


@dataclass(frozen=True)
class StoreStatistics:
    """Statistics of a store.

    Attributes:
        splits: statistics of each split by its name.
        span_counts: counts of span lengths, see `count_span_lengths`; None if the store is shorter than a window.
    """

    splits: dict[str, SplitStatistics]
    span_counts: np.ndarray | None

    @classmethod
    def compute(cls, store: TokenStore, tokenizer: Tokenizer) -> StoreStatistics:
        """Compute the statistics of `store`. Span lengths are counted for the default objective."""
        splits = {
            name: split_statistics(split, tokenizer.starts_word)
            for name, split in zip(SPLITS, (store.train, store.validation), strict=True)
        }
        data, counts = DataConfig(), None
        if len(store.train) > data.lookahead + data.reuse_len:
            counts = count_span_lengths(store, tokenizer, data, ObjectiveConfig())
        return cls(splits, counts)


def describe(statistics: StoreStatistics, store: TokenStore, tokenizer: Tokenizer, n_samples: int) -> str:
    """Return the statistics as text, with the beginnings of `n_samples` random documents."""
    meta, splits = store.meta, statistics.splits
    lines = [
        f"{store.path}: {meta['vocab_size']:,} pieces (sha256 {meta['vocabulary_sha256'][:12]}), ids of {meta['dtype']}, "
        f"preprocess {store.preprocess}, fingerprint {store.fingerprint[:12]}",
        "",
        f"{'':24}{'training':>16}{'validation':>16}",
    ]
    rows = [
        ("documents", "n_documents", ","),
        ("sentences", "n_sentences", ","),
        ("tokens", "n_tokens", ","),
        ("pieces per word", "pieces_per_word", ".3f"),
        ("tokens per sentence", "tokens_per_sentence", ".1f"),
        ("unknown tokens", "unknown_fraction", ".4%"),
    ]
    lines += [
        f"{label:24}" + "".join(f"{getattr(splits[name], field):>16{spec}}" for name in SPLITS)
        for label, field, spec in rows
    ]
    if any(split.unknown_fraction for split in splits.values()):
        lines.append(
            "an unknown token stands for one or more unknown characters; pretrain/prepare.py reports the fraction of characters"
        )
    lines += ["", "longest training documents (tokens, beginning)"]
    for length, index in splits["train"].longest:
        begin = int(store.train.document_ends[index]) - length
        lines.append(f"{length:>12,}  {_one_line(tokenizer.decode(store.train.tokens[begin : begin + 24]))} ...")
    if (counts := statistics.span_counts) is not None:
        max_span = ObjectiveConfig().max_span
        lines += [
            "",
            f"spans of n words: fraction in {N_WINDOWS} windows, and probability of being drawn (adjacent spans count as one)",
        ]
        expected = np.pad(span_probabilities(max_span), (0, len(counts)))
        for n in range(1, max_span + 3):
            lines.append(f"{n:>12}{counts[n] / counts.sum():>10.1%}{expected[n]:>10.1%}")
    lines += ["", "samples"]
    rng = np.random.default_rng(SEED)
    for index in rng.integers(len(store.train.document_ends), size=n_samples):
        end = int(store.train.document_ends[index])
        begin = int(store.train.document_ends[index - 1]) if index else 0
        lines.append(
            f"  document {index:,}: {_one_line(tokenizer.decode(store.train.tokens[begin : min(begin + 60, end)]))} ..."
        )
    return "\n".join(lines)


def draw(statistics: StoreStatistics, path: Path) -> None:
    """Draw the lengths of documents, and the lengths of spans with their probabilities."""
    figure, (left, right) = new_axes(10, 3.6, 2)
    lengths, counts = statistics.splits["train"].document_lengths, statistics.span_counts
    edges = np.geomspace(1, lengths.max() + 1, 40)
    left.hist(lengths, bins=edges, color="#4878a8")
    set_log_scale(left, "x")
    left.set(xlabel="length of a document, tokens", ylabel="documents", title=f"{len(lengths):,} training documents")
    if counts is None:
        right.set_axis_off()
    else:
        n_words = np.arange(1, 9)
        expected = span_probabilities(ObjectiveConfig().max_span)
        fractions = counts[n_words] / counts.sum()
        right.bar(n_words, fractions, color="#4878a8", label="drawn (adjacent spans count as one)")
        right.plot(np.arange(1, len(expected)), expected[1:], "o--", color="#c05020", label="probability of a length")
        right.set(xlabel="length of a span, words", ylabel="fraction of spans", title=f"spans of {N_WINDOWS} windows")
        right.legend(frameon=False)
    save_figure(figure, path, dpi=110)


def _one_line(text: str) -> str:
    return " ".join(text.split())
