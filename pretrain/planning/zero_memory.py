"""Memory and communication of ZeRO: what DeepSpeed stores per process, and the bytes that it sends per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroMemory:
    """Memory of a process that does not depend on the batch, in bytes.

    Attributes:
        weights: weights that the model computes with, including those that stage 3 has fetched from other processes.
        gradients: gradients of the current micro-step, and accumulated gradients.
        optimizer: master weights and moments in fp32.
        buffers: buffers in which gradients are reduced.
        host: host memory that offloading uses. All other attributes are device memory.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    host: float = 0.0

    @property
    def on_device(self) -> float:
        """Total memory on the device."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def zero_memory(
    sizes: Sequence[int],
    stage: int,
    world_size: int,
    precision: str,
    bucket_size: int,
    persistence_threshold: float = 100_000,
    offload_optimizer: bool = False,
    offload_param: bool = False,
    n_single_moment: int = 0,
    overlap_comm: bool = False,
) -> ZeroMemory:
    """Return the memory of a process under DeepSpeed 0.19.8 with the settings of this project, without padding.

    Gradients accumulate in fp32.

    Args:
        sizes: number of elements of each parameter.
        stage: ZeRO stage.
        world_size: number of processes.
        precision: precision of the model: fp32, bf16 or fp16.
        bucket_size: number of gradient elements that are reduced at once.
        persistence_threshold: parameters with fewer elements are not partitioned in stage 3.
        offload_optimizer: stages 1 to 3 store the optimizer and the gradients that it reads in host memory, and update there.
        offload_param: stage 3 stores weights that are not in use in host memory.
        n_single_moment: number of elements whose optimizer state is a single moment (the matrices that Muon updates).
        overlap_comm: in stages 1 and 2, reduce gradients during the backward pass, with two buffers. Without effect in bf16 in stage 1.
    """
    n, share, half = sum(sizes), 1 / world_size, precision != "fp32"
    width = 2 if half else 4  # bytes of an element
    optimizer = (12.0 * n - 4 * n_single_moment) * share  # master weights and moments
    if stage == 0:  # fp32 has no master weights
        return ZeroMemory(width * n, (width * half + 4) * n, (12.0 if half else 8.0) * n - 4 * n_single_moment, 0)
    if stage < 3:
        gradients, buffers = 4 * n * share, width * bucket_size
        if stage == 1:
            gradients, buffers = 4.0 * n, 4 * bucket_size
        if overlap_comm:
            buffers *= 2
        if not offload_optimizer:
            if stage == 1 and precision == "bf16":  # BF16_Optimizer adds each gradient to its fp32 sum and frees it
                buffers = 0
            return ZeroMemory(width * n, gradients, optimizer, buffers)
        in_transfer = width * max(sizes)
        # optimizer, its gradients, and the weights to copy back; in fp32, stage 2 also accumulates gradients in host memory
        host = optimizer + (4 + width) * n * share + in_transfer
        if stage == 2 and not half:
            gradients, host = 0, host + gradients
        return ZeroMemory(width * n, gradients, 0, buffers + in_transfer, host)
    small = sum(size for size in sizes if size < persistence_threshold)
    stored = width * (n * share + small * (world_size > 1))
    fetched = width * min(n - small, 1e9) * (1 - share)  # stage3_max_live_parameters
    host = 0.0
    if offload_param:
        host, stored, fetched = width * n * share, width * small, width * min(n - small, 1e9)
    if offload_optimizer:  # the host holds gradients twice: accumulated, and as the update reads them
        return ZeroMemory(stored + fetched, 0, 0, width * bucket_size, host + optimizer + 8 * n * share)
    return ZeroMemory(stored + fetched, 4 * n * share, optimizer, width * bucket_size, host)


def communication_volume(
    n_parameters: int, stage: int, world_size: int, precision: str, gradient_dtype: str, micro_steps: int
) -> float:
    """Return the bytes that a process sends in a step. `xlpre.training.muon.sent_bytes` returns the bytes that Muon adds.

    In a ring, each process sends (N-1)/N of a tensor for a reduce-scatter or an all-gather, and twice that for an all-reduce.

    Args:
        n_parameters: number of parameters of the model.
        stage: ZeRO stage.
        world_size: number of processes, N.
        precision: precision of the model: fp32, bf16 or fp16.
        gradient_dtype: data type in which gradients are summed; see `communication_dtype`.
        micro_steps: micro-steps per step.
    """
    sent = (world_size - 1) / world_size * n_parameters  # elements
    weights, gradients = (sent * (4 if dtype == "fp32" else 2) for dtype in (precision, gradient_dtype))
    return {
        0: 2 * gradients,
        1: 2 * gradients + weights,  # all-reduce of gradients, all-gather of weights
        2: micro_steps * 2 * gradients + weights,  # DeepSpeed all-reduces its buckets after each micro-step
        3: micro_steps
        * (2 * weights + gradients),  # all-gather of weights forward and backward, reduce-scatter of gradients
    }[stage]
