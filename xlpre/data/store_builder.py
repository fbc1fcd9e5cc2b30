"""Preparation of a token store: processes encode the corpus into shards (folders of encoded text), which are then assembled.

A build that was interrupted resumes after its last shards. The result has the same bytes with any number of processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from xlpre.common.errors import InputError
from xlpre.common.files import atomic_dir, lock_dir
from xlpre.data import encoded_documents
from xlpre.data.encoded_documents import EncodedDocs, count_tokens
from xlpre.data.shards import (
    EncodeJob,
    ProgressCallback,
    ShardTask,
    encode_all,
    has_shards,
    list_tasks,
    record_encoder_version,
)
from xlpre.data.sparse_index import sample_pages
from xlpre.data.store import FORMAT, SPLITS, TokenStore, compute_fingerprint
from xlpre.text.corpus import VAL_KEY, ReadUnit, TextConfig, empty_text_message, source_files, validation_text
from xlpre.text.document import Document, LineType
from xlpre.text.tokenizer import Tokenizer


def build_store(
    path: str | Path,
    config: TextConfig,
    tokenizer: Tokenizer,
    on_progress: ProgressCallback = lambda n_bytes, n_chars: None,
) -> TokenStore:
    """Build a store of the text in `config`. The folder `path` appears when the store is complete.

    Args:
        path: folder of the store.
        config: text settings.
        tokenizer: the vocabulary.
        on_progress: called with the bytes read and the characters encoded since the last call.

    Raises:
        InputError: the text cannot be read, a split is empty, another process builds the same store, or another version of
            SentencePiece wrote shards of it.
    """
    path = Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)  # written where the link leads
    work = path.with_name(f".{path.name}.unfinished")
    lock = lock_dir(work, "another command is preparing this store. Wait for it, or stop it.")
    try:
        record_encoder_version(work, path, tokenizer)
        files = source_files(config)
        states = _file_states(files)
        tasks = list_tasks(work, config, tokenizer)
        with _mention_finished_shards(work):
            if config.val_source is not None:  # before the training text, which may take hours
                val_tasks = [task for task in tasks if task.split == "val"]
                encode_all(val_tasks, config, tokenizer, on_progress)
                if not any(count_tokens(shard / "val", tokenizer) for task in val_tasks for shard in task.shards()):
                    raise EmptySplitError(empty_text_message(validation_text(config), VAL_KEY))
            encode_all(tasks, config, tokenizer, on_progress)
        source = {key: value for key, value in dataclasses.asdict(config).items() if key != "num_processes"}
        if changed := sorted(set(states.items()) ^ set(_file_states(source_files(config)).items())):
            raise InputError(
                f"{config.source_key} is invalid: {changed[0][0]} was added, removed or changed while the text was read. Run the same "
                "command again: finished shards of unchanged files are kept."
            )
        origin = {"source": source, "files": files}
        try:
            _assemble(path, tasks, tokenizer, config, origin)
        except EmptySplitError:
            if config.val_source is None:  # with another text.val_fraction, the shards are of no use
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)
    finally:
        if not has_shards(work):
            shutil.rmtree(work, ignore_errors=True)  # there is nothing to resume from
        lock.close()
        with suppress(OSError):  # it may have shards; NFS keeps the folder of an open file until it is closed
            work.rmdir()
    return TokenStore(path)


def write_store(
    path: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    val_fraction: float,
    source: Mapping[str, Any],
    files: Mapping[str, int],
    line_type: LineType = "paragraphs",
) -> TokenStore:
    """Build a store of documents in memory, as tests and benchmarks do.

    Args:
        path: folder of the store.
        documents: documents to store.
        tokenizer: the vocabulary.
        val_fraction: fraction of the documents for validation.
        source: text settings to record in meta.json.
        files: file sizes to record in meta.json.
        line_type: content of a line, see `Tokenizer.encode_documents`.
    """
    path, config = Path(path), TextConfig(val_fraction=val_fraction, line_type=line_type)
    task = ShardTask(path.with_name(f".{path.name}.unfinished") / "all", [ReadUnit("documents in memory", 1.0)])
    shutil.rmtree(task.folder.parent, ignore_errors=True)
    try:
        EncodeJob(config, tokenizer, 1).encode(task, lambda n_bytes, n_chars: None, iter(documents))
        _assemble(path, [task], tokenizer, config, {"source": dict(source), "files": dict(files)})
    finally:
        shutil.rmtree(task.folder.parent, ignore_errors=True)
    return TokenStore(path)


class EmptySplitError(InputError):
    """The text has no document for a split."""


@contextmanager
def _mention_finished_shards(work: Path) -> Iterator[None]:
    """Append to the message of an InputError about a file that the text in `work`, encoded so far, is kept."""
    try:
        yield
    except InputError as error:
        if str(error).startswith("text.") or not has_shards(work):
            raise
        raise InputError(f"{error} (The encoded text of files that do not change is kept in {work}.)") from None


def _file_states(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the size and the time of the last change, in nanoseconds, of each file in `sizes`."""
    return {path: (size, os.stat(path).st_mtime_ns) for path, size in sizes.items()}


