"""Compare xlpre's Muon with DeepSpeed's Muon: exactness, clipping, skipped steps, access to the momentum, bytes sent.

python benchmarks/quality/muon.py --out reports/muon/results.jsonl

Each case makes four updates of nine small matrices, in one or two processes on a CPU, with gradients that every precision represents
exactly. The result is compared with a reference: Muon in float64 in one process. The two optimizers scale their updates differently, so
each has its own reference. DeepSpeed's functions are not compiled, so that no compiler is needed. Writes one JSON line per case. An
error is the largest of all matrices, and relative to the change of the matrix in the reference:

    update_error        error after the four updates
    skip_error          error if a further step between the second and the third has an infinite gradient; it must be skipped
    clip_error          error if gradients are clipped
    clip_size           largest change of a matrix if gradients are clipped, relative to its change in the reference
    momentum_error      relative error of the momentum, read by parameter as for a checkpoint; null: it cannot be read
    sent_bytes          bytes that the busiest process sends in an update if collectives are rings, minus those that AdamW sends
    predicted_bytes     `sent_bytes` as the formula of the planner predicts it
    failure             exception, if the case fails
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.processes import CPU_ENVIRONMENT

os.environ.update(
    {**CPU_ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}
)  # torch and DeepSpeed read these variables when they are imported

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from xlpre.common.cli_main import run_main
from xlpre.common.tables import to_jsonl
from xlpre.training.config import PretrainOptimConfig, TrainConfig
from xlpre.training.deepspeed_engine import build_deepspeed_config, build_engine, init_process_group
from xlpre.training.muon import sent_bytes
from xlpre.training.optimizer_state import gather_moments, gather_weights

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
SHAPES = {"first": (24, 24), "second": (24, 48), "third": (48, 24)}
LAYERS, UPDATES, CLIP = 3, 4, 1.0
CASES = [
    *((optimizer, stage, "fp32", False) for optimizer in ("xlpre", "deepspeed") for stage in (0, 1, 2)),
    *((optimizer, stage, "bf16", False) for optimizer in ("xlpre", "deepspeed") for stage in (1, 2)),
    *(("deepspeed", 3, precision, False) for precision in ("fp32", "bf16")),
    *(("deepspeed", stage, "fp32", True) for stage in (1, 3)),
]


class GivenGradients(nn.Linear):
    """A matrix and a bias whose gradients the caller chooses."""

    def forward(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return a loss whose gradients are `weight` and `bias`."""
        return (self.weight * weight.to(self.weight.dtype)).sum() + (self.bias * bias.to(self.bias.dtype)).sum()


class Matrices(nn.Module):
    """A model of nine matrices with biases, whose gradients are set in `gradients` by parameter name.

    The parameters are named like those of a language model, and bf16 represents their values exactly.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.backbone, self.gradients = nn.Module(), dict[str, Tensor]()
        self.backbone.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer, (name, shape) in itertools.product(self.backbone.layers, SHAPES.items()):
            layer.add_module(name, GivenGradients(shape[1], shape[0]))
            for parameter in layer.get_submodule(name).parameters():
                nn.init.normal_(parameter, std=0.1, generator=generator)
                parameter.data = parameter.data.bfloat16().float()

    def forward(self) -> Tensor:
        """Return a loss whose gradients are those in `gradients`."""
        matrices = [(name, module) for name, module in self.named_modules() if isinstance(module, GivenGradients)]
        losses = [module(self.gradients[f"{n}.weight"], self.gradients[f"{n}.bias"]) for n, module in matrices]
        return torch.stack(losses).sum()


def make_gradients(update: int, process: int | None, n_processes: int) -> dict[str, Tensor]:
    """Return the gradients of a process, or their mean over processes if `process` is None. bf16 represents them and the mean exactly."""
    generator = torch.Generator().manual_seed(100 + update)
    gradients = {}
    for name, parameter in Matrices().named_parameters():
        both = torch.randint(-8, 9, (2, *parameter.shape), generator=generator) * 2.0 ** (update - 6)
        gradients[name] = both.mean(0) if process is None or n_processes == 1 else both[process]
    return gradients


def orthogonalize(matrix: Tensor) -> Tensor:
    """Orthogonalize a matrix approximately by five Newton-Schulz iterations. Source: K. Jordan, 2024."""
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def reference(optimizer: str, clip: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute all updates in float64. Return the matrices and their momentum.

    Args:
        optimizer: `xlpre` or `deepspeed`; they scale their updates differently.
        clip: norm to which gradients are clipped, or None.
    """
    matrices = {name: p.detach().double() for name, p in Matrices().named_parameters() if p.ndim == 2}
    moments = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
    for update in range(UPDATES):
        gradients = {name: g.double() for name, g in make_gradients(update, None, 1).items()}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        factor = min(1.0, clip / norm.item()) if clip else 1.0
        for name, matrix in matrices.items():
            gradient, (rows, columns) = factor * gradients[name], matrix.shape
            moments[name] = MOMENTUM * moments[name] + (1 - MOMENTUM) * gradient
            step = orthogonalize(MOMENTUM * moments[name] + (1 - MOMENTUM) * gradient)
            scale = 0.2 * max(rows, columns) ** 0.5 if optimizer == "xlpre" else max(1, rows / columns) ** 0.5
            matrices[name] = (1 - LR * DECAY) * matrix - LR * scale * step
    return matrices, moments


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this process sends in collectives, if each collective is a ring."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation; if it is a collective, count its bytes."""
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and name not in ("barrier", "monitored_barrier_"):
            others = (dist.get_world_size() - 1) / dist.get_world_size()
            if name == "alltoall_base_":
                sent = args[1].nbytes - args[4][dist.get_rank()] * args[1].element_size()
            elif name == "allreduce_":
                sent = 2 * others * _bytes(args[0])
            elif name in (
                "broadcast_",
                "reduce_",
                "_allgather_base_",
                "allgather_",
            ):  # args[0]: in a gather, the whole result
                sent = others * _bytes(args[0])
            elif name in ("_reduce_scatter_base_", "reduce_scatter_"):
                sent = others * _bytes(args[1])
            else:
                raise NotImplementedError(f"SentBytes cannot count the collective {name}. Add its formula.")
            self.total += sent
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> float:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes, tensors))


