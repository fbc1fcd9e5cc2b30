"""Units of the text, encoded side by side into shards.

    .store.unfinished/UNIT/00007/{train,val}/*.bin    a finished shard: about 16 M characters

A shard is there whole or not at all; a unit goes on after its last one. Shards of a file that has changed since, of other settings or
another vocabulary are not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from xlpre.common.files import atomic_dir
from xlpre.data import encoded_docs
from xlpre.data.store import FORMAT, SPLITS
from xlpre.text.corpus import ReadUnit, TextConfig, documents_of, units_of
from xlpre.text.document import Document
from xlpre.text.readers import ByteCounter
from xlpre.text.tokenizer import Tokenizer

SHARD_CHARACTERS = 16_000_000
BATCH_CHARACTERS = 1_000_000  # encoded at once

Show = Callable[[int, int], None]  # bytes of sources read, bytes of text encoded, since the last call


@dataclass(frozen=True)
class ShardTask:
    """Units that one worker reads one after another into the shards of a folder."""

    folder: Path
    units: list[ReadUnit]

    @property
    def weight(self) -> float:
        """How often its documents are taken for training."""
        return self.units[0].weight

    @property
    def finished(self) -> bool:
        """Whether all of its shards are there."""
        return (self.folder / "finished").exists()

    def shards(self) -> list[Path]:
        """The shards that are there, in order."""
        return sorted(path for path in self.folder.glob("[0-9]*") if path.is_dir())


def has_shards(work: Path) -> bool:
    """Whether there is one in the folder of an unfinished store."""
    return any(work.glob("*/[0-9]*"))


def tasks_of(work: Path, config: TextConfig, tokenizer: Tokenizer) -> list[ShardTask]:
    """The work, cut so that its shards stay good as long as text, settings and vocabulary are the same."""
    settings = {key: getattr(config, key) for key in ("column", "rows", "lines", "split", "max_chars", "val_fraction")}
    known = {**settings, "format": FORMAT, "vocabulary": tokenizer.sha256, "preprocess": tokenizer.preprocess}

    def key(group: list[ReadUnit]) -> str:
        content = [known, *(dataclasses.asdict(dataclasses.replace(unit, weight=1.0)) for unit in group)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]

    return [ShardTask(work / key(group), group) for group in units_of(config)]


def encode_all(tasks: list[ShardTask], config: TextConfig, tokenizer: Tokenizer, show: Show) -> None:
    """Write the shards that are not there yet, in `config.workers` processes."""
    todo = list({task.folder: task for task in tasks if not task.finished}.values())
    wanted = config.num_processes or os.cpu_count() or 1
    n_workers = max(1, min(wanted, len(todo)))
    job = EncodeJob(config, tokenizer, max(1, wanted // n_workers))
    if n_workers > 1:
        _side_by_side(job, todo, n_workers, show)
        return
    for task in todo:
        job.encode(task, show)


@dataclass(frozen=True)
class EncodeJob:
    """What every worker knows."""

    config: TextConfig
    tokenizer: Tokenizer
    threads: int

    def encode(self, task: ShardTask, show: Show, found: Iterator[Document] | None = None) -> None:
        """Write the shards of `task` that are not there yet; `found` stands in for reading its units."""
        dtype, meter = encoded_docs.dtype_of(self.tokenizer), ByteCounter()
        done = task.shards()
        n_done = sum(encoded_docs.count(shard / part) for shard in done for part in SPLITS)
        stream = encoded_docs.batches(
            islice(found or documents_of(task.units, self.config, meter), n_done, None), BATCH_CHARACTERS
        )
        number, batch, seen = len(done), next(stream, None), 0
        while batch:
            with atomic_dir(task.folder / f"{number:05d}") as partial:
                for part in SPLITS:
                    (partial / part).mkdir()
                size = 0
                while batch and size < SHARD_CHARACTERS:
                    piece = encoded_docs.encode(batch, self.tokenizer, self.config.line_type, dtype, self.threads)
                    is_val = piece.share() < self.config.val_fraction
                    encoded_docs.append(partial / "train", piece.where(~is_val))
                    encoded_docs.append(partial / "val", piece.where(is_val))
                    text = sum(len(line) for document in batch for line in document)
                    size += text
                    show(meter.n_bytes - seen, text)
                    seen, batch = meter.n_bytes, next(stream, None)
            number += 1
        task.folder.mkdir(parents=True, exist_ok=True)
        (task.folder / "finished").touch()


def _side_by_side(job: EncodeJob, tasks: list[ShardTask], n_workers: int, show: Show) -> None:
    """Encode `tasks` in processes; what fails in one ends all, and what is finished stays."""
    context = multiprocessing.get_context("fork")  # what is loaded is shared
    todo, news = context.Queue(), context.Queue()
    for item in [*tasks, *[None] * n_workers]:
        todo.put(item)
    processes = [
        context.Process(target=_work, args=(job, todo, news, os.getpid()), daemon=True) for _ in range(n_workers)
    ]
    for process in processes:
        process.start()
    try:
        left = len(tasks)
        while left:
            try:
                kind, content = news.get(timeout=0.5)
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise ValueError(
                        "a worker was killed, perhaps for lack of memory; run again with fewer text.num_processes, what is finished is kept"
                    ) from None
                continue
            if kind == "failed":
                raise content
            if kind == "finished":
                left -= 1
            else:
                show(*content)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(job: EncodeJob, todo: Any, news: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends this process

    def show(source: int, text: int) -> None:
        if os.getppid() != parent:
            os._exit(1)  # nobody waits for it any more
        news.put(("read", (source, text)))

    while task := todo.get():
        try:
            job.encode(task, show)
        except Exception as error:  # noqa: BLE001 - told to the parent, who raises it
            news.put(("failed", error))
            return
        news.put(("finished", None))
