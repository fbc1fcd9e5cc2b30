"""Weights, optimizer moments and counters as full fp32 tensors by parameter name.

The format is independent of the ZeRO stage, of offloading and of the number of processes, so a run can resume with different ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.common.errors import InputError
from xlpre.training.distributed import rank

LOSS_SCALER_FIELDS = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "cur_hysteresis",
)  # attributes of DeepSpeed's DynamicLossScaler
# torch's names of the first and second moment; matrices that Muon updates have only the first
MOMENTS = ("exp_avg", "exp_avg_sq")


def init_moments(engine: Any) -> None:
    """Set all moments of a new engine to zero, as the first update would, and check that DeepSpeed gives access to its state.

    Checkpoints read and write the state through functions of DeepSpeed that are partly private. To check these functions, one weight and
    its moments are written, read back and restored, which takes milliseconds. Every process must call it.

    Raises:
        InputError: this version of DeepSpeed lacks these functions, or they behave differently.
        RuntimeError: one of the functions failed.
    """
    import deepspeed

    refusal = f"deepspeed {deepspeed.__version__} cannot be used: it does not read back the optimizer state that a checkpoint writes"
    remedy = "Install a version that pyproject.toml allows, such as deepspeed==0.19.8."
    try:
        for tensor, keys in _updated_tensors(engine):
            step = torch.tensor(0.0, device=tensor.device)
            _torch_optimizer(engine).state[tensor] = {"step": step, **{key: torch.zeros_like(tensor) for key in keys}}
        _link_moments(engine)
        differing = _write_and_read_back(engine)
    except (AttributeError, TypeError, KeyError, IndexError, ValueError, AssertionError, ImportError) as error:
        raise InputError(f"{refusal} ({type(error).__name__}: {error}). {remedy}") from error
    except RuntimeError as error:  # for example a lost connection, which the message then names
        raise RuntimeError(
            f"{error}\nThis happened in a check that the optimizer state of deepspeed {deepspeed.__version__} can be read and written."
        ) from error
    if differing is not None:
        raise InputError(f"{refusal} ({differing} differs). {remedy}")


def gather_weights(engine: Any, keep: bool) -> dict[str, Tensor]:
    """Gather the weights on the CPU. Every process must call it; those with `keep=False` get an empty mapping."""
    return dict(_gather(engine, None, lambda index: keep))


def gather_moments(engine: Any, keep: Callable[[int], bool]) -> dict[str, Tensor]:
    """Gather the optimizer moments on the CPU, named `PARAMETER/exp_avg` and `PARAMETER/exp_avg_sq`. Every process must call it.

    Args:
        engine: the DeepSpeed engine.
        keep: function of the index of a parameter, which returns True if this process keeps the moments of that parameter.

    Returns:
        The moments; empty before the first update.
    """
    if not count_updates(engine):
        return {}
    _link_moments(engine)
    return {f"{name}/{key}": moment for key in MOMENTS for name, moment in _gather(engine, key, keep)}


def list_moments(engine: Any) -> dict[str, int]:
    """Return the names of all moments, each with the index of its parameter; an empty mapping before the first update."""
    if not count_updates(engine):
        return {}
    matrices = _muon_matrices(engine)
    return {
        f"{name}/{key}": index
        for index, (name, _) in enumerate(engine.module.named_parameters())
        for key in _moment_names(name in matrices)
    }


def count_updates(engine: Any) -> int:
    """Return the number of updates that the optimizer has made, which Adam's bias correction depends on."""
    return int(max((state["step"].item() for state in _torch_optimizer(engine).state.values()), default=0))


