"""kernels/cpu.cpp as a library: compiled where it is first used, once for each version of it and each kind of processor."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from xlpre.common.files import atomic_write, cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
AVX2 = ["-mavx2", "-mfma"]
VECTORS = {"AVX2": AVX2, "AVX512": [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]}
COMPILERS = ["c++", "g++", "clang++"]
SEAL = 32  # bytes at the end of the file
TYPES = {torch.float32: "float32", torch.float64: "float64"}


class MissingError(Exception):
    """There is no library; the message says why."""


class Library:
    """The functions of kernels/cpu.cpp.

    Args:
        path: of the compiled file.

    Raises:
        OSError: it is not there, damaged, or cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        whole = path.read_bytes()
        if _seal(whole[:-SEAL]) != whole[-SEAL:]:  # a part of one would end the process
            raise OSError(f"{path} is damaged")
        self._functions = ctypes.CDLL(str(path))
        self._functions.use_products(*_products())

    def call(self, name: str, dtype: torch.dtype, *given: Tensor | int | float | ctypes.Structure) -> None:
        """The function `name` for `dtype`, of numbers, structures and contiguous tensors; nothing where those have no data."""
        if any(isinstance(x, Tensor) and x.is_meta for x in given):
            return
        getattr(self._functions, f"{name}_{TYPES[dtype]}")(*map(_passed, given))


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether what is computed there can be left to the library; on torch's meta device as on a processor."""
    return device.type in ("cpu", "meta") and dtype in TYPES and not torch.compiler.is_compiling() and is_there()


@functools.cache
def is_there() -> bool:
    """Whether there is a library; if not, why is said, once."""
    try:
        library()
    except MissingError as reason:
        logging.getLogger(__name__).warning(
            "note: %s; attention, GELU and dropout take torch's, which is slower", reason
        )
        return False
    return True


@functools.cache
def library() -> Library:
    """The library, compiled if need be.

    Raises:
        MissingError: it cannot be.
    """
    flags = [*FLAGS, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])]
    version = hashlib.sha256(SOURCE.read_bytes() + repr((flags, platform.machine())).encode()).hexdigest()[:16]
    try:
        return _loaded(cache_dir() / f"cpu-{version}.so", flags)
    except (OSError, RuntimeError):  # nobody's home, or nothing can be written there
        pass
    try:
        with tempfile.TemporaryDirectory() as elsewhere:
            return _loaded(Path(elsewhere) / "cpu.so", flags)
    except OSError as error:
        raise MissingError(f"there is no room for what a C++ compiler makes of {SOURCE.name} ({error})") from None


def elementwise(name: str, x: Tensor, *given: Tensor | int | float) -> Tensor:
    """What the function `name` makes of every element of `x`, and of what else is given."""
    y = torch.empty_like(x)
    library().call(name, x.dtype, x.numel(), torch.get_num_threads(), x, *given, y)
    return y


def _loaded(path: Path, flags: list[str]) -> Library:
    """The library at `path`, which is compiled if it is not there or cannot be loaded."""
    try:
        return Library(path)
    except OSError:
        _compile(path, flags)
    try:
        return Library(path)
    except OSError as error:
        raise MissingError(f"{SOURCE.name}, compiled, cannot be loaded ({error})") from None


def _compile(path: Path, flags: list[str]) -> None:
    found = [at for name in COMPILERS if (at := shutil.which(name))]
    compiler = shlex.split(os.environ.get("CXX", "")) or found[:1]
    if not compiler:
        raise MissingError(f"there is no C++ compiler ({', '.join(COMPILERS)}; CXX can name another)")
    with atomic_write(path) as partial:
        try:
            done = subprocess.run([*compiler, *flags, str(SOURCE), "-o", str(partial)], capture_output=True, text=True)
        except OSError as error:
            raise MissingError(f"the C++ compiler {compiler[0]} cannot be run ({error.strerror})") from None
        if done.returncode:
            lines = done.stderr.splitlines() or ["it says nothing"]
            said = next((line for line in lines if "error" in line), lines[0])
            raise MissingError(f"the C++ compiler {compiler[0]} cannot compile {SOURCE.name} ({said})")
        whole = partial.read_bytes()
        partial.write_bytes(whole + _seal(whole))


def _seal(whole: bytes) -> bytes:
    return hashlib.sha256(whole).digest()


def _products() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The sgemm and dgemm of the BLAS that torch brings along or is linked with."""
    kind = ".dylib" if sys.platform == "darwin" else ".so"
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{kind}"))
    try:
        single, double = (ctypes.cast(getattr(torch_cpu, f"{letter}gemm_"), ctypes.c_void_p) for letter in "sd")
    except AttributeError:
        raise MissingError("this build of torch has no BLAS that others can call") from None
    return single, double


def _passed(x: Tensor | int | float | ctypes.Structure) -> object:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure):
        return ctypes.byref(x)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)
