"""Token store: memory-mapped token ids with sentence and document ends, in a training and a validation split.

    store/meta.json            counts, sizes, checksums, vocabulary hash, preprocessing, SentencePiece version, fingerprint
    store/vocabulary.model     vocabulary that encoded the text: a SentencePiece model, or a table in JSON
    store/unigram.bin          (V,) int64, count of each token in the training split
    store/train/tokens.bin     uint16, or uint32 for more than 65,536 pieces
    store/train/sentences.bin  int64, position after the last token of each sentence
    store/train/documents.bin  int64, position after the last token of each document
    store/train/sentences_index.bin, documents_index.bin  every 512th position of these files (sparse_index.py); absent in format 5
    store/val/...              the same for the validation documents

A store does not depend on training settings such as batch size, window, processes or objective. `store_builder` writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.common.errors import InputError
from xlpre.config.loader import config_from_mapping
from xlpre.data.sparse_index import PAGE_ITEMS, SparseIndex
from xlpre.text import special_tokens
from xlpre.text.corpus import TextConfig
from xlpre.text.json_objects import parse_object
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.text.preprocess import Preprocess
from xlpre.text.sentencepiece_tokenizer import SENTENCEPIECE_VERSION
from xlpre.text.tokenizer import Tokenizer

FORMAT = 6
READABLE_FORMATS = (5, 6)
SPLITS = ("train", "val")
MAX_BYTES_VERIFIED_ON_OPEN = 256 << 20  # larger stores are verified by TokenStore.verify only
META = "meta.json"
ARRAYS = tuple(f"{split}/{name}.bin" for split in SPLITS for name in ("tokens", "sentences", "documents"))
INDEXES = tuple(f"{split}/{name}_index.bin" for split in SPLITS for name in ("sentences", "documents"))
COUNT_KEYS = ("vocab_size", *(f"{split}_n_{name}" for split in SPLITS for name in ("documents", "tokens", "sentences")))
STRING_KEYS = ("dtype", "vocabulary_sha256", "preprocess", "sentencepiece", "fingerprint")
MARKERS = (
    "unigram.bin",
    *(f"{split}/tokens.bin" for split in SPLITS),
)  # a folder with one of these files is a damaged store
REBUILD = "The store is damaged. Delete the folder and prepare it again with pretrain/prepare.py."


@dataclass(frozen=True)
class SplitData:
    """Tokens of one split.

    Attributes:
        tokens: (N,) token ids.
        sentence_ends: (S,) int64, position after the last token of each sentence. Increasing; the last one is N.
        document_ends: (documents,) int64, position after the last token of each document. Increasing; the last one is N.
        sentence_samples: samples of `sentence_ends` for SparseIndex. None: they are computed when `sentence_index` is first used.
        document_samples: the same for `document_ends`.
    """

    tokens: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray
    sentence_samples: np.ndarray | None = None
    document_samples: np.ndarray | None = None

    @cached_property
    def sentence_index(self) -> SparseIndex:
        """Index of `sentence_ends`."""
        return SparseIndex(self.sentence_ends, self.sentence_samples)

    @cached_property
    def document_index(self) -> SparseIndex:
        """Index of `document_ends`."""
        return SparseIndex(self.document_ends, self.document_samples)

    def __len__(self) -> int:
        return len(self.tokens)

    def random_sentences(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield the sentences in random order: (T,) int64 token ids without special tokens."""
        ends = np.asarray(self.sentence_ends)
        for index in rng.permutation(len(ends)):
            tokens = np.asarray(self.tokens[ends[index - 1] if index else 0 : ends[index]], np.int64)
            yield tokens[(tokens > special_tokens.EOP) | (tokens == special_tokens.UNK)]


