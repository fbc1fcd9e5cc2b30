"""Predictions for blanks during training: the same sentences at every evaluation, written to samples.jsonl."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

from pretrain.config import PretrainConfig
from xlpre.common.errors import InputError
from xlpre.common.os_errors import is_disk_full
from xlpre.data.store import TokenStore
from xlpre.inference.cloze import ClozeResult, cloze_batch, predict_blanks, predict_example, sample_cloze_examples
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.jsonl import Record, read_records, rewrite_records

N_EXAMPLES = 6  # number of sentences from the validation text, if the user sets none


class Samples:
    """Sentences with blanks: `eval.sentences`, or sentences of the validation text with one frequent word hidden.

    A causal model gets no sentences, because it does not see the text after a blank.

    Raises:
        InputError: a sentence is too long.
    """

    def __init__(self, config: PretrainConfig, store: TokenStore, tokenizer: Tokenizer) -> None:
        self._path = Path(config.run_dir) / "samples.jsonl"
        self._waiting: list[Record] = []  # predictions for which the disk had no room
        self._tokenizer = tokenizer
        self._sentences, self._examples = config.eval.sentences, []
        if not OBJECTIVES[config.objective.name].sees_ahead:
            self._sentences = []
        elif not self._sentences:
            self._examples = sample_cloze_examples(
                store.validation, tokenizer, np.asarray(store.unigram), N_EXAMPLES, seed=0
            )
        for text in self._sentences:
            try:
                cloze_batch(text, tokenizer)
            except InputError as error:
                raise InputError(f"eval.sentences: {error}") from None

    def predict(self, model: LanguageModel) -> list[ClozeResult]:
        """Fill in all blanks. Every process must call it."""
        results = [predict_blanks(model, self._tokenizer, text) for text in self._sentences]
        return results + [predict_example(model, self._tokenizer, example) for example in self._examples]

    def write(self, step: int, results: list[ClozeResult]) -> None:
        """Write the predictions of `step`. Existing predictions of this and later steps are removed.

        If the disk is full, they are written with those of the next evaluation.
        """
        self._waiting.append({"step": step, "results": [dataclasses.asdict(result) for result in results]})
        first, serialize = self._waiting[0]["step"], partial(json.dumps, ensure_ascii=False)
        try:
            rewrite_records(self._path, lambda record: record["step"] < first, serialize, *self._waiting)
        except OSError as error:
            if not is_disk_full(error):
                raise
            print(f"warning: {error}. The predictions of step {step:,} are written later.", file=sys.stderr, flush=True)
        else:
            self._waiting = []


def read_samples(run_dir: Path) -> list[dict]:
    """Read the samples.jsonl of a run: one record per evaluation, with `step` and `results`.

    Raises:
        InputError: a line is damaged.
    """
    return read_records(run_dir / "samples.jsonl")
