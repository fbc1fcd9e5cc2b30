"""Show what is in a token store, and what a model would be asked of it.

python pretrain/inspect_store.py stores/quickstart
python pretrain/inspect_store.py stores/wiki --picture wiki.png --verify
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xlpre.common.cli_main import run_main
from xlpre.common.plots import new_figure, save_figure
from xlpre.data.lanes import Lanes
from xlpre.data.store import SPLITS, SplitData, TokenStore
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective
from xlpre.text import special_tokens
from xlpre.text.tokenizer import Tokenizer

READ = 2_000_000  # tokens at most of which rates are taken
WINDOWS = 400  # of which spans are drawn
SEED = 1


@dataclass(frozen=True)
class PartFacts:
    """What a part holds. Rates are of its first READ tokens."""

    documents: int
    sentences: int
    tokens: int
    pieces_per_word: float
    tokens_per_sentence: float
    unknown: float
    longest: list[tuple[int, int]]
    document_lengths: np.ndarray


def facts_of(part: SplitData, starts_word: np.ndarray) -> PartFacts:
    """Count `part`; `longest` is (tokens, number of the document) of the five longest documents."""
    lengths = np.diff(part.document_ends, prepend=0)
    ids = np.asarray(part.tokens[:READ])
    text = ids[ids > special_tokens.EOP]
    order = np.argsort(lengths)[::-1][:5]
    return PartFacts(
        documents=len(lengths),
        sentences=len(part.sentence_ends),
        tokens=len(part),
        pieces_per_word=len(text) / max(int(starts_word[text].sum()), 1),
        tokens_per_sentence=len(part) / len(part.sentence_ends),
        unknown=float((ids == special_tokens.UNK).mean()),
        longest=[(int(lengths[i]), int(i)) for i in order],
        document_lengths=lengths,
    )


def span_lengths(store: TokenStore, tokenizer: Tokenizer, data: DataConfig, objective: ObjectiveConfig) -> np.ndarray:
    """How many spans of n = 1, 2, ... words are drawn in WINDOWS windows; spans that touch count as one."""
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
    for step in range(WINDOWS):
        batch = loader.batch(step, [0])
        positions, ids = batch.target_positions[0].numpy(), batch.input_ids[0].numpy()
        for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
            words = int(tokenizer.starts_word[ids[run]].sum())
            counts[min(max(words, 1), len(counts) - 1)] += 1
    return counts


def theory(max_span: int) -> np.ndarray:
    """The probability of a span of n = 1 ... max_span words, proportional to 1/n; index 0 is 0."""
    weights = 1 / np.arange(1, max_span + 1)
    return np.concatenate([[0.0], weights / weights.sum()])


def describe(
    store: TokenStore, tokenizer: Tokenizer, n_samples: int
) -> tuple[str, dict[str, PartFacts], np.ndarray | None]:
    """Lines for a terminal, and what a picture needs: the facts of each part, counts of span lengths if there is text enough."""
    meta = store.meta
    facts = {
        name: facts_of(part, tokenizer.starts_word)
        for name, part in zip(SPLITS, (store.train, store.validation), strict=True)
    }
    lines = [
        f"{store.path}: {meta['vocab_size']:,} pieces (sha256 {meta['vocabulary_sha256'][:12]}), ids of {meta['dtype']}, "
        f"preprocess {store.preprocess}, fingerprint {store.fingerprint[:12]}",
        "",
        f"{'':24}{'to train on':>16}{'held out':>16}",
    ]
    rows = [
        ("documents", "documents", ","),
        ("sentences", "sentences", ","),
        ("tokens", "tokens", ","),
        ("pieces a word", "pieces_per_word", ".3f"),
        ("tokens a sentence", "tokens_per_sentence", ".1f"),
        ("unknown tokens", "unknown", ".4%"),
    ]
    lines += [
        f"{name:24}" + "".join(f"{getattr(facts[part], key):>16{form}}" for part in SPLITS) for name, key, form in rows
    ]
    if any(part.unknown for part in facts.values()):
        lines += [
            "an unknown token is one unknown character or many in a row; pretrain/prepare.py counts the characters"
        ]
    lines += ["", "longest documents to train on (tokens, begins)"]
    for length, number in facts["train"].longest:
        begin = int(store.train.document_ends[number]) - length
        lines.append(f"{length:>12,}  {tokenizer.decode(store.train.tokens[begin : begin + 24])} ...")
    data, objective, counts = DataConfig(), ObjectiveConfig(), None
    if len(store.train) > data.lookahead + data.reuse_len:
        counts = span_lengths(store, tokenizer, data, objective)
        lines += ["", f"spans of n words in {WINDOWS} windows, and 1/n (spans that touch count as one)"]
        expected = np.pad(theory(objective.max_span), (0, len(counts)))
        for n in range(1, objective.max_span + 3):
            lines.append(f"{n:>12}{counts[n] / counts.sum():>10.1%}{expected[n]:>10.1%}")
    lines += ["", "samples"]
    rng = np.random.default_rng(SEED)
    for number in rng.integers(len(store.train.document_ends), size=n_samples):
        end = int(store.train.document_ends[number])
        begin = int(store.train.document_ends[number - 1]) if number else 0
        lines.append(f"  document {number:,}: {tokenizer.decode(store.train.tokens[begin : min(begin + 60, end)])} ...")
    return "\n".join(lines), facts, counts


def draw(path: Path, facts: dict[str, PartFacts], counts: np.ndarray | None) -> None:
    """A picture: lengths of documents; lengths of spans against 1/n."""
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    lengths = facts["train"].document_lengths
    edges = np.geomspace(1, lengths.max() + 1, 40)
    left.hist(lengths, bins=edges, color="#4878a8")
    left.set(
        xscale="log", xlabel="tokens of a document", ylabel="documents", title=f"{len(lengths):,} documents to train on"
    )
    if counts is not None:
        shown = np.arange(1, 9)
        expected = theory(ObjectiveConfig().max_span)
        right.bar(shown, counts[shown] / counts.sum(), color="#4878a8", label="drawn (spans that touch count as one)")
        right.plot(np.arange(1, len(expected)), expected[1:], "o--", color="#c05020", label="1/n")
        right.set(xlabel="words of a span", ylabel="share", title=f"spans of {WINDOWS} windows")
        right.legend()
    save_figure(figure, path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="a store's folder, such as stores/quickstart")
    parser.add_argument("--samples", type=int, default=3, help="documents to show the beginning of")
    parser.add_argument("--picture", type=Path, help="a .png to write")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    words = parser.parse_args(argv)
    if words.samples < 0:
        raise ValueError(f"--samples ({words.samples}) must be at least 0")
    if words.picture and words.picture.suffix != ".png":
        raise ValueError(f"--picture {words.picture} must end in .png")
    store = TokenStore(words.store)
    if words.verify:
        store.verify()
        print(f"{words.store}: every file is as it was written")
    text, facts, counts = describe(store, store.tokenizer(), words.samples)
    print(text)
    if words.picture:
        draw(words.picture, facts, counts)
        print(f"\n{words.picture}: written")


if __name__ == "__main__":
    run_main(main)
