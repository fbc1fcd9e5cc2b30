"""Compute the outputs of a model for every feature of a split, on any number of processes."""

from __future__ import annotations

import numpy as np
import torch

from finetune.data.batching import FILLER, LengthBucketSampler
from finetune.data.examples import Outputs, Split
from finetune.tasks.base import Task
from finetune.trainer.task_model import TaskModel
from xlpre.common.errors import InputError
from xlpre.model.dropout import without_dropout
from xlpre.training.distributed import Comm, rank, world_size


def predict_split(model: TaskModel, split: Split, batch_size: int, overhead_tokens: int, comm: Comm) -> Outputs:
    """Run the model on all features of a split. Every process must call this function; each receives all outputs, in feature order.

    Args:
        model: the model, on the device of this process.
        split: the encoded examples.
        batch_size: features per forward pass of a process.
        overhead_tokens: fixed cost of a forward pass, in tokens; see LengthBucketSampler.
        comm: communication between processes.

    Raises:
        InputError: an output is NaN.
    """
    sampler = LengthBucketSampler(split.features, model.task.padding_side, rank(), world_size(), overhead_tokens)
    indices: list[np.ndarray] = []
    outputs: list[dict[str, np.ndarray]] = []
    with without_dropout(model):
        for batch in sampler.eval_batches(batch_size):
            batch_outputs = {name: _to_numpy(x) for name, x in model.predict(batch.to(model.backbone.device)).items()}
            if not split.is_labeled:
                batch_outputs.pop("loss", None)  # other batches may lack labels, and so the loss
            is_feature = batch.indices != FILLER
            indices.append(batch.indices[is_feature])
            outputs.append({name: x[is_feature] for name, x in batch_outputs.items()})
    gathered = _gather(indices, outputs, len(split.features), comm)
    if any(np.isnan(x).any() for x in gathered.values()):
        raise InputError(
            f"the model outputs for {split.name} are NaN: the weights of init_from are not finite, or optim.lr is too high. "
            "Under another name, lower optim.lr or use other weights."
        )
    return gathered


def compute_metrics(task: Task, split: Split, outputs: Outputs) -> dict[str, float]:
    """Return the metrics of the task and the mean loss."""
    return {**task.compute_metrics(split, outputs), "loss": float(outputs["loss"].mean())}


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    return (x.float() if x.is_floating_point() else x).cpu().numpy()


def _gather(indices: list[np.ndarray], outputs: list[Outputs], n_features: int, comm: Comm) -> Outputs:
    """Collect the outputs of all processes, in the order of the features."""
    local = (np.concatenate(indices), {name: np.concatenate([x[name] for x in outputs]) for name in outputs[0]})
    gathered = comm.all_gather(local)
    all_indices = np.concatenate([of_process for of_process, _ in gathered])
    assert (np.sort(all_indices) == np.arange(n_features)).all(), "a feature was predicted twice or not at all"
    order = np.argsort(all_indices)
    return {name: np.concatenate([x[name] for _, x in gathered])[order] for name in local[1]}


def resolve_overhead_tokens(overhead_tokens: int | None, device: torch.device) -> int:
    """Return `data.forward_overhead_tokens`, or the default of the device if it is null.

    On a CPU, values from 64 to 256 were equally fast for models with n_layer x d_model of 2 x 128, 4 x 256 and 3 x 768 (2026-11-21,
    SST-2). On a GPU, a pass over few tokens takes as long as one over many; the value of 8192 is a guess.
    """
    if overhead_tokens is not None:
        return overhead_tokens
    return 8192 if device.type == "cuda" else 128
