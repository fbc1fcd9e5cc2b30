"""From text to a TokenStore: units of the text are encoded side by side into shards, which are then put together.

    .store.unfinished/UNIT/00007/{train,held_out}/*.bin    a finished shard: about 16 M characters

A shard is there whole or not at all. Called again after a kill, a unit goes on after its last shard, and the same bytes come out, with
any number of workers. Shards of a file that has changed since, of other settings or another vocabulary are not used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import queue
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.atomic import exclusive, new_folder
from xlpre.data import pieces
from xlpre.data.pieces import Piece
from xlpre.data.store import FORMAT, PARTS, TokenStore
from xlpre.text.corpus import TextConfig, Unit, documents_of, files, no_text, units_of
from xlpre.text.document import Document, Lines
from xlpre.text.files import Meter
from xlpre.text.tokenizer import Tokenizer

SHARD_CHARACTERS = 16_000_000
BATCH_CHARACTERS = 1_000_000  # encoded at once

Show = Callable[[int, int], None]  # bytes of sources read, bytes of text encoded, since the last call


@dataclass(frozen=True)
class Task:
    """Units that one worker reads one after another into the shards of a folder."""

    folder: Path
    units: list[Unit]

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


def build_store(
    path: str | Path, config: TextConfig, tokenizer: Tokenizer, show: Show = lambda source, text: None
) -> TokenStore:
    """Make a store of the text that `config` names; nothing is at `path` until all of it is.

    Raises:
        ValueError: text that cannot be read, a part that came out empty, another process that makes the same store.
    """
    path = Path(path)
    work = path.with_name(f".{path.name}.unfinished")
    lock = exclusive(work, "another command prepares this store; wait for it, or stop it")
    try:
        tasks = _tasks(work, config, tokenizer)
        with _says_what_is_kept(work):
            _encode_all(tasks, config, tokenizer, show)
        source = {key: value for key, value in dataclasses.asdict(config).items() if key != "workers"}
        try:
            _assemble(path, tasks, tokenizer, config, {"source": source, "files": files(config)})
        except ValueError:  # too few documents: another text.held_out cuts other shards
            shutil.rmtree(work)
            raise
        shutil.rmtree(work)
    finally:
        if not _has_shards(work):
            shutil.rmtree(work, ignore_errors=True)  # nothing in it to go on from
        lock.close()
    return TokenStore(path)


def write_store(
    path: str | Path,
    found: Iterable[Document],
    tokenizer: Tokenizer,
    held_out: float,
    source: Mapping[str, Any],
    files: Mapping[str, int],
    lines: Lines = "paragraphs",
) -> TokenStore:
    """Make a store of documents at hand; `source` and `files` say in meta.json where they came from."""
    path, config = Path(path), TextConfig(held_out=held_out, lines=lines)
    task = Task(path.with_name(f".{path.name}.unfinished") / "all", [Unit("documents at hand", 1.0)])
    shutil.rmtree(task.folder.parent, ignore_errors=True)
    try:
        _Job(config, tokenizer, 1).encode(task, lambda source, text: None, iter(found))
        _assemble(path, [task], tokenizer, config, {"source": dict(source), "files": dict(files)})
    finally:
        shutil.rmtree(task.folder.parent, ignore_errors=True)
    return TokenStore(path)


def _has_shards(work: Path) -> bool:
    return any(work.glob("*/[0-9]*"))


@contextmanager
def _says_what_is_kept(work: Path) -> Iterator[None]:
    """Let a user who is told that his text cannot be read know of the shards that are there."""
    try:
        yield
    except ValueError as error:
        kept = f" (what is encoded is kept in {work}; the same command goes on from it)" if _has_shards(work) else ""
        raise ValueError(f"{error}{kept}") from None


@dataclass(frozen=True)
class _Job:
    """What every worker knows."""

    config: TextConfig
    tokenizer: Tokenizer
    threads: int

    def encode(self, task: Task, show: Show, found: Iterator[Document] | None = None) -> None:
        """Write the shards of `task` that are not there yet; `found` stands in for reading its units."""
        dtype, meter = _dtype(self.tokenizer), Meter()
        done = task.shards()
        n_done = sum(pieces.count(shard / part) for shard in done for part in PARTS)
        stream = pieces.batches(
            islice(found or documents_of(task.units, self.config, meter), n_done, None), BATCH_CHARACTERS
        )
        number, batch, seen = len(done), next(stream, None), 0
        while batch:
            with new_folder(task.folder / f"{number:05d}") as partial:
                for part in PARTS:
                    (partial / part).mkdir()
                size = 0
                while batch and size < SHARD_CHARACTERS:
                    piece = pieces.encode(batch, self.tokenizer, self.config.lines, dtype, self.threads)
                    held_out = piece.share() < self.config.held_out
                    pieces.append(partial / "train", piece.where(~held_out))
                    pieces.append(partial / "held_out", piece.where(held_out))
                    text = sum(len(line) for document in batch for line in document)
                    size += text
                    show(meter.n_bytes - seen, text)
                    seen, batch = meter.n_bytes, next(stream, None)
            number += 1
        task.folder.mkdir(parents=True, exist_ok=True)
        (task.folder / "finished").touch()


def _tasks(work: Path, config: TextConfig, tokenizer: Tokenizer) -> list[Task]:
    """The work, cut so that its shards stay good as long as text, settings and vocabulary are the same."""
    settings = {key: getattr(config, key) for key in ("column", "rows", "lines", "split", "limit_mb", "held_out")}
    known = {**settings, "format": FORMAT, "vocabulary": tokenizer.sha256, "preprocess": tokenizer.preprocess}

    def key(group: list[Unit]) -> str:
        content = [known, *(dataclasses.asdict(dataclasses.replace(unit, weight=1.0)) for unit in group)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]

    return [Task(work / key(group), group) for group in units_of(config)]


def _encode_all(tasks: list[Task], config: TextConfig, tokenizer: Tokenizer, show: Show) -> None:
    todo = list({task.folder: task for task in tasks if not task.finished}.values())
    wanted = config.workers or os.cpu_count() or 1
    n_workers = max(1, min(wanted, len(todo)))
    job = _Job(config, tokenizer, max(1, wanted // n_workers))
    if n_workers > 1:
        _side_by_side(job, todo, n_workers, show)
        return
    for task in todo:
        job.encode(task, show)


def _side_by_side(job: _Job, tasks: list[Task], n_workers: int, show: Show) -> None:
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
                        "a worker was killed, perhaps for lack of memory; run again with fewer text.workers, what is finished is kept"
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


def _work(job: _Job, todo: Any, news: Any, parent: int) -> None:
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


def _assemble(path: Path, tasks: list[Task], tokenizer: Tokenizer, config: TextConfig, origin: dict[str, Any]) -> None:
    """Put the shards of all tasks together, in order."""
    dtype = _dtype(tokenizer)
    unigram = np.zeros(len(tokenizer), np.int64)
    with new_folder(path) as partial:
        writers = {part: _PartWriter(partial / part) for part in PARTS}
        try:
            for part, piece in _chosen(tasks, config, dtype):
                writers[part].add(piece)
                if part == "train":
                    unigram += np.bincount(piece.tokens, minlength=len(unigram))
        finally:
            for writer in writers.values():
                writer.close()
        n_documents = sum(writer.n_documents for writer in writers.values())
        if not n_documents:
            raise ValueError(no_text(config))
        for part, writer in writers.items():
            if not writer.n_documents:
                raise ValueError(
                    f"text.held_out={config.held_out} left no document in the {part} part of {n_documents} documents; "
                    f"{_way_out(tasks, dtype)}"
                )
        unigram.tofile(partial / "unigram.bin")
        tokenizer.save(partial / "vocabulary.model")
        checksums = {f"{part}/{name}.bin": digest for part in PARTS for name, digest in writers[part].checksums.items()}
        for name in ("unigram.bin", "vocabulary.model"):
            checksums[name] = hashlib.sha256((partial / name).read_bytes()).hexdigest()
        known = [tokenizer.sha256, tokenizer.preprocess, *(checksums[f"{part}/tokens.bin"] for part in PARTS)]
        meta = {
            "format": FORMAT,
            **origin,
            "dtype": dtype.name,
            "vocab_size": len(tokenizer),
            "vocabulary_sha256": tokenizer.sha256,
            "preprocess": tokenizer.preprocess,
            "fingerprint": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
            **{f"{part}_{name}": value for part, writer in writers.items() for name, value in writer.counts.items()},
            "bytes": {name: (partial / name).stat().st_size for name in checksums},
            "sha256": checksums,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _way_out(tasks: list[Task], dtype: np.dtype) -> str:
    """The least text.held_out, of three digits, by which there is a document in either part, if there is one that may be set."""
    found = [(task, pieces.read(shard / part, dtype)) for task in tasks for shard in task.shards() for part in PARTS]
    shares = np.concatenate([piece.share()[_taken(piece.hashes, task.weight)] for task, piece in found])
    least = float(np.floor(shares.min() * 1000) + 1) / 1000
    if least <= shares.max() and least < 0.5:
        return f"set text.held_out={least:g}, the least that holds one out, or give more documents"
    return "give more documents: an empty line ends one, and so does a file"


def _chosen(tasks: list[Task], config: TextConfig, dtype: np.dtype) -> Iterator[tuple[str, Piece]]:
    """The pieces of the store: each document once, again as often as its weight says, and duplicates not at all."""
    seen = {part: _First(tasks, part) if config.deduplicate else None for part in PARTS}
    for again in range(int(np.ceil(max((task.weight for task in tasks), default=0)))):
        for number, task in enumerate(tasks):
            weight = task.weight - again
            for shard in task.shards() if weight > 0 else []:
                for part in PARTS if again == 0 else PARTS[:1]:
                    piece = pieces.read(shard / part, dtype)
                    kept = _taken(piece.hashes, weight)
                    first = seen[part]
                    if first is not None:
                        kept &= first.among(number, shard)
                    if kept.any():
                        yield part, piece.where(kept)


def _taken(hashes: np.ndarray, weight: float) -> np.ndarray:
    """(documents,) bool: which documents a source of `weight` gives, by another hash than the one that chose the held-out ones."""
    return hashes * np.uint64(0x9E3779B97F4A7C15) / 2.0**64 < weight


class _First:
    """Which documents of each shard are the first of their text, of those that weights leave: 64 bits of a hash tell texts apart."""

    def __init__(self, tasks: list[Task], part: str) -> None:
        shards = [(number, shard) for number, task in enumerate(tasks) for shard in task.shards()]
        hashes = [np.fromfile(shard / part / "hashes.bin", "uint64") for _, shard in shards]
        taken = [_taken(found, tasks[number].weight) for (number, _), found in zip(shards, hashes, strict=True)]
        together, first = np.concatenate([np.empty(0, "uint64"), *hashes]), np.concatenate([np.empty(0, bool), *taken])
        candidates = np.flatnonzero(first)
        first[candidates] = False
        first[candidates[np.unique(together[candidates], return_index=True)[1]]] = True
        self._of = dict(
            zip(shards, np.split(first, np.cumsum([len(found) for found in hashes])[:-1]), strict=bool(shards))
        )

    def among(self, task: int, shard: Path) -> np.ndarray:
        """(documents,) bool, of a shard of the so-manieth task."""
        return self._of[task, shard]


class _PartWriter:
    """The three files of a part, written from front to back."""

    NAMES = ("tokens", "sentences", "documents")

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in self.NAMES}  # noqa: SIM115 - closed by close()
        self._digests = {name: hashlib.sha256() for name in self.NAMES}
        self.n_documents = self._n_tokens = self._n_sentences = 0

    def add(self, piece: Piece) -> None:
        offset = self._n_tokens
        arrays = (piece.tokens, np.cumsum(piece.sentences) + offset, np.cumsum(piece.documents) + offset)
        for name, array in zip(self.NAMES, arrays, strict=True):
            array.tofile(self._files[name])
            self._digests[name].update(np.ascontiguousarray(array).data)
        self.n_documents += len(piece.documents)
        self._n_sentences += len(piece.sentences)
        self._n_tokens += len(piece.tokens)

    @property
    def counts(self) -> dict[str, int]:
        return {"n_documents": self.n_documents, "n_tokens": self._n_tokens, "n_sentences": self._n_sentences}

    @property
    def checksums(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("uint16" if len(tokenizer) <= 1 << 16 else "uint32")
