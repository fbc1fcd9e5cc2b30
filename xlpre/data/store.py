"""TokenStore: token ids in memory-mapped files, with sentence ends, held-out documents apart, and a fingerprint.

    store/meta.json            counts, vocabulary hash, preprocessing, fingerprint
    store/vocabulary.model     the SentencePiece model that made the ids
    store/unigram.bin          (V,) int64, how often each token stands in the training part
    store/train/tokens.bin     uint16 (uint32 for more than 65,536 pieces)
    store/train/sentences.bin  int64, offsets after each sentence
    store/held_out/...         the same for the documents kept out of training

Nothing about training (batch, window, processes, direction, objective) is in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.atomic import new_folder
from xlpre.text.corpus import Document, Lines
from xlpre.text.preprocess import Preprocess
from xlpre.text.tokenizer import Tokenizer

FORMAT = 1
PARTS = ("train", "held_out")


@dataclass(frozen=True)
class Part:
    """One run of text: `tokens` (N,) ids and `sentence_ends`, increasing offsets of which the last is N."""

    tokens: np.ndarray
    sentence_ends: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


class TokenStore:
    """An opened store. Attributes: `path`, `meta` (dict), `train` and `held_out` (Part), `unigram` (V,) counts."""

    def __init__(self, path: str | Path) -> None:
        """Open `path`.

        Raises:
            ValueError: no store there, or one whose files do not have the sizes that its meta.json says.
        """
        self.path = Path(path)
        try:
            self.meta = json.loads((self.path / "meta.json").read_text())
        except FileNotFoundError:
            if self.path.is_dir() and any(self.path.iterdir()):
                raise ValueError(
                    f"data.store={path}: no meta.json in it; delete the folder and make the store again"
                ) from None
            raise ValueError(
                f"data.store={path}: no store there; make it with pretrain/prepare.py and the same settings"
            ) from None
        except (json.JSONDecodeError, OSError) as error:
            raise ValueError(
                f"{self.path / 'meta.json'}: cannot be read ({error}); delete the folder and make it again with pretrain/prepare.py"
            ) from None
        if self.meta.get("format") != FORMAT:
            raise ValueError(
                f"data.store={path}: format {self.meta.get('format')} is not {FORMAT}; delete the folder and make it again"
            )
        self.unigram = self._map("unigram.bin", "int64")
        self.train, self.held_out = (
            Part(self._map(f"{part}/tokens.bin", self.meta["dtype"]), self._map(f"{part}/sentences.bin", "int64"))
            for part in PARTS
        )

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the vocabulary that made the ids."""
        return self.meta["vocab_size"]

    @property
    def preprocess(self) -> Preprocess:
        """What was done to the text besides encoding it."""
        return self.meta.get("preprocess", "none")  # stores from before there was a choice do not say

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary and every token."""
        return self.meta["fingerprint"]

    def tokenizer(self) -> Tokenizer:
        """The vocabulary that made the ids."""
        self._check_size("vocabulary.model")
        tokenizer = Tokenizer.load(self.path / "vocabulary.model", self.preprocess)
        if tokenizer.sha256 != self.meta["vocabulary_sha256"]:
            raise ValueError(
                f"{self.path / 'vocabulary.model'} is not the vocabulary that made this store; delete the folder and make it again"
            )
        return tokenizer

    def check_vocabulary(self, tokenizer: Tokenizer, origin: str) -> None:
        """Raise ValueError unless `tokenizer`, read from `origin`, made this store."""
        if tokenizer.sha256 != self.meta["vocabulary_sha256"]:
            raise ValueError(
                f"data.store={self.path} was made with another vocabulary (sha256 {self.meta['vocabulary_sha256'][:12]}) than "
                f"{origin} ({tokenizer.sha256[:12]}); delete the folder and make it again with pretrain/prepare.py, or name the right one"
            )
        if tokenizer.preprocess != self.preprocess:
            raise ValueError(
                f"data.store={self.path} was made with tokenizer.preprocess={self.preprocess}, not {tokenizer.preprocess}; "
                f"set tokenizer.preprocess={self.preprocess}, or delete the folder and make it again with pretrain/prepare.py"
            )

    def _map(self, name: str, dtype: str) -> np.ndarray:
        self._check_size(name)
        return np.memmap(self.path / name, dtype=dtype, mode="r") if self.meta["bytes"][name] else np.empty(0, dtype)

    def _check_size(self, name: str) -> None:
        path, expected = self.path / name, self.meta["bytes"][name]
        found = f"{path.stat().st_size} bytes" if path.exists() else "no file"
        if found != f"{expected} bytes":
            raise ValueError(
                f"{path}: {found} where {expected} bytes were written; the store is damaged, delete the folder and make it again"
            )


def write_store(
    path: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    held_out: float,
    source: Mapping[str, Any],
    files: Mapping[str, int],
    lines: Lines = "paragraphs",
) -> TokenStore:
    """Encode documents into a store; nothing is at `path` until all of it is.

    Args:
        path: the folder to make.
        documents: read once, one in memory at a time.
        tokenizer: the vocabulary.
        held_out: the share of documents to keep out of training, chosen by a hash of their text.
        source: the settings that named the documents, for meta.json.
        files: the files they came from with their bytes, for meta.json.
        lines: what a line of a document is.

    Raises:
        ValueError: a part that came out empty.
    """
    dtype = np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")
    unigram = np.zeros(len(tokenizer), np.int64)
    digest = hashlib.sha256(tokenizer.sha256.encode())
    with new_folder(path) as partial:
        writers = {part: _PartWriter(partial / part, dtype) for part in PARTS}
        try:
            for document in documents:
                encoded, sentence_ends = tokenizer.encode_document(document, lines)
                ids = encoded.astype(dtype)
                part = "held_out" if _is_held_out(document, held_out) else "train"
                writers[part].add(ids, sentence_ends)
                digest.update(part.encode() + ids.tobytes())
                if part == "train":
                    unigram += np.bincount(ids, minlength=len(unigram))
        finally:
            for writer in writers.values():
                writer.close()
        for part, writer in writers.items():
            if not writer.n_documents:
                raise ValueError(
                    f"text.held_out={held_out} left no document in the {part} part of {sum(w.n_documents for w in writers.values())} "
                    "documents; change text.held_out, or give more documents (an empty line ends one)"
                )
        unigram.tofile(partial / "unigram.bin")
        tokenizer.save(partial / "vocabulary.model")
        written = [
            "unigram.bin",
            "vocabulary.model",
            *(f"{part}/{name}.bin" for part in PARTS for name in ("tokens", "sentences")),
        ]
        meta = {
            "format": FORMAT,
            "source": dict(source),
            "files": dict(files),
            "dtype": dtype.name,
            "vocab_size": len(tokenizer),
            "vocabulary_sha256": tokenizer.sha256,
            "preprocess": tokenizer.preprocess,
            "fingerprint": digest.hexdigest(),
            **{
                f"{part}_{what}": getattr(writers[part], what)
                for part in PARTS
                for what in ("n_documents", "n_tokens", "n_sentences")
            },
            "bytes": {name: (partial / name).stat().st_size for name in written},
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1))
    return TokenStore(path)


class _PartWriter:
    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir()
        self._tokens = open(folder / "tokens.bin", "wb")  # noqa: SIM115 - closed by close()
        self._sentences = open(folder / "sentences.bin", "wb")  # noqa: SIM115
        self.n_documents = self.n_tokens = self.n_sentences = 0

    def add(self, ids: np.ndarray, sentence_ends: np.ndarray) -> None:
        ids.tofile(self._tokens)
        (sentence_ends + self.n_tokens).astype(np.int64).tofile(self._sentences)
        self.n_documents += 1
        self.n_tokens += len(ids)
        self.n_sentences += len(sentence_ends)

    def close(self) -> None:
        self._tokens.close()
        self._sentences.close()


def _is_held_out(document: Document, share: float) -> bool:
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64
