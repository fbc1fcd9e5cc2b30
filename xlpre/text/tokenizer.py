"""SentencePiece with XLNet's symbols: train, load, encode. The one door to sentencepiece.

Source: the settings published in zihangdai/xlnet's README (unigram, coverage 0.99995, ids 0-8 fixed).
"""

from __future__ import annotations

import hashlib
import io
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from xlpre.atomic import new_file
from xlpre.text import symbols
from xlpre.text.corpus import Document, Lines
from xlpre.text.preprocess import Preprocess, prepared, split_after_digits
from xlpre.text.symbols import SPACE


@dataclass(frozen=True)
class TokenizerConfig:
    """The vocabulary.

    Attributes:
        path: the SentencePiece model file; `pretrain/train_tokenizer.py` makes it.
        vocab_size: number of pieces, symbols included.
        character_coverage: share of characters that get a piece; the rest becomes `<unk>`.
        train_mb: learn from about so many million characters, taken evenly from the whole text.
        preprocess: what is done to text besides SentencePiece's own NFKC. `none`: nothing. `cased`: as the released XLNet
            was trained (single spaces, plain quotation marks, no accents, a comma after a digit a piece of its own).
            `uncased`: the same in lower case.
    """

    path: str = "tokenizers/${name}.model"
    vocab_size: int = 32000
    character_coverage: float = 0.99995
    train_mb: float = 100.0
    preprocess: Preprocess = "none"

    def __post_init__(self) -> None:
        least = len(symbols.PIECES) + len(symbols.USER_DEFINED)
        if self.vocab_size <= least:
            raise ValueError(
                f"tokenizer.vocab_size ({self.vocab_size}) must be above {least}, the number of special symbols"
            )


