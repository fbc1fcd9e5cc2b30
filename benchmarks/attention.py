"""How long relative attention takes on a GPU, forward and backward, and whether its backends agree there.

python benchmarks/attention.py [--rows 16] [--heads 16] [--width 64] [--window 512] [--memory 384] [--targets 85] [--dropout 0.1]

One layer's attention of XLNet-Large's shape by default, two streams, half of the window reused, bf16 random data. Prints one JSON line:
the largest difference of output and gradients from the reference in fp32, relative to the largest number of each; milliseconds (medians
of turns taken one after the other) of triton, of sdpa, and of torch's attention without any bias or mask, which is the yardstick; and
the peak memory of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.geometry import Geometry
from xlpre.model.kernels.backend import Backend, backend_named
from xlpre.model.terms import Scores


def geometry_of(rows: int, window: int, memory: int, targets: int, device: str) -> Geometry:
    """Content rows and targets of random factorization orders, one for each half of the window, the first of which is reused."""
    half, keys = window // 2, memory + window
    order = torch.cat([torch.rand(rows, half).argsort(1), half + torch.rand(rows, half).argsort(1)], 1)
    places = torch.rand(rows, window).argsort(1)[:, :targets].sort(1)[0]
    both = torch.cat([torch.arange(window).expand(rows, -1), places], 1)
    ranks = order.gather(1, both)
    seen = torch.cat([torch.full((rows, memory), -1), order], 1)
    segments = (torch.arange(window) > window * 2 // 3).long().expand(rows, -1)
    tensors = (ranks.int(), seen.int(), segments.gather(1, both), F.pad(segments, (memory, 0)), both)
    distances = torch.zeros(2, keys + window, 1, device=device)
    direction = torch.zeros(rows, dtype=torch.long, device=device)
    return Geometry(*(x.to(device) for x in tensors), window, window, None, direction, distances)


def tensors_of(geometry: Geometry, heads: int, width: int, device: str) -> dict[str, Tensor]:
    """What scores are made of, keys and values, by name."""
    B, N = geometry.query_rank.shape
    of_heads, of_keys = (heads, width), (B, geometry.n_keys, heads, width)
    shapes = {"query": (B, N, *of_heads), "place_keys": (2, geometry.distances.size(1), *of_heads)}
    shapes |= dict.fromkeys(("content_bias", "place_bias", "step_bias", "step"), of_heads)
    shapes |= dict.fromkeys(("key", "value"), of_keys)
    return {name: torch.randn(shape, device=device).bfloat16().requires_grad_() for name, shape in shapes.items()}


def turn(backend: Backend, geometry: Geometry, tensors: dict[str, Tensor], dropout: float) -> dict[str, Tensor]:
    """The output and every gradient."""
    parts = {name: x for name, x in tensors.items() if name not in ("key", "value")}
    scores = Scores(scale=tensors["key"].size(3) ** -0.5, **parts)
    out = backend.attend(scores, tensors["key"], tensors["value"], geometry, dropout)
    gradients = torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out) * 0.5)
    return {"out": out.detach(), **dict(zip(tensors, gradients, strict=True))}


def bare_turn(tensors: dict[str, Tensor], dropout: float) -> None:
    """Torch's attention without a bias."""
    given = [tensors[name] for name in ("query", "key", "value")]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given), dropout_p=dropout)
    torch.autograd.grad(out, given, torch.ones_like(out))


def timed(turns: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds and peak megabytes of each."""
    took: dict[str, list[float]] = {name: [] for name in turns}
    peak = {}
    for repeat in range(repeats + 3):
        for name, work in turns.items():
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            peak[name] = (torch.cuda.max_memory_allocated(device) - held) / 2**20
            if repeat >= 3:
                took[name].append(begin.elapsed_time(end))
    return {name: {"ms": round(statistics.median(took[name]), 3), "mb": round(peak[name])} for name in turns}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in {"rows": 16, "heads": 16, "width": 64, "window": 512, "memory": 384, "targets": 85}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", help="`cpu` under TRITON_INTERPRET=1 only compares")
    given = parser.parse_args()
    torch.manual_seed(0)
    geometry = geometry_of(given.rows, given.window, given.memory, given.targets, given.device)
    tensors = tensors_of(geometry, given.heads, given.width, given.device)
    if given.device == "cpu":  # the interpreter multiplies bf16 as integers
        tensors = {name: x.detach().half().requires_grad_() for name, x in tensors.items()}
    backends = {name: backend_named(name) for name in ("triton", "sdpa")}
    ready = {name: replace(geometry, prepared=b.prepare(geometry, tensors["key"])) for name, b in backends.items()}
    exact, reference = (
        {name: x.detach().float().requires_grad_() for name, x in tensors.items()},
        backend_named("reference"),
    )
    expected = turn(reference, replace(geometry, prepared=reference.prepare(geometry, exact["key"])), exact, 0.0)
    report: dict[str, object] = {"shape": vars(given)}
    for name, backend in backends.items():
        found = turn(backend, ready[name], tensors, 0.0)
        off = {key: ((found[key].float() - x).abs().max() / x.abs().max()).item() for key, x in expected.items()}
        report[f"{name} off by"] = {key: float(f"{value:.2g}") for key, value in off.items()}
    if given.device != "cpu":
        del expected, exact
        turns: dict[str, Callable[[], object]] = {
            name: (lambda name=name: turn(backends[name], ready[name], tensors, given.dropout)) for name in backends
        }
        turns["bare"] = lambda: bare_turn(tensors, given.dropout)
        report |= timed(turns, given.device, given.repeats)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
