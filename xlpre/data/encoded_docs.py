"""Encoded documents on their way into a store: in memory, and as the shards of an unfinished one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xlpre.text.document import Document, LineType
from xlpre.text.tokenizer import Tokenizer

FIELDS = {"tokens": None, "sentences": "int64", "documents": "int64", "hashes": "uint64"}  # None: by vocabulary


@dataclass(frozen=True)
class EncodedDocs:
    """Some documents.

    Attributes:
        tokens: (N,) ids.
        sentences: tokens of each sentence.
        documents: tokens of each document.
        hashes: 64 bits of a hash of each document's text.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    hashes: np.ndarray

    def where(self, kept: np.ndarray) -> EncodedDocs:
        """The documents of which `kept` is true."""
        if kept.all():
            return self
        owner = np.searchsorted(np.cumsum(self.documents), np.cumsum(self.sentences))
        return EncodedDocs(
            self.tokens[np.repeat(kept, self.documents)],
            self.sentences[kept[owner]],
            self.documents[kept],
            self.hashes[kept],
        )

    def share(self) -> np.ndarray:
        """A number in [0, 1) for each document, from its hash."""
        return self.hashes / 2.0**64


def encode(documents: Sequence[Document], tokenizer: Tokenizer, line_type: LineType, dtype: np.dtype, threads: int) -> EncodedDocs:
    """Encode documents.

    Args:
        documents: some.
        tokenizer: the vocabulary.
        line_type: what a line of theirs is.
        dtype: of the ids.
        threads: for the encoding.
    """
    ids, sentence_ends, document_ends = tokenizer.encode_documents(documents, line_type, threads)
    hashes = [hashlib.blake2b("\n".join(document).encode(), digest_size=8).digest() for document in documents]
    return EncodedDocs(
        ids.astype(dtype),
        np.diff(sentence_ends, prepend=0),
        np.diff(document_ends, prepend=0),
        np.frombuffer(b"".join(hashes), "<u8"),
    )


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Of its ids."""
    return np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")


def append(folder: Path, piece: EncodedDocs) -> None:
    """Add a piece to the files in `folder`."""
    for name in FIELDS:
        with open(folder / f"{name}.bin", "ab") as file:
            getattr(piece, name).tofile(file)


def read(folder: Path, dtype: np.dtype) -> EncodedDocs:
    """What `append` wrote."""
    return EncodedDocs(*(np.fromfile(folder / f"{name}.bin", kind or dtype) for name, kind in FIELDS.items()))


def count(folder: Path) -> int:
    """How many documents there are in `folder`."""
    return (folder / "documents.bin").stat().st_size // 8


def batches(documents: Iterator[Document], characters: int) -> Iterator[list[Document]]:
    """Documents in lists of about so many characters."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document))
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
