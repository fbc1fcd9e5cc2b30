"""Answer texts with a fine-tuned model: lines in, JSON lines out.

python finetune/predict.py runs/mrpc/model < pairs.tsv
python finetune/predict.py runs/mrpc/model questions.jsonl > answers.jsonl

A line is a JSON object with the task's fields (those of its training files; of RACE: article, question, options; of SQuAD: context,
question), or, where the task reads one text or two, the text, or both with a tab between them or as a JSON list. A .csv or .parquet
file, and a .tsv file whose first line names the task's columns, are read by their columns; of SQuAD a .json file, as distributed,
question by question.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from finetune.data.examples import Example, Prediction, Split
from finetune.data.features import Features
from finetune.data.table_reader import Fields, read_rows
from finetune.tasks.base import Task
from finetune.tasks.span import SpanTask
from finetune.tasks.squad_files import read_questions
from finetune.trainer.evaluator import answer, device_pass_tokens
from finetune.trainer.task_model import open_task_model
from finetune.trainer.task_model import TaskModel
from xlpre.common.cli_main import run_main
from xlpre.conversion.task_model import TaskModelFolder
from xlpre.model.initialization import build_with_weights
from xlpre.text.json_objects import parse_object
from xlpre.text.readers import STDIN, ByteCounter, read_lines
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import Comm, use_device

CHUNK = 1024  # lines that are answered together, in rows of like lengths


def predict(
    model: TaskModelFolder, task: Task, lines: Iterable[tuple[str, str | Fields]], rows: int = 32, chunk: int = CHUNK
) -> Iterator[Prediction]:
    """Answers to lines, or to fields, given with their places, in their order.

    Args:
        model: a fine-tuned one.
        task: that it is of.
        lines: what `entries_of` reads, for example.
        rows: in one forward pass.
        chunk: lines that are read before the first of them is answered.

    Raises:
        ValueError: a line that is not as the task wants it, once those before it are answered.
    """
    network = build_with_weights(model.weights, partial(TaskModel, model.folder.config, task)).to(use_device())
    tokenizer, pass_tokens = model.folder.require_tokenizer("the folder"), device_pass_tokens(None, network.device)
    rest, comm = iter(lines), Comm()
    fault = None
    while not fault:
        split, fault = _next_split(task, islice(rest, chunk), tokenizer)
        if split.examples:
            yield from task.to_predictions(split, answer(network, split, rows, pass_tokens, comm))
        elif not fault:
            return
    raise fault


def _next_split(
    task: Task, lines: Iterable[tuple[str, str | Fields]], tokenizer: Tokenizer
) -> tuple[Split, ValueError | None]:
    """Lines up to the first that cannot be read, and what is wrong with that."""
    examples: list[Example] = []
    items: list[Features] = []
    try:
        for place, line in lines:
            example = _example(task, line, place)
            items += [replace(item, example_index=len(examples)) for item in task.encode([example], tokenizer)]
            examples.append(example)
    except ValueError as error:
        return Split("lines", examples, items), error
    return Split("lines", examples, items), None


def _example(task: Task, line: str | Fields, place: str) -> Example:
    if not isinstance(line, str):
        fields = line
    elif line.lstrip().startswith("{"):
        try:
            fields = parse_object(line, place)
        except ValueError as error:
            way_out = f'; a text that begins so is given as {{"{task.text_columns[0]}": "{{..."}}' if task.text_columns else ""
            raise ValueError(f"{error}{way_out}") from None
    else:
        columns, texts = task.text_columns, _texts_in(line)
        if len(columns) != len(texts):
            wanted = " and ".join(columns) if columns else "a JSON object"
            raise ValueError(
                f"{place}: {task.name} reads {wanted}; the line has {len(texts)} text(s), apart by tabs or in a list"
            )
        fields = dict(zip(columns, texts, strict=True))
    return task.parse_example({"id": place.rpartition(" ")[2], **fields}, place)


def _texts_in(line: str) -> list[str]:
    """Texts apart by tabs, or as a JSON list of them."""
    if line.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
                return found
    return line.split("\t")


def entries_of(file: Path | None, columns: Sequence[str], squad: bool = False) -> Iterator[tuple[str, str | Fields]]:
    """Places and lines of a file, or of what comes in, or fields where there are columns; empty lines are passed over.

    Args:
        file: None: what comes in.
        columns: of the task's texts.
        squad: a .json file is one of SQuAD as distributed.

    Raises:
        ValueError: it cannot be read.
    """
    if file is not None and not file.is_file():
        raise ValueError(f"{file}: {'is a folder' if file.is_dir() else 'there is no such file'}; name a file of lines")
    if file is not None and squad and ".json" in file.suffixes:
        yield from read_questions(file)
        return
    if file is not None and _has_columns(file, columns):
        yield from read_rows(file)
        return
    path = file or STDIN
    for number, (_, text) in enumerate(read_lines(path, ByteCounter()), 1):
        if line := text.rstrip("\r\n"):
            yield f"{path}, line {number}", line


def _has_columns(file: Path, columns: Sequence[str]) -> bool:
    if ".tsv" not in file.suffixes:
        return bool({".csv", ".parquet"} & {*file.suffixes})
    _, first = next(read_lines(file, ByteCounter()), (0, ""))
    return bool(columns) and {*columns} <= {*first.rstrip("\r\n").split("\t")}


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a fine-tuned folder, such as runs/mrpc/model, or a run's")
    parser.add_argument("file", type=Path, nargs="?", help="lines to answer; none: what comes in")
    parser.add_argument("--rows", type=int, default=32, help="texts in one forward pass")
    words = parser.parse_args(argv)
    if words.rows < 1:
        raise ValueError(f"--rows {words.rows} must be at least 1")
    model, task = open_task_model(words.model)
    entries = entries_of(words.file, task.text_columns, isinstance(task, SpanTask))
    chunk = 1 if words.file is None and os.isatty(0) else CHUNK  # who types a line waits for its answer
    for one in predict(model, task, entries, words.rows, chunk):
        print(json.dumps(one, ensure_ascii=not str(sys.stdout.encoding).lower().startswith("utf")))


if __name__ == "__main__":
    run_main(main)
