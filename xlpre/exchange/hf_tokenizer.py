"""The tokenizer files of a Hugging Face model folder, such that AutoTokenizer gives the ids that ours gives.

spiece.model            the SentencePiece vocabulary, unchanged
tokenizer.json          the same for the `tokenizers` library, which AutoTokenizer reads
tokenizer_config.json   the special tokens, padding on the left

`tokenizers` has SentencePiece's unigram model, but not its character map: Precompiled reads it a grapheme at a time and loses
what follows a match, so that e + circumflex + acute becomes ê. Here it is given single characters, the marks after them are
composed by NFC, and a mark that the map would not compose (an Arabic vowel, a dot below after a circumflex) is held away from
NFC, which would compose or reorder it.

Not the same as ours:
- <unk> <s> </s> <cls> <sep> <pad> <mask> <eod> spelled out in a text are symbols, as everywhere at Hugging Face;
  AutoTokenizer.from_pretrained(folder, split_special_tokens=True) reads them as text, as SentencePiece does.
- Two segmentations of one score, "ii i" and "i ii": SentencePiece adds in single precision and rounds at random, `tokenizers`
  in double and takes the first. 2 of 978,000 tokens of Wikipedia and novels (2026-11-21).
- Marks composed in scripts newer than the Unicode 12 of `tokenizers` (Todhri, Tulu), and the noncharacters used here as marks.
- cased, uncased: "20," is there never one piece, here it is one first and split then. Where another segmentation of the
  number wins without it the ids differ: none of 213 in Wikipedia (2026-11-21).
"""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xlpre.text import symbols
from xlpre.text.preprocess import Preprocess
from xlpre.text.symbols import SPACE
from xlpre.text.tokenizer import Tokenizer

PART, HELD = "\ufdd0", "\ufdd1"  # noncharacters put before a mark: until the map was applied; until all was composed
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # sentencepiece_model.proto
UNIGRAM = 1
NEVER = -1000.0  # added to a score, below any other segmentation of a word

