"""Evaluations of a model folder on held-out text: settings, text, processes, tables and a picture."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.config import PretrainConfig, load_run_config
from pretrain.tools.run_record import find_pretraining_run
from xlpre.common.errors import InputError
from xlpre.common.job_pool import stop_with_parent
from xlpre.common.messages import counted
from xlpre.common.plots import new_axes, save_figure
from xlpre.conversion.model_folder import ModelFolder, load_folder
from xlpre.data.store import TokenStore, is_store
from xlpre.inference.evaluation import (
    EvalSettings,
    Evaluation,
    Evaluator,
    HeldOutText,
    build_evaluator,
    encode_text,
    stored_text,
)
from xlpre.text.corpus import TextConfig, read_documents, source_exists
from xlpre.text.document import LineType, RowType
from xlpre.text.hub import is_hf_dataset
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import Comm, rank, world_size

Unit = tuple[int, int]  # index of the evaluation, unit of the evaluation
HUB_SPLIT = "test"  # split of a dataset whose name has none


@dataclass(frozen=True)
class Job:
    """Evaluations of one model on one text.

    Attributes:
        model: model folder, or folder of a run.
        overrides: settings of the model that differ from those in the folder.
        text: the text.
        settings: settings of each evaluation.
        device: device of the model.
    """

    model: str
    overrides: dict[str, Any]
    text: HeldOutText
    settings: Sequence[EvalSettings]
    device: str

    def evaluators(self) -> list[Evaluator]:
        """Load the model and return the evaluator of each evaluation."""
        folder = open_model(self.model, self.overrides)
        tokenizer, models = folder.require_tokenizer(self.model), {}
        evaluators = []
        for settings in self.settings:
            # a limited span ends `model.mem_len` tokens back, as in the original, which sets it for each evaluation
            mem_len = folder.config.mem_len if folder.config.attention_span == "all" else settings.mem_len
            if mem_len == 0 and folder.config.attention_span != "all":
                raise InputError(
                    f"--mem-len=0 is invalid with model.attention_span={folder.config.attention_span}: each token would see at most "
                    "itself. Add --attention-span all, or leave out 0."
                )
            if mem_len not in models:
                config = dataclasses.replace(folder.config, mem_len=mem_len)
                models[mem_len] = dataclasses.replace(folder, config=config).model().to(self.device)
            evaluators.append(build_evaluator(models[mem_len], tokenizer, self.text, settings, folder.objective))
        return evaluators


def open_model(path: str, overrides: dict[str, Any]) -> ModelFolder:
    """Read a model folder and replace settings of the model.

    Raises:
        InputError: see `load_folder`; or a setting does not fit the model.
    """
    folder = load_folder(path)
    return dataclasses.replace(folder, config=dataclasses.replace(folder.config, **overrides))


def read_run_config(path: str) -> PretrainConfig:
    """Return the settings of the run that the model folder `path` belongs to. Default settings if it belongs to none."""
    run_dir = find_pretraining_run(Path(path))
    return PretrainConfig() if run_dir is None else load_run_config(run_dir)


def text_config(
    run: PretrainConfig, column: str | None = None, row_type: RowType | None = None, line_type: LineType | None = None
) -> TextConfig:
    """Return how to read a held-out text: as the run read its text, except for the arguments that are not None."""
    return TextConfig(
        column=column or run.text.column,
        row_type=row_type or run.text.row_type,
        line_type=line_type or run.text.line_type,
    )


def read_text(
    sources: Sequence[str], tokenizer: Tokenizer, origin: str, text: TextConfig, max_tokens: int | None
) -> HeldOutText:
    """Read files, datasets or the validation part of a token store.

    Args:
        sources: files, globs, `hf:NAME[:SPLIT]`, or one folder of a token store.
        tokenizer: vocabulary of the model.
        origin: name of the model in error messages.
        text: how to read files and datasets.
        max_tokens: see `encode_text`.

    Raises:
        InputError: a source cannot be read, holds no text, or is a store with another vocabulary; or the vocabulary cannot encode
            verbatim text.
    """
    folders = [source for source in sources if Path(source).is_dir()]
    if not folders and text.line_type == "verbatim" and tokenizer.kind == "sentencepiece":
        raise InputError(
            f"--line-type=verbatim is invalid: the SentencePiece vocabulary of {origin} does not keep text as it is. "
            "Set --line-type=paragraphs."
        )
    for source in sources:
        if not source_exists(source):
            raise InputError(
                f"TEXT={source} is invalid: no file matches it. Give files, a quoted glob, hf:NAME:SPLIT, or the folder of a token store."
            )
    if not folders:
        configs = [source_config(source, text) for source in sources]
        documents = chain.from_iterable(read_documents(config, "TEXT") for config in configs)
        return encode_text(tokenizer, documents, line_type=text.line_type, max_tokens=max_tokens)
    if len(sources) > 1 or not is_store(Path(folders[0])):
        rule = "it is a folder" if len(sources) == 1 else "a folder must be the only text"
        raise InputError(
            f"TEXT={folders[0]} is invalid: {rule}. Give the folder of one token store, or files, such as '{folders[0]}/*.txt'."
        )
    store = TokenStore(folders[0])
    store.check_vocabulary(tokenizer, f"that of {origin}")
    return stored_text(store, tokenizer, max_tokens)


def source_config(source: str, text: TextConfig) -> TextConfig:
    """Return the settings to read a source; `hf:NAME:SPLIT` names a split."""
    if not is_hf_dataset(source):
        return dataclasses.replace(text, source=source)
    name, _, split = source.removeprefix("hf:").partition(":")
    return dataclasses.replace(text, source=f"hf:{name}", split=split or HUB_SPLIT)


def run_evaluations(job: Job, n_processes: int, report_progress: Callable[[int, int], None]) -> list[Evaluation]:
    """Evaluate in `n_processes` new processes, or in this process if it is 1. The number does not change the result.

    Args:
        job: the evaluations.
        n_processes: number of processes on this machine.
        report_progress: called after each unit of work with the number of units done and the number of all units.

    Raises:
        InputError: a process ended, for example because memory ran out.
    """
    evaluators = job.evaluators()
    units = [(index, unit) for index, evaluator in enumerate(evaluators) for unit in range(evaluator.n_units)]
    sums: list[np.ndarray] = []

    def collect(unit_sums: np.ndarray) -> None:
        sums.append(unit_sums)
        report_progress(len(sums), len(units))

    if n_processes == 1:
        for index, unit in units:
            collect(evaluators[index].evaluate_unit(unit))
        return _results(evaluators, units, sums)
    threads = max(1, torch.get_num_threads() // n_processes)
    context = multiprocessing.get_context("spawn")  # a fork would copy locked mutexes of OpenMP
    with ProcessPoolExecutor(min(n_processes, len(units)), context, _start_worker, (job, threads)) as executor:
        try:
            for unit_sums in executor.map(_evaluate_unit, units):
                collect(unit_sums)
        except BrokenProcessPool:
            raise InputError(
                f"--processes={n_processes} is invalid: a process ended, perhaps because memory ran out. Set fewer processes."
            ) from None
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    return _results(evaluators, units, sums)


def run_in_job(job: Job, comm: Comm, report_progress: Callable[[int, int], None]) -> list[Evaluation]:
    """Evaluate together with the other processes that a launcher started. Every process must call it, and gets the result."""
    evaluators = job.evaluators()
    units = [(index, unit) for index, evaluator in enumerate(evaluators) for unit in range(evaluator.n_units)]
    mine = range(rank(), len(units), world_size())
    sums = {}
    for number in mine:
        index, unit = units[number]
        sums[number] = evaluators[index].evaluate_unit(unit)
        report_progress(len(sums), len(mine))
    return _results(evaluators, units, _in_order(comm.all_gather(sums), len(units)))


def to_rows(evaluations: Sequence[Evaluation]) -> list[dict[str, str]]:
    """Return a table with one row per evaluation."""
    return [{"memory": f"{evaluation.settings.mem_len:,}", **_numbers(evaluation)} for evaluation in evaluations]


def describe_text(text: HeldOutText) -> str:
    """Return the counts of a text in one line."""
    unknown = f"; {text.unknown_fraction:.2%} of the tokens are <unk>" if text.unknown_fraction else ""
    return (
        f"{len(text.data):,} tokens, {text.n_bytes:,} bytes, {text.n_characters:,} characters, {text.n_words:,} words in "
        f"{counted(len(text.data.document_ends), 'document')}{unknown}"
    )


def draw_memory_curve(evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Draw the loss over the length of memory."""
    figure, (axes,) = new_axes(5.5, 3.6)
    losses = [evaluation.loss for evaluation in evaluations]
    lengths = [f"{evaluation.settings.mem_len:,}" for evaluation in evaluations]
    axes.plot(lengths, losses, marker="o")
    for length, loss in zip(lengths, losses, strict=True):
        axes.annotate(f"{loss:.3f}", (length, loss), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xlabel="memory in tokens", ylabel="loss in nats per target", title=title)
    axes.margins(y=0.2)
    save_figure(figure, path)


