"""Predictions for a split: every item once, whatever the number of processes."""

from __future__ import annotations

import numpy as np
import torch

from finetune.data.batching import FILLER, LengthBucketSampler
from finetune.data.examples import Outputs, Split
from finetune.trainer.task_model import TaskModel
from xlpre.model.dropout import without_dropout
from xlpre.training.distributed import Comm, rank, world_size


def predict_split(model: TaskModel, split: Split, batch_size: int, overhead_tokens: int, comm: Comm) -> Outputs:
    """Run the model on all items of a split. Every process must call it, and receives all outputs in the order of the items.

    Args:
        model: the model, on the device of this process.
        split: the encoded examples.
        batch_size: items per forward pass of a process.
        overhead_tokens: fixed cost of a forward pass, in tokens; see LengthBucketSampler.
        comm: communication between processes.

    Raises:
        ValueError: an output is NaN.
    """
    sampler = LengthBucketSampler(split.features, model.task.padding_side, rank(), world_size(), overhead_tokens)
    indices: list[np.ndarray] = []
    parts: list[dict[str, np.ndarray]] = []
    with without_dropout(model):
        for part in sampler.eval_batches(batch_size):
            outputs = {name: _to_numpy(x) for name, x in model.predict(part.to(model.device)).items()}
            if not split.is_labelled:
                outputs.pop("loss", None)  # labels may be known for all items of one part and not of another
            is_item = part.indices != FILLER
            indices.append(part.indices[is_item])
            parts.append({name: x[is_item] for name, x in outputs.items()})
    gathered = _gather(indices, parts, len(split.features), comm)
    if any(np.isnan(x).any() for x in gathered.values()):
        raise ValueError(
            f"the outputs of the model for {split.name} are NaN: the weights of init_from are not finite, or optim.lr is too high. "
            "Lower optim.lr, or use other weights."
        )
    return gathered


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.is_floating_point() else x).cpu().numpy()


def _gather(indices: list[np.ndarray], parts: list[dict[str, np.ndarray]], n_items: int, comm: Comm) -> Outputs:
    """Collect the outputs of all processes, in the order of the items."""
    local = (np.concatenate(indices), {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    gathered = comm.all_gather(local)
    all_indices = np.concatenate([of_process for of_process, _ in gathered])
    assert (np.sort(all_indices) == np.arange(n_items)).all(), "an item was predicted twice or not at all"
    order = np.argsort(all_indices)
    return {name: np.concatenate([outputs[name] for _, outputs in gathered])[order] for name in local[1]}


def resolve_overhead_tokens(overhead_tokens: int | None, device: torch.device) -> int:
    """Return `data.forward_overhead_tokens`, or the default of the device if it is null.

    On a CPU, 64 to 256 were equally good for models of 2 x 128, 4 x 256 and 3 x 768 (2026-11-21, SST-2). On a GPU, where a pass of
    few tokens costs as much as one of many, 8192 is a guess.
    """
    if overhead_tokens is not None:
        return overhead_tokens
    return 8192 if device.type == "cuda" else 128
