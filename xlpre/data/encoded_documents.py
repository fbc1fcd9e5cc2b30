"""Encoded documents, in memory and in the shards (folders of encoded text) of a store that is being built."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xlpre.text.document import Document, LineType
from xlpre.text.tokenizer import Tokenizer

DTYPES = {"tokens": None, "sentences": "int64", "documents": "int64", "hashes": "uint64"}  # None: see token_dtype


@dataclass(frozen=True)
class EncodedDocs:
    """Encoded documents with N tokens.

    Attributes:
        tokens: (N,) token ids.
        sentences: (S,) int64, number of tokens in each of the S sentences.
        documents: (documents,) int64, number of tokens in each document.
        hashes: (documents,) uint64, hash of the text of each document.
    """

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    hashes: np.ndarray

    def select(self, mask: np.ndarray) -> EncodedDocs:
        """Return the documents for which `mask` (documents,) is True."""
        if mask.all():
            return self
        document_of_sentence = np.searchsorted(np.cumsum(self.documents), np.cumsum(self.sentences))
        return EncodedDocs(
            self.tokens[np.repeat(mask, self.documents)],
            self.sentences[mask[document_of_sentence]],
            self.documents[mask],
            self.hashes[mask],
        )

    def hash_fractions(self) -> np.ndarray:
        """Return the hashes scaled to [0, 1)."""
        return self.hashes / 2.0**64


def encode(
    documents: Sequence[Document], tokenizer: Tokenizer, line_type: LineType, dtype: np.dtype, threads: int
) -> EncodedDocs:
    """Encode documents.

    Args:
        documents: documents to encode.
        tokenizer: the vocabulary.
        line_type: what a line is, a paragraph or a sentence, see `Tokenizer.encode_documents`.
        dtype: dtype of the token ids.
        threads: number of threads.
    """
    ids, sentence_ends, document_ends = tokenizer.encode_documents(documents, line_type, threads)
    hashes = [
        hashlib.blake2b("\n".join(document).encode(errors="surrogateescape"), digest_size=8).digest()
        for document in documents
    ]
    return EncodedDocs(
        ids.astype(dtype),
        np.diff(sentence_ends, prepend=0),
        np.diff(document_ends, prepend=0),
        np.frombuffer(b"".join(hashes), "<u8"),
    )


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the dtype of stored token ids: uint16, or uint32 for more than 65,536 pieces."""
    return np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")


def append(folder: Path, docs: EncodedDocs) -> None:
    """Append documents to the files in `folder`."""
    for name in DTYPES:
        with open(folder / f"{name}.bin", "ab") as file:
            file.write(np.ascontiguousarray(getattr(docs, name)).data)  # unlike tofile, it says when the disk is full


def read(folder: Path, dtype: np.dtype) -> EncodedDocs:
    """Read all documents that `append` wrote to `folder`; `dtype` is the dtype of the token ids."""
    return EncodedDocs(*(np.fromfile(folder / f"{name}.bin", kind or dtype) for name, kind in DTYPES.items()))


def read_hashes(folder: Path) -> np.ndarray:
    """Return the hashes of the documents in `folder`, (documents,) uint64."""
    return np.fromfile(folder / "hashes.bin", "uint64")


def count_tokens(folder: Path, tokenizer: Tokenizer) -> int:
    """Return the number of tokens in `folder`."""
    return (folder / "tokens.bin").stat().st_size // token_dtype(tokenizer).itemsize


def count(folder: Path) -> int:
    """Return the number of documents in `folder`."""
    return (folder / "documents.bin").stat().st_size // 8


def batches(documents: Iterator[Document], n_chars: int) -> Iterator[list[Document]]:
    """Yield lists of consecutive documents. Each list has at least `n_chars` characters; the last one may have fewer."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document))
        if size >= n_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
