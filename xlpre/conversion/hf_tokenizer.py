"""Files of a Hugging Face model folder for its tokenizer, with which AutoTokenizer returns the ids of `SentencePieceTokenizer`.

spiece.model            SentencePiece vocabulary, unchanged
tokenizer.json          the same vocabulary for the `tokenizers` library; AutoTokenizer reads it
tokenizer_config.json   special tokens and padding side

Known differences:
- AutoTokenizer reads <unk> <s> </s> <cls> <sep> <pad> <mask> <eod> in a text (as in WikiText) as special tokens.
  AutoTokenizer.from_pretrained(folder, split_special_tokens=True) reads them as text, as SentencePiece does.
- Two segmentations may have equal scores, such as "ii i" and "i ii". The choice of SentencePiece depends on rounding in
  single precision; `tokenizers` computes in double precision and takes the first.
- `tokenizers` implements Unicode 12. Newer characters may differ: composed marks (scripts Todhri and Tulu) and, with
  `uncased`, lower-cased capitals. The noncharacters U+FDD0 and U+FDD1, which mark positions in the normalizer, may differ, too.
- With `cased` and `uncased`, xlpre first matches a piece such as "20," and then splits it. `tokenizers` never matches such
  a piece, so another segmentation of the number may win.

SentencePiece's character map is written as normalizer steps. The `Precompiled` step of `tokenizers` applies that map to
whole graphemes and drops the characters after a match: e + circumflex + acute becomes ê. Here, `Precompiled` receives
single characters, and NFC then composes their marks. Marks that the map does not compose (an Arabic vowel, a dot below
after a circumflex) are hidden from NFC, which would compose or reorder them.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from xlpre.common.errors import InputError
from xlpre.text import special_tokens
from xlpre.text.preprocess import Preprocess, ends_with_number_and_comma
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.special_tokens import WORD_BOUNDARY

Json = dict[str, Any]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # piece types in sentencepiece_model.proto
UNIGRAM = 1
# added to the score of a piece that must not be used: every other segmentation of a word scores higher
EXCLUDED_SCORE = -1000.0
# noncharacters that separate a mark from its base character until the map (SPLIT_MARK) or NFC (HOLD_MARK) has been applied
SPLIT_MARK, HOLD_MARK = "\ufdd0", "\ufdd1"


def write_tokenizer(
    tokenizer: SentencePieceTokenizer,
    folder: Path,
    padding_side: Literal["left", "right"] = "left",
    max_len: int | None = None,
) -> None:
    """Write spiece.model, tokenizer.json and tokenizer_config.json.

    Args:
        tokenizer: vocabulary to convert.
        folder: folder of the model, whose config.json has `model_type` xlnet.
        padding_side: side on which shorter rows of a batch are padded.
        max_len: number of tokens to which `truncation=True` shortens a row; None: no limit.

    Raises:
        InputError: the vocabulary is not a unigram model, or treats spaces in a way that `tokenizers` does not support.
    """
    content = json.dumps(_tokenizer_json(tokenizer), ensure_ascii=False, indent=1)
    tokenizer.save(folder / "spiece.model")
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(tokenizer.preprocess, padding_side, max_len), indent=1), encoding="utf-8"
    )


def read_vocabulary(folder: Path) -> bytes:
    """Return the SentencePiece model of a model folder.

    Raises:
        InputError: there is no spiece.model.
    """
    try:
        return (folder / "spiece.model").read_bytes()
    except OSError as error:
        if (folder / "tokenizer.json").exists():
            raise InputError(
                f"{folder} is invalid: it has no spiece.model, and its tokenizer.json does not contain a SentencePiece model. "
                "Put the spiece.model of the original model there."
            ) from None
        raise InputError(
            f"{folder}/spiece.model cannot be read ({error.strerror}). Put the vocabulary of this model there."
        ) from None


def read_preprocess(folder: Path) -> Preprocess:
    """Return the preprocessing that tokenizer_config.json describes, for a folder without provenance. The default is `cased`.

    Raises:
        InputError: tokenizer_config.json cannot be read.
    """
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return "uncased" if settings.get("do_lower_case") else "none" if settings.get("keep_accents") else "cased"
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} cannot be read: {error}. Copy the file again from the original folder.") from None


def _tokenizer_config(preprocess: Preprocess, padding_side: str, max_len: int | None) -> Json:
    unk, bos, eos, cls, sep, pad, mask, eod, _ = special_tokens.SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # XLNetTokenizer would replace the normalizer of tokenizer.json
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "cls_token": cls,
        "sep_token": sep,
        "pad_token": pad,
        "mask_token": mask,
        "additional_special_tokens": [eod],
        "padding_side": padding_side,
        **({"model_max_length": max_len} if max_len else {}),
        "do_lower_case": preprocess == "uncased",
        "keep_accents": preprocess == "none",  # read_preprocess reads this and do_lower_case
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


def _tokenizer_json(tokenizer: SentencePieceTokenizer) -> Json:
    proto = tokenizer.model_proto
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    usual_spaces = spec.add_dummy_prefix and spec.remove_extra_whitespaces and spec.escape_whitespaces
    if trainer.model_type != UNIGRAM or trainer.byte_fallback or trainer.treat_whitespace_as_suffix or not usual_spaces:
        raise InputError(
            "the vocabulary is invalid for Hugging Face's tokenizers: it must be a unigram SentencePiece model with add_dummy_prefix, "
            "remove_extra_whitespaces and escape_whitespaces, and without byte_fallback. Train one with pretrain/train_tokenizer.py."
        )
    special_ids = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type in (UNKNOWN, CONTROL)}
    user_defined = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    metaspace = {"type": "Metaspace", "replacement": WORD_BOUNDARY, "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": piece, **flags} for piece, i in special_ids.items()],
        "normalizer": _sequence(
            *_preprocess_steps(tokenizer.preprocess),
            *_character_map_steps(spec.precompiled_charsmap, user_defined),
            *_collapse_spaces(),
            {"type": "Prepend", "prepend": WORD_BOUNDARY},
            {"type": "Replace", "pattern": {"String": " "}, "content": WORD_BOUNDARY},
        ),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [_split_special_tokens(special_ids), {**metaspace, "prepend_scheme": "never"}],
        },
        "post_processor": _template(),
        "decoder": {**metaspace, "prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": special_tokens.UNK,
            "byte_fallback": False,
            "vocab": [[piece.piece, _score(piece, tokenizer.preprocess)] for piece in proto.pieces],
        },
    }


def _score(piece: Any, preprocess: Preprocess) -> float:
    if piece.type == USER_DEFINED:
        return -0.1  # as in SentencePiece: above the score of every other piece
    is_excluded = preprocess != "none" and ends_with_number_and_comma(piece.piece)
    return piece.score + (EXCLUDED_SCORE if is_excluded else 0.0)


def _template() -> Json:
    """Return the templates A <sep> <cls> and A <sep> B <sep> <cls>, with segments 0, 1 and 2."""

    def text(sequence: str, segment: int) -> Json:
        return {"Sequence": {"id": sequence, "type_id": segment}}

    def special(i: int, segment: int) -> Json:
        return {"SpecialToken": {"id": special_tokens.SPECIAL_TOKENS[i], "type_id": segment}}

    first, second, end = (
        [text("A", 0), special(special_tokens.SEP, 0)],
        [text("B", 1), special(special_tokens.SEP, 1)],
        [special(special_tokens.CLS, 2)],
    )
    ids = {special_tokens.SPECIAL_TOKENS[i]: i for i in (special_tokens.SEP, special_tokens.CLS)}
    return {
        "type": "TemplateProcessing",
        "single": first + end,
        "pair": first + second + end,
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in ids.items()},
    }


def _split_special_tokens(pieces: Iterable[str]) -> Json:
    """Return a step that splits the text of a special token after its `<`: SentencePiece does not match special tokens in a text."""
    rest = "|".join(re.escape(piece[1:]) for piece in pieces)
    return {
        "type": "Split",
        "pattern": {"Regex": f"<(?={rest})"},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }


def _preprocess_steps(preprocess: Preprocess) -> list[Json]:
    """Return `xlpre.text.preprocess.clean_text` as normalizer steps."""
    if preprocess == "none":
        return []
    characters = [chr(i) for i in range(sys.maxunicode + 1)]
    steps = [
        _replace(f"[{_ranges(c for c in characters if c.isspace())}]+", " "),
        *_collapse_spaces(),
        _replace("``|''", '"'),
        {"type": "NFKD"},
        _replace(f"[{_ranges(c for c in characters if unicodedata.combining(c))}]", ""),
    ]
    if preprocess == "uncased":
        before, after = r"(?<=\p{Cased}|\p{Cased}\p{Case_Ignorable})", r"(?!\p{Case_Ignorable}*\p{Cased})"
        steps += [_replace(f"{before}Σ{after}", "ς"), {"type": "Lowercase"}]  # Lowercase has no rule for a final sigma
    return steps


def _collapse_spaces() -> list[Json]:
    return [_replace(" {2,}", " "), _replace(r"\A | \z", "")]


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(steps)}


def _character_map_steps(charsmap: bytes, user_defined: Sequence[str]) -> list[Json]:
    """Return SentencePiece's character map as normalizer steps.

    The steps do not insert a character at the start of a text, and leave none there that Precompiled removes. In both cases,
    `tokenizers` 0.23 would panic.
    """
    if not charsmap:
        return []
    rules = read_charsmap(charsmap)
    first_by_marks: defaultdict[str, set[str]] = defaultdict(set)  # characters that compose with a sequence of marks
    for sequence, composed in rules.items():
        if len(sequence) > 1 and not "가" <= composed <= "힣":
            first_by_marks[sequence[1:]].add(sequence[0])
    marks = r"\p{M}" + _ranges({mark for sequence in first_by_marks for mark in sequence})
    composes = "|".join(
        f"(?<=[{_ranges(first)}]{re.escape(sequence[:-1])}){re.escape(sequence[-1])}"
        for sequence, first in first_by_marks.items()
    )
    finals = {c for c, to in rules.items() if "\u11a8" <= to <= "\u11c2"} | {chr(i) for i in range(0x11A8, 0x11C3)}
    held = [
        rf"(?!\A)(?=[{marks}])(?!{composes})",
        f"(?<=[가-힣])(?=[{_ranges(finals)}])",  # NFC would add a final consonant to the syllable
    ]
    if user_defined:
        # SentencePiece splits the text at these pieces first
        held.append(f"(?<={'|'.join(map(re.escape, user_defined))})(?=[{marks}])")
    deleted = _ranges(c for c, to in rules.items() if not to)
    return [
        _replace("|".join(held), HOLD_MARK),
        _replace(
            rf"(?!\A)(?=[{marks}\u0e33\u0eb3\u200c\u200d])", SPLIT_MARK
        ),  # all characters that continue a grapheme
        # Precompiled fails if it deletes the first character
        *([_replace(f"[{deleted}]", HOLD_MARK)] if deleted else []),
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
        _replace(SPLIT_MARK, ""),
        {"type": "NFC"},
        _replace(HOLD_MARK, ""),
    ]


def read_charsmap(charsmap: bytes) -> dict[str, str]:
    """Return the replacement of each character sequence in SentencePiece's character map; the longest match applies.

    Source: sentencepiece normalizer.cc (length of the trie, trie, zero-terminated texts); darts-clone (units of the trie).
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
    """Return a regular expression for these characters, to be put into [...]."""
    runs: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if runs and code == runs[-1][1] + 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    ends = [[re.escape(chr(code)) for code in run] for run in runs]
    return "".join(first if first == last else f"{first}-{last}" for first, last in ends)


def _replace(pattern: str, content: str) -> Json:
    """Return a step that replaces the matches of a regular expression."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
