"""Vocabularies that are plain tables: bytes, characters and words, as in language-modeling benchmarks. Text is kept as it is.

The vocabulary file is JSON: `format`, `format_version`, `kind`, and `pieces`, the pieces after the special tokens, most frequent
first. A table of bytes has no `pieces`. As in Transformer-XL (kimiyoung/transformer-xl, vocabulary.py), words are separated by white
space, every line end is a token (here <eop>, there <eos>), and equally frequent pieces keep the order of their first occurrence.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

import numpy as np

from xlpre.common.errors import InputError
from xlpre.text.document import Document
from xlpre.text.offsets import NO_POSITION, TokenOffsets, build_offsets
from xlpre.text.special_tokens import EOP, N_SPECIAL, NEWLINE_PIECE, SPECIAL_TOKENS, UNK, WORD_BOUNDARY
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig

FORMAT, FORMAT_VERSION = "xlpre vocabulary", 1
UNKNOWN = "⁇"  # text of <unk>
NEWLINE = "\n"
N_CODE_POINTS = 0x110000


class TableTokenizer(Tokenizer):
    """A vocabulary whose pieces are listed in a table.

    Args:
        table: pieces after the special tokens.
    """

    file_name = "vocabulary.json"
    library_version = ""
    preprocess = "none"

    def __init__(self, table: Sequence[str]) -> None:
        self.table = list(table)

    def __len__(self) -> int:
        return N_SPECIAL + len(self.table)

    @cached_property
    def content(self) -> bytes:  # type: ignore[override]
        """Content of the vocabulary file."""
        identity = {"format": FORMAT, "format_version": FORMAT_VERSION, "kind": self.kind}
        return (json.dumps({**identity, **self._stored_table()}, ensure_ascii=False, indent=0) + "\n").encode()

    @cached_property
    def pieces(self) -> list[str]:
        """The V pieces, indexed by id."""
        return [*SPECIAL_TOKENS, *map(self._piece, self.table)]

    @cached_property
    def bytes_per_piece(self) -> np.ndarray:
        """(V,) int64, number of UTF-8 bytes of each piece; see `Tokenizer`."""
        return np.array([1] * N_SPECIAL + [self._n_bytes(entry) for entry in self.table])

    def encode_with_offsets(self, text: str) -> TokenOffsets:
        """Return token ids and the characters that each token covers; see `Tokenizer`."""
        ids, starts, ends = self._encode_with_extents(text)
        # a token of white space has no position of its own
        extents = [
            (NO_POSITION, NO_POSITION) if text[start:end].isspace() else (start, end - 1)
            for start, end in zip(starts, ends, strict=True)
        ]
        return build_offsets(text, ids, extents, np.arange(len(text) + 1))

    def _stored_table(self) -> dict[str, list[str]]:
        return {"pieces": self.table}

    @abstractmethod
    def _piece(self, entry: str) -> str:
        """Return the piece of an entry of the table, in which `▁` stands for a space."""

    @abstractmethod
    def _n_bytes(self, entry: str) -> int:
        """Return the bytes of text that an entry of the table stands for."""

    @abstractmethod
    def _encode_with_extents(self, text: str) -> tuple[list[int], Sequence[int], Sequence[int]]:
        """Return the token ids of a text, and the first character of each token and the one after its last."""


class ByteTokenizer(TableTokenizer):
    """The 256 bytes. A newline is a byte like any other.

    Bytes that are not UTF-8 are surrogate escapes in a text (PEP 383); `decode` replaces them.
    """

    kind = "bytes"
    line_end = N_SPECIAL + ord(NEWLINE)

    def __init__(self) -> None:
        super().__init__([chr(byte) for byte in range(256)])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; see `Tokenizer`."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of token ids; see `Tokenizer`."""
        text = bytearray()
        for i in self._check_ids(ids):
            text += UNKNOWN.encode() if i == UNK else bytes([i - N_SPECIAL] if i != EOP else [])
        return bytes(text)

    def unknown_fraction(self, texts: Sequence[str]) -> float:
        """Return the fraction of the characters of `texts` that become <unk>."""
        return 0.0

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool, True if the piece starts a word; see `Tokenizer`."""
        # a span may start with white space and ASCII punctuation, and not inside of a character
        can_start = [chr(byte).isascii() and not chr(byte).isalnum() for byte in range(256)]
        return np.array([True] * N_SPECIAL + can_start)

    def _stored_table(self) -> dict[str, list[str]]:
        return {}

    def _piece(self, entry: str) -> str:
        if entry == " ":
            return WORD_BOUNDARY
        return entry if entry.isascii() and entry.isprintable() else f"<0x{ord(entry):02X}>"

    def _n_bytes(self, entry: str) -> int:
        return 1

    def _encode(self, texts: Sequence[str], threads: int = 1) -> Iterator[list[int]]:
        for text in texts:
            content = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
            yield (content.astype(np.int64) + N_SPECIAL).tolist()

    def _encode_with_extents(self, text: str) -> tuple[list[int], Sequence[int], Sequence[int]]:
        characters = [index for index, c in enumerate(text) for _ in c.encode(errors="surrogateescape")]
        return self.encode(text), characters, [index + 1 for index in characters]


class CharacterTokenizer(TableTokenizer):
    """A table of characters. The newline is always one of them."""

    kind = "characters"

    def __init__(self, table: Sequence[str]) -> None:
        super().__init__(table)
        self.line_end = N_SPECIAL + self.table.index(NEWLINE)  # type: ignore[misc]
        self._ids = np.full(N_CODE_POINTS, UNK, np.int64)
        self._ids[_code_points("".join(self.table))] = np.arange(N_SPECIAL, len(self))

    @classmethod
    def train(cls, documents: Iterable[Document], config: TokenizerConfig) -> CharacterTokenizer:
        """Return the table of the characters of a text that occur at least `config.min_count` times.

        Raises:
            InputError: no character does.
        """
        counts: Counter[str] = Counter()
        for document in documents:
            for line in document:
                counts.update(line)
        counts.pop(NEWLINE, None)
        return cls([NEWLINE, *_most_frequent(counts, config, n_reserved=N_SPECIAL + 1)])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; see `Tokenizer`."""
        text = {UNK: UNKNOWN, EOP: ""}
        return "".join(text[i] if i < N_SPECIAL else self.table[i - N_SPECIAL] for i in self._check_ids(ids))

    def unknown_fraction(self, texts: Sequence[str]) -> float:
        """Return the fraction of the characters of `texts` that become <unk>."""
        ids = self._ids[_code_points("".join(texts))]
        return float((ids == UNK).sum() / max(len(ids), 1))

    def _piece(self, entry: str) -> str:
        return {" ": WORD_BOUNDARY, NEWLINE: NEWLINE_PIECE}.get(entry, entry)

    def _n_bytes(self, entry: str) -> int:
        return len(entry.encode())

    def _encode(self, texts: Sequence[str], threads: int = 1) -> Iterator[list[int]]:
        for text in texts:
            yield self._ids[_code_points(text)].tolist()

    def _encode_with_extents(self, text: str) -> tuple[list[int], Sequence[int], Sequence[int]]:
        return self.encode(text), range(len(text)), range(1, len(text) + 1)


