"""The tokenizer files of a Hugging Face model folder, such that AutoTokenizer gives the ids that ours gives.

spiece.model            the SentencePiece vocabulary, unchanged
tokenizer.json          the same for the `tokenizers` library, which AutoTokenizer reads
tokenizer_config.json   the special tokens, the side of the padding

Not the same as ours:
- <unk> <s> </s> <cls> <sep> <pad> <mask> <eod> spelled out in a text (WikiText's <unk>) are symbols, as everywhere at
  Hugging Face; AutoTokenizer.from_pretrained(folder, split_special_tokens=True) reads them as text, as SentencePiece does.
- Two segmentations of one score, "ii i" and "i ii": SentencePiece adds in single precision and rounds at random,
  `tokenizers` in double and takes the first.
- Characters newer than the Unicode 12 of `tokenizers`: marks composed in such scripts (Todhri, Tulu); with uncased, the
  lower case of such capitals. And the two noncharacters used here.
- cased, uncased: "20," is there never one piece, here it is one first and split then. Where another segmentation of the
  number wins without it the ids differ.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from xlpre.conversion.hf_normalizer import Json, map_characters, ranges, replace
from xlpre.text import special_tokens
from xlpre.text.preprocess import Preprocess
from xlpre.text.special_tokens import WORD_BOUNDARY
from xlpre.text.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # sentencepiece_model.proto
UNIGRAM = 1
NEVER = -1000.0  # added to a score, below any other segmentation of a word


def write_tokenizer(tokenizer: Tokenizer, folder: Path, padding: Literal["left", "right"] = "left") -> None:
    """Write spiece.model, tokenizer.json and tokenizer_config.json.

    Args:
        tokenizer: what they shall be equal to.
        folder: of the model; its config.json says `model_type` xlnet.
        padding: the side on which shorter rows of a batch are padded.

    Raises:
        ValueError: the vocabulary is not a unigram one, or treats spaces in a way `tokenizers` has no word for.
    """
    content = json.dumps(_tokenizer(tokenizer), ensure_ascii=False, indent=1)
    tokenizer.save(folder / "spiece.model")
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_config(tokenizer.preprocess, padding), indent=1), encoding="utf-8"
    )


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
        raise ValueError(
            f"{folder}/spiece.model: cannot be read ({error.strerror}); put the model's own vocabulary there"
        ) from None


def read_preprocess(folder: Path) -> Preprocess:
    """How text was prepared for the vocabulary of a Hugging Face folder without a passport: as published, unless it says otherwise.

    Raises:
        ValueError: its tokenizer_config.json cannot be read.
    """
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return "uncased" if settings.get("do_lower_case") else "none" if settings.get("keep_accents") else "cased"
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _config(preprocess: Preprocess, padding: str) -> Json:
    unk, bos, eos, cls, sep, pad, mask, eod, _ = special_tokens.SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # XLNetTokenizer would not take tokenizer.json's normalizer
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "cls_token": cls,
        "sep_token": sep,
        "pad_token": pad,
        "mask_token": mask,
        "additional_special_tokens": [eod],
        "padding_side": padding,
        "do_lower_case": preprocess == "uncased",
        "keep_accents": preprocess == "none",  # read_preprocess finds all three in these two
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
    space = {"type": "Metaspace", "replacement": WORD_BOUNDARY, "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": piece, **flags} for piece, i in symbol.items()],
        "normalizer": _sequence(
            *_preprocess(tokenizer.preprocess),
            *map_characters(spec.precompiled_charsmap, own),
            *_single_spaces(),
            {"type": "Prepend", "prepend": WORD_BOUNDARY},
            {"type": "Replace", "pattern": {"String": " "}, "content": WORD_BOUNDARY},
        ),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [_split_spelled_out(symbol), {**space, "prepend_scheme": "never"}],
        },
        "post_processor": _template(),
        "decoder": {**space, "prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": special_tokens.UNK,
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
        return {"SpecialToken": {"id": special_tokens.SPECIAL_TOKENS[i], "type_id": segment}}

    first, second, end = (
        [text("A", 0), symbol(special_tokens.SEP, 0)],
        [text("B", 1), symbol(special_tokens.SEP, 1)],
        [symbol(special_tokens.CLS, 2)],
    )
    named = {special_tokens.SPECIAL_TOKENS[i]: i for i in (special_tokens.SEP, special_tokens.CLS)}
    return {
        "type": "TemplateProcessing",
        "single": first + end,
        "pair": first + second + end,
        "special_tokens": {piece: {"id": piece, "ids": [i], "tokens": [piece]} for piece, i in named.items()},
    }


def _split_spelled_out(pieces: Iterable[str]) -> Json:
    """Part a symbol that is spelled out in a text: the unigram model would find it, for SentencePiece it is no piece."""
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
        replace(f"[{ranges(c for c in every if c.isspace())}]+", " "),
        *_single_spaces(),
        replace("``|''", '"'),
        {"type": "NFKD"},
        replace(f"[{ranges(c for c in every if unicodedata.combining(c))}]", ""),
    ]
    if preprocess == "uncased":
        before, after = r"(?<=\p{Cased}|\p{Cased}\p{Case_Ignorable})", r"(?!\p{Case_Ignorable}*\p{Cased})"
        steps += [replace(f"{before}Σ{after}", "ς"), {"type": "Lowercase"}]  # Lowercase knows no final sigma
    return steps


def _single_spaces() -> list[Json]:
    return [replace(" {2,}", " "), replace(r"\A | \z", "")]


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "normalizers": list(steps)}
