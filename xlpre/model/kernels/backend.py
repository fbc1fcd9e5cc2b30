"""Choice of the attention backend: `model.attention_backend`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from importlib.util import find_spec

import torch

from xlpre.common.errors import InputError
from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.base import AttentionBackend
from xlpre.model.kernels.cpu.attention import CpuBackend
from xlpre.model.kernels.cpu.build import MissingLibraryError, is_supported, load_library
from xlpre.model.kernels.reference import ReferenceBackend
from xlpre.model.kernels.sdpa import SdpaBackend
from xlpre.model.kernels.selfcheck.selfcheck import passes_selfcheck

HAS_TRITON = find_spec("triton") is not None  # looked up here, because torch.compile cannot trace the search


def load_cpu() -> type[AttentionBackend]:
    """Return the CPU backend, compiled if necessary.

    Raises:
        InputError: the C++ kernels cannot be compiled or loaded.
    """
    try:
        load_library()
    except MissingLibraryError as reason:
        raise InputError(
            f"model.attention_backend=cpu is invalid: its C++ kernels must be compiled and loaded, but {reason}. "
            "Set model.attention_backend=auto."
        ) from None
    return CpuBackend


def load_triton() -> type[AttentionBackend]:
    """Return the Triton backend. The import is local because only the GPU builds of torch include triton.

    Raises:
        InputError: the package triton is not installed.
    """
    if not HAS_TRITON:
        raise InputError(
            "model.attention_backend=triton is invalid: it needs the package triton, which the GPU builds of torch install. "
            "Set model.attention_backend=auto."
        )
    from xlpre.model.kernels.triton.attention import TritonBackend

    return TritonBackend


BACKENDS: dict[str, Callable[[], type[AttentionBackend]]] = {
    "reference": lambda: ReferenceBackend,
    "sdpa": lambda: SdpaBackend,
    "cpu": load_cpu,
    "triton": load_triton,
}


def load_backend(name: str) -> type[AttentionBackend]:
    """Load a backend by name.

    Args:
        name: one of BACKENDS.

    Raises:
        InputError: the backend is not available on this machine.
    """
    return BACKENDS[name]()


def check_backend(name: str) -> None:
    """Raise InputError unless `model.attention_backend=name` is available on this machine. `auto` is always available."""
    if name != "auto":
        load_backend(name)


def fastest_backend(device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """Return the name of the backend that `auto` selects.

    This is `cpu` on a CPU where it compiles, `triton` on a GPU where its kernels pass the self-check, and otherwise `sdpa`.

    Args:
        device: device of the model.
        dtype: dtype of queries, keys and values.
        head_width: E.
    """
    if device.type == "cpu":
        return "cpu" if is_supported(device, dtype) else "sdpa"
    return "triton" if passes_selfcheck(device, dtype, head_width) else "sdpa"


def run_needed_selfchecks(
    name: str, head_width: int, device: torch.device, dtypes: Collection[torch.dtype], timeout_seconds: float
) -> None:
    """Run the self-check of the GPU kernels where `resolve_backend` will need its result, which this process remembers.

    Args:
        name: `model.attention_backend`.
        head_width: E.
        device: device of the model.
        dtypes: dtypes of queries, keys and values.
        timeout_seconds: time limit of all checks together.
    """
    if name == "auto" and device.type != "cpu":
        for dtype in dtypes:
            passes_selfcheck(device, dtype, head_width, timeout_seconds / len(dtypes))


def resolve_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_width: int, saved: str | None = None
) -> str:
    """Replace `auto` by the fastest backend of a GPU, before the model is built.

    All processes can then use the same backend. On a CPU `auto` is kept, because the choice depends on torch.compile, which does not
    support the backend `cpu`.

    Args:
        name: `model.attention_backend`.
        device: device of the model.
        dtype: dtype of queries, keys and values.
        head_width: E.
        saved: backend that computed the checkpoint from which training resumes, see `concrete_backend`. `auto` keeps this backend if it is
            available here, because backends differ in rounding. If it is not available, a warning is logged.
    """
    if name != "auto":
        return name
    fastest = fastest_backend(device, dtype, head_width)
    if saved is not None and saved != fastest:
        if saved in ("reference", "sdpa"):
            return saved
        logging.getLogger(__name__).warning(
            "note: the checkpoint was computed with model.attention_backend=%s, which is not available here. The run continues with %s: "
            "from this step on, its numbers differ in rounding from those of an uninterrupted run.",
            saved,
            fastest,
        )
    return name if device.type == "cpu" else fastest


def concrete_backend(name: str, device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """Return `name`, or the name of the backend that `auto` selects. For the arguments, see `resolve_backend`."""
    return fastest_backend(device, dtype, head_width) if name == "auto" else name


def prepare_backend(name: str, attn_meta: AttentionMeta, dtype: torch.dtype, head_width: int) -> AttentionBackend:
    """Prepare a backend for the rows of a forward pass.

    Args:
        name: `model.attention_backend`. `auto` selects the fastest backend for the device of `attn_meta` and `dtype` in every
            forward pass, so that a model may be moved or cast between them.
        attn_meta: metadata of the rows.
        dtype: dtype of queries, keys and values.
        head_width: E.

    Raises:
        InputError: the backend is not available, or does not support the device or the dtype.
    """
    if (
        not attn_meta.query_rank.numel()
    ):  # a batch without targets, in the last layer; the kernels need at least one row
        return ReferenceBackend.prepare(attn_meta, dtype)
    name = concrete_backend(name, attn_meta.query_rank.device, dtype, head_width)
    return load_backend(name).prepare(attn_meta, dtype)
