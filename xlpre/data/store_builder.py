"""From text to a TokenStore: units of the text are encoded side by side into shards, which are then put together.

Called again after a kill, a unit goes on after its last shard, and the same bytes come out, with any number of workers.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xlpre.common.files import lock_dir
from xlpre.data.assembly import assemble
from xlpre.data.shards import EncodeJob, ShardTask, Show, encode_all, has_shards, tasks_of
from xlpre.data.store import TokenStore
from xlpre.text.corpus import ReadUnit, TextConfig, source_files
from xlpre.text.document import Document, LineType
from xlpre.text.tokenizer import Tokenizer


def build_store(
    path: str | Path, config: TextConfig, tokenizer: Tokenizer, show: Show = lambda source, text: None
) -> TokenStore:
    """Make a store of the text that `config` names; nothing is at `path` until all of it is.

    Raises:
        ValueError: text that cannot be read, a part that came out empty, another process that makes the same store.
    """
    path = Path(path)
    work = path.with_name(f".{path.name}.unfinished")
    lock = lock_dir(work, "another command prepares this store; wait for it, or stop it")
    try:
        tasks = tasks_of(work, config, tokenizer)
        with _says_what_is_kept(work):
            encode_all(tasks, config, tokenizer, show)
        source = {key: value for key, value in dataclasses.asdict(config).items() if key != "workers"}
        try:
            assemble(path, tasks, tokenizer, config, {"source": source, "files": source_files(config)})
        except ValueError:  # too few documents: another text.val_fraction cuts other shards
            shutil.rmtree(work)
            raise
        shutil.rmtree(work)
    finally:
        if not has_shards(work):
            shutil.rmtree(work, ignore_errors=True)  # nothing in it to go on from
        lock.close()
    return TokenStore(path)


def write_store(
    path: str | Path,
    found: Iterable[Document],
    tokenizer: Tokenizer,
    val_fraction: float,
    source: Mapping[str, Any],
    source_files: Mapping[str, int],
    line_type: LineType = "paragraphs",
) -> TokenStore:
    """Make a store of documents at hand; `source` and `files` say in meta.json where they came from."""
    path, config = Path(path), TextConfig(val_fraction=val_fraction, line_type=line_type)
    task = ShardTask(path.with_name(f".{path.name}.unfinished") / "all", [ReadUnit("documents at hand", 1.0)])
    shutil.rmtree(task.folder.parent, ignore_errors=True)
    try:
        EncodeJob(config, tokenizer, 1).encode(task, lambda source, text: None, iter(found))
        assemble(path, [task], tokenizer, config, {"source": dict(source), "files": dict(source_files)})
    finally:
        shutil.rmtree(task.folder.parent, ignore_errors=True)
    return TokenStore(path)


@contextmanager
def _says_what_is_kept(work: Path) -> Iterator[None]:
    """Let a user who is told that his text cannot be read know of the shards that are there."""
    try:
        yield
    except ValueError as error:
        kept = f" (what is encoded is kept in {work}; the same command goes on from it)" if has_shards(work) else ""
        raise ValueError(f"{error}{kept}") from None
