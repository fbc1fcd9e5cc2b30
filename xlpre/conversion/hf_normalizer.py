"""SentencePiece's character map, written as normalizer steps of the `tokenizers` library.

`tokenizers` has a step for that map, but it reads a grapheme at a time and loses what follows a match, so that e + circumflex + acute
becomes ê. Here it is given single characters, the marks after them are composed by NFC, and a mark that the map would not compose (an
Arabic vowel, a dot below after a circumflex) is held away from NFC, which would compose or reorder it.
"""

from __future__ import annotations

import base64
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]

PART, HELD = "\ufdd0", "\ufdd1"  # noncharacters put before a mark: until the map was applied; until all was composed


def map_characters(charsmap: bytes, own: Sequence[str]) -> list[Json]:
    """SentencePiece's character map in steps of `tokenizers`.

    Nothing is put in at the start of a text, nor left to Precompiled to remove there: `tokenizers` 0.23 panics on both.
    """
    if not charsmap:
        return []
    rules = read_charsmap(charsmap)
    before: defaultdict[str, set[str]] = defaultdict(set)  # characters by the marks that compose with them
    for sequence, composed in rules.items():
        if len(sequence) > 1 and not "가" <= composed <= "힣":
            before[sequence[1:]].add(sequence[0])
    marks = r"\p{M}" + ranges({mark for sequence in before for mark in sequence})
    composes = "|".join(
        f"(?<=[{ranges(first)}]{re.escape(marks[:-1])}){re.escape(marks[-1])}" for marks, first in before.items()
    )
    finals = {c for c, to in rules.items() if "\u11a8" <= to <= "\u11c2"} | {chr(i) for i in range(0x11A8, 0x11C3)}
    held = [
        rf"(?!\A)(?=[{marks}])(?!{composes})",
        f"(?<=[가-힣])(?=[{ranges(finals)}])",  # NFC would close an open syllable
    ]
    if own:
        held.append(f"(?<={'|'.join(map(re.escape, own))})(?=[{marks}])")  # SentencePiece takes its symbols out first
    deleted = ranges(c for c, to in rules.items() if not to)
    return [
        replace("|".join(held), HELD),
        replace(rf"(?!\A)(?=[{marks}\u0e33\u0eb3\u200c\u200d])", PART),  # all that a grapheme can go on with
        *([replace(f"[{deleted}]", HELD)] if deleted else []),  # Precompiled fails on a first one
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
        replace(PART, ""),
        {"type": "NFC"},
        replace(HELD, ""),
    ]


def read_charsmap(charsmap: bytes) -> dict[str, str]:
    """What SentencePiece replaces by what, the longest match first.

    Source: sentencepiece normalizer.cc (length of the trie, trie, texts that end in 0); darts-clone (the trie's units).
    """
    (size,) = struct.unpack_from("<I", charsmap)
    trie, texts = struct.unpack_from(f"<{size // 4}I", charsmap, 4), charsmap[4 + size :]
    children: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for node, unit in enumerate(trie):
        if unit & 0xFF and not unit & 1 << 31:
            children[node ^ unit & 0xFF].append((node, bytes([unit & 0xFF])))
    rules = {}
    open_nodes = [(0, b"")]
    while open_nodes:
        node, key = open_nodes.pop()
        unit = trie[node]
        below = node ^ (unit >> 10 << ((unit & 1 << 9) >> 6))
        if unit & 1 << 8:
            start = trie[below] & 0x7FFFFFFF
            rules[key.decode()] = texts[start : texts.index(0, start)].decode()
        open_nodes += [(child, key + byte) for child, byte in children[below]]
    return rules


def ranges(characters: Iterable[str]) -> str:
    """The inside of a regular expression's [...] for these characters."""
    runs: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if runs and code == runs[-1][1] + 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    ends = [[re.escape(chr(code)) for code in run] for run in runs]
    return "".join(first if first == last else f"{first}-{last}" for first, last in ends)


def replace(pattern: str, content: str) -> Json:
    """A step that replaces what a regular expression matches."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
