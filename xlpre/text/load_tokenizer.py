"""Vocabulary files of all kinds: a SentencePiece model, or a table in JSON."""

from __future__ import annotations

import codecs
from pathlib import Path

from xlpre.common.errors import InputError
from xlpre.text.preprocess import Preprocess
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.table_tokenizer import parse_table
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig, check_preprocess


def parse_tokenizer(content: bytes, origin: str, preprocess: Preprocess = "none") -> Tokenizer:
    """Return the vocabulary in the content of a vocabulary file.

    Args:
        content: content of the file.
        origin: name of the file in error messages.
        preprocess: cleaning of text. The file does not store it.

    Raises:
        InputError: the file holds no vocabulary, or a table is to clean text.
    """
    if not content.removeprefix(codecs.BOM_UTF8).startswith(b"{"):
        return SentencePieceTokenizer(content, origin, preprocess)
    table = parse_table(content, origin)
    check_preprocess(table.kind, preprocess)
    return table


def load_tokenizer(path: str | Path, preprocess: Preprocess = "none", origin: str = "") -> Tokenizer:
    """Load a vocabulary file.

    Args:
        path: vocabulary file.
        preprocess: cleaning of text. The file does not store it.
        origin: name of the file in error messages. Default: `path`.

    Raises:
        InputError: the file cannot be read, or holds no vocabulary with XLNet's special tokens.
    """
    origin = origin or str(path)
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{origin} does not exist. Train it with pretrain/train_tokenizer.py.") from None
    except OSError as error:
        raise InputError(
            f"{origin} cannot be read ({error.strerror}). Set another path, or get permission to read it."
        ) from None
    return parse_tokenizer(content, origin, preprocess)


def tokenizer_from_config(config: TokenizerConfig) -> Tokenizer:
    """Load the vocabulary file `config.path`; see `load_tokenizer`.

    Raises:
        InputError: the file cannot be loaded, or holds a vocabulary of another kind than `config.kind`.
    """
    tokenizer = load_tokenizer(config.path, config.preprocess, f"tokenizer.path={config.path}")
    if tokenizer.kind != config.kind:
        raise InputError(
            f"tokenizer.kind={config.kind} is invalid: tokenizer.path={config.path} is a vocabulary of the kind {tokenizer.kind}. "
            f"Set tokenizer.kind={tokenizer.kind} or another tokenizer.path."
        )
    return tokenizer