class Tokenizer:
    """A vocabulary of V pieces. `encode` gives ids; the arrays over V say what a piece is at a boundary."""

    def __init__(self, model: bytes, origin: str = "tokenizer", preprocess: Preprocess = "none") -> None:
        self.model, self.preprocess = model, preprocess
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"{origin}: not a SentencePiece model ({str(error).splitlines()[0]})") from None
        found = tuple(self._pieces.id_to_piece(i) for i in range(min(len(symbols.PIECES), len(self))))
        if found != symbols.PIECES:
            raise ValueError(
                f"{origin}: pieces 0-8 must be {' '.join(symbols.PIECES)}, not {' '.join(found)}; train one with train_tokenizer.py"
            )

    @classmethod
    def load(cls, path: str | Path, preprocess: Preprocess = "none") -> Tokenizer:
        """Read a model file, which does not say how text is preprocessed for it.

        Raises:
            ValueError: no such file, not a SentencePiece model, or one without XLNet's symbols.
        """
        try:
            return cls(Path(path).read_bytes(), str(path), preprocess)
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no vocabulary; make it with pretrain/train_tokenizer.py") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None

    def save(self, path: str | Path) -> None:
        """Write the model file, whole or not at all."""
        with new_file(path) as partial:
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

    @cached_property
    def pieces(self) -> list[str]:
        """The V pieces by id."""
        return [self._pieces.id_to_piece(i) for i in range(len(self))]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self._encode([text])[0]

    def encode_document(self, document: Document, lines: Lines = "paragraphs") -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a document and where its sentences end.

        Args:
            document: its lines.
            lines: what they are. Each paragraph gets an <eop>, a sentence nothing; an <eod> follows the last line either way,
                and belongs to the sentence before it.

        Returns:
            (N,) int64 ids; (S,) int64 increasing offsets after each sentence, the last one N.
        """
        after = [symbols.EOP] if lines == "paragraphs" else []
        encoded = [ids + after for ids in self._encode(document)]
        ids = np.array([i for line in encoded for i in line] + [symbols.EOD], np.int64)
        if lines == "paragraphs":
            return ids, self.sentence_ends(ids)
        ends = np.unique(np.cumsum([len(line) for line in encoded]))  # a line may hold no token
        return ids, np.append(ends[(ends > 0) & (ends < len(ids) - 1)], len(ids))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self.preprocess == "none":
            return self._pieces.encode(texts)
        texts = [prepared(text, self.preprocess) for text in texts]
        return [
            self._pieces.piece_to_id(split_after_digits(pieces, self._pieces.encode_as_pieces))
            for pieces in self._pieces.encode_as_pieces(texts)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; symbols are left out, unknown pieces become ⁇."""
        return self._pieces.decode([int(i) for i in ids if i > symbols.EOP or i == symbols.UNK])

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool: the piece begins a word, where a span may begin.

        Source: zihangdai/xlnet data_utils.py (space mark, '<', ASCII punctuation), and here also a script written without spaces,
        whose every piece begins one.
        """
        return np.array([_starts_word(piece) for piece in self.pieces])

    def sentence_ends(self, ids: np.ndarray) -> np.ndarray:
        """Offsets after each sentence of an encoded document of paragraphs, the last one its end.

        A sentence ends at a terminal mark (and closing quotes or brackets) before a piece that begins a word and is not
        lower-case (in uncased text any such piece), and at the end of a paragraph.
        """
        final = self._terminal[ids]
        final[1:] |= self._closing[ids[1:]] & final[:-1]
        lower = self._lower_case[ids]
        alone = self._space[ids]  # a space whose word begins in the next piece
        lower[:-1] |= alone[:-1] & lower[1:]
        ends = final[:-1] & (self.starts_word[ids] & ~lower)[1:]
        ends |= (ids[:-1] == symbols.EOP) & (ids[1:] != symbols.EOD)
        return np.append(np.flatnonzero(ends) + 1, len(ids))

    @cached_property
    def _terminal(self) -> np.ndarray:
        return np.array([piece.endswith((".", "!", "?", "…", "。", "！", "？", "｡")) for piece in self.pieces])

    @cached_property
    def _closing(self) -> np.ndarray:
        return np.array([all(c in "\"')]»”’」』）" for c in piece) for piece in self.pieces])

    @cached_property
    def _lower_case(self) -> np.ndarray:
        cased = self.preprocess != "uncased"  # else lower case says nothing
        return np.array([cased and piece.removeprefix(SPACE)[:1].islower() for piece in self.pieces])

    @cached_property
    def _space(self) -> np.ndarray:
        return np.array([piece == SPACE for piece in self.pieces])


def train(documents: Iterable[Document], config: TokenizerConfig) -> Tokenizer:
    """Learn a unigram vocabulary.

    Raises:
        ValueError: the text does not allow a vocabulary of that size; the message names the largest that it does.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(prepared(line, config.preprocess) for line in _evenly(documents, config.train_mb * 1e6)),
            model_writer=model,
            model_type="unigram",
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            control_symbols=list(symbols.CONTROL),
            user_defined_symbols=list(symbols.USER_DEFINED),
            max_sentence_length=1 << 16,  # bytes; longer lines would be passed over
            minloglevel=2,
        )
    except RuntimeError as error:
        allowed = re.search(r"value <= (\d+)", str(error))
        if allowed:
            raise ValueError(
                f"tokenizer.vocab_size ({config.vocab_size}) is more than this text allows; "
                f"set tokenizer.vocab_size={allowed[1]} or less, or give more text"
            ) from None
        raise ValueError(
            f"tokenizer.vocab_size={config.vocab_size}: SentencePiece could not learn it: {error}"
        ) from None
    return Tokenizer(model.getvalue(), preprocess=config.preprocess)


def _evenly(documents: Iterable[Document], characters: float) -> list[str]:
    """Lines of every n-th document, with the smallest n (a power of two) that keeps them below `characters`."""
    kept: list[tuple[int, Document]] = []
    size, stride = 0, 1
    for number, document in enumerate(documents):
        if number % stride:
            continue
        kept.append((number, document))
        size += sum(map(len, document))
        while size > characters and len(kept) > 1:
            stride *= 2
            kept = [(n, d) for n, d in kept if n % stride == 0]
            size = sum(len(line) for _, d in kept for line in d)
    return [line for _, document in kept for line in document]


def _starts_word(piece: str) -> bool:
    if piece.startswith((SPACE, "<")) or (len(piece) == 1 and piece in '!"#$%&()*+,-./:;?@[\\]^_`{|}~'):
        return True
    first = piece[:1]
    return first != "" and written_without_spaces(first)


def written_without_spaces(character: str) -> bool:
    """Han, kana, Thai, Lao, Khmer, Burmese, Tibetan: scripts that put no space between words."""
    name = unicodedata.name(character, "")
    return name.startswith(("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"))
