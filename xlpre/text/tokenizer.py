"""SentencePiece tokenizer with XLNet's special tokens. The only module that imports `sentencepiece`.

Source: the settings in zihangdai/xlnet's README: a unigram model, character coverage 0.99995, fixed ids 0-8.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from xlpre.common.cli_main import immediate_interrupts
from xlpre.common.files import atomic_write
from xlpre.text import special_tokens
from xlpre.text.document import Document, LineType
from xlpre.text.offsets import TokenOffsets, build_offsets, clean_text_with_offsets, piece_extents
from xlpre.text.preprocess import Preprocess, clean_text, split_comma_after_digit, split_commas_after_digits
from xlpre.text.sentence_boundaries import boundary_flags, concatenate_documents, starts_word

# Other versions encode a few tokens in a million differently, and train different vocabularies.
SENTENCEPIECE_VERSION: str = sentencepiece.__version__
MIN_COVERAGE = 0.98  # the minimum that SentencePiece accepts
MAX_SENTENCE_BYTES = 1 << 16  # SentencePiece skips longer training lines


@dataclass(frozen=True)
class TokenizerConfig:
    """Vocabulary and its training.

    Attributes:
        path: SentencePiece model file, written by `pretrain/train_tokenizer.py`.
        vocab_size: number of pieces, including special tokens.
        character_coverage: fraction of the characters of the training text that pieces cover. The rarest characters become `<unk>`.
        train_chars: approximate number of characters to train on, sampled evenly from the text.
        preprocess: cleaning of text in addition to SentencePiece's NFKC. `none`: no cleaning. `cased`: as for the released XLNet (single
            spaces, plain quotation marks, no accents, a comma after a digit is a piece of its own). `uncased`: the same in lower case.
    """

    path: str = "tokenizers/${name}.model"
    vocab_size: int = 32000
    character_coverage: float = 0.99995
    train_chars: int = 100_000_000
    preprocess: Preprocess = "none"

    def __post_init__(self) -> None:
        if not MIN_COVERAGE <= self.character_coverage <= 1:
            raise ValueError(
                f"tokenizer.character_coverage={self.character_coverage} is invalid: SentencePiece accepts {MIN_COVERAGE} to 1. "
                "Set 0.9995 for scripts with thousands of characters, otherwise 0.99995."
            )
        if self.train_chars < 1:
            raise ValueError(
                f"tokenizer.train_chars={self.train_chars} is invalid: it must be at least 1. Set 100000000, for example."
            )
        n_symbols = len(special_tokens.SPECIAL_TOKENS) + len(special_tokens.USER_DEFINED_SYMBOLS)
        if self.vocab_size <= n_symbols:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is invalid: it must be above {n_symbols}, the number of special tokens and "
                "symbols. Set 32000, for example."
            )


class Tokenizer:
    """A vocabulary of V pieces.

    Args:
        model: content of a SentencePiece model file.
        origin: name of the model in error messages.
        preprocess: cleaning of text before it is encoded.

    Raises:
        ValueError: `model` is not a SentencePiece model, or lacks XLNet's special tokens.
    """

    def __init__(self, model: bytes, origin: str = "tokenizer", preprocess: Preprocess = "none") -> None:
        self.model, self.preprocess = model, preprocess
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError(
                f"{origin} is not a SentencePiece model. Train one with pretrain/train_tokenizer.py."
            ) from None
        n_special = len(special_tokens.SPECIAL_TOKENS)
        actual = tuple(self._processor.id_to_piece(i) for i in range(min(n_special, len(self))))
        if actual != special_tokens.SPECIAL_TOKENS:
            raise ValueError(
                f"{origin} is invalid: its pieces 0-8 must be {' '.join(special_tokens.SPECIAL_TOKENS)}, not {' '.join(actual)}. "
                "Train a vocabulary with pretrain/train_tokenizer.py."
            )

    @classmethod
    def load(cls, path: str | Path, preprocess: Preprocess = "none", origin: str = "") -> Tokenizer:
        """Load a model file.

        Args:
            path: SentencePiece model file.
            preprocess: cleaning of text. The file does not store it.
            origin: name of the file in error messages. Default: `path`.

        Raises:
            ValueError: the file cannot be read, is not a SentencePiece model, or lacks XLNet's special tokens.
        """
        origin = origin or str(path)
        try:
            return cls(Path(path).read_bytes(), origin, preprocess)
        except FileNotFoundError:
            raise ValueError(f"{origin} does not exist. Train it with pretrain/train_tokenizer.py.") from None
        except OSError as error:
            raise ValueError(
                f"{origin} cannot be read ({error.strerror}). Set another path, or get permission to read it."
            ) from None

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> Tokenizer:
        """Load the model file `config.path`; see `load`."""
        return cls.load(config.path, config.preprocess, f"tokenizer.path={config.path}")

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> Tokenizer:
        """Train a unigram vocabulary on cleaned lines; see `tokenizer_training.train_tokenizer`.

        Raises:
            ValueError: the text does not allow a vocabulary of this size. The message contains the nearest possible size.
        """
        model = io.BytesIO()
        try:
            with immediate_interrupts():
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(lines),
                    model_writer=model,
                    model_type="unigram",
                    vocab_size=config.vocab_size,
                    character_coverage=config.character_coverage,
                    control_symbols=list(special_tokens.CONTROL_SYMBOLS),
                    user_defined_symbols=list(special_tokens.USER_DEFINED_SYMBOLS),
                    max_sentence_length=MAX_SENTENCE_BYTES,
                    minloglevel=2,
                )
        except RuntimeError as error:
            raise ValueError(_training_error(str(error), config.vocab_size)) from None
        return cls(model.getvalue(), preprocess=config.preprocess)

    def save(self, path: str | Path) -> None:
        """Write the model file atomically."""
        with atomic_write(path) as partial:
            partial.write_bytes(self.model)

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the model file, which identifies the vocabulary."""
        return hashlib.sha256(self.model).hexdigest()

    @cached_property
    def model_proto(self) -> Any:
        """The parsed model file: pieces with scores and types, and the normalizer (sentencepiece_model.proto)."""
        return sentencepiece_model_pb2.ModelProto.FromString(self.model)

    @property
    def character_coverage(self) -> float:
        """Value of `tokenizer.character_coverage` in training."""
        return round(self.model_proto.trainer_spec.character_coverage, 6)  # stored with 32 bits

    @cached_property
    def pieces(self) -> list[str]:
        """The V pieces, indexed by id."""
        return [self._processor.id_to_piece(i) for i in range(len(self))]

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool, True if the piece starts a word, so that a span may start with it."""
        return np.array([starts_word(piece) for piece in self.pieces])

    @cached_property
    def bytes_per_piece(self) -> np.ndarray:
        """(V,) int64, number of UTF-8 bytes of each piece. 1 for special tokens, including <unk>."""
        n_special = len(special_tokens.SPECIAL_TOKENS)
        lengths = [len(piece.replace(special_tokens.WORD_BOUNDARY, " ").encode()) for piece in self.pieces]
        return np.array([1] * n_special + lengths[n_special:])

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            ValueError: `text` is not a string, or cannot be encoded as UTF-8.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode() takes one text, a str, not {text!r:.60}. Call it once per text.")
        return self._encode([text])[0]

    def encode_with_offsets(self, text: str) -> TokenOffsets:
        """Return the token ids that `encode` returns, with the characters of the text that each token covers."""
        cleaned, positions = clean_text_with_offsets(text, self.preprocess)
        _, offsets = self._processor.normalize(cleaned, with_offsets=True)
        pieces = [(piece, self._split_piece(piece)) for piece in self._processor.encode(cleaned, out_type=str)]
        ids = self._processor.piece_to_id([part for _, parts in pieces for part in parts])
        extents = piece_extents((piece, *parts) for piece, parts in pieces)
        return build_offsets(text, ids, extents, positions[offsets])

    def encode_document(self, document: Document, line_type: LineType = "paragraphs") -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (N,) of a document and the offsets after its sentences; see `encode_documents`."""
        return self.encode_documents([document], line_type)[:2]

    def encode_documents(
        self, documents: Sequence[Document], line_type: LineType = "paragraphs", threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode and concatenate documents.

        <eod> follows the last line of a document and belongs to its last sentence.

        Args:
            documents: lists of lines.
            line_type: whether a line is a paragraph, which <eop> follows, or a sentence.
            threads: number of threads.

        Returns:
            (N,) int64 token ids; (S,) int64 offset after each sentence; (documents,) int64 offset after each document. Offsets increase,
            and the last ones are N.
        """
        encoded = iter(self._encode([line for document in documents for line in document], threads))
        lines_of_documents = (islice(encoded, len(document)) for document in documents)
        return concatenate_documents(lines_of_documents, line_type, self._boundary_flags)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Special tokens are left out; <unk> becomes ⁇.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        text_ids = [int(i) for i in ids if i > special_tokens.EOP or i == special_tokens.UNK]
        if text_ids and max(text_ids) >= len(self):
            raise ValueError(
                f"token id {max(text_ids)} is invalid: ids are 0 to {len(self) - 1}. Use the vocabulary that encoded the text."
            )
        return self._processor.decode(text_ids)

    def unknown_fraction(self, texts: Sequence[str]) -> float:
        """Return the fraction of the characters of `texts` that become <unk>."""
        texts = [clean_text(text, self.preprocess) for text in texts]
        pieces = [piece for encoded in self._processor.encode(texts, out_type=str) for piece in encoded]
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))  # an unknown piece can be many characters
        is_unknown = np.array(self._processor.piece_to_id(pieces)) == special_tokens.UNK
        return float((lengths * is_unknown).sum() / max(lengths.sum(), 1))

    @cached_property
    def _boundary_flags(self) -> np.ndarray:
        return boundary_flags(self.pieces, self.preprocess)

    def _encode(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        try:
            return self._encode_cleaned(texts, threads)
        except TypeError:
            invalid = next((text for text in texts if any("\ud800" <= c <= "\udfff" for c in text)), None)
            if invalid is None:
                raise
            raise ValueError(f"{invalid[:40]!a} is not valid UTF-8. Convert it.") from None

    def _encode_cleaned(self, texts: list[str], threads: int) -> list[list[int]]:
        if self.preprocess == "none":
            return self._processor.encode(texts, num_threads=threads)
        texts = [clean_text(text, self.preprocess) for text in texts]
        encoded = self._processor.encode(texts, out_type=str, num_threads=threads)
        encode = self._processor.encode_as_pieces
        return [self._processor.piece_to_id(split_commas_after_digits(pieces, encode)) for pieces in encoded]

    def _split_piece(self, piece: str) -> list[str]:
        return (
            [piece] if self.preprocess == "none" else split_comma_after_digit(piece, self._processor.encode_as_pieces)
        )


def _training_error(message: str, vocab_size: int) -> str:
    """Translate an error message of SentencePiece's trainer."""
    if largest := re.search(r"value <= (\d+)", message):
        return (
            f"tokenizer.vocab_size={vocab_size} is invalid: it is too large for this text. "
            f"Set tokenizer.vocab_size={largest[1]} or less, or provide more text."
        )
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"tokenizer.vocab_size={vocab_size} is invalid: it is too small for the characters of this text. "
            f"Set tokenizer.vocab_size={smallest[1]} or more, or lower tokenizer.character_coverage (minimum {MIN_COVERAGE})."
        )
    return f"tokenizer.vocab_size={vocab_size}: SentencePiece could not train the vocabulary: {message}"
