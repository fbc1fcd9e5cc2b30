"""Errors of the operating system: which of them are temporary, what the user can do about them, and retries."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# errors of network file systems, of networks, and of limits shared with other programs
TRANSIENT_NAMES = (
    *("EIO", "EREMOTEIO", "ESTALE", "EBUSY", "EAGAIN", "EINTR", "EMFILE", "ENFILE", "ENOBUFS", "ENOLINK"),
    *("ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "ESHUTDOWN"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EADDRINUSE"),
)
TRANSIENT = frozenset(getattr(errno, name) for name in TRANSIENT_NAMES if hasattr(errno, name))
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    **dict.fromkeys(DISK_FULL, "Free disk space, and run the same command again."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Choose another path, or get permission for this one."),
    **dict.fromkeys(TRANSIENT, "This error may be temporary: run the same command again."),
}
# messages of torch on a CPU, on a GPU, and for a tensor larger than any memory
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
RETRY_SECONDS = (1.0, 5.0)  # waiting times before the second and the third attempt


def error_number(error: BaseException) -> int | None:
    """Return the errno of `error`, or None if it has none."""
    number = getattr(error, "errno", None)
    if number is None and (
        found := re.search(r"\(os error (\d+)\)", str(error))
    ):  # raised by a library written in Rust
        return int(found[1])
    return number


def is_transient(error: BaseException) -> bool:
    """Return True if the same command may succeed later, without a change by the user."""
    return error_number(error) in TRANSIENT


def remedy(number: int | None) -> str:
    """Return a sentence that says what to do about the error with the errno `number`. Empty: there is no general advice."""
    return REMEDIES.get(number or 0, "")


def is_disk_full(error: OSError) -> bool:
    """Return True if the disk or the quota is full."""
    return error.errno in DISK_FULL


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if Python or torch could not get memory."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)


def retry(function: Callable[[], T]) -> T:
    """Call `function`. If it raises OSError, try again after each of RETRY_SECONDS, then raise the error."""
    for seconds in RETRY_SECONDS:
        try:
            return function()
        except OSError:
            time.sleep(seconds)
    return function()
