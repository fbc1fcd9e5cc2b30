"""Minimal pairs: a model prefers the better of two sentences if it gives it the higher log-likelihood (BLiMP, arXiv:1912.00582).

A paradigm is a set of pairs of one construction, and a phenomenon is a group of paradigms. Accuracies of phenomena, and of all pairs, are
means over paradigms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.common.errors import InputError, check_minimum
from xlpre.inference.scoring import TextScore, encode_texts
from xlpre.text.readers import json_rows
from xlpre.text.tokenizer import Tokenizer

SENTENCE_KEYS = ("sentence_good", "sentence_bad")
OTHER = "other"  # phenomenon of pairs without `linguistics_term`


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences of which the first is acceptable and the second is not.

    Attributes:
        good: acceptable sentence.
        bad: unacceptable sentence.
        paradigm: name of the paradigm.
        phenomenon: name of the phenomenon.
        location: file and line, for error messages.
    """

    good: str
    bad: str
    paradigm: str
    phenomenon: str
    location: str


@dataclass(frozen=True)
class Accuracy:
    """Accuracy in percent.

    Attributes:
        percent: percentage of the pairs in which the good sentence has the higher score; of a group, the mean over its paradigms.
        standard_error: standard error of `percent`, from the number of pairs.
        n_pairs: number of pairs.
    """

    percent: float
    standard_error: float
    n_pairs: int


@dataclass(frozen=True)
class PairAccuracies:
    """Accuracies on minimal pairs.

    Attributes:
        overall: mean over the paradigms.
        phenomena: accuracy of each phenomenon, by name.
        paradigms: accuracy of each paradigm, by name.
        phenomenon_of: phenomenon of each paradigm.
    """

    overall: Accuracy
    phenomena: Mapping[str, Accuracy]
    paradigms: Mapping[str, Accuracy]
    phenomenon_of: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the accuracies and their standard errors in percent, as JSON values."""
        return {
            "accuracy": self.overall.percent,
            "paradigms": {name: accuracy.percent for name, accuracy in self.paradigms.items()},
            "phenomena": {name: accuracy.percent for name, accuracy in self.phenomena.items()},
            "accuracy_standard_error": self.overall.standard_error,
            "paradigm_standard_errors": {name: a.standard_error for name, a in self.paradigms.items()},
            "phenomenon_standard_errors": {name: a.standard_error for name, a in self.phenomena.items()},
            "n_pairs": self.overall.n_pairs,
        }

    def paradigm_table(self) -> list[dict[str, str]]:
        """Return the rows of a table of the paradigms, by phenomenon."""
        names = sorted(self.paradigms, key=lambda name: (self.phenomenon_of[name], name))
        return [
            {"paradigm": name, "phenomenon": self.phenomenon_of[name], **_cells(self.paradigms[name])} for name in names
        ]

    def phenomenon_table(self) -> list[dict[str, str]]:
        """Return the rows of a table of the phenomena. The last row is the mean over all paradigms."""
        groups = {**dict(sorted(self.phenomena.items())), "mean over paradigms": self.overall}
        return [{"phenomenon": name, **_cells(accuracy)} for name, accuracy in groups.items()]


def read_pairs(paths: Sequence[str | Path], limit: int | None = None) -> list[MinimalPair]:
    """Read minimal pairs in the form of BLiMP: a JSON object a line with `sentence_good`, `sentence_bad`, `UID` and `linguistics_term`.

    `UID` is the paradigm; by default it is the name of the file. `linguistics_term` is the phenomenon; by default it is `other`.

    Args:
        paths: .jsonl files, perhaps compressed (.gz, .zst), or folders of such files.
        limit: largest number of pairs of each paradigm, from the start of its file. None: all.

    Raises:
        InputError: there is no such file, a line is malformed, or a paradigm has two phenomena. The message names file and line.
    """
    check_minimum("limit", limit, 1)
    pairs: list[MinimalPair] = []
    phenomenon_of: dict[str, str] = {}
    counts: dict[str, int] = {}
    for file in _pair_files(paths):
        for location, row in json_rows(file):
            pair = _parse_pair(location, row, file.name.partition(".")[0])
            if (known := phenomenon_of.setdefault(pair.paradigm, pair.phenomenon)) != pair.phenomenon:
                raise InputError(
                    f"{location}: linguistics_term={pair.phenomenon!r} is invalid: earlier pairs of {pair.paradigm} have {known!r}. "
                    "Give a paradigm one phenomenon."
                )
            counts[pair.paradigm] = counts.get(pair.paradigm, 0) + 1
            if limit is None or counts[pair.paradigm] <= limit:
                pairs.append(pair)
    if not pairs:
        raise InputError(f"{', '.join(map(str, paths))} is invalid: there are no pairs. Write one pair a line.")
    return pairs


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[MinimalPair]) -> list[np.ndarray]:
    """Encode the sentences of N pairs.

    Returns:
        2 N arrays of int64 token ids: the good and the bad sentence of the first pair, then of the second, and so on.

    Raises:
        InputError: a sentence has no tokens. The message names file and line.
    """
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    return encode_texts(tokenizer, sentences, lambda index: f"{pairs[index // 2].location}: sentence")


def pair_accuracies(pairs: Sequence[MinimalPair], scores: Sequence[TextScore]) -> PairAccuracies:
    """Compute accuracies. A pair whose sentences have equal scores counts as wrong.

    Args:
        pairs: N pairs.
        scores: scores of the 2 N sentences: the good and the bad sentence of the first pair, then of the second, and so on.
    """
    correct: dict[str, list[bool]] = {}
    phenomenon_of = {}
    for pair, good, bad in zip(pairs, scores[::2], scores[1::2], strict=True):
        correct.setdefault(pair.paradigm, []).append(good.log_likelihood > bad.log_likelihood)
        phenomenon_of[pair.paradigm] = pair.phenomenon
    paradigms = {name: _accuracy(values) for name, values in correct.items()}
    phenomena = {
        phenomenon: _mean([paradigms[name] for name in paradigms if phenomenon_of[name] == phenomenon])
        for phenomenon in dict.fromkeys(phenomenon_of.values())
    }
    return PairAccuracies(_mean([*paradigms.values()]), phenomena, paradigms, phenomenon_of)


def _pair_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of `paths`, each once."""
    files: dict[Path, Path] = {}
    for path in map(Path, paths):
        found = _pair_files_of_folder(path) if path.is_dir() else [path]
        if not found:
            raise InputError(
                f"{path} is invalid: the folder has no .jsonl file. Give a folder or files of minimal pairs."
            )
        if not found[0].exists():
            raise InputError(f"{path} is invalid: there is no such file. Give .jsonl files, or a folder of them.")
        files |= {file.resolve(): file for file in found if file.resolve() not in files}
    return [*files.values()]


