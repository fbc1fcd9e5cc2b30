"""SentencePiece with XLNet's symbols: train, load, encode. The one door to sentencepiece.

Source: the settings published in zihangdai/xlnet's README (unigram, coverage 0.99995, ids 0-8 fixed).
"""

from __future__ import annotations

import hashlib
import io
import re
import signal
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from xlpre.atomic import new_file
from xlpre.text import symbols
from xlpre.text.alignment import Located, extents_of, located, prepared_and_located
from xlpre.text.boundaries import kinds_of, sentence_ends, starts_word
from xlpre.text.corpus import Document, Lines
from xlpre.text.preprocess import Preprocess, prepared, split_after_digits

LONGEST_SENTENCE = 1 << 16  # bytes; SentencePiece, for which a line is a sentence, passes over longer ones
LEAST_COVERAGE = 0.98  # of characters; SentencePiece refuses less


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
        if not LEAST_COVERAGE <= self.character_coverage <= 1:
            raise ValueError(
                f"tokenizer.character_coverage ({self.character_coverage}) is the share of characters with a piece; SentencePiece takes "
                f"{LEAST_COVERAGE} to 1"
            )
        if self.train_mb <= 0:
            raise ValueError(f"tokenizer.train_mb ({self.train_mb}) must be positive: million characters to learn from")
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
        except RuntimeError:
            raise ValueError(f"{origin}: not a SentencePiece model, as pretrain/train_tokenizer.py makes one") from None
        found = tuple(self._pieces.id_to_piece(i) for i in range(min(len(symbols.PIECES), len(self))))
        if found != symbols.PIECES:
            raise ValueError(
                f"{origin}: pieces 0-8 must be {' '.join(symbols.PIECES)}, not {' '.join(found)}; train one with train_tokenizer.py"
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

    @property
    def character_coverage(self) -> float:
        """See TokenizerConfig."""
        return round(self.proto.trainer_spec.character_coverage, 6)  # kept in 32 bits

    @cached_property
    def pieces(self) -> list[str]:
        """The V pieces by id."""
        return [self._pieces.id_to_piece(i) for i in range(len(self))]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self._encode([text])[0]

    def locate(self, text: str) -> Located:
        """The token ids that `encode` gives, and where in the text they stand."""
        cleaned, places = prepared_and_located(text, self.preprocess)
        _, offsets = self._pieces.normalize(cleaned, with_offsets=True)
        pieces = [(piece, self._parts(piece)) for piece in self._pieces.encode(cleaned, out_type=str)]
        ids = self._pieces.piece_to_id([part for _, parts in pieces for part in parts])
        extents = extents_of((piece, *parts) for piece, parts in pieces)
        return located(text, ids, extents, places[offsets])

    def encode_document(self, document: Document, lines: Lines = "paragraphs") -> tuple[np.ndarray, np.ndarray]:
        """Token ids (N,) of one document, and the offsets after each of its sentences; see encode_documents."""
        ids, ends, _ = self.encode_documents([document], lines)
        return ids, ends

    def encode_documents(
        self, documents: Sequence[Document], lines: Lines = "paragraphs", threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids of documents one after another, and where their sentences and they themselves end.

        Args:
            documents: each a list of lines.
            lines: what they are. Each paragraph gets an <eop>, a sentence nothing; an <eod> follows the last line either way,
                and belongs to the sentence before it.
            threads: for the encoding.

        Returns:
            (N,) int64 ids; (S,) and (documents,) int64 increasing offsets, the last ones N.
        """
        encoded = iter(self._encode([line for document in documents for line in document], threads))
        ids, line_ends, document_ends = array("q"), [], []
        for document in documents:
            for line in islice(encoded, len(document)):
                ids.fromlist(line)
                if lines == "paragraphs":
                    ids.append(symbols.EOP)
                line_ends.append(len(ids))
            ids.append(symbols.EOD)
            document_ends.append(len(ids))
        found = np.asarray(ids)
        if lines == "paragraphs":
            return found, sentence_ends(found, self._kinds), np.array(document_ends)
        ends = np.array(line_ends, np.int64)
        ends = ends[(ends > 0) & (found[ends] != symbols.EOD)]  # the last line of a document ends with it
        ends = np.union1d(ends[found[ends - 1] != symbols.EOD], document_ends)  # a line may hold no token
        return found, ends, np.array(document_ends)

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
        return [self._pieces.piece_to_id(self._split(pieces)) for pieces in encoded]

    def _split(self, pieces: list[str]) -> list[str]:
        found: list[str] = []
        for piece in pieces:
            if piece[-1:] == ",":  # few: the rest is not worth a call
                found += self._parts(piece)
            else:
                found.append(piece)
        return found

    def _parts(self, piece: str) -> list[str]:
        return [piece] if self.preprocess == "none" else split_after_digits(piece, self._pieces.encode_as_pieces)

    def unknown(self, texts: Sequence[str]) -> float:
        """The share of the characters of texts, as they are encoded, that are `<unk>`: a run of them is one token, however long."""
        texts = [prepared(text, self.preprocess) for text in texts]
        pieces = [piece for encoded in self._pieces.encode(texts, out_type=str) for piece in encoded]
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        unknown = np.array(self._pieces.piece_to_id(pieces)) == symbols.UNK
        return float((sizes * unknown).sum() / max(sizes.sum(), 1))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; symbols are left out, unknown pieces become ⁇."""
        return self._pieces.decode([int(i) for i in ids if i > symbols.EOP or i == symbols.UNK])

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool: the piece begins a word, where a span may begin."""
        return np.array([starts_word(piece) for piece in self.pieces])

    @cached_property
    def n_bytes(self) -> np.ndarray:
        """(V,) int64: bytes of UTF-8 that a piece stands for; a symbol counts as one, and so does what is unknown."""
        lengths = [len(piece.replace(symbols.SPACE, " ").encode()) for piece in self.pieces]
        return np.array([1] * len(symbols.PIECES) + lengths[len(symbols.PIECES) :])

    @cached_property
    def _kinds(self) -> np.ndarray:
        return kinds_of(self.pieces, self.preprocess)


def train(documents: Iterable[Document], config: TokenizerConfig) -> Tokenizer:
    """Learn a unigram vocabulary.

    Raises:
        ValueError: text of nothing that can be seen, or which does not allow a vocabulary of that size; the message names the largest.
    """
    lines = [prepared(line, config.preprocess) for line in _evenly(documents, config.train_mb * 1e6)]
    if all(
        character == symbols.SPACE or not character.isprintable()
        for line in lines
        for character in line
        if character != " "
    ):
        raise ValueError("the text has no characters that can be seen; a vocabulary has nothing to learn from it")
    model = io.BytesIO()
    try:
        with _interruptible():
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(part for line in lines for part in _cut(line)),
                model_writer=model,
                model_type="unigram",
                vocab_size=config.vocab_size,
                character_coverage=config.character_coverage,
                control_symbols=list(symbols.CONTROL),
                user_defined_symbols=list(symbols.USER_DEFINED),
                max_sentence_length=LONGEST_SENTENCE,
                minloglevel=2,
            )
    except RuntimeError as error:
        allowed = re.search(r"value <= (\d+)", str(error))
        if allowed:
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


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once; Python would hear of it when SentencePiece is done, in minutes, and throw away what was learned."""
    as_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not as_usual or threading.current_thread() is not threading.main_thread():  # others decide, or may
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _cut(line: str) -> Iterator[str]:
    """A line, in parts if it is so long that SentencePiece would pass over it; cut before a space where there is one."""
    if len(line.encode()) <= LONGEST_SENTENCE:
        yield line
        return
    start, most = 0, LONGEST_SENTENCE // 4  # characters of at most 4 bytes
    while len(line) - start > most:
        space = line.rfind(" ", start + 1, start + most)
        end = space if space > 0 else start + most
        yield line[start:end]
        start = end
    yield line[start:]


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
