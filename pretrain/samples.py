"""What the model fills into blanks as it learns: the same sentences at every evaluation, kept in samples.jsonl."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pretrain.config import PretrainConfig
from pretrain.fill import Filled, fill, held_out_puzzles, solve
from xlpre.atomic import new_file
from xlpre.data.store import TokenStore
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.blanks import blanks_batch
from xlpre.text.tokenizer import Tokenizer

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
        if config.objective.name == "causal":  # sees nothing after a blank
            self._sentences = []
        elif not self._sentences:
            self._puzzles = held_out_puzzles(store.held_out, tokenizer, COUNT, seed=0)
        for text in self._sentences:
            try:
                blanks_batch(text, tokenizer)
            except ValueError as error:
                raise ValueError(f"eval.sentences: {error}") from None

    def fill(self, model: LanguageModel) -> list[Filled]:
        """Fill in all blanks; every process must call it."""
        given = [fill(model, self._tokenizer, text) for text in self._sentences]
        return given + [solve(model, self._tokenizer, puzzle) for puzzle in self._puzzles]

    def write(self, step: int, filled: list[Filled]) -> None:
        """Keep what was filled in at `step`, in place of anything of that step or later."""
        kept = [line for line in read_samples(self._path.parent) if line["step"] < step]
        kept.append({"step": step, "filled": [dataclasses.asdict(one) for one in filled]})
        with new_file(self._path) as partial:
            partial.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8")


def read_samples(run_dir: Path) -> list[dict]:
    """The lines of a run's samples.jsonl: step and what was filled in."""
    path = run_dir / "samples.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] if path.exists() else []
