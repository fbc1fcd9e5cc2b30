"""SentencePiece with XLNet's symbols: train, load, encode. The one door to sentencepiece.

Source: the settings published in zihangdai/xlnet's README (unigram, coverage 0.99995, ids 0-8 fixed).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
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
from xlpre.text.offsets import TokenOffsets, extents_of, located, prepared_and_located
from xlpre.text.preprocess import Preprocess, all_split_after_digits, prepared, split_after_digits
from xlpre.text.sentence_boundaries import joined, kinds_of, starts_word
from xlpre.text.tokenizer_config import LEAST_COVERAGE, TokenizerConfig
from xlpre.text.tokenizer_training import LONGEST_SENTENCE, lines_to_learn


class Tokenizer:
    """A vocabulary of V pieces. `encode` gives ids; the arrays over V say what a piece is at a boundary."""

    def __init__(self, model: bytes, origin: str = "tokenizer", preprocess: Preprocess = "none") -> None:
        self.model, self.preprocess = model, preprocess
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError(f"{origin}: not a SentencePiece model, as pretrain/train_tokenizer.py makes one") from None
        found = tuple(self._pieces.id_to_piece(i) for i in range(min(len(special_tokens.SPECIAL_TOKENS), len(self))))
        if found != special_tokens.SPECIAL_TOKENS:
            raise ValueError(
                f"{origin}: pieces 0-8 must be {' '.join(special_tokens.SPECIAL_TOKENS)}, not {' '.join(found)}; train one with train_tokenizer.py"
            )

    @classmethod
    def load(cls, path: str | Path, preprocess: Preprocess = "none", origin: str = "") -> Tokenizer:
        """Read a model file, which does not say how text is preprocessed for it; messages name `origin`, or the file.

        Raises:
            ValueError: no such file, not a SentencePiece model, or one without XLNet's symbols.
        """
        origin = origin or str(path)
        try:
            return cls(Path(path).read_bytes(), origin, preprocess)
        except FileNotFoundError:
            raise ValueError(f"{origin}: there is no vocabulary; make it with pretrain/train_tokenizer.py") from None
        except OSError as error:
            raise ValueError(f"{origin}: cannot be read: {error.strerror}") from None

    @classmethod
    def named_in(cls, config: TokenizerConfig) -> Tokenizer:
        """Read the model file that settings name."""
        return cls.load(config.path, config.preprocess, f"tokenizer.path={config.path}")

    def save(self, path: str | Path) -> None:
        """Write the model file, whole or not at all."""
        with atomic_write(path) as partial:
            partial.write_bytes(self.model)

    def __len__(self) -> int:
        return self._pieces.get_piece_size()

    @cached_property
    def sha256(self) -> str:
        """Identity of the vocabulary: a hash of the model file."""
        return hashlib.sha256(self.model).hexdigest()

    @cached_property
    def proto(self) -> Any:
        """What the model file says: pieces with their scores and types, how it normalizes (sentencepiece_model.proto)."""
        return sentencepiece_model_pb2.ModelProto.FromString(self.model)

    @property
    def character_coverage(self) -> float:
        """See TokenizerConfig."""
        return round(self.proto.trainer_spec.character_coverage, 6)  # kept in 32 bits

    @cached_property
    def pieces(self) -> list[str]:
        """The V pieces by id."""
        return [self._pieces.id_to_piece(i) for i in range(len(self))]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text.

        Raises:
            ValueError: it is no text.
        """
        if not isinstance(text, str):
            raise ValueError(f"one text is encoded at a time, a str, not {text!r:.60}")
        return self._encode([text])[0]

    def locate(self, text: str) -> TokenOffsets:
        """The token ids that `encode` gives, and where in the text they stand."""
        cleaned, places = prepared_and_located(text, self.preprocess)
        _, offsets = self._pieces.normalize(cleaned, with_offsets=True)
        pieces = [(piece, self._parts(piece)) for piece in self._pieces.encode(cleaned, out_type=str)]
        ids = self._pieces.piece_to_id([part for _, parts in pieces for part in parts])
        extents = extents_of((piece, *parts) for piece, parts in pieces)
        return located(text, ids, extents, places[offsets])

    def encode_document(self, document: Document, line_type: LineType = "paragraphs") -> tuple[np.ndarray, np.ndarray]:
        """Token ids (N,) of one document, and the offsets after each of its sentences; see encode_documents."""
        return self.encode_documents([document], line_type)[:2]

    def encode_documents(
        self, documents: Sequence[Document], line_type: LineType = "paragraphs", threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids of documents one after another, and where their sentences and they themselves end.

        Args:
            documents: each a list of lines.
            line_type: what a line is. Each paragraph gets an <eop>, a sentence nothing; an <eod> follows the last line either way,
                and belongs to the sentence before it.
            threads: for the encoding.

        Returns:
            (N,) int64 ids; (S,) and (documents,) int64 increasing offsets, the last ones N.
        """
        encoded = iter(self._encode([line for document in documents for line in document], threads))
        return joined((islice(encoded, len(document)) for document in documents), line_type, self._kinds)

    def _encode(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        try:
            return self._ids(texts, threads)
        except TypeError:
            odd = next((text for text in texts if any("\ud800" <= character <= "\udfff" for character in text)), None)
            if odd is None:
                raise
            raise ValueError(f"{odd[:40]!a} is not UTF-8; convert it") from None

    def _ids(self, texts: list[str], threads: int) -> list[list[int]]:
        if self.preprocess == "none":
            return self._pieces.encode(texts, num_threads=threads)
        texts = [prepared(text, self.preprocess) for text in texts]
        encoded = self._pieces.encode(texts, out_type=str, num_threads=threads)
        anew = self._pieces.encode_as_pieces
        return [self._pieces.piece_to_id(all_split_after_digits(pieces, anew)) for pieces in encoded]

    def _parts(self, piece: str) -> list[str]:
        return [piece] if self.preprocess == "none" else split_after_digits(piece, self._pieces.encode_as_pieces)

    def unknown(self, texts: Sequence[str]) -> float:
        """The share of the characters of texts, as they are encoded, that are `<unk>`: a run of them is one token, however long."""
        texts = [prepared(text, self.preprocess) for text in texts]
        pieces = [piece for encoded in self._pieces.encode(texts, out_type=str) for piece in encoded]
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        unknown = np.array(self._pieces.piece_to_id(pieces)) == special_tokens.UNK
        return float((sizes * unknown).sum() / max(sizes.sum(), 1))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; symbols are left out, unknown pieces become ⁇."""
        pieces = [int(i) for i in ids if i > special_tokens.EOP or i == special_tokens.UNK]
        if pieces and max(pieces) >= len(self):
            raise ValueError(
                f"there is no piece {max(pieces)} among the {len(self)}, 0 to {len(self) - 1}, of this vocabulary"
            )
        return self._pieces.decode(pieces)

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool: the piece begins a word, where a span may begin."""
        return np.array([starts_word(piece) for piece in self.pieces])

    @cached_property
    def n_bytes(self) -> np.ndarray:
        """(V,) int64: bytes of UTF-8 that a piece stands for; a symbol counts as one, and so does what is unknown."""
        lengths = [len(piece.replace(special_tokens.WORD_BOUNDARY, " ").encode()) for piece in self.pieces]
        return np.array([1] * len(special_tokens.SPECIAL_TOKENS) + lengths[len(special_tokens.SPECIAL_TOKENS) :])

    @cached_property
    def _kinds(self) -> np.ndarray:
        return kinds_of(self.pieces, self.preprocess)


def train(documents: Iterable[Document], config: TokenizerConfig) -> Tokenizer:
    """Learn a unigram vocabulary.

    Raises:
        ValueError: text of nothing that can be seen, or which does not allow a vocabulary of that size; the message names the largest.
    """
    lines = lines_to_learn(documents, config.train_chars, config.preprocess)
    model = io.BytesIO()
    try:
        with immediate_interrupts():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines,
                model_writer=model,
                model_type="unigram",
                vocab_size=config.vocab_size,
                character_coverage=config.character_coverage,
                control_symbols=list(special_tokens.CONTROL),
                user_defined_symbols=list(special_tokens.USER_DEFINED),
                max_sentence_length=LONGEST_SENTENCE,
                minloglevel=2,
            )
    except RuntimeError as error:
        if allowed := re.search(r"value <= (\d+)", str(error)):
            raise ValueError(
                f"tokenizer.vocab_size ({config.vocab_size}) is more than this text allows; "
                f"set tokenizer.vocab_size={allowed[1]} or less, or give more text"
            ) from None
        if needed := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise ValueError(
                f"tokenizer.vocab_size ({config.vocab_size}) has no room for the text's characters and the symbols; set "
                f"tokenizer.vocab_size={needed[1]} at the least, or a smaller tokenizer.character_coverage ({LEAST_COVERAGE} at the least)"
            ) from None
        raise ValueError(
            f"tokenizer.vocab_size={config.vocab_size}: SentencePiece could not learn it: {error}"
        ) from None
    return Tokenizer(model.getvalue(), preprocess=config.preprocess)
