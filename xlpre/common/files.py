"""Atomic files and folders, folder locks and checksums.

A file or folder is written under a temporary name, flushed to disk, then renamed: readers see the complete content or nothing.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from xlpre.common.errors import InputError
from xlpre.common.os_errors import is_transient

WEIGHTS_SUFFIX = ".safetensors"
FileEntry = tuple[int, int]  # size in bytes and CRC-32C of the content, to detect a damaged file
FileEntries = dict[str, FileEntry]  # file name -> entry
# errors of flock on Lustre mounted without -o flock, NFS without its lock service, and other file systems without locks
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
LEASE_SECONDS = 60.0  # a lease expires if it is not renewed for this time
LOCK_FILE, LEASE_FILE = ".lock", ".lease"
ABANDONED_SECONDS = 86_400.0  # age at which temporary files of other machines are removed


def cache_dir() -> Path:
    """Return the cache folder for compiled kernels and measurements of this machine: $XDG_CACHE_HOME/xlpre or ~/.cache/xlpre.

    The folder is created if it does not exist.

    Raises:
        OSError: the folder cannot be created.
        RuntimeError: the home directory is unknown.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xlpre"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def with_filename(path: Path) -> Iterator[None]:
    """Set `path` as the file name of an OSError that has none, for example because the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. On success it is renamed to `path`; on an error it is removed.

    If `path` is a symbolic link, the file that it points to is replaced.
    """
    path = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    partial = _temporary_path(path)
    try:
        with with_filename(path):
            yield partial
            fsync(partial)
            os.replace(partial, path)
            fsync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Write a file. Return its size and checksum."""
    path.write_bytes(content)
    return entry_of(content)


def entry_of(content: bytes) -> FileEntry:
    """Return the size and checksum of `content`."""
    return len(content), extend_crc32c(0, content)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`. On success it replaces `path`; on an error it is removed."""
    path = Path(path)
    partial = _temporary_path(path)
    partial.mkdir()
    try:
        with with_filename(path):
            yield partial
            for file in [*partial.rglob("*"), partial]:
                fsync(file)
            replaced = path.with_name(f".{path.name}.replaced-{machine_id()}-{os.getpid()}")
            if path.exists():
                os.replace(path, replaced)
            os.replace(partial, path)
            fsync(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def hardlink_copy(source: Path, target: Path) -> None:
    """Copy the folder `source` to `target`, replacing an existing one. Weight files become hard links where possible."""
    with atomic_dir(target) as partial:
        for file in source.iterdir():
            if not (file.suffix == WEIGHTS_SUFFIX and _hardlink_read_only(file, partial / file.name)):
                shutil.copy2(file, partial / file.name)


def lock_dir(folder: Path, refusal: str) -> ExitStack:
    """Lock `folder` for this process, until the returned object is closed or the process exits.

    On a file system without file locks, the lock is a lease: a file that names the holder (machine, boot id, process id). The holder renews
    it regularly.

    Args:
        folder: created if it does not exist.
        refusal: end of the error message if another process holds the lock.

    Raises:
        InputError: the folder cannot be created or written, or another process holds the lock.
        OSError: a temporary error of the file system.
    """
    held = ExitStack()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(open(folder / LOCK_FILE, "w"))  # noqa: SIM115 - the open file is the lock
    except OSError as error:
        if is_transient(error):
            raise
        raise InputError(f"{folder} cannot be written ({error.strerror}). Choose another folder.") from None
    try:
        with with_filename(folder / LOCK_FILE):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise InputError(f"{folder}: {refusal}") from None
    except OSError as error:
        held.close()
        if error.errno not in NO_FLOCK:
            raise
        held.callback(_acquire_lease(folder, refusal).release)
    return held


def fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (
            path.is_dir() and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
        ):  # some file systems flush files only
            raise
    finally:
        os.close(descriptor)


def compute_crc32c(path: Path) -> int:
    """Return the CRC-32C of a file."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = extend_crc32c(crc, block)
    return crc


def extend_crc32c(crc: int, content: bytes | np.ndarray) -> int:
    """Extend a checksum: `crc` is the CRC-32C of some bytes; return the CRC-32C of these bytes followed by `content`."""
    import google_crc32c  # local: the self-check of the GPU kernels also runs without this package

    return int(google_crc32c.extend(crc, content))


def _hardlink_read_only(source: Path, target: Path) -> bool:
    """Make `source` read-only and hard-link it to `target`. Return False where the file system has no hard links."""
    try:
        source.chmod(source.stat().st_mode & 0o555)
        os.link(source, target)
    except OSError:
        return False
    return True


def _acquire_lease(folder: Path, refusal: str) -> Any:
    import filelock  # local: the self-check of the GPU kernels also runs without this package

    print(
        f"warning: {folder} is on a file system without file locks. The file {LEASE_FILE} inside it replaces the lock. If the machine that "
        f"created this file has died, this command waits {LEASE_SECONDS:g} s until the file expires.",
        file=sys.stderr,
        flush=True,
    )
    lost = f"warning: the lock of {folder} was lost; another process may use the folder now."
    lease = filelock.SoftFileLease(
        folder / LEASE_FILE,
        lease_duration=LEASE_SECONDS,
        on_compromise=lambda compromise: print(lost, file=sys.stderr, flush=True),
        thread_local=False,
    )
    try:
        lease.acquire(timeout=1.5 * LEASE_SECONDS, poll_interval=LEASE_SECONDS / 100)
    except filelock.Timeout:
        raise InputError(f"{folder}: {refusal}") from None
    return lease


@cache
def machine_id() -> str:
    """Return the name and the boot id of this machine. A process id is unique only until the machine restarts."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except OSError:  # not Linux
        boot_id = ""
    return f"{socket.gethostname()}-{boot_id.strip().replace('-', '')[:12]}"


def _temporary_path(path: Path) -> Path:
    """Return a name next to `path` for this process, after removing or restoring leftovers of killed processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(path, "replaced"):
        if path.exists():
            _remove(leftover)
        else:
            os.replace(leftover, path)  # the process was killed between the two renames of atomic_dir
    for leftover in _leftovers(path, "partial"):
        _remove(leftover)
    return path.with_name(f".{path.name}.partial-{machine_id()}-{os.getpid()}")


def _leftovers(path: Path, kind: str) -> list[Path]:
    """List the temporary files and folders of `path` that belong to this process or to a process that has ended."""
    prefix = f".{path.name}.{kind}-"
    candidates = path.parent.glob(f"{glob.escape(prefix)}*")
    return [leftover for leftover in candidates if _is_abandoned(leftover, leftover.name.removeprefix(prefix))]


def _is_abandoned(leftover: Path, owner: str) -> bool:
    """Return True if the process `owner` (HOST-BOOTID-PID) no longer uses the temporary file or folder `leftover`."""
    machine, _, pid = owner.rpartition("-")
    if machine == machine_id():
        return int(pid) == os.getpid() or not psutil.pid_exists(int(pid))
    if machine.rpartition("-")[0] == socket.gethostname():
        return True  # this machine has been restarted
    times = [file.lstat().st_mtime for file in (leftover, *leftover.rglob("*"))]
    return time.time() - max(times) > ABANDONED_SECONDS


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
