"""TokenStore: token ids in memory-mapped files, with ends of sentences and documents, held-out documents apart, and a fingerprint.

    store/meta.json            counts, sizes and checksums, vocabulary hash, preprocessing, fingerprint
    store/vocabulary.model     the SentencePiece model that made the ids
    store/unigram.bin          (V,) int64, how often each token stands in the training part
    store/train/tokens.bin     uint16 (uint32 for more than 65,536 pieces)
    store/train/sentences.bin  int64, offsets after each sentence
    store/train/documents.bin  int64, offsets after each document
    store/val/...         the same for the documents kept out of training

Nothing about training (batch, window, processes, direction, objective) is in it. xlpre/data/store_builder.py makes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.text.json_objects import parse_object
from xlpre.text.preprocess import Preprocess
from xlpre.text.tokenizer import Tokenizer

FORMAT = 3
SPLITS = ("train", "val")
CHECKED_AT_OPENING = 256 << 20  # bytes; a larger store is read through by TokenStore.verify alone
META = "meta.json"
ARRAYS = tuple(f"{part}/{name}.bin" for part in SPLITS for name in ("tokens", "sentences", "documents"))
COUNTS = ("vocab_size", *(f"{part}_n_{what}" for part in SPLITS for what in ("documents", "tokens", "sentences")))
TEXTS = ("dtype", "vocabulary_sha256", "preprocess", "fingerprint")
SIGNS = ("unigram.bin", *(f"{part}/tokens.bin" for part in SPLITS))  # by which a store is known that lost its meta.json
MAKE_AGAIN = "the store is damaged, delete the folder and make it again with pretrain/prepare.py"


@dataclass(frozen=True)
class SplitData:
    """One run of text.

    Attributes:
        tokens: (N,) ids.
        sentence_ends: increasing offsets after each sentence, the last is N.
        document_ends: the same for documents.
    """

    tokens: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def is_nothing(path: Path) -> bool:
    """Whether there is nothing at `path`, or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def is_store(path: Path) -> bool:
    """Whether a folder has anything of a store in it, damaged or not."""
    try:
        meta = json.loads((path / META).read_text("utf-8"))
    except (OSError, ValueError):
        meta = None
    return (isinstance(meta, dict) and "fingerprint" in meta) or any((path / name).exists() for name in SIGNS)


