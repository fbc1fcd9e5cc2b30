"""Dump of the last step of a run that stops because of non-finite gradients: micro-batches, memories and weights.

    model/                    model folder with the weights of the step, which was not applied
    rank_000.safetensors      for each micro-step i: `i.batch.NAME` for each field of Batch, and the memory that the
    ...                       micro-batch read, `i.memory.hidden` and `i.memory.valid`; values of `METADATA` as metadata

It contains no pickled data. `pretrain/replay.py` repeats the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from xlpre.batch import FIELD_SPECS, Batch
from xlpre.common.errors import InputError
from xlpre.common.files import atomic_write
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.model.memory import Memory
from xlpre.training.deepspeed_engine import PRECISIONS

PARENT = "nonfinite"  # folder of the dumps, in the folder of the run
MEMORY_FIELDS = tuple(field.name for field in dataclasses.fields(Memory))
METADATA = {"seed", "step", "world_size", "precision"}


@dataclass(frozen=True)
class RankDump:
    """Micro-batches and memories of one process in the step.

    Attributes:
        path: file of the process.
        seed: seed of the run.
        step: index of the step: the number of applied and skipped steps before it.
        rank: rank of the process.
        world_size: number of processes.
        precision: data type in which the run computed.
        reuse_len: `reuse_len` of the batches.
        n_micro_steps: number of micro-batches.
    """

    path: Path
    seed: int
    step: int
    rank: int
    world_size: int
    precision: torch.dtype
    reuse_len: int
    n_micro_steps: int

    def micro_steps(self) -> Iterator[tuple[Batch, Memory]]:
        """Yield each micro-batch with the memory that it read. Only one micro-batch is loaded at a time."""
        with safetensors.safe_open(self.path, framework="pt") as file:
            for i in range(self.n_micro_steps):
                batch = {name: file.get_tensor(f"{i}.batch.{name}") for name in FIELD_SPECS}
                memory = {name: file.get_tensor(f"{i}.memory.{name}") for name in MEMORY_FIELDS}
                yield Batch(**batch, reuse_len=self.reuse_len), Memory(**memory)


def dump_dir(run_dir: Path, step: int) -> Path:
    """Return the folder for the dump of a step; the first step of a run is 1."""
    return run_dir / PARENT / f"step_{step:08d}"


def write_rank_dump(
    folder: Path,
    rank: int,
    micro_steps: Sequence[tuple[Batch, Memory]],
    model: ModelFolder | None,
    metadata: Mapping[str, object],
) -> None:
    """Write the dump of one process. Every process writes its own file, and one process also writes the model.

    Args:
        folder: folder of the dump, the same for all processes.
        rank: rank of the process.
        micro_steps: each micro-batch with the memory that it read.
        model: weights of the step on the process that writes them; None on the others.
        metadata: value of each name in `METADATA`; the precision is str(dtype).
    """
    assert metadata.keys() == METADATA, metadata
    if model is not None:
        save_folder(folder / "model", model)
    tensors = {}
    for i, (batch, memory) in enumerate(micro_steps):
        tensors.update({f"{i}.batch.{name}": _copy(getattr(batch, name)) for name in FIELD_SPECS})
        tensors.update({f"{i}.memory.{name}": _copy(getattr(memory, name)) for name in MEMORY_FIELDS})
    values = {**metadata, "rank": rank, "reuse_len": micro_steps[0][0].reuse_len, "n_micro_steps": len(micro_steps)}
    with atomic_write(_rank_file(folder, rank)) as partial:
        partial.write_bytes(safetensors.torch.save(tensors, {key: str(value) for key, value in values.items()}))


def read_dump(folder: Path) -> tuple[ModelFolder, list[RankDump]]:
    """Read a dump.

    Returns:
        Model folder with the weights of the step, and the dump of each process in the order of ranks.

    Raises:
        InputError: the folder is missing or not a dump; a file is missing or damaged; or files belong to different steps.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is invalid: there is no such folder. Give the folder that the run printed when it stopped."
        )
    if not _rank_file(folder, 0).exists():
        dumps = sorted((folder / PARENT).glob("step_*")) or sorted(folder.glob("step_*"))
        remedy = f"Did you mean {dumps[-1]}?" if dumps else f"Dumps are in RUN_DIR/{PARENT}."
        raise InputError(f"{folder} is invalid: it has no {_rank_file(folder, 0).name}, so it is not a dump. {remedy}")
    first = _read_rank_dump(_rank_file(folder, 0))
    dumps_by_rank = [first, *(_read_rank_dump(_rank_file(folder, rank)) for rank in range(1, first.world_size))]
    for dump in dumps_by_rank:
        expected = dataclasses.replace(first, path=dump.path, rank=dump.rank)
        if dump != expected or _rank_file(folder, dump.rank) != dump.path:
            raise InputError(
                f"{dump.path} is invalid: it belongs to another step than {first.path}. Copy all files of one dump again."
            )
    return load_folder(folder / "model", allow_nonfinite=True), dumps_by_rank


def _read_rank_dump(path: Path) -> RankDump:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata, names = dict(file.metadata() or {}), set(file.keys())
        precision = {str(dtype): dtype for dtype in PRECISIONS.values()}[metadata.pop("precision")]
        dump = RankDump(path, precision=precision, **{key: int(value) for key, value in metadata.items()})
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing. Copy it from the machine of that process, or give the folder that holds all files."
        ) from None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} is damaged: {str(error).splitlines()[0]}. Copy it again.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is invalid: it is not a dump of this version of xlpre ({error}). Use the version that wrote it."
        ) from None
    fields = [f"batch.{name}" for name in FIELD_SPECS] + [f"memory.{name}" for name in MEMORY_FIELDS]
    if missing := {f"{i}.{field}" for i in range(dump.n_micro_steps) for field in fields} - names:
        raise InputError(f"{path} is invalid: {min(missing)} is missing. Use the version of xlpre that wrote it.")
    return dump


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:03d}.safetensors"


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU: safetensors refuses tensors that share storage."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
