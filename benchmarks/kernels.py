"""Relative attention by each backend: whether it agrees with the reference, and how long it takes, forward and backward.

python benchmarks/kernels.py --dropout 0.1
python benchmarks/kernels.py --device cpu --rows 2 --dropout 0.1 --repeats 5

One layer's attention of XLNet-Large's shape, two streams, half of the window reused, on random data. Two JSON lines for each backend, of
numbers and then of times:

- how far it is from `reference` in twice the precision, the norm of the difference over the norm, for the output and every gradient,
  without dropout; and with it, where the reference drops what the backend was seen to drop;
- the share of probabilities that dropout kept, and how many deviations that is from its due; whether two turns give the same bits;
- milliseconds of forward and backward, medians of turns that the backends take one after the other (on a CPU of processor time), and the
  peak memory of a turn. `bare` is torch's attention of the same size without bias and mask, the yardstick.

Status 1 if one is farther off than TOLERANCE, keeps another share, or fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from layer_shapes import DTYPES, add_shape, exact, kept_by
from torch import Tensor
from torch.nn import functional as F

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.backend import backend_named
from xlpre.model.kernels.selfcheck.fixtures import AttentionCase, Case, apart, attention_case, geometry_of, tensors_of
from xlpre.model.kernels.selfcheck.selfcheck import TOLERANCE

DEVIATIONS = 6.0  # of a binomial count; by chance in 2e-9 of cases
BACKENDS = {"cpu": ["reference", "sdpa", "cpu"], "cuda": ["reference", "sdpa", "triton"]}


def agreement(layer: AttentionCase, attn_meta: AttentionMeta, weights: Tensor, dropout: float) -> dict[str, Any]:
    """What a line says of the numbers."""
    expected = exact(attn_meta, layer.tensors, weights, None, 0.0)
    line: dict[str, Any] = {"off_by": apart(layer.all(weights), expected)}
    del expected
    if dropout:
        kept, seen = kept_by(layer, dropout), attn_meta.visible()[:, None]
        n, stayed = int(seen.sum()) * kept.size(1), int((kept & seen).sum())
        share = 1 - round(dropout * 2**16) / 2**16  # dropout is drawn with 16 bits, at the coarsest
        line["kept"] = round(stayed / n, 6)
        line["kept_deviations"] = round((stayed / n - share) / (share * (1 - share) / n) ** 0.5, 2)
        found = layer.all(weights, dropout)
        line["off_by_with_dropout"] = apart(found, exact(attn_meta, layer.tensors, weights, kept, dropout))
    first, second = (layer.all(weights, dropout) for _ in range(2))
    line["same_bits"] = all(torch.equal(first[name], second[name]) for name in first)
    return line


def agrees(line: dict[str, Any], dtype: str) -> bool:
    """Whether it is near enough; nan is not."""
    errors = [*line["off_by"].values(), *line.get("off_by_with_dropout", {}).values()]
    return all(x <= TOLERANCE[DTYPES[dtype]] for x in errors) and abs(line.get("kept_deviations", 0)) <= DEVIATIONS


def bare(tensors: dict[str, Tensor], dropout: float) -> Callable[[], tuple[Tensor, Callable[[], object]]]:
    """Torch's attention without a bias: a turn of it."""
    given = [tensors[name].detach().requires_grad_() for name in ("query", "key", "value")]
    weights = torch.randn_like(given[0]).transpose(1, 2)

    def forward() -> tuple[Tensor, Callable[[], object]]:
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given), dropout_p=dropout)
        return out, lambda: torch.autograd.grad(out, given, weights)

    return forward


def of_layer(layer: Case, weights: Tensor, dropout: float) -> Callable[[], tuple[Tensor, Callable[[], object]]]:
    """A turn of it."""

    def forward() -> tuple[Tensor, Callable[[], object]]:
        out = layer.output(dropout)
        return out, lambda: layer.differentiate(out, weights)

    return forward


def on_gpu(forward: Callable[[], Any]) -> tuple[float, float, float]:
    """Milliseconds forward and backward, and peak megabytes of a turn."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda._sleep(10_000_000)  # cycles, in which much of the turn is queued, so that launches are not timed
    times[0].record()
    _, backward = forward()
    times[1].record()
    backward()
    times[2].record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return times[0].elapsed_time(times[1]), times[1].elapsed_time(times[2]), peak


def on_cpu(forward: Callable[[], Any]) -> tuple[float, float, None]:
    """The same of a processor, whose memory is not told apart."""
    begun = time.process_time()
    _, backward = forward()
    between = time.process_time()
    backward()
    return 1e3 * (between - begun), 1e3 * (time.process_time() - between), None


def race(turns: dict[str, Callable[[], Any]], device: str, repeats: int, yardstick: str) -> dict[str, dict[str, Any]]:
    """What a line says of time and memory, `yardstick` being one of `turns`; `repeats` turns after three to warm up."""
    took: dict[str, list[Any]] = {name: [] for name in turns}
    for repeat in range(repeats + 3):
        for name, forward in turns.items():
            found = on_cpu(forward) if device == "cpu" else on_gpu(forward)
            if repeat >= 3:
                took[name].append(found)
    lines = {}
    for name, found in took.items():
        forward_ms, backward_ms = (statistics.median(x[i] for x in found) for i in (0, 1))
        against = (sum(x[:2]) / sum(y[:2]) for x, y in zip(found, took[yardstick], strict=True))
        lines[name] = {
            "forward_ms": round(forward_ms, 3),
            "backward_ms": round(backward_ms, 3),
            f"times_as_long_as_{yardstick}": round(statistics.median(against), 2),
            "mb": found[-1][2] and round(found[-1][2]),
        }
    return lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=20, help="0 does not time")
    parser.add_argument("--backends", nargs="+", help="else all that the device has")
    given = parser.parse_args()
    torch.manual_seed(0)
    attn_meta = geometry_of(given.rows, given.window, given.memory, given.targets, given.device)
    tensors = tensors_of(attn_meta, given.heads, given.width, DTYPES[given.dtype])
    weights = torch.randn(*attn_meta.query_rank.shape, given.heads, given.width, device=given.device)
    right = True
    turns = {"bare": bare(tensors, given.dropout)} if given.repeats else {}
    for name in given.backends or BACKENDS[torch.device(given.device).type]:
        try:
            layer = attention_case(backend_named(name), attn_meta, tensors)
            line = agreement(layer, attn_meta, weights, given.dropout)
            line["agrees"] = agrees(line, given.dtype)
            turns[name] = of_layer(layer, weights, given.dropout)
        except Exception:
            line = _failed()
        right &= line["agrees"] or name == "reference"  # which rounds as it does
        _say(name, line, given)
    try:
        for name, line in (race(turns, given.device, given.repeats, "bare") if given.repeats else {}).items():
            _say(name, line, given)
    except Exception:
        right = False
        _say("all", _failed(), given)
    sys.exit(not right)


def _failed() -> dict[str, Any]:
    return {"agrees": False, "failed": traceback.format_exc(limit=-4)[-3000:]}


def _say(name: str, line: dict[str, Any], given: argparse.Namespace) -> None:
    print(json.dumps({"backend": name, **line, "shape": vars(given)}), flush=True)


if __name__ == "__main__":
    main()
