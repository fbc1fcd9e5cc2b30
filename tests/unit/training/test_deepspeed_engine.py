import types
from typing import Any

import pytest
import torch

from xlpre.training import startup
from xlpre.training.config import OptimConfig, TrainConfig
from xlpre.training.deepspeed_engine import (
    _import_deepspeed,
    build_deepspeed_config,
    init_process_group,
    reduce_bucket_size,
    resolve_precision,
)
from xlpre.training.deepspeed_overrides import (
    KNOWN_KEYS,
    OWNED_KEYS,
    ZERO_KEYS,
    check_overrides,
    zero_stage,
)
from xlpre.training.distributed import set_timeout
from xlpre.training.startup import TrainingContext


class RecordingDict(dict[str, Any]):
    """Mapping that records the keys that its reader looks up. A copy records in the same set."""

    def __init__(self, config):
        super().__init__(config)
        self.looked_up = set()

    def __contains__(self, key):
        self.looked_up.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key):
        self.looked_up.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.looked_up.add(key)
        return super().get(key, default)


def build(overrides):
    return build_deepspeed_config(TrainConfig(), OptimConfig(), torch.device("cpu"), 1, overrides)


def test_overrides_are_merged_into_nested_settings():
    zero = {"stage": 2, "overlap_comm": True}
    plain, merged = build({"zero_optimization": {"stage": 2}}), build({"zero_optimization": zero})
    assert merged == {**plain, "zero_optimization": {**plain["zero_optimization"], "overlap_comm": True}}


@pytest.mark.parametrize(
    ("stage", "overrides", "precision", "world_size"),
    [
        (0, {}, "fp32", 1),
        (0, {"wall_clock_breakdown": True}, "fp32", 1),
        (1, {}, "fp32", 2),
        (1, {}, "bf16", 1),
        (1, {}, "fp16", 1),
        (1, {"zero_optimization": {"stage": 1}}, "fp32", 1),
        (3, {"zero_optimization": {"stage": 3}}, "fp32", 1),
        (0, {"zero_optimization": {"stage": 0}}, "fp32", 2),
        (1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "fp32", 1),
        (1, {"torch_autocast": {"enabled": True}}, "fp32", 1),
    ],
)
def test_zero_is_off_for_a_single_process_in_fp32_without_zero_settings(stage, overrides, precision, world_size):
    assert zero_stage(overrides, precision, world_size) == stage


def test_the_operator_that_would_be_compiled_at_startup_is_switched_off():
    import deepspeed.ops

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    _import_deepspeed(torch.device("cpu"))
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


def test_the_process_groups_of_deepspeed_have_the_configured_timeout(monkeypatch):
    import deepspeed

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # restored afterwards
        monkeypatch.setattr(torch.distributed.distributed_c10d, name, getattr(torch.distributed.distributed_c10d, name))
    arguments = {}
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **kwargs: arguments.update(kwargs))
    set_timeout(0.5)
    init_process_group(torch.device("cpu"))
    assert arguments["timeout"].total_seconds() == 30


@pytest.mark.parametrize(("major", "precision"), [(7, "fp32"), (8, "bf16")])
def test_auto_is_bf16_on_a_gpu_that_computes_it_and_fp32_on_one_that_emulates_it(monkeypatch, major, precision):
    gpu = torch.device("cuda:0")
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "get_device_name": "Tesla V100",
        "get_device_properties": types.SimpleNamespace(major=major),
        "_check_bf16_tensor_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert resolve_precision(gpu, "auto") == precision
    if major < 8:
        with pytest.raises(ValueError, match="train.precision=bf16 is invalid: Tesla V100 .* Set train.precision=auto"):
            resolve_precision(gpu, "bf16")