def make_engine(optimizer: str, stage: int, precision: str, offload: bool, clip: float | None) -> Any:
    """Build a DeepSpeed engine with the settings of this project.

    Args:
        optimizer: `xlpre` (its Muon), `deepspeed` (its Muon) or `adamw`.
        stage: ZeRO stage.
        precision: `fp32` or `bf16`.
        offload: True to keep the optimizer state in the memory of the host.
        clip: norm to which gradients are clipped, or None.
    """
    device = torch.device("cpu")
    name = "adamw" if optimizer == "adamw" else "muon"
    optim = PretrainOptimConfig(name=name, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, max_grad_norm=clip)
    train = TrainConfig(global_batch_size=dist.get_world_size(), micro_batch_size=1, precision=precision, compile=False)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {
            "reduce_scatter": False,
            "stage3_param_persistence_threshold": 0,
        }  # DeepSpeed's Muon requires reduce_scatter=False
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = build_deepspeed_config(train, optim, device, dist.get_world_size(), {"zero_optimization": zero})
    model = Matrices()
    if optimizer != "deepspeed":
        engine = build_engine(model, config, train, optim, device)
        engine.basic_optimizer.bf16_on_cpu = False  # so that its products can be compared with those of the reference
        return engine
    import deepspeed
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim == 2
        groups[parameter.use_muon].append(parameter)
    settings = {"lr": LR, "weight_decay": DECAY}
    both = [
        {"params": groups[True], "use_muon": True, "momentum": MOMENTUM, **settings},
        {"params": groups[False], "use_muon": False, **settings},
    ]
    muon = MuonWithAuxAdam(both, adam_optimizer=torch.optim.AdamW)
    config["gradient_clipping"] = clip or 0.0
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints many lines about memory
        return deepspeed.initialize(model=model, optimizer=muon, config=config)[0]


def train(engine: Any, with_infinity: bool = False) -> float:
    """Train for all updates. Returns the bytes that this process sends in the last update.

    Args:
        engine: engine of a `Matrices` model.
        with_infinity: True to add a step with an infinite gradient, after the second update.
    """
    steps = [0, 1, None, 2, 3] if with_infinity else range(UPDATES)
    for update in steps:
        gradients = make_gradients(update or 0, dist.get_rank(), dist.get_world_size())
        if update is None:
            gradients["backbone.layers.1.second.weight"][3, 5] = torch.inf
        engine.module.gradients = gradients
        with SentBytes() as sent:
            engine.backward(engine())
            engine.step()
    return sent.total