class TokenStore:
    """An opened store. Attributes: `path`, `meta` (dict), `train` and `validation` (Part), `unigram` (V,) counts."""

    def __init__(self, path: str | Path) -> None:
        """Open `path`: sizes are checked, and in a small store every byte.

        Raises:
            ValueError: no store there, or one whose files are not as its meta.json says.
        """
        self.path = Path(path)
        self.meta = self._read_meta()
        for name, size in self.meta["bytes"].items():
            self._check_size(name, size)
        if sum(self.meta["bytes"].values()) <= CHECKED_AT_OPENING:
            self.verify()
        self.unigram = self._map("unigram.bin", "int64")
        self.train, self.validation = (
            SplitData(
                self._map(f"{part}/tokens.bin", self.meta["dtype"]),
                self._map(f"{part}/sentences.bin", "int64"),
                self._map(f"{part}/documents.bin", "int64"),
            )
            for part in SPLITS
        )

    def verify(self) -> None:
        """Read every file through; raise ValueError naming one that is not as it was written."""
        for name, checksum in self.meta["sha256"].items():
            if hashlib.sha256(self._map(name, "uint8").data).hexdigest() != checksum:
                raise ValueError(f"{self.path / name}: does not match its checksum; {MAKE_AGAIN}")

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the vocabulary that made the ids."""
        return self.meta["vocab_size"]

    @property
    def preprocess(self) -> Preprocess:
        """What was done to the text besides encoding it."""
        return self.meta["preprocess"]

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary and every token."""
        return self.meta["fingerprint"]

    def tokenizer(self) -> Tokenizer:
        """The vocabulary that made the ids."""
        tokenizer = Tokenizer.load(self.path / "vocabulary.model", self.preprocess)
        if tokenizer.sha256 != self.meta["vocabulary_sha256"]:
            raise ValueError(
                f"{self.path / 'vocabulary.model'} is not the vocabulary that made this store; {MAKE_AGAIN}"
            )
        return tokenizer

    def check_vocabulary(self, tokenizer: Tokenizer, origin: str) -> None:
        """Raise ValueError unless `tokenizer`, read from `origin`, made this store."""
        if tokenizer.sha256 != self.meta["vocabulary_sha256"]:
            raise ValueError(
                f"data.store_dir={self.path} was made with another vocabulary (sha256 {self.meta['vocabulary_sha256'][:12]}) than "
                f"{origin} ({tokenizer.sha256[:12]}); delete the folder and make it again with pretrain/prepare.py, or name the right one"
            )
        if tokenizer.preprocess != self.preprocess:
            raise ValueError(
                f"data.store_dir={self.path} was made with tokenizer.preprocess={self.preprocess}, not {tokenizer.preprocess}; "
                f"set tokenizer.preprocess={self.preprocess}, or delete the folder and make it again with pretrain/prepare.py"
            )

    def _read_meta(self) -> dict[str, Any]:
        if is_nothing(self.path):
            raise ValueError(
                f"data.store_dir={self.path}: no store there; make it with pretrain/prepare.py and the same settings"
            )
        if not is_store(self.path):
            inside = sorted(path.parent for path in self.path.glob(f"*/{META}") if is_store(path.parent))
            hint = f"did you mean {inside[0]}?" if inside else "data.store_dir names what pretrain/prepare.py wrote"
            raise ValueError(f"data.store_dir={self.path} is not a token store; {hint}")
        path = self.path / META
        try:
            meta = parse_object(path.read_text("utf-8"), str(path))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); {MAKE_AGAIN}") from None
        if meta.get("format") != FORMAT:
            raise ValueError(
                f"data.store_dir={self.path}: format {meta.get('format')} is not {FORMAT}; the store is of another version of xlpre, "
                "make it again with pretrain/prepare.py, under another name or in its place"
            )
        if (key := _not_as_written(meta)) is not None:
            raise ValueError(f"{path}: {key} is not as it was written; {MAKE_AGAIN}")
        return meta

    def _map(self, name: str, dtype: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype=dtype, mode="r") if self.meta["bytes"][name] else np.empty(0, dtype)

    def _check_size(self, name: str, expected: int) -> None:
        path = self.path / name
        found = f"{path.stat().st_size} bytes" if path.exists() else "no file"
        if found != f"{expected} bytes":
            raise ValueError(f"{path}: {found} where {expected} bytes were written; {MAKE_AGAIN}")


def fingerprint_of(vocabulary_sha256: str, preprocess: str, sha256: Mapping[str, str]) -> str:
    """A hash of the vocabulary and every token, from hashes of the files."""
    known = [vocabulary_sha256, preprocess, *(sha256[f"{part}/tokens.bin"] for part in SPLITS)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _not_as_written(meta: Mapping[str, Any]) -> str | None:
    """The first key of a meta.json that does not go with the others; None where all do."""
    inside = {"files": int, "bytes": int, "sha256": str}
    kinds = dict.fromkeys(COUNTS, int) | dict.fromkeys(TEXTS, str) | dict.fromkeys(("source", *inside), dict)
    for key, kind in kinds.items():
        if not isinstance(meta.get(key), kind):
            return key
    for key, of_values in inside.items():
        if not all(isinstance(value, of_values) for value in meta[key].values()):
            return key
    if meta["dtype"] not in ("uint16", "uint32"):
        return "dtype"
    for key in ("bytes", "sha256"):
        if {*meta[key]} != {*ARRAYS, "unigram.bin", "vocabulary.model"}:
            return key
    width = {name: np.dtype(meta["dtype"]).itemsize if "tokens" in name else 8 for name in ARRAYS}
    counted = {name: meta["_n_".join(name.removesuffix(".bin").split("/"))] for name in ARRAYS}
    if any(meta["bytes"][name] != counted[name] * width[name] for name in ARRAYS):
        return "bytes"
    if meta["bytes"]["unigram.bin"] != 8 * meta["vocab_size"]:
        return "vocab_size"
    made = fingerprint_of(meta["vocabulary_sha256"], meta["preprocess"], meta["sha256"])
    return "fingerprint" if made != meta["fingerprint"] else None