def _assemble(
    path: Path, tasks: list[ShardTask], tokenizer: Tokenizer, config: TextConfig, origin: dict[str, Any]
) -> None:
    """Assemble the shards of all tasks, in order, into a store.

    Args:
        path: folder of the store.
        tasks: finished tasks.
        tokenizer: vocabulary that encoded them.
        config: text settings.
        origin: entries of meta.json about the origin of the text.

    Raises:
        EmptySplitError: a split is empty.
    """
    dtype = encoded_documents.token_dtype(tokenizer)
    unigram = np.zeros(len(tokenizer), np.int64)
    with atomic_dir(path) as partial:
        writers = {split: _SplitWriter(partial / split) for split in SPLITS}
        try:
            for split, docs in _select_documents(tasks, config, dtype):
                writers[split].add(docs)
                if split == "train":
                    unigram += np.bincount(docs.tokens, minlength=len(unigram))
        finally:
            for writer in writers.values():
                writer.close()
        n_documents = sum(writer.n_documents for writer in writers.values())
        if not n_documents:
            raise EmptySplitError(empty_text_message(config))
        for split, writer in writers.items():
            if not writer.n_tokens and config.val_source is not None:
                if config.deduplicate and any(task.split == "train" and task.shards() for task in tasks):
                    raise EmptySplitError(
                        f"{config.source_key} is invalid: all of its documents are also in text.val_source. "
                        "Name other text for one of them."
                    )
                raise EmptySplitError(empty_text_message(config))
            if not writer.n_documents:
                raise EmptySplitError(
                    f"text.val_fraction={config.val_fraction} is invalid: it leaves no document of {n_documents:,} for the {split} split. "
                    f"{_empty_split_remedy(tasks, dtype)}"
                )
        (partial / "unigram.bin").write_bytes(unigram.data)
        tokenizer.save(partial / "vocabulary.model")
        checksums = {
            f"{split}/{name}.bin": digest for split in SPLITS for name, digest in writers[split].checksums.items()
        }
        for name in ("unigram.bin", "vocabulary.model"):
            checksums[name] = hashlib.sha256((partial / name).read_bytes()).hexdigest()
        meta = {
            "format": FORMAT,
            **origin,
            "dtype": dtype.name,
            "vocab_size": len(tokenizer),
            "vocabulary_sha256": tokenizer.sha256,
            "preprocess": tokenizer.preprocess,
            "sentencepiece": tokenizer.library_version,
            "fingerprint": compute_fingerprint(tokenizer.sha256, tokenizer.preprocess, checksums),
            **{f"{split}_{name}": value for split, writer in writers.items() for name, value in writer.counts.items()},
            "bytes": {name: (partial / name).stat().st_size for name in checksums},
            "sha256": checksums,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _empty_split_remedy(tasks: list[ShardTask], dtype: np.dtype) -> str:
    """Return the remedy for an empty split: if possible, the smallest text.val_fraction with three decimals that leaves no split empty."""
    task_docs = [
        (task, encoded_documents.read(shard / split, dtype))
        for task in tasks
        for shard in task.shards()
        for split in SPLITS
    ]
    hashes = np.concatenate([docs.hash_fractions()[_is_sampled(docs.hashes, task.weight)] for task, docs in task_docs])
    smallest = float(np.floor(hashes.min() * 1000) + 1) / 1000
    if smallest <= hashes.max() and smallest < 0.5:
        return (
            f"Set text.val_fraction={smallest:g}, the smallest value that leaves none empty, or provide more documents."
        )
    return "Provide more documents. An empty line or the end of a file ends a document."


def _select_documents(tasks: list[ShardTask], config: TextConfig, dtype: np.dtype) -> Iterator[tuple[str, EncodedDocs]]:
    """Yield (split, documents) pairs. A source's weight leaves out documents (below 1) or repeats training documents (above 1).

    With `text.deduplicate`, training has no document of the validation text.
    """
    in_validation = np.empty(0, "uint64")  # without val_source, the hash of a text decides its split
    if config.deduplicate and config.val_source is not None:
        shards = [shard for task in tasks if task.split == "val" for shard in task.shards()]
        in_validation = np.concatenate([encoded_documents.read_hashes(shard / "val") for shard in shards])
    is_first = {split: _first_occurrences(tasks, split) for split in SPLITS} if config.deduplicate else None
    for repetition in range(int(np.ceil(max((task.weight for task in tasks), default=0)))):
        for task_index, task in enumerate(tasks):
            weight = task.weight - repetition
            for shard in task.shards() if weight > 0 else []:
                for split in SPLITS if repetition == 0 else SPLITS[:1]:
                    docs = encoded_documents.read(shard / split, dtype)
                    mask = _is_sampled(docs.hashes, weight)
                    if is_first is not None:
                        mask &= is_first[split][task_index, shard]
                    if split == "train" and len(in_validation):
                        mask &= ~np.isin(docs.hashes, in_validation)
                    if mask.any():
                        yield split, docs.select(mask)


def _is_sampled(hashes: np.ndarray, weight: float) -> np.ndarray:
    """Return (documents,) bool, True for a fraction `weight` of the documents. The choice does not depend on the split."""
    return hashes * np.uint64(0x9E3779B97F4A7C15) / 2.0**64 < weight


def _first_occurrences(tasks: list[ShardTask], split: str) -> dict[tuple[int, Path], np.ndarray]:
    """Find the first occurrence of each text among the documents that `_is_sampled` selects; later ones are duplicates.

    Texts are compared by 64-bit hashes.

    Returns:
        (documents,) bool for each shard, by index of its task and path: True for first occurrences.
    """
    shards = [(index, shard) for index, task in enumerate(tasks) for shard in task.shards()]
    hashes = [encoded_documents.read_hashes(shard / split) for _, shard in shards]
    sampled = [_is_sampled(values, tasks[index].weight) for (index, _), values in zip(shards, hashes, strict=True)]
    all_hashes = np.concatenate([np.empty(0, "uint64"), *hashes])
    is_first = np.concatenate([np.empty(0, bool), *sampled])
    candidates = np.flatnonzero(is_first)
    is_first[candidates] = False
    is_first[candidates[np.unique(all_hashes[candidates], return_index=True)[1]]] = True
    masks = np.split(is_first, np.cumsum([len(values) for values in hashes])[:-1])
    return dict(zip(shards, masks, strict=bool(shards)))


class _SplitWriter:
    """Writes the files of a split, and computes their checksums and counts."""

    NAMES = ("tokens", "sentences", "documents", "sentences_index", "documents_index")

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in self.NAMES}  # noqa: SIM115 - closed by close()
        self._digests = {name: hashlib.sha256() for name in self.NAMES}
        self.n_documents = self.n_tokens = self._n_sentences = 0

    def add(self, docs: EncodedDocs) -> None:
        offset = self.n_tokens
        sentence_ends, document_ends = np.cumsum(docs.sentences) + offset, np.cumsum(docs.documents) + offset
        samples = (sample_pages(sentence_ends, self._n_sentences), sample_pages(document_ends, self.n_documents))
        arrays = (docs.tokens, sentence_ends, document_ends, *samples)
        for name, array in zip(self.NAMES, arrays, strict=True):
            content = np.ascontiguousarray(array).data
            self._files[name].write(content)  # unlike array.tofile, it says when the disk is full
            self._digests[name].update(content)
        self.n_documents += len(docs.documents)
        self._n_sentences += len(docs.sentences)
        self.n_tokens += len(docs.tokens)

    @property
    def counts(self) -> dict[str, int]:
        return {"n_documents": self.n_documents, "n_tokens": self.n_tokens, "n_sentences": self._n_sentences}

    @property
    def checksums(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
