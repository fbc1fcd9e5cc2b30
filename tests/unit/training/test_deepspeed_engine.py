import types

import pytest
import torch

from xlpre.training.deepspeed_engine import (
    TrainConfig,
    _import_deepspeed,
    _merge,
    build_deepspeed_config,
    resolve_precision,
    init_process_group,
)
from xlpre.training.deepspeed_overrides import zero_stage
from xlpre.training.distributed import set_timeout
from xlpre.training.optimizer import OptimConfig


def test_overrides_keep_what_they_do_not_name():
    settings = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}
    assert _merge(settings, {"zero_optimization": {"overlap_comm": True}}) == {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("stage", "overrides", "precision", "processes"),
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
def test_zero_is_left_out_by_a_process_alone_in_fp32_that_was_told_nothing_of_it(
    stage, overrides, precision, processes
):
    assert zero_stage(overrides, precision, processes) == stage


def test_deepspeeds_list_of_operators_still_has_the_one_that_is_switched_off():
    import deepspeed.ops

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    _import_deepspeed(torch.device("cpu"))
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


def test_deepspeeds_processes_wait_as_long_as_ours(monkeypatch):
    import deepspeed

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # to be put back
        monkeypatch.setattr(torch.distributed.distributed_c10d, name, getattr(torch.distributed.distributed_c10d, name))
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **given: asked.update(given))
    asked = {}
    set_timeout(0.5)
    init_process_group(torch.device("cpu"))
    assert asked["timeout"].total_seconds() == 30


@pytest.mark.parametrize(("major", "taken"), [(7, "fp32"), (8, "bf16")])
def test_auto_takes_bf16_where_a_gpu_computes_it_and_does_not_emulate_it(monkeypatch, major, taken):
    gpu = torch.device("cuda:0")
    for name, answer in {
        "is_available": True,
        "current_device": 0,
        "get_device_name": "Tesla V100",
        "get_device_properties": types.SimpleNamespace(major=major),
        "_check_bf16_tensor_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    assert resolve_precision(gpu, "auto") == taken
    if major < 8:
        with pytest.raises(ValueError, match="train.precision=bf16 on Tesla V100, .* leave train.precision=auto"):
            resolve_precision(gpu, "bf16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wall_clock_breakdwn": True}, r"deepspeed.wall_clock_breakdwn: .*did you mean 'wall_clock_breakdown'\?"),
        ({"foo": 1}, r"deepspeed.foo: DeepSpeed has no such setting; the settings are .*zero_optimization"),
        ({"amp": {"enabled": True}}, r"deepspeed: DeepSpeed refuses these settings: .*has been removed"),
        ({"communication_data_type": "fp33"}, r"deepspeed: DeepSpeed refuses these settings: .*Got: fp33"),
    ],
)
def test_a_setting_that_deepspeed_does_not_know_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_deepspeed_config(TrainConfig(), OptimConfig(), torch.device("cpu"), 1, settings)


def test_settings_that_deepspeed_knows_are_not_refused():
    known = {
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": False},
        "checkpoint": {},
        "compile": {},
        "aio": {},
    }
    known |= {
        "activation_checkpointing": {},
        "tensorboard": {},
        "csv_monitor": {},
        "comms_logger": {},
        "data_types": {},
    }
    known |= {"communication_data_type": "fp32", "zero_allow_untested_optimizer": True, "dump_state": False}
    build_deepspeed_config(TrainConfig(), OptimConfig(), torch.device("cpu"), 1, known)
