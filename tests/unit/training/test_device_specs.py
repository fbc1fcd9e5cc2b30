import pytest

from xlpre.training.device_specs import DEVICES, find_device_spec


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_cuda_gives_it(name, entry):
    assert find_device_spec(name) is DEVICES[entry]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100-SXM2-32GB",
        "",
    ],
)
def test_a_variant_that_may_have_another_speed_is_not_known(name):
    assert find_device_spec(name) is None
