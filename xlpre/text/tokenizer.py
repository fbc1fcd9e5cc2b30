"""Vocabularies: the interface of all kinds, and its settings.

`sentencepiece_tokenizer` and `table_tokenizer` implement it, and `load_tokenizer` reads vocabulary files. Ids 0-8 are the special tokens
of XLNet in every vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from xlpre.common.errors import InputError, check_minimum
from xlpre.common.files import atomic_write
from xlpre.text import special_tokens
from xlpre.text.document import Document, LineType
from xlpre.text.offsets import TokenOffsets
from xlpre.text.preprocess import Preprocess
from xlpre.text.sentence_boundaries import boundary_flags, concatenate_documents, starts_word

TokenizerKind = Literal["sentencepiece", "bytes", "characters", "words"]
MIN_COVERAGE = 0.98  # the minimum that SentencePiece accepts
N_BYTE_PIECES = special_tokens.N_SPECIAL + 256


@dataclass(frozen=True)
class TokenizerConfig:
    """Vocabulary and its training.

    Attributes:
        kind: kind of the vocabulary. `sentencepiece`: pieces of words (a unigram model). `bytes`: the 256 bytes, without training.
            `characters`: the characters of the training text. `words`: its words, separated by white space. Tokens of the last three
            kinds are found in a table, and their text is kept as it is.
        path: vocabulary file, written by `pretrain/train_tokenizer.py`.
        vocab_size: number of pieces, including special tokens. `characters` and `words`: the maximum, the most frequent are kept. `bytes`
            always has 265.
        min_count: smallest number of occurrences of a piece in the training text, for `characters` and `words`. Others become `<unk>`.
        character_coverage: fraction of the characters of the training text that pieces cover, for `sentencepiece`. The rarest characters
            become `<unk>`.
        train_chars: largest number of characters to train on, for `sentencepiece`. Longer text is sampled evenly, by leaving out every
            second document as often as needed, so that more than half of this number remains. `characters` and
            `words` are counted in the whole text.
        preprocess: cleaning of text in addition to SentencePiece's NFKC. `none`: no cleaning. `cased`: as for the released XLNet (single
            spaces, ``"`` for the quotation marks of LaTeX, no accents, a comma after a digit is a piece of its own). `uncased`: the
            same in lower case.
    """

    kind: TokenizerKind = "sentencepiece"
    path: str = "tokenizers/${name}.model"
    vocab_size: int = 32000
    min_count: int = 1
    character_coverage: float = 0.99995
    train_chars: int = 100_000_000
    preprocess: Preprocess = "none"

    def __post_init__(self) -> None:
        if not MIN_COVERAGE <= self.character_coverage <= 1:
            raise InputError(
                f"tokenizer.character_coverage={self.character_coverage} is invalid: SentencePiece accepts {MIN_COVERAGE} to 1. "
                "Set 0.9995 for scripts with thousands of characters, otherwise 0.99995."
            )
        check_minimum("tokenizer.train_chars", self.train_chars, 1, "Set 100000000, for example.")
        check_minimum("tokenizer.min_count", self.min_count, 1, "Set 1 to keep every piece.")
        n_symbols = special_tokens.N_SPECIAL + (
            len(special_tokens.USER_DEFINED_SYMBOLS) if self.kind == "sentencepiece" else 0
        )
        if self.vocab_size <= n_symbols:
            raise InputError(
                f"tokenizer.vocab_size={self.vocab_size} is invalid: it must be above {n_symbols}, the number of special tokens and "
                "symbols. Set 32000, for example."
            )
        if self.kind != "sentencepiece":
            check_preprocess(self.kind, self.preprocess)

    @property
    def n_pieces(self) -> int:
        """Number of pieces of the vocabulary, or the maximum if it depends on the text."""
        return N_BYTE_PIECES if self.kind == "bytes" else self.vocab_size


def check_preprocess(kind: TokenizerKind, preprocess: Preprocess) -> None:
    """Raise InputError if `preprocess` cleans text, which a vocabulary of the kind `kind` keeps as it is."""
    if preprocess != "none":
        raise InputError(
            f"tokenizer.preprocess={preprocess} is invalid: a vocabulary of {kind} keeps text as it is. Set tokenizer.preprocess=none."
        )


class Tokenizer(ABC):
    """A vocabulary of V pieces.

    Attributes:
        kind: kind of the vocabulary.
        file_name: name of the vocabulary file in a model folder.
        library_version: version of the library on which the ids of a text depend. Empty: they depend on none.
        line_end: id of the token after a line: <eop>, or the newline if the vocabulary has one.
        content: content of the vocabulary file.
        preprocess: cleaning of text before it is encoded.
    """

    kind: ClassVar[TokenizerKind]
    file_name: ClassVar[str]
    library_version: ClassVar[str]
    line_end: ClassVar[int] = special_tokens.EOP
    content: bytes
    preprocess: Preprocess

    @property
    @abstractmethod
    def pieces(self) -> Sequence[str]:
        """The V pieces, indexed by id. `▁` stands for a space."""

    @property
    @abstractmethod
    def bytes_per_piece(self) -> np.ndarray:
        """(V,) int64, number of UTF-8 bytes of each piece, including the space before a word. 1 for special tokens, including <unk>."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens are left out; <unk> becomes ⁇, and the <eop> of a word vocabulary a line end.

        Raises:
            InputError: an id is not in the vocabulary.
        """

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the UTF-8 text of token ids, see `decode`. Tokens of a byte vocabulary give their bytes, also those that are not UTF-8."""
        return self.decode(ids).encode()

    @abstractmethod
    def encode_with_offsets(self, text: str) -> TokenOffsets:
        """Return the token ids that `encode` returns, with the characters of the text that each token covers."""

    @abstractmethod
    def unknown_fraction(self, texts: Sequence[str]) -> float:
        """Return the fraction of the characters of `texts` that become <unk>."""

    @abstractmethod
    def _encode(self, texts: Sequence[str], threads: int = 1) -> Iterable[list[int]]:
        """Return the token ids of each text. Raise InputError if one cannot be encoded."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            InputError: `text` is not a string, or cannot be encoded as UTF-8.
        """
        if not isinstance(text, str):
            raise InputError(f"encode() takes one text, a str, not {text!r:.60}. Call it once per text.")
        return next(iter(self._encode([text])))

    def encode_document(self, document: Document, line_type: LineType = "paragraphs") -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (N,) of a document and the offsets after its sentences; see `encode_documents`."""
        return self.encode_documents([document], line_type)[:2]

    def encode_documents(
        self, documents: Sequence[Document], line_type: LineType = "paragraphs", threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode and concatenate documents.

        `line_end` follows each paragraph. <eod> follows the last line of a document and belongs to its last sentence. Nothing is
        added to a verbatim document: its text contains the line ends.

        Args:
            documents: lists of lines.
            line_type: content of a line: a paragraph, a sentence, or a part of a verbatim text.
            threads: number of threads.

        Returns:
            (N,) int64 token ids; (S,) int64 offset after each sentence; (documents,) int64 offset after each document. Offsets increase,
            and the last ones are N.

        Raises:
            InputError: a text cannot be encoded.
        """
        encoded = iter(self._encode([line for document in documents for line in document], threads))
        lines_of_documents = (islice(encoded, len(document)) for document in documents)
        return concatenate_documents(lines_of_documents, line_type, self._boundary_flags, self.line_end)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary file atomically."""
        with atomic_write(path) as partial:
            partial.write_bytes(self.content)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the vocabulary file, which identifies the vocabulary."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool, True if the piece starts a word, so that a span may start with it."""
        return np.array([starts_word(piece) for piece in self.pieces])

    @cached_property
    def _boundary_flags(self) -> np.ndarray:
        return boundary_flags(self.pieces, self.preprocess)

    def _check_ids(self, ids: Iterable[int]) -> list[int]:
        """Return token ids as a list without special tokens besides <unk> and <eop>. Raise InputError if one is too large."""
        ids = [int(i) for i in ids if i >= special_tokens.EOP or i == special_tokens.UNK]
        _check_token_ids(np.array(ids), self)
        return ids