Json = dict[str, Any]


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write spiece.model, tokenizer.json and tokenizer_config.json.

    Args:
        tokenizer: what they shall be equal to.
        folder: of the model; its config.json says `model_type` xlnet.

    Raises:
        ValueError: the vocabulary is not a unigram one, or treats spaces in a way `tokenizers` has no word for.
    """
    content = json.dumps(_tokenizer(tokenizer), ensure_ascii=False, indent=1)
    tokenizer.save(folder / "spiece.model")
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=1))


def read_vocabulary(folder: Path) -> bytes:
    """The SentencePiece model of a Hugging Face XLNet folder.

    Raises:
        ValueError: there is none.
    """
    try:
        return (folder / "spiece.model").read_bytes()
    except OSError as error:
        if (folder / "tokenizer.json").exists():
            raise ValueError(
                f"{folder}: the vocabulary is there as tokenizer.json only, which does not hold a SentencePiece model; "
                "put the spiece.model of the model that it comes from beside it"
            ) from None
        raise ValueError(f"{folder}/spiece.model: cannot be read: {error.strerror}") from None


def _config() -> Json:
    unk, bos, eos, cls, sep, pad, mask, eod, _ = symbols.PIECES
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # XLNetTokenizer would put its own normalizer for that of tokenizer.json
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "cls_token": cls,
        "sep_token": sep,
        "pad_token": pad,
        "mask_token": mask,
        "additional_special_tokens": [eod],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


def _tokenizer(tokenizer: Tokenizer) -> Json:
    """tokenizer.json."""
    proto = tokenizer.proto
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    spaces = spec.add_dummy_prefix and spec.remove_extra_whitespaces and spec.escape_whitespaces
    if trainer.model_type != UNIGRAM or trainer.byte_fallback or trainer.treat_whitespace_as_suffix or not spaces:
        raise ValueError(
            "the vocabulary is not a unigram SentencePiece model with the usual spaces (add_dummy_prefix, "
            "remove_extra_whitespaces, escape_whitespaces, no byte_fallback); train one with train_tokenizer.py"
        )
    symbol = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type in (UNKNOWN, CONTROL)}
    own = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    space = {"type": "Metaspace", "replacement": SPACE, "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": piece, **flags} for piece, i in symbol.items()],
        "normalizer": _sequence(
            *_preprocess(tokenizer.preprocess),
            *_map_characters(spec.precompiled_charsmap, own),
            *_single_spaces(),
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [_split_spelled_out(symbol), {**space, "prepend_scheme": "never"}],
        },
        "post_processor": _template(),
        "decoder": {**space, "prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": symbols.UNK,
            "byte_fallback": False,
            "vocab": [[piece.piece, _score(piece, tokenizer.preprocess)] for piece in proto.pieces],
        },
    }


def _score(piece: Any, preprocess: Preprocess) -> float:
    if piece.type == USER_DEFINED:
        return -0.1  # as SentencePiece scores it: above every other piece, below nothing
    ends_in_number_and_comma = piece.piece[-1:] == "," and piece.piece[-2:-1].isdigit()
    return piece.score + (NEVER if preprocess != "none" and ends_in_number_and_comma else 0.0)


def _template() -> Json:
    """A <sep> <cls> and A <sep> B <sep> <cls>, in segments 0, 1 and 2."""

    def text(which: str, segment: int) -> Json:
        return {"Sequence": {"id": which, "type_id": segment}}

    def symbol(i: int, segment: int) -> Json:
        return {"SpecialToken": {"id": symbols.PIECES[i], "type_id": segment}}

    first, second, end = (
        [text("A", 0), symbol(symbols.SEP, 0)],
        [text("B", 1), symbol(symbols.SEP, 1)],
        [symbol(symbols.CLS, 2)],
    )
    named = {symbols.PIECES[i]: i for i in (symbols.SEP, symbols.CLS)}
    return {
        "type": "TemplateProcessing",
        "single": first + end,
        "pair": first + second + end,
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in named.items()},
    }


def _split_spelled_out(pieces: Iterable[str]) -> Json:
    """Part a symbol that is spelled out in a text, or the unigram model would find it: for SentencePiece it is no piece."""
    rest = "|".join(re.escape(piece[1:]) for piece in pieces)
    return {
        "type": "Split",
        "pattern": {"Regex": f"<(?={rest})"},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }


def _preprocess(preprocess: Preprocess) -> list[Json]:
    """`xlpre.text.preprocess.prepared` in steps of `tokenizers`."""
    if preprocess == "none":
        return []
    every = [chr(i) for i in range(sys.maxunicode + 1)]
    steps = [
        _replace(f"[{_ranges(c for c in every if c.isspace())}]+", " "),
        *_single_spaces(),
        _replace("``|''", '"'),
        {"type": "NFKD"},
        _replace(f"[{_ranges(c for c in every if unicodedata.combining(c))}]", ""),
    ]
    if preprocess == "uncased":
        before, after = r"(?<=\p{Cased}|\p{Cased}\p{Case_Ignorable})", r"(?!\p{Case_Ignorable}*\p{Cased})"
        steps += [_replace(f"{before}Σ{after}", "ς"), {"type": "Lowercase"}]  # Lowercase knows no final sigma
    return steps


def _single_spaces() -> list[Json]:
    return [_replace(" {2,}", " "), _replace(r"\A | \z", "")]


def _map_characters(charsmap: bytes, own: Iterable[str]) -> list[Json]:
    """SentencePiece's character map in steps of `tokenizers`; what is put in never stands first, where removing it fails."""
    if not charsmap:
        return []
    rules = read_charsmap(charsmap)
    before: defaultdict[str, set[str]] = defaultdict(set)  # characters by the marks that compose with them
    for sequence, composed in rules.items():
        if len(sequence) > 1 and not "가" <= composed <= "힣":
            before[sequence[1:]].add(sequence[0])
    marks = r"\p{M}" + _ranges({mark for sequence in before for mark in sequence})
    composes = "|".join(
        f"(?<=[{_ranges(first)}]{re.escape(marks[:-1])}){re.escape(marks[-1])}" for marks, first in before.items()
    )
    finals = {c for c, to in rules.items() if "\u11a8" <= to <= "\u11c2"} | {chr(i) for i in range(0x11A8, 0x11C3)}
    held = [
        rf"(?!\A)(?=[{marks}])(?!{composes})",
        f"(?<=[가-힣])(?=[{_ranges(finals)}])",  # NFC would close an open syllable
        f"(?<={'|'.join(map(re.escape, own))})(?=[{marks}])",  # SentencePiece takes its symbols out first
    ]
    return [
        _replace("|".join(held), HELD),
        _replace(rf"(?!\A)(?=[{marks}\u0e33\u0eb3\u200c\u200d])", PART),  # all that a grapheme can go on with
        _replace(f"[{_ranges(c for c, to in rules.items() if not to)}]", HELD),  # Precompiled fails on a first one
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
        _replace(PART, ""),
        {"type": "NFC"},
        _replace(HELD, ""),
    ]


def read_charsmap(charsmap: bytes) -> dict[str, str]:
    """What SentencePiece replaces by what, the longest match first.

    Source: sentencepiece normalizer.cc (length of the trie, trie, texts that end in 0) and darts-clone (the trie's units).
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


def _ranges(characters: Iterable[str]) -> str:
    """The inside of a regular expression's [...] for these characters."""
    runs: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if runs and code == runs[-1][1] + 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    ends = [[re.escape(chr(code)) for code in run] for run in runs]
    return "".join(first if first == last else f"{first}-{last}" for first, last in ends)


def _replace(pattern: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(steps)}


def read_preprocess(folder: Path) -> str:
    """How the original prepared text for the vocabulary of a Hugging Face folder: `cased`, or `uncased` if it lower-cases."""
    return "cased"
