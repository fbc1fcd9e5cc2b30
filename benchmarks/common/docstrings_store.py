"""A store of text that is always there, for trainings of which only the course matters."""

from __future__ import annotations

from pathlib import Path

from xlpre.data.store_builder import write_store
from xlpre.text.corpus import TextConfig, read_documents
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def docstrings_store(path: Path, million_characters: float, vocab_size: int, val_fraction: float) -> Path:
    """Make it of installed docstrings, with a vocabulary learned from them."""
    text = list(read_documents(TextConfig(max_chars=round(million_characters * 1e6))))
    vocabulary = train_tokenizer(text, TokenizerConfig(vocab_size=vocab_size))
    return write_store(path, text, vocabulary, val_fraction, {"source": "docstrings"}, {}).path
