"""What a vocabulary is learned from: lines taken evenly from the whole text, none longer than SentencePiece reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xlpre.text.document import Document
from xlpre.text.preprocess import Preprocess, prepared
from xlpre.text.special_tokens import WORD_BOUNDARY

LONGEST_SENTENCE = 1 << 16  # bytes; SentencePiece, for which a line is a sentence, passes over longer ones


def lines_to_learn(documents: Iterable[Document], characters: float, preprocess: Preprocess) -> Iterator[str]:
    """Lines of about `characters` in all, as a vocabulary with this `preprocess` wants them; a line that is too long in parts.

    Raises:
        ValueError: text of nothing that can be seen.
    """
    lines = [prepared(line, preprocess) for line in _evenly(documents, characters)]
    if all(
        character == WORD_BOUNDARY or not character.isprintable() for line in lines for character in line if character != " "
    ):
        raise ValueError("the text has no characters that can be seen; a vocabulary has nothing to learn from it")
    return (part for line in lines for part in parts_of(line))


def parts_of(line: str) -> Iterator[str]:
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
