"""Speeds and memory sizes of GPUs, as published by their manufacturers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpec:
    """Specification of a device and its links.

    Attributes:
        flops: peak floating-point operations per second of dense matrix products, in the precision of training.
        memory: size of the memory in bytes.
        bandwidth: memory bandwidth in bytes per second.
        link: bandwidth to other devices of the node, in bytes per second in one direction.
        network: bandwidth of each device to other nodes, in bytes per second in one direction.
        per_node: number of devices per node.
        bf16: True if training uses bf16.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_node: int = 8
    bf16: bool = True


DEVICES = {
    # NVIDIA A100 datasheet: 312 TFLOP/s, 1555 and 2039 GB/s, NVLink 600 GB/s in both directions; DGX A100: 200 Gb/s HDR for each GPU
    "a100-40": DeviceSpec(312e12, 40e9, 1.555e12, 300e9, 25e9),
    "a100-80": DeviceSpec(312e12, 80e9, 2.039e12, 300e9, 25e9),
    # NVIDIA H100 SXM datasheet: 1979 TFLOP/s with sparsity, half without; 3.35 TB/s, NVLink 900 GB/s; DGX H100: 400 Gb/s NDR
    "h100": DeviceSpec(989.5e12, 80e9, 3.35e12, 450e9, 50e9),
    # NVIDIA H200 SXM datasheet: as H100, with 141 GB at 4.8 TB/s
    "h200": DeviceSpec(989.5e12, 141e9, 4.8e12, 450e9, 50e9),
    # NVIDIA DGX B200 datasheet, divided by 8 GPUs: 36 PFLOP/s of bf16 with sparsity, 1440 GB, 64 TB/s, NVLink 14.4 TB/s; 400 Gb/s
    "b200": DeviceSpec(2250e12, 180e9, 8e12, 900e9, 50e9),
    # NVIDIA Ada white paper: 165.2 TFLOP/s with fp32 accumulation, 24 GB at 1008 GB/s, no NVLink: PCIe 4.0 x16; network assumed
    "rtx4090": DeviceSpec(165.2e12, 24e9, 1.008e12, 32e9, 12.5e9),
    # one core at 3 GHz with two AVX2 units (96 GFLOP/s of fp32) and a share of a server; all numbers are assumptions
    "cpu": DeviceSpec(96e9, 8e9, 20e9, 5e9, 1.25e9, per_node=16, bf16=False),
}

# names that CUDA reports; variants with another speed (PCIe, NVL, a MIG slice) have other names
CUDA_NAMES = {
    "A100-SXM4-40GB": "a100-40",
    "A100-SXM4-80GB": "a100-80",
    "H100 80GB HBM3": "h100",
    "H200": "h200",
    "B200": "b200",
    "GeForce RTX 4090": "rtx4090",
}


def find_device_spec(cuda_name: str) -> DeviceSpec | None:
    """Return the specification of a GPU by the name that CUDA reports; None if it is unknown."""
    return DEVICES.get(CUDA_NAMES.get(cuda_name.removeprefix("NVIDIA "), ""))