class TokenStore:
    """An open token store.

    Opening checks the size of every file, and the checksums of a store of up to 256 MB.

    Args:
        path: folder of the store.

    Attributes:
        path: folder of the store.
        meta: content of meta.json.
        train: training split.
        validation: validation split.
        unigram: (V,) int64, count of each token in the training split.

    Raises:
        InputError: there is no store at `path`, it is damaged, or another version of xlpre wrote it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = self._read_meta()
        for name, size in self.meta["bytes"].items():
            self._check_size(name, size)
        if sum(self.meta["bytes"].values()) <= MAX_BYTES_VERIFIED_ON_OPEN:
            self.verify()
        self.unigram = self._map_file("unigram.bin", "int64")
        self.train, self.validation = (
            SplitData(
                self._map_file(f"{split}/tokens.bin", self.meta["dtype"]),
                self._map_file(f"{split}/sentences.bin", "int64"),
                self._map_file(f"{split}/documents.bin", "int64"),
                self._read_samples(f"{split}/sentences_index.bin"),
                self._read_samples(f"{split}/documents_index.bin"),
            )
            for split in SPLITS
        )

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the vocabulary."""
        return self.meta["vocab_size"]

    @property
    def preprocess(self) -> Preprocess:
        """Cleaning that was applied to the text."""
        return self.meta["preprocess"]

    @property
    def text_config(self) -> TextConfig:
        """Settings of the text that the store was built from."""
        return config_from_mapping(TextConfig, self.meta["source"], str(self.path / META))

    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary and all tokens."""
        return self.meta["fingerprint"]

    @property
    def upgrade_note(self) -> str:
        """Warning if the installed version of SentencePiece differs from the one that encoded the text. Empty: they are equal."""
        if (version := self.meta["sentencepiece"]) in ("", SENTENCEPIECE_VERSION):  # a table depends on none
            return ""
        return (
            f"{self.path} was encoded with sentencepiece {version}; the installed {SENTENCEPIECE_VERSION} may encode a few tokens per "
            "million differently."
        )

    def verify(self) -> None:
        """Read all files and raise InputError if one does not match its checksum."""
        for name, checksum in self.meta["sha256"].items():
            if hashlib.sha256(self._map_file(name, "uint8").data).hexdigest() != checksum:
                raise InputError(f"{self.path / name} does not match its checksum. {REBUILD}")

    def tokenizer(self) -> Tokenizer:
        """Load the vocabulary that encoded the text."""
        tokenizer = load_tokenizer(self.path / "vocabulary.model", self.preprocess)
        if tokenizer.sha256 != self.meta["vocabulary_sha256"]:
            raise InputError(f"{self.path / 'vocabulary.model'} is not the vocabulary of this store. {REBUILD}")
        return tokenizer

    def check_vocabulary(self, tokenizer: Tokenizer, origin: str) -> None:
        """Raise InputError unless this store was encoded with `tokenizer`, which was read from `origin`."""
        if tokenizer.sha256 != self.meta["vocabulary_sha256"]:
            raise InputError(
                f"data.store_dir={self.path} is invalid: its vocabulary (sha256 {self.meta['vocabulary_sha256'][:12]}) differs from "
                f"{origin} (sha256 {tokenizer.sha256[:12]}). Name the store of this vocabulary, or prepare another one with "
                "pretrain/prepare.py and the setting tokenizer.path."
            )
        if tokenizer.preprocess != self.preprocess:
            raise InputError(
                f"tokenizer.preprocess={tokenizer.preprocess} is invalid: data.store_dir={self.path} was prepared with "
                f"tokenizer.preprocess={self.preprocess}. Set tokenizer.preprocess={self.preprocess}, or delete the folder and prepare it "
                "again with pretrain/prepare.py."
            )

    def _read_meta(self) -> dict[str, Any]:
        if is_nothing(self.path):
            raise InputError(
                f"data.store_dir={self.path} is invalid: there is no token store. Run pretrain/prepare.py with the same settings, or "
                "name another store."
            )
        if not is_store(self.path):
            inside = sorted(path.parent for path in self.path.glob(f"*/{META}") if is_store(path.parent))
            remedy = f"Did you mean {inside[0]}?" if inside else "Name a folder that pretrain/prepare.py wrote."
            raise InputError(f"data.store_dir={self.path} is invalid: it is not a token store. {remedy}")
        path = self.path / META
        try:
            meta = parse_object(path.read_text("utf-8"), str(path))
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"{path} cannot be read ({error}). {REBUILD}") from None
        if meta.get("format") not in READABLE_FORMATS:
            formats = " and ".join(map(str, READABLE_FORMATS))
            raise InputError(
                f"data.store_dir={self.path} is invalid: its format is {meta.get('format')}, but this version of xlpre reads formats "
                f"{formats}. Prepare it again with pretrain/prepare.py, after deleting the folder or under another name."
            )
        if (key := _invalid_key(meta)) is not None:
            raise InputError(f"{path} is invalid: {key} was changed. {REBUILD}")
        return meta

    def _map_file(self, name: str, dtype: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype=dtype, mode="r") if self.meta["bytes"][name] else np.empty(0, dtype)

    def _read_samples(self, name: str) -> np.ndarray | None:
        return np.fromfile(self.path / name, "int64") if name in self.meta["bytes"] else None

    def _check_size(self, name: str, expected: int) -> None:
        path = self.path / name
        actual = f"has {path.stat().st_size} bytes" if path.exists() else "does not exist"
        if actual != f"has {expected} bytes":
            raise InputError(f"{path} {actual}, but it had {expected} bytes when the store was built. {REBUILD}")


def is_nothing(path: Path) -> bool:
    """Return True if `path` does not exist or is an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def is_store(path: Path) -> bool:
    """Return True if a folder contains a store, damaged or not."""
    try:
        meta = json.loads((path / META).read_text("utf-8"))
    except (OSError, ValueError):
        meta = None
    return (isinstance(meta, dict) and "fingerprint" in meta) or any((path / name).exists() for name in MARKERS)


