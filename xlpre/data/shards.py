"""Parallel encoding of the corpus into the shards of an unfinished store.

    .store.unfinished/TASK/00007/{train,val}/*.bin    a finished shard, about 16 M characters
    .store.unfinished/sentencepiece.txt               version of SentencePiece that encoded all shards

A task is a part of the corpus that one process encodes. Shards are written atomically. After an interruption, a task resumes after its
last shard. The name of its folder is a hash of its files, the settings, the vocabulary and the version of SentencePiece, so shards of
changed files or other settings are not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from xlpre.common.errors import InputError
from xlpre.common.files import atomic_dir, write_text
from xlpre.data import encoded_documents
from xlpre.data.store import FORMAT, SPLITS
from xlpre.text.corpus import ReadUnit, TextConfig, check_disjoint, list_units, list_val_units, read_units
from xlpre.text.document import Document
from xlpre.text.readers import ByteCounter
from xlpre.text.tokenizer import Tokenizer

SHARD_CHARS = 16_000_000
BATCH_CHARS = 1_000_000  # characters encoded at a time
ENCODER_FILE = "sentencepiece.txt"

ProgressCallback = Callable[[int, int], None]  # (bytes read from the sources, characters encoded) since the last call


@dataclass(frozen=True)
class ShardTask:
    """A part of the corpus that one process encodes into the shards of one folder.

    Attributes:
        folder: folder of the shards.
        units: units (files, parts of files or parts of datasets) to read, all with the same weight.
        split: split of all documents. None: a hash of the text decides.
    """

    folder: Path
    units: list[ReadUnit]
    split: str | None = None

    @property
    def weight(self) -> float:
        """Number of times that training sees each document."""
        return self.units[0].weight

    @property
    def is_finished(self) -> bool:
        """True if all shards of the task exist."""
        return (self.folder / "finished").exists()

    def shards(self) -> list[Path]:
        """List the existing shards in order."""
        return sorted(path for path in self.folder.glob("[0-9]*") if path.is_dir())


@dataclass(frozen=True)
class EncodeJob:
    """Settings that all encoding processes share.

    Attributes:
        config: text settings.
        tokenizer: the vocabulary.
        threads: threads of each process.
    """

    config: TextConfig
    tokenizer: Tokenizer
    threads: int

    def encode(
        self, task: ShardTask, on_progress: ProgressCallback, documents: Iterator[Document] | None = None
    ) -> None:
        """Write the missing shards of `task`.

        Args:
            task: task to finish.
            on_progress: called after each batch.
            documents: documents to encode. None: those of the task's units.
        """
        dtype, counter = encoded_documents.token_dtype(self.tokenizer), ByteCounter()
        existing = task.shards()
        n_encoded = sum(encoded_documents.count(shard / split) for shard in existing for split in SPLITS)
        documents = documents or read_units(task.units, self.config, counter)
        batches = encoded_documents.batches(islice(documents, n_encoded, None), BATCH_CHARS)
        number, batch, n_bytes_reported = len(existing), next(batches, None), 0
        while batch:
            with atomic_dir(task.folder / f"{number:05d}") as partial:
                for split in SPLITS:
                    (partial / split).mkdir()
                shard_chars = 0
                while batch and shard_chars < SHARD_CHARS:
                    docs = encoded_documents.encode(batch, self.tokenizer, self.config.line_type, dtype, self.threads)
                    is_val = docs.hash_fractions() < self.config.val_fraction
                    if task.split:
                        is_val[:] = task.split == "val"
                    encoded_documents.append(partial / "train", docs.select(~is_val))
                    encoded_documents.append(partial / "val", docs.select(is_val))
                    batch_chars = sum(len(line) for document in batch for line in document)
                    shard_chars += batch_chars
                    on_progress(counter.n_bytes - n_bytes_reported, batch_chars)
                    n_bytes_reported, batch = counter.n_bytes, next(batches, None)
            number += 1
        task.folder.mkdir(parents=True, exist_ok=True)
        (task.folder / "finished").touch()


def has_shards(work: Path) -> bool:
    """Return True if the folder of an unfinished store contains a shard."""
    return any(work.glob("*/[0-9]*"))


def record_encoder_version(work: Path, path: Path, tokenizer: Tokenizer) -> None:
    """Write the version of SentencePiece into `work`, the folder with the shards of the unfinished store `path`; "" for a table.

    Raises:
        InputError: another version encoded the shards that exist.
    """
    file = work / ENCODER_FILE
    installed = tokenizer.library_version
    version = file.read_text("utf-8") if file.exists() and has_shards(work) else installed
    if version != installed and version and installed:
        raise InputError(
            f"data.store_dir={path} is invalid: {work} holds text that was encoded with sentencepiece {version}, but the installed "
            f"{installed} encodes a few tokens differently. Install sentencepiece=={version} to resume, or delete that folder "
            "to encode all text again."
        )
    write_text(file, installed)


def list_tasks(work: Path, config: TextConfig, tokenizer: Tokenizer) -> list[ShardTask]:
    """Return the tasks that encode the corpus into the folder `work`."""
    names = ["column", "row_type", "line_type", "split", "max_chars"]
    if config.val_source is None:
        names.append("val_fraction")
    settings = {name: getattr(config, name) for name in names}
    vocabulary = {"vocabulary": tokenizer.sha256, "preprocess": tokenizer.preprocess}
    identity = {**settings, **vocabulary, "format": FORMAT, "sentencepiece": tokenizer.library_version}

    def folder_name(units: list[ReadUnit], split: str | None) -> str:
        content = [
            identity if split is None else {**identity, "of": split},
            *(dataclasses.asdict(dataclasses.replace(unit, weight=1.0)) for unit in units),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]

    groups = [("train" if config.val_source is not None else None, units) for units in list_units(config)]
    val_groups = list_val_units(config)
    check_disjoint([unit for _, units in groups for unit in units], [unit for units in val_groups for unit in units])
    groups += [("val", units) for units in val_groups]
    return [ShardTask(work / folder_name(units, split), units, split) for split, units in groups]


def encode_all(tasks: list[ShardTask], config: TextConfig, tokenizer: Tokenizer, on_progress: ProgressCallback) -> None:
    """Write the missing shards of all tasks in `config.num_processes` processes."""
    unfinished = list({task.folder: task for task in tasks if not task.is_finished}.values())
    num_processes = config.num_processes or len(os.sched_getaffinity(0))
    n_workers = max(1, min(num_processes, len(unfinished)))
    job = EncodeJob(config, tokenizer, max(1, num_processes // n_workers))
    if n_workers > 1:
        _encode_in_parallel(job, unfinished, n_workers, on_progress)
        return
    for task in unfinished:
        job.encode(task, on_progress)


def _encode_in_parallel(job: EncodeJob, tasks: list[ShardTask], n_workers: int, on_progress: ProgressCallback) -> None:
    """Encode `tasks` in worker processes. An error in one process ends all processes; finished shards remain."""
    context = multiprocessing.get_context("fork")  # shares the loaded vocabulary
    task_queue, result_queue = context.Queue(), context.Queue()
    for item in [*tasks, *[None] * n_workers]:
        task_queue.put(item)
    processes = [
        context.Process(target=_run_worker, args=(job, task_queue, result_queue, os.getpid()), daemon=True)
        for _ in range(n_workers)
    ]
    for process in processes:
        process.start()
    try:
        n_unfinished = len(tasks)
        while n_unfinished:
            try:
                kind, content = result_queue.get(timeout=0.5)
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise InputError(
                        "an encoding process was killed, perhaps because memory ran out. Lower text.num_processes and run the same "
                        "command again: finished shards are kept."
                    ) from None
                continue
            if kind == "failed":
                raise content
            if kind == "finished":
                n_unfinished -= 1
            else:
                on_progress(*content)
    finally:
        task_queue.cancel_join_thread()  # it would wait for a worker to read the remaining tasks
        for process in processes:
            process.terminate()
            process.join()


def _run_worker(job: EncodeJob, task_queue: Any, result_queue: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process

    def on_progress(n_bytes: int, n_chars: int) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the parent was killed
        result_queue.put(("progress", (n_bytes, n_chars)))

    while task := task_queue.get():
        try:
            job.encode(task, on_progress)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            is_bug = isinstance(error, ValueError) and not isinstance(error, InputError)
            result_queue.put(("failed", RuntimeError(traceback.format_exc()) if is_bug else error))
            return
        result_queue.put(("finished", None))