def as_token_ids(name: str, values: Any, tokenizer: Tokenizer) -> np.ndarray:
    """Return token ids that a user passed in place of a text, (T,) int64.

    Args:
        name: name of the ids in error messages.
        values: (T,) token ids.
        tokenizer: their vocabulary.

    Raises:
        InputError: `values` is not a one-dimensional sequence of integers, or an id is not in the vocabulary.
    """
    ids = integer_row(name, values, "a text or its token ids. Correct or remove it")
    _check_token_ids(ids, tokenizer)
    return ids


def integer_row(name: str, values: Any, rule: str) -> np.ndarray:
    """Return integers as an (N,) int64 array.

    Args:
        name: name of the integers in error messages.
        values: (N,) integers.
        rule: what an error message says that `values` must be, and a remedy, without the last period.

    Raises:
        InputError: `values` is not a one-dimensional sequence of integers.
    """
    try:
        row = np.asarray(values)
    except (ValueError, TypeError):  # nested lists of different lengths
        row = np.empty((0, 0))
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise InputError(f"{name}={values!r:.60} is invalid: it must be {rule}.")
    return row.astype(np.int64)


def check_list(name: str, values: object) -> None:
    """Raise InputError if an argument that must be a list of texts is a single text."""
    if isinstance(values, str):
        raise InputError(f"{name}={values!r:.60} is invalid: it must be a list of texts. Write [{name.rstrip('s')}].")


def _check_token_ids(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < len(tokenizer):
        invalid = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(
            f"token id {invalid} is invalid: ids are 0 to {len(tokenizer) - 1}. Use the vocabulary that encoded the text."
        )


def check_vocab_size(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Raise InputError if the vocabulary has another size than that of a model."""
    if len(tokenizer) != vocab_size:
        raise InputError(
            f"tokenizer is invalid: it has {len(tokenizer)} pieces, but the model has vocab_size {vocab_size}. "
            "Give the vocabulary that the model was trained with."
        )