def read_momentum(engine: Any, optimizer: str) -> dict[str, Tensor] | None:
    """Return the momentum of each matrix by parameter name, or None if DeepSpeed gives no access to it."""
    if optimizer == "xlpre":
        moments = gather_moments(engine, lambda index: True)
        return {name.removesuffix("/exp_avg"): value for name, value in moments.items() if name.endswith("/exp_avg")}
    from deepspeed.utils import safe_get_full_optimizer_state

    matrices = {name: p for name, p in engine.module.named_parameters() if p.use_muon}
    if engine.zero_optimization_stage() == 0:
        return {name: engine.optimizer.state[p]["momentum_buffer"] for name, p in matrices.items()}
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
        mappings = [p._hp_mapping for p in matrices.values() if p._hp_mapping is not None]
        accessible = torch.tensor(float(all("momentum_buffer" in m.optim_fragment for m in mappings)))
        dist.all_reduce(
            accessible, dist.ReduceOp.MIN
        )  # all processes must agree, because the function below is collective
        if not accessible:
            return None
    return {name: safe_get_full_optimizer_state(p, "momentum_buffer") for name, p in matrices.items()}


def largest_error(values: dict[str, Tensor], expected: dict[str, Tensor], initial: dict[str, Tensor]) -> float:
    """Return the largest relative error of a matrix: the norm of its error, divided by the norm of its expected change from `initial`."""
    errors = {
        name: (values[name].double().view_as(e) - e).norm() / (e - initial[name]).norm() for name, e in expected.items()
    }
    return max(error.item() if error.isfinite() else torch.inf for error in errors.values())


def measure(optimizer: str, stage: int, precision: str, offload: bool) -> dict[str, Any]:
    """Run a case. Return the values of its JSON line, which the module docstring explains."""
    initial = {name: p.detach().double() for name, p in Matrices().named_parameters()}
    zeros = {name: torch.zeros_like(value) for name, value in initial.items()}
    expected, moments = reference(optimizer, None)
    engine = make_engine(optimizer, stage, precision, offload, None)
    sent = train(engine) - train(make_engine("adamw", stage, precision, offload, None))
    totals = [torch.tensor(sent), torch.tensor(0.0)]
    dist.all_reduce(totals[0], dist.ReduceOp.MAX)
    update_error = largest_error(gather_weights(engine, True), expected, initial)
    momentum = read_momentum(engine, optimizer)
    engine = make_engine(optimizer, stage, precision, offload, None)
    train(engine, with_infinity=True)
    skip_error = largest_error(gather_weights(engine, True), expected, initial)
    clipped, _ = reference(optimizer, CLIP)
    engine = make_engine(optimizer, stage, precision, offload, CLIP)
    train(engine)
    weights = gather_weights(engine, True)
    size = max(
        (weights[n].double().view_as(e) - initial[n]).norm() / (e - initial[n]).norm() for n, e in clipped.items()
    )
    shapes = [shape for _ in range(LAYERS) for shape in SHAPES.values()]
    return {
        "update_error": _rounded(update_error),
        "skip_error": _rounded(skip_error),
        "clip_error": _rounded(largest_error(weights, clipped, initial)),
        "clip_size": _rounded(size.item()),
        "momentum_error": None if momentum is None else _rounded(largest_error(momentum, moments, zeros)),
        "sent_bytes": totals[0].item(),
        **(
            {"predicted_bytes": sent_bytes(shapes, dist.get_world_size(), is_flat=stage > 0)}
            if optimizer == "xlpre"
            else {}
        ),
    }


def _rounded(value: float) -> float | str:
    return float(f"{value:.2g}") if value < torch.inf else "infinite"


def work(process: int, n_processes: int, folder: str) -> None:
    """Run all cases as one of `n_processes` processes. Process 0 writes the JSON lines to a file in `folder`."""
    os.environ.update({"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": str(n_processes)})
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{folder}/join{n_processes}", timeout, n_processes, process)
    init_process_group(torch.device("cpu"))
    lines = []
    for optimizer, stage, precision, offload in CASES:
        case = {"optimizer": optimizer, "processes": n_processes, "stage": stage, "precision": precision}
        case["offload_optimizer"] = offload
        try:
            lines.append({**case, **measure(optimizer, stage, precision, offload)})
        except (RuntimeError, ValueError, AssertionError, AttributeError, KeyError, TypeError, IndexError) as error:
            lines.append({**case, "failure": f"{type(error).__name__}: {error}".splitlines()[0]})
        if process == 0:
            print(json.dumps(lines[-1]), flush=True)
    if process == 0:
        Path(folder, f"{n_processes}.jsonl").write_text(to_jsonl(lines))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the lines")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for n_processes in (1, 2):
            torch.multiprocessing.start_processes(work, (n_processes, folder), n_processes, start_method="fork")
        lines = "".join(Path(folder, f"{n}.jsonl").read_text() for n in (1, 2))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