def _pair_files_of_folder(folder: Path) -> list[Path]:
    """Return the .jsonl files of a folder, plain or compressed. Raise InputError if one of them is there in both forms."""
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.jsonl*")):
        name, _, suffix = path.name.rpartition(".jsonl")
        if suffix not in ("", ".gz", ".zst"):
            continue
        if name in files:
            raise InputError(
                f"{folder} is invalid: it has both {files[name].name} and {path.name}, so pairs would count twice. Remove one of them."
            )
        files[name] = path
    return list(files.values())


def _parse_pair(location: str, row: Mapping[str, Any], file_name: str) -> MinimalPair:
    """Return the pair of a line."""
    values = {"UID": file_name, "linguistics_term": OTHER} | {key: row[key] for key in row}
    for key in (*SENTENCE_KEYS, "UID", "linguistics_term"):
        value = values.get(key)
        if not isinstance(value, str) or not value.strip():
            problem = f"{key}={value!r:.40} is invalid" if key in values else f"{key} is missing"
            raise InputError(f"{location}: {problem}: it must be a text that is not empty. Correct or remove the line.")
    good, bad = (values[key] for key in SENTENCE_KEYS)
    return MinimalPair(good, bad, values["UID"], values["linguistics_term"], location)


def _accuracy(correct: Sequence[bool]) -> Accuracy:
    """Return the accuracy of a paradigm, with the binomial standard error."""
    fraction = sum(correct) / len(correct)
    return Accuracy(100 * fraction, 100 * math.sqrt(fraction * (1 - fraction) / len(correct)), len(correct))


def _mean(accuracies: Sequence[Accuracy]) -> Accuracy:
    """Return the mean over paradigms, which are independent samples."""
    n = len(accuracies)
    standard_error = math.sqrt(sum(accuracy.standard_error**2 for accuracy in accuracies)) / n
    return Accuracy(
        sum(accuracy.percent for accuracy in accuracies) / n, standard_error, sum(a.n_pairs for a in accuracies)
    )


def _cells(accuracy: Accuracy) -> dict[str, str]:
    """Return the cells of an accuracy in a table."""
    return {
        "pairs": f"{accuracy.n_pairs:,}",
        "accuracy (%)": f"{accuracy.percent:.1f}",
        "standard error": f"{accuracy.standard_error:.1f}",
    }
