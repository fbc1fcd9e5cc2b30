"""What training costs on devices: their stated speeds, what DeepSpeed keeps on each of them, and what it sends between them."""

from __future__ import annotations

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
    """Bytes of a process that do not depend on the batch.

    Attributes:
        weights: those that the model computes with, and those of other processes that stage 3 has fetched.
        gradients: of a micro-step and accumulated.
        optimizer: master weights and two moments in fp32.
        buffers: what gradients are reduced in.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float


def state_of(n: int, small: int, stage: int, processes: int, bf16: bool, bucket: float) -> State:
    """What DeepSpeed 0.19.8 keeps with this project's settings (gradients accumulate in fp32), padding left out.

    Args:
        n: parameters.
        small: parameters of tensors that stage 3 does not split (fewer than 100,000 elements).
        stage: of ZeRO.
        processes: that share what is split.
        bf16: whether the model computes in bf16.
        bucket: elements that are reduced at once.
    """
    width, share = (2 if bf16 else 4), 1 / processes
    optimizer = 12.0 if bf16 or stage else 8.0  # stage 0 in fp32 updates the weights themselves
    if stage == 0:
        return State(width * n, (width * bf16 + 4) * n, optimizer * n, 0)
    if stage == 1:
        return State(width * n, (width * bf16 + 4) * n, optimizer * n * share, 0 if bf16 else 4 * bucket)
    if stage == 2:
        return State(width * n, 4 * n * share, optimizer * n * share, width * bucket)
    fetched = min(n - small, 1e9) * (1 - share)  # stage3_max_live_parameters
    own = n * share + small * (processes > 1)
    return State(width * (own + fetched), 4 * n * share, optimizer * n * share, width * bucket)


def traffic_of(n: int, stage: int, processes: int, bf16: bool, micro_steps: int) -> float:
    """Bytes that a process sends in an update: a ring moves (N-1)/N of a tensor to reduce, scatter or gather it, twice to all-reduce."""
    width, ring = (2 if bf16 else 4), (processes - 1) / processes
    once = ring * n
    return {
        0: 2 * once * 4,
        1: 2 * once * 4 + once * width,  # fp32 gradients all-reduced at the update, weights gathered after it
        2: micro_steps * 2 * once * width + once * width,  # DeepSpeed all-reduces its buckets, after each micro-step
        3: micro_steps * 3 * once * width,  # weights gathered forward and backward, gradients scattered
    }[stage]
