"""A token store that needs no download, for benchmarks whose text does not matter."""

from __future__ import annotations

from pathlib import Path

from xlpre.data.store_builder import write_store
from xlpre.text.corpus import TextConfig, read_documents
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def make_docstrings_store(path: Path, million_characters: float, vocab_size: int, val_fraction: float) -> Path:
    """Write a store of the docstrings of installed packages, with a tokenizer trained on them. Returns its path."""
    documents = list(read_documents(TextConfig(max_chars=round(million_characters * 1e6))))
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=vocab_size))
    return write_store(path, documents, tokenizer, val_fraction, {"source": "docstrings"}, {}).path
