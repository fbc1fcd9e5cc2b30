"""What training costs on devices: their stated speeds, what DeepSpeed keeps on each of them, and what it sends between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One device and its links, as their makers state them.

    Attributes:
        flops: peak of dense products a second, in the precision that training takes there.
        memory: bytes.
        bandwidth: of the memory, bytes a second.
        link: to others of the same node, bytes a second in one direction.
        network: to other nodes, bytes a second in one direction and for one device.
        per_node: devices of a node.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int = 8
    bf16: bool = True


DEVICES = {
    # NVIDIA A100 datasheet: 312 TFLOP/s, 1555 and 2039 GB/s, NVLink 600 GB/s both ways; DGX A100: 200 Gb/s HDR for each GPU
    "a100-40": Device(312e12, 40e9, 1.555e12, 300e9, 25e9),
    "a100-80": Device(312e12, 80e9, 2.039e12, 300e9, 25e9),
    # NVIDIA H100 SXM datasheet: 1979 TFLOP/s with sparsity, half without; 3.35 TB/s, NVLink 900 GB/s; DGX H100: 400 Gb/s NDR
    "h100": Device(989.5e12, 80e9, 3.35e12, 450e9, 50e9),
    # NVIDIA H200 SXM datasheet: as H100, with 141 GB at 4.8 TB/s
    "h200": Device(989.5e12, 141e9, 4.8e12, 450e9, 50e9),
    # NVIDIA DGX B200 datasheet, an eighth of: 36 PFLOP/s of bf16 with sparsity, 1440 GB, 64 TB/s, NVLink 14.4 TB/s; 400 Gb/s
    "b200": Device(2250e12, 180e9, 8e12, 900e9, 50e9),
    # NVIDIA Ada white paper: 165.2 TFLOP/s with fp32 accumulation, 24 GB at 1008 GB/s, no NVLink: PCIe 4.0 x16; network assumed
    "rtx4090": Device(165.2e12, 24e9, 1.008e12, 32e9, 12.5e9),
    # one core at 3 GHz with two AVX2 units (96 GFLOP/s of fp32) and a share of a server; all of it assumed
    "cpu": Device(96e9, 8e9, 20e9, 5e9, 1.25e9, per_node=16, bf16=False),
}

# what CUDA calls them; a variant of another speed (PCIe, NVL, a part of a GPU) has another name
NAMES = {
    "A100-SXM4-40GB": "a100-40",
    "A100-SXM4-80GB": "a100-80",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "B200": "b200",
    "GeForce RTX 4090": "rtx4090",
}


def device_named(name: str) -> Device | None:
    """The entry of DEVICES of the GPU that CUDA calls `name`; None if it is not known for certain."""
    return DEVICES.get(NAMES.get(name.removeprefix("NVIDIA "), ""))


@dataclass(frozen=True)
class State:
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
) -> State:
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
        return State(width * n, (width * half + 4) * n, (12.0 if half else 8.0) * n - 4 * single, 0)
    if stage < 3:
        gradients, buffers = 4 * n * share, width * bucket
        if stage == 1:
            gradients, buffers = 4.0 * n, 4 * bucket
        if not offload_optimizer:
            if (
                stage == 1 and precision == "bf16"
            ):  # has an optimizer of its own, which keeps gradients as they are made, too
                gradients, buffers = 6.0 * n, 0
            return State(width * n, gradients, optimizer, buffers)
        on_their_way = width * max(sizes)
        # besides the optimizer its gradients, the weights on their way back, and what stage 2 accumulates in fp32
        host = optimizer + (4 + width) * n * share + on_their_way
        if stage == 2 and not half:
            gradients, host = 0, host + gradients
        return State(width * n, gradients, 0, buffers + on_their_way, host)
    small = sum(size for size in sizes if size < unsplit)
    own = width * (n * share + small * (processes > 1))
    fetched = width * min(n - small, 1e9) * (1 - share)  # stage3_max_live_parameters
    host = 0.0
    if offload_param:
        host, own, fetched = width * n * share, width * small, width * min(n - small, 1e9)
    if offload_optimizer:  # with gradients twice: as they are accumulated, and as the update reads them
        return State(own + fetched, 0, 0, width * bucket, host + optimizer + 8 * n * share)
    return State(own + fetched, 4 * n * share, optimizer, width * bucket, host)


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
