"""Compiled CPU kernels: kernels.cpp is compiled on first use, once for each version of the file and each type of processor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from xlpre.common.files import atomic_write, cache_dir

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
AVX2 = ["-mavx2", "-mfma"]
VECTOR_FLAGS = {"AVX2": AVX2, "AVX512": [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]}
COMPILERS = ["g++", "c++", "clang++"]  # GCC first: it uses the OpenMP library of torch
CHECKSUM_BYTES = 32  # SHA-256 at the end of the library file
DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class MissingLibraryError(Exception):
    """The library cannot be built or loaded. The message gives the reason."""


class Library:
    """Functions of kernels.cpp.

    Args:
        path: library file.

    Raises:
        OSError: the file is missing or damaged, or cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        if _checksum(content[:-CHECKSUM_BYTES]) != content[-CHECKSUM_BYTES:]:  # loading a truncated file would crash
            raise OSError(f"{path} is damaged")
        self._functions = ctypes.CDLL(str(path))
        self._functions.set_gemm(*_blas_gemm())

    def call(self, name: str, dtype: torch.dtype, *args: Tensor | int | float | ctypes.Structure) -> None:
        """Call the function `name` for `dtype`. Do nothing if a tensor is on the meta device.

        Args:
            name: name of the function, without its dtype suffix.
            dtype: one of DTYPES.
            *args: arguments of the function. Tensors must be contiguous.
        """
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            return
        getattr(self._functions, f"{name}_{DTYPES[dtype]}")(*map(_to_ctypes, args))


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the library can compute on `device` in `dtype`. The meta device counts as a CPU."""
    return device.type in ("cpu", "meta") and dtype in DTYPES and not torch.compiler.is_compiling() and is_available()


@functools.cache
def is_available() -> bool:
    """Return True if the library can be built and loaded. Otherwise log the reason, once."""
    try:
        load_library()
    except MissingLibraryError as reason:
        logging.getLogger(__name__).warning(
            "note: %s; attention, GELU, dropout and the softmax use torch's operators, which are slower", reason
        )
        return False
    return True


@functools.cache
def load_library() -> Library:
    """Load the library. Compile it first if necessary.

    Raises:
        MissingLibraryError: the library cannot be built or loaded.
    """
    *choices, last = _flag_choices()
    for flags in choices:
        with contextlib.suppress(MissingLibraryError):
            return _load_library(flags)
    return _load_library(last)


def _load_library(flags: list[str]) -> Library:
    version = hashlib.sha256(SOURCE.read_bytes() + repr((flags, platform.machine())).encode()).hexdigest()[:16]
    name = f"cpu-{version}.so"
    try:
        return Library(cache_dir() / name)
    except (OSError, RuntimeError):  # not compiled yet, damaged, or no cache folder
        pass
    try:
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / name
            _compile(compiled, flags)
            library = Library(compiled)
            # the cache folder may be missing, read-only, full or not allow execution
            with contextlib.suppress(OSError, RuntimeError):
                with atomic_write(cache_dir() / name) as partial:
                    shutil.copyfile(compiled, partial)
                return Library(cache_dir() / name)
            return library
    except OSError as error:
        raise MissingLibraryError(f"the compiled {SOURCE.name} cannot be written or loaded ({error})") from None


def elementwise(name: str, x: Tensor, *args: Tensor | int | float) -> Tensor:
    """Apply an elementwise function of the library.

    Args:
        name: function without its dtype suffix.
        x: contiguous tensor of any shape.
        *args: further arguments of the function.

    Returns:
        A tensor like `x`.
    """
    y = torch.empty_like(x)
    load_library().call(name, x.dtype, x.numel(), torch.get_num_threads(), x, *args, y)
    return y


def _compile(path: Path, flags: list[str]) -> None:
    """Compile the library to `path`, with the first compiler that can."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise MissingLibraryError(f"the environment variable CXX is invalid ({error})") from None
    installed = [[executable] for name in COMPILERS if (executable := shutil.which(name))]
    reasons = []
    for compiler in [chosen] if chosen else installed:
        try:
            return _run_compiler(compiler, path, flags)
        except MissingLibraryError as reason:
            reasons.append(reason)
    if reasons:
        raise reasons[0]
    names = ", ".join(COMPILERS)
    raise MissingLibraryError(f"no C++ compiler was found ({names}, or the environment variable CXX)")


def _run_compiler(compiler: list[str], path: Path, flags: list[str]) -> None:
    command = [*compiler, *flags, str(SOURCE), "-o", str(path)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env={**os.environ, "LC_ALL": "C"}
        )
    except OSError as error:
        raise MissingLibraryError(f"the C++ compiler {compiler[0]} cannot be run ({error.strerror})") from None
    if result.returncode:
        lines = result.stderr.splitlines() or ["no error message"]
        message = next((line for line in lines if re.search("error|cannot", line)), lines[0])
        raise MissingLibraryError(f"the C++ compiler {compiler[0]} cannot compile {SOURCE.name} ({message})")
    content = path.read_bytes()
    path.write_bytes(content + _checksum(content))


def _flag_choices() -> list[list[str]]:
    """Return lists of compiler options, the fastest first. Old compilers refuse those for bf16, but not the last list.

    Asks Linux for permission to use the tiles of AMX.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    choices = [[*FLAGS, *VECTOR_FLAGS.get(capability, [])]]
    if capability == "AVX512" and torch.cpu._is_avx512_bf16_supported():
        choices.insert(0, [*choices[0], "-mavx512bf16"])
        if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
            choices.insert(0, [*choices[0], "-mamx-tile", "-mamx-bf16"])
    return choices


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _blas_gemm() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """Return sgemm and dgemm of the BLAS that torch includes or links."""
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        single, double = (ctypes.cast(getattr(torch_cpu, f"{letter}gemm_"), ctypes.c_void_p) for letter in "sd")
    except AttributeError:
        raise MissingLibraryError("this build of torch exports no BLAS functions") from None
    return single, double


def _to_ctypes(x: Tensor | int | float | ctypes.Structure) -> object:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure):
        return ctypes.byref(x)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)
