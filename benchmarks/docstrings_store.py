"""A store of text that is always there, for trainings of which only the course matters."""

from __future__ import annotations

from pathlib import Path

from xlpre.data.store_builder import write_store
from xlpre.text.corpus import TextConfig, documents
from xlpre.text.tokenizer import train
from xlpre.text.tokenizer_config import TokenizerConfig


def docstrings_store(path: Path, million_characters: float, vocab_size: int, val_fraction: float) -> Path:
    """Make it of installed docstrings, with a vocabulary learned from them."""
    text = list(documents(TextConfig(max_chars=round(million_characters * 1e6))))
    vocabulary = train(text, TokenizerConfig(vocab_size=vocab_size))
    return write_store(path, text, vocabulary, val_fraction, {"source": "docstrings"}, {}).path
