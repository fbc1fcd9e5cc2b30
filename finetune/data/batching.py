"""Split the features of each optimizer step into batches of similar length, for each process and micro-step.

The features of a step (a `Features` is one token row, or several rows that are read together) depend only on the seed and the step.
They are sorted by length and split into batches, each padded to its longest row. The loss is the mean over all features of the step
and does not depend on this split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from finetune.data.features import Chunking, Features, PaddingSide, pad
from xlpre.batch import HIDDEN_RANK, Batch, make_batch

FILLER = -1  # index of an added feature, so that every process has the same number of rows; its outputs are dropped


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of n features with C rows each: B = n C rows, padded to one length T.

    Attributes:
        input_ids: (B, T) int64; the rows of a feature are adjacent.
        segment_ids: (B, T) int64.
        padding_mask: (B, T) bool, True at padding.
        labels: tensors that the loss needs, by name, each (n, ...); empty if any feature has no labels.
        indices: (n,) int64, indices of the features in their split, on the CPU; FILLER for an added feature.
        chunking: whether the rows are read whole or window by window.
    """

    input_ids: Tensor
    segment_ids: Tensor
    padding_mask: Tensor
    labels: dict[str, Tensor]
    indices: np.ndarray
    chunking: Chunking = field(default_factory=Chunking)

    def to(self, device: torch.device) -> PaddedBatch:
        """Copy the tensors to another device."""
        return dataclasses.replace(
            self,
            input_ids=_to_device(self.input_ids, device),
            segment_ids=_to_device(self.segment_ids, device),
            padding_mask=_to_device(self.padding_mask, device),
            labels={name: _to_device(label, device) for name, label in self.labels.items()},
        )

    def windows(self) -> list[PaddedBatch]:
        """Split the rows into windows of `chunking.window_len` tokens, in reading order.

        Windows are cut from the right end, so only the first one may be shorter. Rows with several windows
        are padded on the left.
        """
        length = self.input_ids.size(1)
        window_len = self.chunking.window_len or length
        slices = [slice(max(end - window_len, 0), end) for end in range(length, 0, -window_len)][::-1]
        return [
            dataclasses.replace(
                self,
                input_ids=self.input_ids[:, window],
                segment_ids=self.segment_ids[:, window],
                padding_mask=self.padding_mask[:, window],
            )
            for window in slices
        ]

    def model_batch(self, target_positions: Tensor, visible_mem_len: Tensor | None = None, reuse_len: int = 0) -> Batch:
        """Return the input of the backbone, in which every token attends to all tokens except padding.

        Args:
            target_positions: (B, P) int64, positions whose hidden states the backbone returns.
            visible_mem_len: (B,) int64, number of positions in memory that each row may attend to. None: 0.
            reuse_len: number of tokens, from the start of the window, that enter memory.
        """
        return make_batch(
            input_ids=self.input_ids,
            segment_ids=self.segment_ids,
            query_rank=torch.ones_like(self.input_ids, dtype=torch.int32),
            key_rank=self.padding_mask.int() * HIDDEN_RANK,
            target_positions=target_positions,
            visible_mem_len=visible_mem_len,
            reuse_len=reuse_len,
        )


@dataclass(frozen=True)
class MicroStep:
    """Batches that one process reads in one micro-step.

    Attributes:
        batches: batches of different row lengths.
        loss_scale: factor by which the sum of the losses of all features is multiplied.
    """

    batches: list[PaddedBatch]
    loss_scale: float

    def to(self, device: torch.device) -> MicroStep:
        """Copy the batches to another device."""
        return MicroStep([batch.to(device) for batch in self.batches], self.loss_scale)

    @property
    def n_tokens(self) -> int:
        """Number of tokens excluding padding."""
        return sum(int((~batch.padding_mask).sum()) for batch in self.batches)

    @property
    def n_padded_tokens(self) -> int:
        """Number of tokens including padding."""
        return sum(batch.input_ids.numel() for batch in self.batches)


