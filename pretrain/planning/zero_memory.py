"""Memory and communication of ZeRO: what DeepSpeed stores per process, and the bytes that it sends per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes of a process that do not depend on the batch; those on its device, but for `host`.

    Attributes:
        weights: those that the model computes with, and those of other processes that stage 3 has fetched.
        gradients: of a micro-step and accumulated.
        optimizer: master weights and moments in fp32.
        buffers: what gradients are reduced in.
        host: what is offloaded to the memory of its machine.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    host: float = 0.0

    @property
    def on_device(self) -> float:
        """All that is on the device."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def zero_memory(
    sizes: Sequence[int],
    stage: int,
    processes: int,
    precision: str,
    bucket: int,
    unsplit: float = 100_000,
    offload_optimizer: bool = False,
    offload_param: bool = False,
    single: int = 0,
) -> ZeroMemory:
    """What DeepSpeed 0.19.8 keeps with this project's settings (gradients accumulate in fp32), padding left out.

    Args:
        sizes: elements of each parameter.
        stage: of ZeRO.
        processes: that share what is split.
        precision: that the model computes in: fp32, bf16 or fp16.
        bucket: elements that are reduced at once.
        unsplit: stage 3 does not split parameters of fewer elements.
        offload_optimizer: stages 1 to 3 keep the optimizer, and the gradients it reads, in the machine's memory, and update there.
        offload_param: stage 3 keeps weights there that are not in use.
        single: elements that have one moment only, those of Muon's matrices.
    """
    n, share, half = sum(sizes), 1 / processes, precision != "fp32"
    width = 2 if half else 4
    optimizer = (12.0 * n - 4 * single) * share  # master weights and moments
    if stage == 0:  # in fp32 the weights themselves are updated
        return ZeroMemory(width * n, (width * half + 4) * n, (12.0 if half else 8.0) * n - 4 * single, 0)
    if stage < 3:
        gradients, buffers = 4 * n * share, width * bucket
        if stage == 1:
            gradients, buffers = 4.0 * n, 4 * bucket
        if not offload_optimizer:
            if (
                stage == 1 and precision == "bf16"
            ):  # has an optimizer of its own, which keeps gradients as they are made, too
                gradients, buffers = 6.0 * n, 0
            return ZeroMemory(width * n, gradients, optimizer, buffers)
        on_their_way = width * max(sizes)
        # besides the optimizer its gradients, the weights on their way back, and what stage 2 accumulates in fp32
        host = optimizer + (4 + width) * n * share + on_their_way
        if stage == 2 and not half:
            gradients, host = 0, host + gradients
        return ZeroMemory(width * n, gradients, 0, buffers + on_their_way, host)
    small = sum(size for size in sizes if size < unsplit)
    own = width * (n * share + small * (processes > 1))
    fetched = width * min(n - small, 1e9) * (1 - share)  # stage3_max_live_parameters
    host = 0.0
    if offload_param:
        host, own, fetched = width * n * share, width * small, width * min(n - small, 1e9)
    if offload_optimizer:  # with gradients twice: as they are accumulated, and as the update reads them
        return ZeroMemory(own + fetched, 0, 0, width * bucket, host + optimizer + 8 * n * share)
    return ZeroMemory(own + fetched, 4 * n * share, optimizer, width * bucket, host)


def communication_volume(n: int, stage: int, processes: int, half: bool, micro_steps: int) -> float:
    """Bytes that a process sends in an update: a ring moves (N-1)/N of a tensor to reduce, scatter or gather it, twice to all-reduce."""
    width, ring = (2 if half else 4), (processes - 1) / processes
    once = ring * n
    return {
        0: 2 * once * width,
        1: 3 * once * width,  # gradients all-reduced at the update, weights gathered after it
        2: micro_steps * 2 * once * width + once * width,  # DeepSpeed all-reduces its buckets, after each micro-step
        3: micro_steps * 3 * once * width,  # weights gathered forward and backward, gradients scattered
    }[stage]
