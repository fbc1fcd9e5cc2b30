"""How much memory is read and written around the products of a layer: operator by operator, as torch.compile fuses it, and by kernels.

python benchmarks/fusion.py [--rows 597] [--width 1024]

Counted, not timed: bytes of all that operators read and write, forward and backward, in bf16, for an element of the rows (rows x width).
Two things stand between the products of a layer: dropout, sum and norm, twice; and the activation with its dropout, on four times the
width. `compiled` are torch's own counts of the kernels that it makes (of a processor: a GPU's differ in how sums over rows are cut),
`kernel` those of kernels/between.py, counted as the operators that they are, without what programs' sums over rows take: (512, D) fp32 at
the most, twice. One JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import metrics
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from xlpre.model.kernels.selfcheck.fused_fixtures import kernel_of

DROPOUT = 0.1


def norm(residual: Tensor, attended: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Dropout, sum and norm."""
    dropped = torch.native_dropout(attended, DROPOUT, True)[0]  # one operator, as on GPUs
    return F.layer_norm(residual + dropped, weight.shape, weight, bias, 1e-12)


def activation(inner: Tensor) -> Tensor:
    """Between the products of the feed-forward layer."""
    return torch.native_dropout(F.gelu(inner, approximate="tanh"), DROPOUT, True)[0]


def _with_dropout(kernel: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return kernel(*given, DROPOUT)


class Counted(TorchDispatchMode):
    """Adds up what operators read and write; views read nothing."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            results = result if isinstance(result, tuple | list) else (result,)
            self.n_bytes += sum(x.numel() * x.element_size() for x in (*args, *results) if isinstance(x, Tensor))
        return result


def forward_and_backward(work: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Once."""
    torch.autograd.grad(work(*given), given, given[0].detach())


def counts(
    work: Callable[..., Tensor], kernel: Callable[..., Tensor], given: list[Tensor], elements: int
) -> dict[str, float]:
    """Bytes an element."""
    with Counted() as eager:
        forward_and_backward(work, given)
    metrics.reset()
    forward_and_backward(torch.compile(work, dynamic=False), given)
    compiled = metrics.num_bytes_accessed
    meta_model = [x.detach().to("meta").requires_grad_() for x in given]
    with Counted() as by_kernel:
        forward_and_backward(kernel, meta_model)
    n_bytes = {"eager": eager.n_bytes, "compiled": compiled, "kernel": by_kernel.n_bytes}
    return {name: round(n / elements, 2) for name, n in n_bytes.items()}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=597, help="of both streams of XLNet-Large, for one sequence")
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    torch._logging.set_logs(inductor_metrics=True)  # or torch does not count
    logging.getLogger("torch._inductor.metrics").propagate = False
    N, D = given.rows, given.width

    def rows(width: int) -> Tensor:
        return torch.randn(N, width).bfloat16().requires_grad_()

    of_norm = [rows(D), rows(D), *(torch.randn(D).bfloat16().requires_grad_() for _ in range(2))]
    for name, work, tensors in (("norm", norm, of_norm), ("gelu", activation, [rows(4 * D)])):
        found = counts(work, partial(_with_dropout, kernel_of(name)), tensors, N * D)
        print(json.dumps({"what": name, "bytes_an_element": found, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
