"""The predicted memory of each ZeRO stage equals that of DeepSpeed; communication volumes."""

import json

import pytest

from pretrain.planning.zero_memory import communication_volume, zero_memory
from tests.conftest import has_bf16, has_fp16
from tests.integration.conftest import run_together
from xlpre.training.deepspeed_engine import reduce_bucket_size
from xlpre.training.deepspeed_overrides import communication_dtype

OFFLOADED = ["1 optimizer", "2 optimizer", "3 optimizer", "3 param", "3 param optimizer"]
PRECISIONS = ["bf16", "fp32"] if has_bf16() else ["fp32"]
CASES = [f"{precision} {stage}" for precision in PRECISIONS for stage in ["1", "2", "3", *OFFLOADED]]
CASES += [f"{precision} {stage} overlap" for precision in PRECISIONS for stage in (1, 2)]
CASES += ["fp32 0", *(["fp16 1", "fp16 2", "fp16 3", "fp16 1 optimizer"] if has_fp16() else [])]


@pytest.fixture(scope="module")
def deepspeed_bytes(tmp_path_factory) -> dict[str, int]:
    """Bytes of rank 0 of 2 after updates by case; on a CPU they include what is offloaded."""
    out = tmp_path_factory.mktemp("memory") / "memory.json"
    result = run_together(2, "tests/unit/pretrain/deepspeed_memory.py", out, *CASES, timeout=240)
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())


@pytest.mark.xdist_group("deepspeed_bytes")  # computed once
@pytest.mark.parametrize("case", CASES)
def test_predicted_zero_memory_equals_that_of_deepspeed(deepspeed_bytes, case):
    precision, stage, *offloaded = case.split()
    sizes, small, width = [200 * 200] * 10 + [200], 200, 4 if precision == "fp32" else 2
    options = {"overlap_comm" if name == "overlap" else f"offload_{name}": True for name in offloaded}
    bucket = reduce_bucket_size(options, int(stage), sizes)
    memory = zero_memory(sizes, int(stage), 2, precision, bucket, persistence_threshold=1000, **options)
    expected = memory.on_device + memory.host
    if stage == "3":  # no weights are fetched after an update
        expected -= width * (sum(sizes) - small) * (1 if "param" in offloaded else 1 / 2)
    if stage == "2":  # buffers are freed after each backward
        expected -= width * bucket * (2 if "overlap" in offloaded else 1)
    assert deepspeed_bytes[case] == pytest.approx(expected, rel=0.01)  # 0.2 % is padding


def volume(stage, world_size, micro_steps, gradient_dtype="bf16"):
    return communication_volume(10**6, stage, world_size, "bf16", gradient_dtype, micro_steps)


def test_a_single_process_sends_nothing():
    assert [volume(stage, 1, 4) for stage in range(4)] == [0, 0, 0, 0]


def test_stages_2_and_3_send_more_with_every_micro_step():
    sent = {stage: [volume(stage, 8, steps) for steps in (1, 4)] for stage in range(4)}
    assert sent[1][0] == sent[1][1] == 7 / 8 * 10**6 * 3 * 2
    assert sent[3][1] == 4 * sent[3][0] == 4 * 7 / 8 * 10**6 * 3 * 2
    assert sent[2][0] < sent[2][1] < sent[3][1]


def test_gradients_summed_in_fp32_add_their_bytes_once_a_step_in_stage_1():
    assert volume(1, 8, 4, "fp32") == 7 / 8 * 10**6 * (2 * 4 + 2)
    assert [communication_dtype({}, "bf16", stage) for stage in (1, 2, 3)] == ["fp32", "bf16", "bf16"]
    assert communication_dtype({"communication_data_type": "bf16"}, "bf16", 1) == "bf16"
