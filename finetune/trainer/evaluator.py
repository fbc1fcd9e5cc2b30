"""Answers to all items of a split: each once, whatever the number of processes."""

from __future__ import annotations

import numpy as np
import torch

from finetune.data.batching import FILLER, LengthBucketSampler
from finetune.data.examples import Split
from finetune.tasks.base import Outputs, Task
from finetune.trainer.task_model import TaskModel
from xlpre.model.dropout import without_dropout
from xlpre.training.distributed import Comm, rank, world_size


def answer(model: TaskModel, split: Split, rows: int, pass_tokens: int, comm: Comm) -> Outputs:
    """Outputs of the items in their order, on every process; every process must call it.

    Args:
        model: on the device of this process.
        split: what is asked.
        rows: items in one forward pass of a process.
        pass_tokens: see Dealer.
        comm: between the processes.

    Raises:
        ValueError: an answer is not a number.
    """
    dealer = LengthBucketSampler(split.items, model.task.padding, rank(), world_size(), pass_tokens)
    numbers: list[np.ndarray] = []
    found: list[dict[str, np.ndarray]] = []
    with without_dropout(model):
        for part in dealer.once(rows):
            answers = {name: _array(x) for name, x in model.answer(part.to(model.device)).items()}
            if not split.labelled:
                answers.pop("loss", None)  # a part may know all of its answers, another not
            mine = part.numbers != FILLER
            numbers.append(part.numbers[mine])
            found.append({name: x[mine] for name, x in answers.items()})
    outputs = _gathered(numbers, found, len(split.items), comm)
    if any(np.isnan(x).any() for x in outputs.values()):
        raise ValueError(
            f"what the model answers to {split.name} is not a number: the weights that it started from are not, or optim.lr is too high"
        )
    return outputs


def _array(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.is_floating_point() else x).cpu().numpy()


def _gathered(numbers: list[np.ndarray], found: list[dict[str, np.ndarray]], n_items: int, comm: Comm) -> Outputs:
    """Of all processes, in the order of items."""
    mine = (np.concatenate(numbers), {name: np.concatenate([x[name] for x in found]) for name in found[0]})
    everywhere = comm.all_gather(mine)
    order = np.concatenate([theirs for theirs, _ in everywhere])
    assert (np.sort(order) == np.arange(n_items)).all(), "an item was answered twice or not at all"
    place = np.argsort(order)
    return {name: np.concatenate([outputs[name] for _, outputs in everywhere])[place] for name in mine[1]}


def measure(task: Task, split: Split, outputs: Outputs) -> dict[str, float]:
    """The task's scores, and the mean `loss` in its unit."""
    return {**task.measure(split, outputs), "loss": float(outputs["loss"].mean())}


def device_pass_tokens(pass_tokens: int | None, device: torch.device) -> int:
    """`data.forward_overhead_tokens`, or what fits the device.

    On a CPU, 64 to 256 were equally good for models of 2 x 128, 4 x 256 and 3 x 768 (2026-11-21, SST-2). On a GPU, where a pass of
    few tokens costs as much as one of many, it is a guess.
    """
    return pass_tokens if pass_tokens is not None else 8192 if device.type == "cuda" else 128
