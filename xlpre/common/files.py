"""Files and folders that appear whole or not at all: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

WEIGHTS = ".safetensors"


def cache_folder() -> Path:
    """Where what was made for this machine is kept, $XDG_CACHE_HOME/xlpre or ~/.cache/xlpre; it is there then.

    Raises:
        OSError: it cannot be made.
        RuntimeError: nobody is at home.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xlpre"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def named(path: Path) -> Iterator[None]:
    """What the operating system refuses meanwhile without a name, as it does when a disk is full, has that of `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, on an error it is removed."""
    path = Path(path)
    partial = _partial(path)
    try:
        with named(path):
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Make `text`, in UTF-8, all that is in the file `path`; see new_file."""
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`, on an error it is removed."""
    path = Path(path)
    partial = _partial(path)
    partial.mkdir()
    try:
        with named(path):
            yield partial
            for file in sorted(partial.rglob("*")):
                sync(file)
            replaced = path.with_name(f".{path.name}.replaced-{os.getpid()}")
            if path.exists():
                os.replace(path, replaced)
            os.replace(partial, path)
            sync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def linked_copy(source: Path, target: Path) -> None:
    """A folder at `target` with the files of `source`, on the disk only once where it can be; one that is there is replaced."""
    with new_folder(target) as partial:
        for file in source.iterdir():
            if not (file.suffix == WEIGHTS and _linked(file, partial / file.name)):
                shutil.copy2(file, partial / file.name)


def exclusive(folder: Path, refusal: str) -> IO[str]:
    """Hold `folder` for this process, until it ends, however it ends, or the returned file is closed.

    Raises:
        ValueError: it cannot be made or written in; another process holds it, where the message ends with `refusal`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 - it is the open file that holds the folder
    except OSError as error:
        raise ValueError(f"{folder}: nothing can be written there ({error.strerror}); name another place") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{folder}: {refusal}") from None
    return lock


def sync(path: Path) -> None:
    """Ask the operating system to put a file or folder on the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _linked(file: Path, name: Path) -> bool:
    """Whether `file`, read-only from now on, could be given another name; some file systems have no hard links."""
    try:
        file.chmod(file.stat().st_mode & 0o555)
        os.link(file, name)
    except OSError:
        return False
    return True


def _partial(path: Path) -> Path:
    """A name beside `path` for this process; what a killed process left under such names is removed, or put back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in _left_by_the_dead(path, "replaced"):
        if path.exists():
            _remove(left)
        else:
            os.replace(left, path)  # killed between the two renames
    for left in _left_by_the_dead(path, "partial"):
        _remove(left)
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def _left_by_the_dead(path: Path, kind: str) -> list[Path]:
    found = path.parent.glob(f".{glob.escape(path.name)}.{kind}-*")
    numbers = [(left, int(left.name.rpartition("-")[2])) for left in found]
    return [left for left, number in numbers if number == os.getpid() or not psutil.pid_exists(number)]


def _remove(left: Path) -> None:
    if left.is_dir():
        shutil.rmtree(left)
    else:
        left.unlink(missing_ok=True)
