"""Count the bytes that add-norm and GELU-dropout read and write: as single torch operators, compiled, and as fused kernels.

python benchmarks/gpu/memory_traffic.py [--rows 597] [--width 1024]

No time is measured. Bytes are counted for a forward and a backward pass in bf16, and divided by rows x width. A layer computes add-norm
twice, and GELU-dropout once, on rows four times as wide. Three implementations are counted:

- `eager`: torch's operators, one by one.
- `compiled`: kernels that torch.compile generates for a CPU, as torch counts them. On a GPU, sums over rows are split differently.
- `kernel`: the operators of kernels/triton/fused_ops.py. Partial sums of programs (at most two (512, D) tensors) are not included.

Prints one JSON line for each operation.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import metrics
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.model.kernels.selfcheck.fixtures import fused_kernel

DROPOUT = 0.1


def add_norm(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute norm(x + dropout(branch)), with dropout as a single operator, as torch runs it on a GPU."""
    dropped = torch.native_dropout(branch, DROPOUT, True)[0]
    return F.layer_norm(x + dropped, weight.shape, weight, bias, 1e-12)


def gelu_dropout(x: Tensor) -> Tensor:
    """Compute dropout(gelu(x))."""
    return torch.native_dropout(F.gelu(x, approximate="tanh"), DROPOUT, True)[0]


def call_kernel(kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return kernel(*tensors, DROPOUT)


class ByteCounter(TorchDispatchMode):
    """Counts the bytes that operators read and write. Operators that return a view count as no bytes."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its bytes."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            results = result if isinstance(result, tuple | list) else (result,)
            self.n_bytes += sum(x.numel() * x.element_size() for x in (*args, *results) if isinstance(x, Tensor))
        return result


def run_forward_and_backward(function: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    torch.autograd.grad(function(*tensors), tensors, tensors[0].detach())


def bytes_per_element(
    function: Callable[..., Tensor], kernel: Callable[..., Tensor], tensors: list[Tensor], n_elements: int
) -> dict[str, float]:
    """Return the bytes of each implementation, divided by `n_elements`.

    Args:
        function: the operation with torch's operators.
        kernel: the operation as a fused kernel.
        tensors: inputs.
        n_elements: rows x width.
    """
    with ByteCounter() as eager:
        run_forward_and_backward(function, tensors)
    metrics.reset()
    run_forward_and_backward(torch.compile(function, dynamic=False), tensors)
    compiled = metrics.num_bytes_accessed
    with ByteCounter() as fused:
        run_forward_and_backward(kernel, [x.detach().to("meta").requires_grad_() for x in tensors])
    n_bytes = {"eager": eager.n_bytes, "compiled": compiled, "kernel": fused.n_bytes}
    return {name: round(n / n_elements, 2) for name, n in n_bytes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=597, help="default: both streams of one sequence of XLNet-Large")
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    torch._logging.set_logs(inductor_metrics=True)  # torch counts bytes only if this log is on
    logging.getLogger("torch._inductor.metrics").propagate = False
    N, D = args.rows, args.width

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).bfloat16().requires_grad_()

    inputs = {"add_norm": [random(N, D), random(N, D), random(D), random(D)], "gelu_dropout": [random(N, 4 * D)]}
    for function in (add_norm, gelu_dropout):
        op = function.__name__
        counts = bytes_per_element(function, partial(call_kernel, fused_kernel(op)), inputs[op], N * D)
        print(json.dumps({"fused_op": op, "bytes_per_element": counts, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