class LengthBucketSampler:
    """Batch sampler that groups features of similar length.

    Args:
        features: all features of a split.
        padding_side: side to pad on.
        process_index: rank of this process.
        world_size: number of processes.
        forward_overhead_tokens: fixed cost of a forward pass, expressed as a number of tokens. The higher it is, the fewer and
            larger are the batches.
    """

    def __init__(
        self,
        features: Sequence[Features],
        padding_side: PaddingSide,
        process_index: int,
        world_size: int,
        forward_overhead_tokens: int,
    ) -> None:
        self._features, self._padding_side = features, padding_side
        self._process_index, self._world_size = process_index, world_size
        self._forward_overhead_tokens = forward_overhead_tokens
        self._lengths = np.array([feature.length for feature in features])
        self._epoch, self._epoch_order = -1, np.empty(0, np.int64)

    def micro_steps(self, seed: int, step: int, batch_size: int, accumulation_steps: int) -> list[MicroStep]:
        """Return the micro-steps of this process in an optimizer step.

        Args:
            seed: seed of the order of features. Every epoch has another order.
            step: number of the optimizer step, from 0.
            batch_size: number of features per step, over all processes and micro-steps.
            accumulation_steps: number of micro-steps per step.
        """
        indices = np.array([self._index_at(seed, n) for n in range(step * batch_size, (step + 1) * batch_size)])
        indices = indices[np.argsort(self._lengths[indices], kind="stable")]
        # DeepSpeed divides the loss by the accumulation steps and averages the gradients over processes
        loss_scale = accumulation_steps * self._world_size / batch_size
        shares = indices.reshape(accumulation_steps, -1, self._world_size)
        return [MicroStep(self._batches(share), loss_scale) for share in shares]

    def eval_batches(self, batch_size: int) -> Iterator[PaddedBatch]:
        """Yield the batches of this process. Every feature is on one process, and all processes have the same number of batches.

        Args:
            batch_size: maximum number of features in a batch.
        """
        indices = np.argsort(self._lengths, kind="stable")
        filled = np.append(indices, np.full(-len(indices) % self._world_size, FILLER))
        shares = filled.reshape(-1, self._world_size)
        for start in range(0, len(shares), batch_size):
            yield from self._batches(shares[start : start + batch_size])

    def _index_at(self, seed: int, n: int) -> int:
        """Return the index of the n-th feature to train on, counted over all epochs."""
        epoch, offset = divmod(n, len(self._features))
        if self._epoch != epoch:
            self._epoch = epoch
            self._epoch_order = np.random.default_rng([seed, epoch]).permutation(len(self._features))
        return int(self._epoch_order[offset])

    def _batches(self, shares: np.ndarray) -> list[PaddedBatch]:
        """Return the batches of this process.

        Args:
            shares: (n, processes) indices of features, sorted by length, one column per process. All processes split their
                columns at the same places.
        """
        max_lengths = self._lengths[shares].max(1)
        n_rows = len(self._features[0].rows)
        ends = bucket_ends(max_lengths * n_rows, self._forward_overhead_tokens)
        indices = shares[:, self._process_index]
        return [
            self._batch(indices[start:end], int(max_lengths[start:end].max()))
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _batch(self, indices: np.ndarray, length: int) -> PaddedBatch:
        features = [
            self._features[index] for index in indices
        ]  # the index FILLER selects the last feature, for its shape
        rows = pad([row for feature in features for row in feature.rows], self._padding_side, length)
        names = features[0].labels.keys() if all(feature.labels for feature in features) else ()
        labels = {name: torch.from_numpy(np.stack([feature.labels[name] for feature in features])) for name in names}
        input_ids, segment_ids, padding_mask = map(
            torch.from_numpy, (rows.input_ids, rows.segment_ids, rows.padding_mask)
        )
        return PaddedBatch(input_ids, segment_ids, padding_mask, labels, indices, features[0].chunking)


def bucket_ends(lengths: np.ndarray, overhead: int) -> list[int]:
    """Split sorted lengths into buckets of minimum total cost. Each bucket costs its size times its longest length, plus `overhead`.

    Args:
        lengths: (n,) lengths in ascending order.
        overhead: fixed cost of a bucket.

    Returns:
        The index after the last element of each bucket; the last index is n.
    """
    n = len(lengths)
    cost, best_start = np.zeros(n + 1), np.zeros(n + 1, np.int64)
    for end in range(1, n + 1):
        candidates = cost[:end] + (end - np.arange(end)) * lengths[end - 1] + overhead
        best_start[end] = candidates.argmin()
        cost[end] = candidates[best_start[end]]
    ends = [n]
    while best_start[ends[-1]]:
        ends.append(int(best_start[ends[-1]]))
    return ends[::-1]


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy to a GPU from page-locked memory, so that the host does not wait for the copy."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)