class WordTokenizer(TableTokenizer):
    """A table of words, which are separated by white space. A newline becomes <eop>.

    The words `<unk>` and `<eop>` of a text are these tokens. Every other word that the table does not have becomes <unk>. A word counts
    the space before it as one byte.
    """

    kind = "words"

    def __init__(self, table: Sequence[str]) -> None:
        super().__init__(table)
        self._ids = {SPECIAL_TOKENS[UNK]: UNK, SPECIAL_TOKENS[EOP]: EOP}
        self._ids |= {word: i for i, word in enumerate(self.table, N_SPECIAL)}

    @classmethod
    def train(cls, documents: Iterable[Document], config: TokenizerConfig) -> WordTokenizer:
        """Return the table of the words of a text that occur at least `config.min_count` times.

        Raises:
            InputError: no word does.
        """
        counts: Counter[str] = Counter()
        for document in documents:
            for line in document:
                counts.update(line.split())
        for piece in SPECIAL_TOKENS:
            counts.pop(piece, None)
        return cls(_most_frequent(counts, config, n_reserved=N_SPECIAL))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; see `Tokenizer`."""
        text = {UNK: UNKNOWN, EOP: NEWLINE}
        words = [text[i] if i < N_SPECIAL else self.table[i - N_SPECIAL] for i in self._check_ids(ids)]
        return re.sub(r" ?\n ?", NEWLINE, " ".join(words))

    def unknown_fraction(self, texts: Sequence[str]) -> float:
        """Return the fraction of the characters of `texts` that become <unk>."""
        words = Counter(word for text in texts for word in text.split())
        n_chars = sum((len(word) + 1) * count for word, count in words.items())
        unknown = sum((len(word) + 1) * count for word, count in words.items() if word not in self._ids)
        return unknown / max(n_chars, 1)

    def _piece(self, entry: str) -> str:
        return WORD_BOUNDARY + entry

    def _n_bytes(self, entry: str) -> int:
        return 1 + len(entry.encode())

    def _encode(self, texts: Sequence[str], threads: int = 1) -> Iterator[list[int]]:
        for text in texts:
            yield [self._ids.get(word, UNK) for word in text.replace(NEWLINE, f" {SPECIAL_TOKENS[EOP]} ").split()]

    def _encode_with_extents(self, text: str) -> tuple[list[int], Sequence[int], Sequence[int]]:
        spans = [match.span() for match in re.finditer(r"\n|\S+", text)]
        return self.encode(text), [start for start, _ in spans], [end for _, end in spans]


TABLES: dict[str, type[CharacterTokenizer] | type[WordTokenizer]] = {
    table.kind: table for table in (CharacterTokenizer, WordTokenizer)
}


def train_table(documents: Iterable[Document], config: TokenizerConfig) -> TableTokenizer:
    """Return the table of `config.kind` for the whole text; a table of bytes does not read it.

    Raises:
        InputError: the text has no piece that occurs often enough.
    """
    return ByteTokenizer() if config.kind == "bytes" else TABLES[config.kind].train(documents, config)


def parse_table(content: bytes, origin: str) -> TableTokenizer:
    """Return the vocabulary in the content of a vocabulary file, which is named `origin` in error messages.

    Raises:
        InputError: the file is not a valid table, or another version of xlpre wrote it.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{origin} cannot be read: {error}. Copy the file again, or train the vocabulary again."
        ) from None
    remedy = "Copy the file again, or train the vocabulary again with pretrain/train_tokenizer.py."
    if fields.get("format") != FORMAT or fields.get("kind") not in ("bytes", *TABLES):
        raise InputError(f"{origin} is invalid: it holds no vocabulary of bytes, characters or words. {remedy}")
    if (version := fields.get("format_version")) != FORMAT_VERSION:
        raise InputError(
            f"{origin} is invalid: it has format {version}, this version of xlpre reads {FORMAT_VERSION}. {remedy}"
        )
    if fields["kind"] == "bytes":
        return ByteTokenizer()
    kind, table = TABLES[fields["kind"]], fields.get("pieces")
    if not isinstance(table, list) or not all(isinstance(entry, str) and entry for entry in table):
        raise InputError(f"{origin} is invalid: `pieces` must be a list of texts. {remedy}")
    if repeated := len(table) - len({*table, *SPECIAL_TOKENS} - {*SPECIAL_TOKENS}):
        raise InputError(
            f"{origin} is invalid: {repeated} entries of `pieces` are repeated or special tokens. {remedy}"
        )
    if kind is CharacterTokenizer and (NEWLINE not in table or max(map(len, table)) > 1):
        raise InputError(f"{origin} is invalid: `pieces` must be single characters with a newline. {remedy}")
    if kind is WordTokenizer and any(entry.split() != [entry] for entry in table):
        raise InputError(f"{origin} is invalid: `pieces` must be words without white space. {remedy}")
    return kind(table)


def _most_frequent(counts: Counter[str], config: TokenizerConfig, n_reserved: int) -> list[str]:
    """Return the most frequent entries for a vocabulary of up to `config.vocab_size` pieces, of which `n_reserved` are no entries.

    Equally frequent entries keep the order of their first occurrence. Bytes that are not UTF-8 are no entries.
    """
    if config.vocab_size <= n_reserved:
        raise InputError(
            f"tokenizer.vocab_size={config.vocab_size} is invalid: it must be above {n_reserved}, the number of special tokens and "
            "newlines. Raise it."
        )
    frequent = (entry for entry, count in counts.most_common() if count >= config.min_count and _is_utf8(entry))
    if not (entries := list(islice(frequent, config.vocab_size - n_reserved))):
        raise InputError(
            f"tokenizer.min_count={config.min_count} is invalid: no piece of the text occurs as often. Lower it, or check text.source."
        )
    return entries


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