def compute_fingerprint(vocabulary_sha256: str, preprocess: str, sha256: Mapping[str, str]) -> str:
    """Return a hash of the vocabulary and all tokens.

    Args:
        vocabulary_sha256: hash of the vocabulary.
        preprocess: cleaning of the text.
        sha256: hash of each file.
    """
    content = [vocabulary_sha256, preprocess, *(sha256[f"{split}/tokens.bin"] for split in SPLITS)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _invalid_key(meta: Mapping[str, Any]) -> str | None:
    """Return the first key of meta.json whose value has the wrong type or contradicts other keys. None: all values are valid."""
    value_kinds = {"files": int, "bytes": int, "sha256": str}
    kinds = (
        dict.fromkeys(COUNT_KEYS, int) | dict.fromkeys(STRING_KEYS, str) | dict.fromkeys(("source", *value_kinds), dict)
    )
    for key, kind in kinds.items():
        if not isinstance(meta.get(key), kind):
            return key
    for key, value_kind in value_kinds.items():
        if not all(isinstance(value, value_kind) for value in meta[key].values()):
            return key
    if meta["dtype"] not in ("uint16", "uint32"):
        return "dtype"
    item_size = {name: np.dtype(meta["dtype"]).itemsize if "tokens" in name else 8 for name in ARRAYS}
    n_items = {name: meta["_n_".join(name.removesuffix(".bin").split("/"))] for name in ARRAYS}
    sizes = {name: n_items[name] * item_size[name] for name in ARRAYS}
    if meta["format"] != 5:
        sizes |= {name: n_items[name.replace("_index", "")] // PAGE_ITEMS * 8 for name in INDEXES}
    for key in ("bytes", "sha256"):
        if {*meta[key]} != {*sizes, "unigram.bin", "vocabulary.model"}:
            return key
    if any(meta["bytes"][name] != size for name, size in sizes.items()):
        return "bytes"
    if meta["bytes"]["unigram.bin"] != 8 * meta["vocab_size"]:
        return "vocab_size"
    fingerprint = compute_fingerprint(meta["vocabulary_sha256"], meta["preprocess"], meta["sha256"])
    return "fingerprint" if fingerprint != meta["fingerprint"] else None
