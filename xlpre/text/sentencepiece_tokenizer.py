"""SentencePiece tokenizer with XLNet's special tokens. The only module that imports `sentencepiece`.

Source: the settings in zihangdai/xlnet's README: a unigram model, character coverage 0.99995, fixed ids 0-8.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from xlpre.common.cli_main import immediate_interrupts
from xlpre.common.errors import InputError
from xlpre.text import special_tokens
from xlpre.text.offsets import TokenOffsets, build_offsets, clean_text_with_offsets, piece_extents
from xlpre.text.preprocess import (
    Preprocess,
    clean_text,
    ends_with_number_and_comma,
    split_comma_after_digit,
    split_commas_after_digits,
)
from xlpre.text.tokenizer import MIN_COVERAGE, Tokenizer, TokenizerConfig

# Other versions encode a few tokens in a million differently, and train different vocabularies.
SENTENCEPIECE_VERSION: str = sentencepiece.__version__
MAX_SENTENCE_BYTES = 1 << 16  # SentencePiece skips longer training lines


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece vocabulary of V pieces.

    Args:
        content: content of a SentencePiece model file.
        origin: name of the model in error messages.
        preprocess: cleaning of text before it is encoded.

    Raises:
        InputError: `content` is not a SentencePiece model, or lacks XLNet's special tokens.
    """

    kind = "sentencepiece"
    file_name = "spiece.model"
    library_version = SENTENCEPIECE_VERSION

    def __init__(self, content: bytes, origin: str = "tokenizer", preprocess: Preprocess = "none") -> None:
        self.content, self.preprocess = content, preprocess
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise InputError(
                f"{origin} is not a SentencePiece model. Train one with pretrain/train_tokenizer.py."
            ) from None
        n_special = special_tokens.N_SPECIAL
        actual = tuple(self._processor.id_to_piece(i) for i in range(min(n_special, len(self))))
        if actual != special_tokens.SPECIAL_TOKENS:
            raise InputError(
                f"{origin} is invalid: its pieces 0-8 must be {' '.join(special_tokens.SPECIAL_TOKENS)}, not {' '.join(actual)}. "
                "Train a vocabulary with pretrain/train_tokenizer.py."
            )

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> SentencePieceTokenizer:
        """Train a unigram vocabulary on cleaned lines; see `tokenizer_training.train_tokenizer`.

        Raises:
            InputError: the text does not allow a vocabulary of this size. The message contains the nearest possible size.
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
            raise InputError(_training_error(str(error), config.vocab_size)) from None
        return cls(model.getvalue(), preprocess=config.preprocess)

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @cached_property
    def model_proto(self) -> Any:
        """The parsed model file: pieces with scores and types, and the normalizer (sentencepiece_model.proto)."""
        return sentencepiece_model_pb2.ModelProto.FromString(self.content)

    @property
    def character_coverage(self) -> float:
        """Value of `tokenizer.character_coverage` in training."""
        return round(self.model_proto.trainer_spec.character_coverage, 6)  # stored with 32 bits

    @cached_property
    def pieces(self) -> list[str]:
        """The V pieces, indexed by id."""
        return [self._processor.id_to_piece(i) for i in range(len(self))]

    @cached_property
    def bytes_per_piece(self) -> np.ndarray:
        """(V,) int64, number of UTF-8 bytes of each piece; see `Tokenizer`."""
        n_special = special_tokens.N_SPECIAL
        lengths = [len(piece.replace(special_tokens.WORD_BOUNDARY, " ").encode()) for piece in self.pieces]
        return np.array([1] * n_special + lengths[n_special:])

    def encode_with_offsets(self, text: str) -> TokenOffsets:
        """Return token ids and the characters that each token covers; see `Tokenizer`."""
        cleaned, positions = clean_text_with_offsets(text, self.preprocess)
        _, offsets = self._processor.normalize(cleaned, with_offsets=True)
        pieces = [(piece, self._split_piece(piece)) for piece in self._processor.encode(cleaned, out_type=str)]
        ids = self._processor.piece_to_id([part for _, parts in pieces for part in parts])
        extents = piece_extents((piece, *parts) for piece, parts in pieces)
        return build_offsets(text, ids, extents, positions[offsets])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; see `Tokenizer`."""
        return self._processor.decode([i for i in self._check_ids(ids) if i != special_tokens.EOP])

    def unknown_fraction(self, texts: Sequence[str]) -> float:
        """Return the fraction of the characters of `texts` that become <unk>."""
        texts = [clean_text(text, self.preprocess) for text in texts]
        pieces = [piece for encoded in self._processor.encode(texts, out_type=str) for piece in encoded]
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))  # an unknown piece can be many characters
        is_unknown = np.array(self._processor.piece_to_id(pieces)) == special_tokens.UNK
        return float((lengths * is_unknown).sum() / max(lengths.sum(), 1))

    def _encode(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        try:
            return self._encode_cleaned(list(texts), threads)
        except TypeError:
            invalid = next((text for text in texts if any("\ud800" <= c <= "\udfff" for c in text)), None)
            if invalid is None:
                raise
            raise InputError(f"{invalid[:40]!a} is not valid UTF-8. Convert it.") from None

    def _encode_cleaned(self, texts: list[str], threads: int) -> list[list[int]]:
        if self.preprocess == "none":
            return self._processor.encode(texts, num_threads=threads)
        texts = [clean_text(text, self.preprocess) for text in texts]
        encoded: list[list[int]] = self._processor.encode(texts, num_threads=threads)
        for index, ids in enumerate(encoded):
            if not self._may_end_with_comma.isdisjoint(ids):
                pieces = split_commas_after_digits(
                    self._processor.encode_as_pieces(texts[index]), self._processor.encode_as_pieces
                )
                encoded[index] = self._processor.piece_to_id(pieces)
        return encoded

    @cached_property
    def _may_end_with_comma(self) -> frozenset[int]:
        """Ids of the pieces that end with a comma after a digit, and <unk>, which stands for any characters."""
        numbers = (i for i, piece in enumerate(self.pieces) if ends_with_number_and_comma(piece))
        return frozenset([special_tokens.UNK, *numbers])

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
