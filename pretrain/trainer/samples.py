"""What the model fills into blanks as it learns: the same sentences at every evaluation, kept in samples.jsonl."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

from pretrain.config import PretrainConfig
from pretrain.fill import ClozeResult, fill, held_out_puzzles, solve
from xlpre.data.store import TokenStore
from xlpre.inference.cloze import blanks_batch
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.jsonl import read_lines, rewrite

COUNT = 6  # held-out sentences, where the user gives none


class Samples:
    """Sentences with blanks: `eval.sentences`, or some from the held-out text with one word hidden.

    Raises:
        ValueError: a sentence that is too long.
    """

    def __init__(self, config: PretrainConfig, store: TokenStore, tokenizer: Tokenizer) -> None:
        self._path = Path(config.run_dir) / "samples.jsonl"
        self._tokenizer = tokenizer
        self._sentences, self._puzzles = config.eval.sentences, []
        if not OBJECTIVES[config.objective.name].sees_ahead:  # nor what is after a blank
            self._sentences = []
        elif not self._sentences:
            self._puzzles = held_out_puzzles(store.validation, tokenizer, COUNT, seed=0)
        for text in self._sentences:
            try:
                blanks_batch(text, tokenizer)
            except ValueError as error:
                raise ValueError(f"eval.sentences: {error}") from None

    def fill(self, model: LanguageModel) -> list[ClozeResult]:
        """Fill in all blanks; every process must call it."""
        given = [fill(model, self._tokenizer, text) for text in self._sentences]
        return given + [solve(model, self._tokenizer, puzzle) for puzzle in self._puzzles]

    def write(self, step: int, filled: list[ClozeResult]) -> None:
        """Keep what was filled in at `step`, in place of anything of that step or later."""
        line = {"step": step, "filled": [dataclasses.asdict(one) for one in filled]}
        rewrite(self._path, lambda written: written < step, partial(json.dumps, ensure_ascii=False), line)


def read_samples(run_dir: Path) -> list[dict]:
    """The lines of a run's samples.jsonl: step and what was filled in.

    Raises:
        ValueError: one is damaged.
    """
    return read_lines(run_dir / "samples.jsonl")