@pytest.mark.parametrize(
    ("precision", "has_bf16", "is_noted"), [("fp32", True, True), ("fp32", False, False), ("bf16", True, False)]
)
def test_a_run_in_fp32_says_that_the_processor_has_bf16_instructions(monkeypatch, precision, has_bf16, is_noted):
    monkeypatch.setattr(startup, "cpu_has_bf16", lambda: has_bf16)
    context = TrainingContext(
        torch.device("cpu"), precision, TrainConfig().batch_schedule(1), None, {"zero_optimization": {"stage": 0}}
    )
    assert context.precision_note().startswith("note: this processor has bf16 instructions") is is_noted


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("wall_clock_breakdwn", r"deepspeed.wall_clock_breakdwn is invalid: .*did you mean 'wall_clock_breakdown'\?"),
        ("xyz", r"deepspeed.xyz is invalid: DeepSpeed has no such setting; see the configuration reference"),
        ("train_batch_size", r"deepspeed.train_batch_size is invalid: train.global_batch_size decides it"),
        ("sequence_parallel_size", r"deepspeed.sequence_parallel_size is invalid: xlpre does not support this feature"),
    ],
)
def test_a_key_that_deepspeed_does_not_have_or_that_is_owned_is_refused(key, message):
    with pytest.raises(ValueError, match=message):
        check_overrides({key: 1})


def test_a_setting_of_zero_that_deepspeed_does_not_have_is_refused_without_deepspeed():
    with pytest.raises(ValueError, match=r"^deepspeed.zero_optimization.stag is invalid: .*did you mean 'stage'\?$"):
        check_overrides({"zero_optimization": {"stag": 1}})
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    assert fields.keys() | {field.alias for field in fields.values() if field.alias} == ZERO_KEYS


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            r"zero_optimization.reduce_bucket_size=auto .*Leave it out",
        ),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, r"zero_optimization.reduce_bucket_size=0 .* at least 1"),
        ({"steps_per_print": 0}, r"deepspeed.steps_per_print=0 is invalid: it must be at least 1"),
    ],
)
def test_an_invalid_number_for_deepspeed_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        check_overrides(overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data_types": 5}, r"DeepSpeed refuses the settings: "),
        ({"communication_data_type": "fp33"}, r"DeepSpeed refuses the settings: .*Got: fp33"),
        (
            {"zero_optimization": {"offload_optimizer": {"devic": "cpu"}}},
            r"^deepspeed.zero_optimization.offload_optimizer.devic is invalid: DeepSpeed has no such setting",
        ),
        (
            {"zero_optimization": {"sub_group_size": "x"}},
            r"^deepspeed.zero_optimization.sub_group_size is invalid: Input",
        ),
    ],
)
def test_a_value_that_deepspeed_refuses_is_refused(overrides, message):
    check_overrides(overrides)
    with pytest.raises(ValueError, match=message):
        build(overrides)


def test_the_known_keys_are_those_that_the_installed_deepspeed_reads():
    deepspeed = _import_deepspeed(torch.device("cpu"))
    config = RecordingDict(build({}))
    deepspeed.DeepSpeedConfig(config)
    conditional = {"activation_checkpointing", "aio", "autotuning", "flops_profiler"}  # read only if they are set
    with_processes = {"sequence_parallel_size"}  # read only in a process group
    expected = KNOWN_KEYS | OWNED_KEYS.keys() - {"optimizer", "scheduler"}
    assert config.looked_up | conditional | with_processes == expected
    for key in conditional:
        config = RecordingDict(build({key: {}}))
        deepspeed.DeepSpeedConfig(config)
        assert key in config.looked_up


def test_the_reduction_bucket_is_the_model_or_a_part_of_it_that_is_full_before_the_backward_pass_ends():
    sizes = [100] * 16
    assert [reduce_bucket_size({}, stage, sizes) for stage in (1, 2, 3)] == [1600, 1600, 200]
    assert reduce_bucket_size({"overlap_comm": True}, 2, sizes) == 200
    assert reduce_bucket_size({"overlap_comm": False}, 3, sizes) == 1600
    assert reduce_bucket_size({"overlap_comm": True}, 2, [*sizes, 900]) == 900  # the largest gradient must fit
    assert reduce_bucket_size({}, 1, [10**9]) == 500_000_000
    assert reduce_bucket_size({"overlap_comm": True, "reduce_bucket_size": 50}, 2, sizes) == 50