def _numbers(evaluation: Evaluation) -> dict[str, str]:
    """Return the numbers of an evaluation for a table."""
    loss = {"loss": f"{evaluation.loss:.4f}"}
    if not evaluation.predicts_all:
        return {
            **loss,
            "accuracy": f"{evaluation.accuracy:.2%}",
            "bits per byte of targets": f"{evaluation.bits_per_target_byte:.4f}",
            "targets": f"{evaluation.n_targets:,}",
        }
    kind = "pseudo-perplexity" if evaluation.settings.mode == "pll" else "perplexity"
    return {
        **loss,
        kind: f"{evaluation.perplexity:,.2f}",
        "bits per byte": f"{evaluation.bits_per_byte:.4f}",
        "bits per character": f"{evaluation.bits_per_character:.4f}",
        f"{kind} per word": "" if evaluation.word_perplexity is None else f"{evaluation.word_perplexity:,.2f}",
        **({} if evaluation.accuracy is None else {"accuracy": f"{evaluation.accuracy:.2%}"}),
    }


def _results(evaluators: Sequence[Evaluator], units: Sequence[Unit], sums: Sequence[np.ndarray]) -> list[Evaluation]:
    by_evaluator: list[list[np.ndarray]] = [[] for _ in evaluators]
    for (index, _), unit_sums in zip(units, sums, strict=True):
        by_evaluator[index].append(unit_sums)
    return [evaluator.result(sums) for evaluator, sums in zip(evaluators, by_evaluator, strict=True)]


def _in_order(parts: Sequence[dict[int, np.ndarray]], n_units: int) -> list[np.ndarray]:
    """Return the sums of all units in order, from the sums that each process computed, by number of the unit."""
    by_number = {number: unit_sums for part in parts for number, unit_sums in part.items()}
    return [by_number[number] for number in range(n_units)]


_evaluators: list[Evaluator] = []  # of a worker process


def _start_worker(job: Job, threads: int) -> None:
    stop_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    _evaluators[:] = job.evaluators()


def _evaluate_unit(unit: Unit) -> np.ndarray:
    index, number = unit
    return _evaluators[index].evaluate_unit(number)