def read_counters(engine: Any) -> dict[str, Any]:
    """Return the numbers of updates and of skipped steps, and the state of the fp16 loss scaler."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    scale = {name: getattr(scaler, name) for name in LOSS_SCALER_FIELDS if hasattr(scaler, name)}
    return {"updates": count_updates(engine), "skipped_steps": int(engine.skipped_steps), "loss_scale": scale}


@torch.no_grad()
def load_state(
    engine: Any, weights: Mapping[str, Any], moments: Mapping[str, Any], counters: Mapping[str, Any]
) -> None:
    """Set the fp32 master weights, the moments and the counters. Every process must call it.

    Each process reads what it holds: without ZeRO, everything; in stages 1 and 2, the parameters in its ZeRO partition; in stage 3,
    its part of every parameter.

    The weights that the forward pass uses are not set: build the engine around a model that has `weights` on rank 0, and call
    `init_moments`.

    Args:
        engine: the DeepSpeed engine.
        weights: tensors, or slices of safetensors, by the names of parameters.
        moments: the same by the names of `list_moments`.
        counters: see `read_counters`.
    """
    engine.skipped_steps, n_updates = counters["skipped_steps"], counters["updates"]
    for state in _torch_optimizer(engine).state.values():
        state["step"].fill_(float(n_updates))
    scaler = getattr(engine.optimizer, "loss_scaler", None)  # in fp32, ZeRO has a loss scaler without effect
    for name, value in counters["loss_scale"].items() if scaler else ():
        setattr(scaler, name, value)
    matrices = _muon_matrices(engine)
    for name, parameter in engine.module.named_parameters():
        if engine.zero_optimization_stage() in (1, 2) and parameter._hp_mapping is None:
            continue  # other processes hold it
        _set(engine, parameter, weights[name], None)
        for key in _moment_names(name in matrices) if n_updates else ():
            _set(engine, parameter, moments[f"{name}/{key}"], key)


@torch.no_grad()
def _write_and_read_back(engine: Any) -> str | None:
    """Write a weight and its moments, read them back and restore them. Return the name of the first tensor that differs, or None."""
    parameters = dict(engine.module.named_parameters())
    # the smallest parameter with both moments, and the last of equal size, which in stages 1 and 2 is not in the first group
    candidates = [name for name in parameters if name not in _muon_matrices(engine)]
    name = min(reversed(candidates), key=lambda name: getattr(parameters[name], "ds_numel", parameters[name].numel()))
    for key in (None, *MOMENTS):
        (original,) = _gather(engine, key, lambda index: True, {name})
        written = torch.arange(1.0, original[1].numel() + 1).view_as(original[1]) / 8
        for value in (written, original[1]):
            _set(engine, parameters[name], value, key)
            ((_, read),) = _gather(engine, key, lambda index: True, {name})
            if not torch.equal(read, value):
                return f"{name}/{key or 'weight'}"
    return None


def _gather(
    engine: Any, key: str | None, keep: Callable[[int], bool], names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors that this process keeps: weights if `key` is None, else moments. `names=None`: of all parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    stage, matrices = engine.zero_optimization_stage(), _muon_matrices(engine)
    for index, (name, parameter) in enumerate(engine.module.named_parameters()):
        if (names is not None and name not in names) or (
            key is not None and key not in _moment_names(name in matrices)
        ):
            continue
        if stage == 0:
            full = parameter if key is None else engine.optimizer.state[parameter][key]
        elif key is None:
            full = safe_get_full_fp32_param(parameter)
        else:
            full = safe_get_full_optimizer_state(parameter, key)
        if keep(index):
            shape = getattr(parameter, "ds_shape", parameter.shape)  # stage 3 stores a flat part of the parameter
            # above stage 0, DeepSpeed returns a copy
            yield name, full.detach().view(shape).to("cpu", torch.float32, copy=stage == 0)


def _set(engine: Any, parameter: Any, saved: Any, key: str | None) -> None:
    """Set a parameter's master weight if `key` is None, else its moment, from a tensor or a slice of safetensors."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    stage = engine.zero_optimization_stage()
    if stage == 0:
        (parameter if key is None else engine.optimizer.state[parameter][key]).copy_(saved[:])
    elif stage == 3:  # the setter of full tensors fails if their size is not a multiple of the number of processes
        size = parameter.ds_tensor.numel()
        share = _read_elements(saved, parameter.ds_shape, rank() * size, size)
        if key is None:
            safe_set_local_fp32_param(parameter, share)
        else:
            safe_set_local_optimizer_state(parameter, share, key)
    elif key is None:
        safe_set_full_fp32_param(parameter, saved[:])
    else:
        safe_set_full_optimizer_state(parameter, saved[:], key)


def _read_elements(saved: Any, shape: Sequence[int], begin: int, size: int) -> Tensor:
    """Read the elements `begin` to `begin + size` of a flattened tensor, padded with zeros past its end.

    Only the rows that contain these elements are read from disk.
    """
    row_size = math.prod(shape[1:])
    end = min(begin + size, shape[0] * row_size)
    if end <= begin:
        return torch.zeros(size)
    first_row = begin // row_size
    rows = saved[first_row : -(-end // row_size)].flatten()
    elements = rows[begin - first_row * row_size : end - first_row * row_size]
    return F.pad(elements, (0, size - len(elements)))


def _torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that DeepSpeed's optimizer wraps."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _link_moments(engine: Any) -> None:
    """Make the moments accessible by parameter in stages 1 and 2. DeepSpeed itself links the moments of the first group only."""
    if engine.zero_optimization_stage() in (1, 2):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _muon_matrices(engine: Any) -> set[str]:
    """Return the names of the parameters that Muon updates."""
    return {name for group in _torch_optimizer(engine).param_groups for name in group.get("matrices", ())}


def _moment_names(is_muon_matrix: bool) -> tuple[str, ...]:
    return MOMENTS[:1] if is_muon_matrix else MOMENTS


def _updated_tensors(engine: Any) -> list[tuple[Tensor, tuple[str, ...]]]:
    """Return the tensors that the optimizer updates (parameters, or their ZeRO partition) with the names of their moments."""
    flat = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # stage 3 removes them from the groups
    if flat is not None:
        return [(tensor, MOMENTS) for tensor in flat]
    groups = _torch_optimizer(engine).param_groups
    return [(tensor, _moment_names("matrices" in group)) for group in groups for tensor in group["params"]]
