"""What training knows of each parameter, whole: its weight and the optimizer's moments, in fp32, by its name in the model.

The same whatever the ZeRO stage, the offload and the number of processes, so that a training can go on with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.training.distributed import rank, world_size

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of DeepSpeed's DynamicLossScaler
# torch's names of Adam's first and second moment, of which Muon's matrices have the first
MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_weights(engine: Any, keep: bool) -> dict[str, Tensor]:
    """The model's weights on the CPU. Every process must call it; those that do not `keep` them get none."""
    return dict(_whole(engine, None, lambda index: keep))


def gather_moments(engine: Any, keep: Callable[[int], bool]) -> dict[str, Tensor]:
    """Adam's moments on the CPU, as `NAME/exp_avg` and `NAME/exp_avg_sq`.

    Every process must call it, and gets those of the parameters whose index it wants to `keep`. There are none before the first
    update.
    """
    if not n_updates(engine):
        return {}
    _link_moments(engine)
    return {f"{name}/{key}": moment for key in MOMENTS for name, moment in _whole(engine, key, keep)}


def n_updates(engine: Any) -> int:
    """Updates that Adam has made, which its correction of the moments counts by."""
    return int(max((state["step"].item() for state in _adam(engine).state.values()), default=0))


def read_counters(engine: Any) -> dict[str, Any]:
    """Small numbers that go on: updates made, updates skipped, and how fp16's loss is scaled."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scale = {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}
    return {"updates": n_updates(engine), "skipped_steps": int(engine.skipped_steps), "loss_scale": scale}


@torch.no_grad()
def load_state(
    engine: Any, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], counters: Mapping[str, Any]
) -> None:
    """Set the fp32 weights, the moments and the counters; every process must call it.

    The weights that the model computes with are those it had when the engine was built: build it around a model that has `weights`.
    """
    engine.skipped_steps, n_updates = counters["skipped_steps"], counters["updates"]
    scaler = getattr(engine.optimizer, "loss_scaler", None)  # ZeRO has one in fp32, too, which does nothing
    for name, value in counters["loss_scale"].items() if scaler else ():
        setattr(scaler, name, value)
    if n_updates:
        for tensor, keys in _partitions(engine):
            step = torch.tensor(float(n_updates), device=tensor.device)
            _adam(engine).state[tensor] = {"step": step, **{key: torch.zeros_like(tensor) for key in keys}}
        _link_moments(engine)
    matrices = _matrices(engine)
    for name, parameter in engine.module.named_parameters():
        _put(engine, parameter, weights[name], None)
        for key in _moments(name in matrices) if n_updates else ():
            _put(engine, parameter, moments[f"{name}/{key}"], key)


def _whole(engine: Any, key: str | None, keep: Callable[[int], bool]) -> Iterator[tuple[str, Tensor]]:
    """Weights (no `key`) or moments of all parameters that this process keeps."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    stage, matrices = engine.zero_optimization_stage(), _matrices(engine)
    for index, (name, parameter) in enumerate(engine.module.named_parameters()):
        if key is not None and key not in _moments(name in matrices):
            continue
        if stage == 0:
            whole = parameter if key is None else engine.optimizer.state[parameter][key]
        elif key is None:
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = safe_get_full_optimizer_state(parameter, key)
        if keep(index):
            shape = getattr(parameter, "ds_shape", parameter.shape)  # stage 3 keeps a share of the parameter only
            yield (
                name,
                whole.detach().view(shape).to("cpu", torch.float32, copy=stage == 0),
            )  # DeepSpeed hands over a copy


def _put(engine: Any, parameter: Any, whole: Tensor, key: str | None) -> None:
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    stage = engine.zero_optimization_stage()
    if stage == 0:
        (parameter if key is None else engine.optimizer.state[parameter][key]).copy_(whole)
    elif stage == 3:  # its setter of whole tensors fails where they are not a multiple of the processes
        size = parameter.ds_tensor.numel()
        share = F.pad(whole.flatten(), (0, size * world_size() - whole.numel()))[rank() * size :][:size]
        if key is None:
            safe_set_local_fp32_param(parameter, share)
        else:
            safe_set_local_optimizer_state(parameter, share, key)
    elif key is None:
        safe_set_full_fp32_param(parameter, whole)
    else:
        safe_set_full_optimizer_state(parameter, whole, key)


def _adam(engine: Any) -> torch.optim.Optimizer:
    """Torch's optimizer inside DeepSpeed's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _link_moments(engine: Any) -> None:
    """Let stages 1 and 2 find the moments of a parameter: DeepSpeed does it after the update of the first group, for that alone."""
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _matrices(engine: Any) -> set[str]:
    """The parameters that Muon moves."""
    return {name for group in _adam(engine).param_groups for name in group.get("matrices", ())}


def _moments(matrix: bool) -> tuple[str, ...]:
    """Those of a parameter: Muon's matrices have no second one."""
    return MOMENTS[:1] if matrix else MOMENTS


def _partitions(engine: Any) -> list[tuple[Tensor, tuple[str, ...]]]:
    """What is updated, parameters, or the flat shares of them that this process has, and which moments it has."""
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # stage 3 takes them out of the groups
    if flat is not None:
        return [(tensor, MOMENTS) for tensor in flat]
    groups = _adam(engine).param_groups
    return [(tensor, _moments("matrices" in group)) for group in groups for tensor in group["params"]]
