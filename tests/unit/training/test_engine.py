import torch

from xlpre.training.engine import _deepspeed, _merged


def test_overrides_keep_what_they_do_not_name():
    settings = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}
    assert _merged(settings, {"zero_optimization": {"overlap_comm": True}}) == {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": False},
    }


def test_deepspeeds_list_of_operators_still_has_the_one_that_is_switched_off():
    import deepspeed.ops

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    _deepspeed(torch.device("cpu"))
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
