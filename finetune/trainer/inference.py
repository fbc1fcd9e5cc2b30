"""Predictions of a fine-tuned model for lines of a file or of standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from finetune.data.examples import Example, Prediction, Split
from finetune.data.features import Features
from finetune.data.table_reader import Fields, kind_of, read_rows
from finetune.tasks.base import Task
from finetune.tasks.squad import read_questions
from finetune.trainer.evaluator import predict_split, resolve_overhead_tokens
from finetune.trainer.task_model import TaskModel
from xlpre.common.errors import InputError
from xlpre.common.messages import counted
from xlpre.conversion.task_model_folder import TaskModelFolder
from xlpre.model.initialization import build_with_weights
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import STDIN, read_lines
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import Comm, use_device

CHUNK_SIZE = 1024  # lines that are read before predicting, so that batches have rows of similar length

Line = tuple[str, str | Fields]  # location, and the text of a line or the fields of a table row


def predict_lines(
    model: TaskModelFolder, task: Task, lines: Iterable[Line], batch_size: int = 32, chunk_size: int = CHUNK_SIZE
) -> Iterator[Prediction]:
    """Predict lines, in input order.

    Args:
        model: content of a fine-tuned model folder.
        task: task of the model.
        lines: the lines, for example from `read_input`. An example without an id gets the number of its line, from 0, as id.
        batch_size: features per forward pass.
        chunk_size: number of lines that are read and then predicted together.

    Raises:
        InputError: a line is invalid. The predictions for the lines before it are yielded first.
    """
    network = build_with_weights(model.weights, partial(TaskModel, model.folder.config, task)).to(use_device())
    tokenizer = model.folder.require_tokenizer("the folder")
    overhead_tokens, comm = resolve_overhead_tokens(None, network.backbone.device), Comm()
    remaining = enumerate(lines)
    error = None
    while not error:
        split, error = _read_chunk(task, islice(remaining, chunk_size), tokenizer)
        if split.examples:
            yield from task.to_predictions(split, predict_split(network, split, batch_size, overhead_tokens, comm))
        elif not error:
            return
    raise error


def read_input(file: Path | None, text_columns: Sequence[str], is_squad: bool = False) -> Iterator[Line]:
    """Yield the non-empty lines of a file, or the rows of a table.

    Args:
        file: the file; None for standard input. A .csv or .parquet file is read as a table, and so is a .tsv or .txt file whose first
            line names the text columns.
        text_columns: names of the columns with texts.
        is_squad: read a .json file as a SQuAD file.

    Raises:
        InputError: the file cannot be read.
    """
    if file is not None and not file.is_file():
        if file.exists() and not file.is_dir():
            raise InputError(f"{file} is invalid: it is a pipe. Pass its text as standard input, without FILE.")
        reason = "it is a folder" if file.is_dir() else "there is no such file"
        raise InputError(f"{file} is invalid: {reason}. Pass a file with one example per line.")
    if file is not None and is_squad and kind_of(file) == ".json":
        yield from read_questions(file)
        return
    if file is not None and _has_columns(file, text_columns):
        yield from read_rows(file)
        return
    if file is not None and kind_of(file) == ".tsv" and text_columns:
        columns = " and ".join(text_columns)
        note = f"note: the first line of {file} does not name the columns {columns}: each line is read as texts"
        print(note, file=sys.stderr)
    path = file or STDIN
    for number, (_, text) in enumerate(read_lines(path), 1):
        line = text.rstrip("\r\n")
        if file is None and number == 1 and any(_names_columns(line, text_columns, x) for x in ("\t", ",")):
            raise InputError(
                f"{path}, line 1 is invalid: it names the columns of a table. Pass the table as FILE, or remove this line and all columns "
                f"but {' and '.join(text_columns)}."
            )
        if line:
            yield f"{path}, line {number}", line


def _read_chunk(task: Task, lines: Iterable[tuple[int, Line]], tokenizer: Tokenizer) -> tuple[Split, ValueError | None]:
    """Encode the lines before the first invalid line. Return them with the error of the invalid line, or None if all are valid."""
    examples: list[Example] = []
    features: list[Features] = []
    try:
        for row, (location, line) in lines:
            example = _parse_line(task, line, location, row)
            encoded = task.encode([example], tokenizer)
            features += [replace(feature, example_index=len(examples)) for feature in encoded]
            examples.append(example)
    except ValueError as error:
        return Split("lines", examples, features), error
    return Split("lines", examples, features), None


def _parse_line(task: Task, line: str | Fields, location: str, row: int) -> Example:
    if not isinstance(line, str):
        fields = line
    elif line.lstrip().startswith("{"):
        try:
            fields = parse_object(line, location)
        except InputError as error:
            remedy = ""
            if task.text_columns:
                remedy = f' To predict a text that begins with "{{", write {{"{task.text_columns[0]}": "{{..."}}.'
            raise InputError(f"{error}{remedy}") from None
    else:
        columns, texts = task.text_columns, _split_texts(line)
        if len(columns) != len(texts):
            if not columns:
                raise InputError(
                    f"{location} is invalid: for task={task.name}, each line must be a JSON object. Write it as one."
                )
            rule = f"this model reads {counted(len(columns), 'text')} ({' and '.join(columns)}), but the line has {len(texts)}"
            if len(columns) > 1:
                remedy = "Separate the texts with one tab, or write a JSON list."
            elif "\t" in line:
                remedy = "Remove the tab." if line.count("\t") == 1 else "Remove the tabs."
            else:
                remedy = "Remove the other texts."
            raise InputError(f"{location} is invalid: {rule}. {remedy}")
        fields = dict(zip(columns, texts, strict=True))
    without_labels = {name: value for name, value in fields.items() if name not in task.label_columns}
    return task.parse_example(without_labels, location, str(row))


def _split_texts(line: str) -> list[str]:
    """Return the texts of a line, which is a JSON list or contains texts separated by tabs."""
    if line.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            texts = json.loads(line)
            if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
                return texts
    return line.split("\t")


def _has_columns(file: Path, text_columns: Sequence[str]) -> bool:
    """Return True if the file is a table with named columns."""
    if (kind := kind_of(file)) not in (".tsv", ".txt"):
        return kind in (".csv", ".parquet")
    _, first = next(read_lines(file), (0, ""))
    return _names_columns(first.rstrip("\r\n"), text_columns)


def _names_columns(line: str, text_columns: Sequence[str], separator: str = "\t") -> bool:
    """Return True if a line is the header of a table with these columns."""
    return bool(text_columns) and {*text_columns} <= {*line.split(separator)}
