"""Shards put together into a store: each document as often as its source's weight says, and duplicates not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.common.files import atomic_dir
from xlpre.data import encoded_docs
from xlpre.data.encoded_docs import EncodedDocs
from xlpre.data.shards import ShardTask
from xlpre.data.store import FORMAT, SPLITS, fingerprint_of
from xlpre.text.corpus import TextConfig, empty_text_message
from xlpre.text.tokenizer import Tokenizer


def assemble(path: Path, tasks: list[ShardTask], tokenizer: Tokenizer, config: TextConfig, origin: dict[str, Any]) -> None:
    """Put the shards of all tasks together, in order; nothing is at `path` until all of it is.

    Args:
        path: of the store.
        tasks: all of them, finished.
        tokenizer: the vocabulary that they were encoded with.
        config: of the text.
        origin: what meta.json says besides, of where the text came from.

    Raises:
        ValueError: a part that came out empty.
    """
    dtype = encoded_docs.dtype_of(tokenizer)
    unigram = np.zeros(len(tokenizer), np.int64)
    with atomic_dir(path) as partial:
        writers = {part: _PartWriter(partial / part) for part in SPLITS}
        try:
            for part, piece in _chosen(tasks, config, dtype):
                writers[part].add(piece)
                if part == "train":
                    unigram += np.bincount(piece.tokens, minlength=len(unigram))
        finally:
            for writer in writers.values():
                writer.close()
        n_documents = sum(writer.n_documents for writer in writers.values())
        if not n_documents:
            raise ValueError(empty_text_message(config))
        for part, writer in writers.items():
            if not writer.n_documents:
                raise ValueError(
                    f"text.val_fraction={config.val_fraction} left no document in the {part} part of {n_documents} documents; "
                    f"{_way_out(tasks, dtype)}"
                )
        unigram.tofile(partial / "unigram.bin")
        tokenizer.save(partial / "vocabulary.model")
        checksums = {f"{part}/{name}.bin": digest for part in SPLITS for name, digest in writers[part].checksums.items()}
        for name in ("unigram.bin", "vocabulary.model"):
            checksums[name] = hashlib.sha256((partial / name).read_bytes()).hexdigest()
        meta = {
            "format": FORMAT,
            **origin,
            "dtype": dtype.name,
            "vocab_size": len(tokenizer),
            "vocabulary_sha256": tokenizer.sha256,
            "preprocess": tokenizer.preprocess,
            "fingerprint": fingerprint_of(tokenizer.sha256, tokenizer.preprocess, checksums),
            **{f"{part}_{name}": value for part, writer in writers.items() for name, value in writer.counts.items()},
            "bytes": {name: (partial / name).stat().st_size for name in checksums},
            "sha256": checksums,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _way_out(tasks: list[ShardTask], dtype: np.dtype) -> str:
    """The least text.val_fraction, of three digits, by which there is a document in either part, if there is one that may be set."""
    found = [
        (task, encoded_docs.read(shard / part, dtype)) for task in tasks for shard in task.shards() for part in SPLITS
    ]
    shares = np.concatenate([piece.share()[_taken(piece.hashes, task.weight)] for task, piece in found])
    least = float(np.floor(shares.min() * 1000) + 1) / 1000
    if least <= shares.max() and least < 0.5:
        return f"set text.val_fraction={least:g}, the least that holds one out, or give more documents"
    return "give more documents: an empty line ends one, and so does a file"


def _chosen(tasks: list[ShardTask], config: TextConfig, dtype: np.dtype) -> Iterator[tuple[str, EncodedDocs]]:
    """The pieces of the store: each document once, again as often as its weight says, and duplicates not at all."""
    seen = {part: _First(tasks, part) if config.deduplicate else None for part in SPLITS}
    for again in range(int(np.ceil(max((task.weight for task in tasks), default=0)))):
        for number, task in enumerate(tasks):
            weight = task.weight - again
            for shard in task.shards() if weight > 0 else []:
                for part in SPLITS if again == 0 else SPLITS[:1]:
                    piece = encoded_docs.read(shard / part, dtype)
                    kept = _taken(piece.hashes, weight)
                    first = seen[part]
                    if first is not None:
                        kept &= first.among(number, shard)
                    if kept.any():
                        yield part, piece.where(kept)


def _taken(hashes: np.ndarray, weight: float) -> np.ndarray:
    """(documents,) bool: which documents a source of `weight` gives, by another hash than the one that chose the held-out ones."""
    return hashes * np.uint64(0x9E3779B97F4A7C15) / 2.0**64 < weight


class _First:
    """Which documents of each shard are the first of their text, of those that weights leave: 64 bits of a hash tell texts apart."""

    def __init__(self, tasks: list[ShardTask], part: str) -> None:
        shards = [(number, shard) for number, task in enumerate(tasks) for shard in task.shards()]
        hashes = [np.fromfile(shard / part / "hashes.bin", "uint64") for _, shard in shards]
        taken = [_taken(found, tasks[number].weight) for (number, _), found in zip(shards, hashes, strict=True)]
        together, first = np.concatenate([np.empty(0, "uint64"), *hashes]), np.concatenate([np.empty(0, bool), *taken])
        candidates = np.flatnonzero(first)
        first[candidates] = False
        first[candidates[np.unique(together[candidates], return_index=True)[1]]] = True
        self._of = dict(
            zip(shards, np.split(first, np.cumsum([len(found) for found in hashes])[:-1]), strict=bool(shards))
        )

    def among(self, task: int, shard: Path) -> np.ndarray:
        """(documents,) bool, of a shard of the so-manieth task."""
        return self._of[task, shard]


class _PartWriter:
    """The three files of a part, written from front to back."""

    NAMES = ("tokens", "sentences", "documents")

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in self.NAMES}  # noqa: SIM115 - closed by close()
        self._digests = {name: hashlib.sha256() for name in self.NAMES}
        self.n_documents = self._n_tokens = self._n_sentences = 0

    def add(self, piece: EncodedDocs) -> None:
        offset = self._n_tokens
        arrays = (piece.tokens, np.cumsum(piece.sentences) + offset, np.cumsum(piece.documents) + offset)
        for name, array in zip(self.NAMES, arrays, strict=True):
            array.tofile(self._files[name])
            self._digests[name].update(np.ascontiguousarray(array).data)
        self.n_documents += len(piece.documents)
        self._n_sentences += len(piece.sentences)
        self._n_tokens += len(piece.tokens)

    @property
    def counts(self) -> dict[str, int]:
        return {"n_documents": self.n_documents, "n_tokens": self._n_tokens, "n_sentences": self._n_sentences}

    @property
    def checksums(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
