"""What a run leaves when its gradients stay not finite: the micro-batches of its last update, and the model that met them.

    model/                     a model folder; no update was made, so its weights are those that the batches met
    process_000.safetensors    of micro-step i: `i.batch.NAME`, each field of Batch, and the memory that it met,
    ...                        `i.memory.hidden` and `i.memory.valid`; what else the update depends on as metadata

Nothing in it is ever unpickled. `pretrain/replay.py` makes the update again.
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

from xlpre.batch import Batch
from xlpre.common.files import atomic_write
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.model.memory import Memory
from xlpre.training.deepspeed_engine import PRECISIONS

PARENT = "not_finite"  # of the dumps, in a run folder
BATCH = tuple(field.name for field in dataclasses.fields(Batch) if field.name != "reuse_len")
MEMORY = tuple(field.name for field in dataclasses.fields(Memory))
ABOUT = {"seed", "step", "world_size", "precision"}


@dataclass(frozen=True)
class Share:
    """What one process met in the update.

    Attributes:
        path: its file.
        seed: of the run.
        step: updates made or skipped before this one.
        process: its number,
        n_processes: of so many.
        precision: that the run computed in.
        reuse_len: of the batches.
        n_micro_steps: how many batches.
    """

    path: Path
    seed: int
    step: int
    process: int
    world_size: int
    precision: torch.dtype
    reuse_len: int
    n_micro_steps: int

    def micro_steps(self) -> Iterator[tuple[Batch, Memory]]:
        """Each micro-batch and the memory it met, read when asked for."""
        with safetensors.safe_open(self.path, framework="pt") as file:
            for i in range(self.n_micro_steps):
                batch = {name: file.get_tensor(f"{i}.batch.{name}") for name in BATCH}
                memory = {name: file.get_tensor(f"{i}.memory.{name}") for name in MEMORY}
                yield Batch(**batch, reuse_len=self.reuse_len), Memory(**memory)


def folder_of(run_dir: Path, step: int) -> Path:
    """Where a run leaves the dump of an update."""
    return run_dir / PARENT / f"step_{step:08d}"


def write(
    folder: Path,
    process: int,
    met: Sequence[tuple[Batch, Memory]],
    model: ModelFolder | None,
    about: Mapping[str, object],
) -> None:
    """Write the share of one process; each process writes its own, one of them the model.

    Args:
        folder: of the dump, the same for all processes.
        process: its number.
        met: each micro-batch with the memory it met.
        model: the weights it met; None on all processes but one.
        about: `seed`, `step`, `world_size` and `precision` (as str(dtype) has it); see Share.
    """
    assert about.keys() == ABOUT, about
    if model is not None:
        save_folder(folder / "model", model)
    tensors = {}
    for i, (batch, memory) in enumerate(met):
        tensors.update({f"{i}.batch.{name}": _own(getattr(batch, name)) for name in BATCH})
        tensors.update({f"{i}.memory.{name}": _own(getattr(memory, name)) for name in MEMORY})
    facts = {**about, "process": process, "reuse_len": met[0][0].reuse_len, "n_micro_steps": len(met)}
    with atomic_write(_file(folder, process)) as partial:
        partial.write_bytes(safetensors.torch.save(tensors, {key: str(value) for key, value in facts.items()}))


def read(folder: Path) -> tuple[ModelFolder, list[Share]]:
    """The model of a dump, and what each process met.

    Raises:
        ValueError: no such folder, no dump, a file missing or cut, files of different updates.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: there is no such folder; a run that stops because of its gradients names the one it left"
        )
    if not _file(folder, 0).exists():
        dumps = sorted((folder / PARENT).glob("step_*")) or sorted(folder.glob("step_*"))
        hint = f"did you mean {dumps[-1]}?" if dumps else f"a run leaves them in RUN_DIR/{PARENT}"
        raise ValueError(f"{folder}: no {_file(folder, 0).name} in it, so not the dump of an update; {hint}")
    first = _share(_file(folder, 0))
    shares = [first, *(_share(_file(folder, process)) for process in range(1, first.world_size))]
    for share in shares:
        expected = dataclasses.replace(first, path=share.path, process=share.process)
        if share != expected or _file(folder, share.process) != share.path:
            raise ValueError(
                f"{share.path}: of another update than {first.path}; both must be from one stop of one run"
            )
    return load_folder(folder / "model", allow_nonfinite=True), shares


def _share(path: Path) -> Share:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts, names = dict(file.metadata() or {}), set(file.keys())
        precision = {str(dtype): dtype for dtype in PRECISIONS.values()}[facts.pop("precision")]
        share = Share(path, precision=precision, **{key: int(value) for key, value in facts.items()})
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing; copy it from the machine where that process ran, or give the whole folder"
        ) from None
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: cut or damaged ({str(error).splitlines()[0]}); copy it again") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a share of an update, as this version of xlpre writes it: {error}") from None
    kinds = [f"batch.{name}" for name in BATCH] + [f"memory.{name}" for name in MEMORY]
    if absent := {f"{i}.{kind}" for i in range(share.n_micro_steps) for kind in kinds} - names:
        raise ValueError(f"{path}: {min(absent)} is not in it; it is of another version of xlpre")
    return share


def _file(folder: Path, process: int) -> Path:
    return folder / f"process_{process:03d}.safetensors"


def _own(tensor: Tensor) -> Tensor:
    """A copy that shares no storage, on the CPU, as safetensors wants it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
