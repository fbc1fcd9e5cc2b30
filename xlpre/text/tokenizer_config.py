"""What is chosen of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from xlpre.text import special_tokens
from xlpre.text.preprocess import Preprocess

LEAST_COVERAGE = 0.98  # of characters; SentencePiece refuses less


@dataclass(frozen=True)
class TokenizerConfig:
    """The vocabulary.

    Attributes:
        path: the SentencePiece model file; `pretrain/train_tokenizer.py` makes it.
        vocab_size: number of pieces, symbols included.
        character_coverage: share of characters that get a piece; the rest becomes `<unk>`.
        train_chars: learn from about so many characters, taken evenly from the whole text.
        preprocess: what is done to text besides SentencePiece's own NFKC. `none`: nothing. `cased`: as the released XLNet
            was trained (single spaces, plain quotation marks, no accents, a comma after a digit a piece of its own).
            `uncased`: the same in lower case.
    """

    path: str = "tokenizers/${name}.model"
    vocab_size: int = 32000
    character_coverage: float = 0.99995
    train_chars: int = 100_000_000
    preprocess: Preprocess = "none"

    def __post_init__(self) -> None:
        if not LEAST_COVERAGE <= self.character_coverage <= 1:
            raise ValueError(
                f"tokenizer.character_coverage ({self.character_coverage}) is the share of characters with a piece; SentencePiece takes "
                f"{LEAST_COVERAGE} to 1"
            )
        if self.train_chars <= 0:
            raise ValueError(f"tokenizer.train_chars ({self.train_chars}) must be positive: characters to learn from")
        least = len(special_tokens.SPECIAL_TOKENS) + len(special_tokens.USER_DEFINED)
        if self.vocab_size <= least:
            raise ValueError(
                f"tokenizer.vocab_size ({self.vocab_size}) must be above {least}, the number of special symbols"
            )
