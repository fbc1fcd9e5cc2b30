"""A DeepSpeed engine in one process, with a model of two linear layers whose loss can be scaled to infinity or NaN."""

import pytest
import torch
from torch import nn

from tests.conftest import has_bf16, has_fp16
from xlpre.training import distributed, optimizer_state
from xlpre.training.config import OptimConfig, TrainConfig
from xlpre.training.deepspeed_engine import build_deepspeed_config, build_engine, init_process_group

CPU = torch.device("cpu")


def make_engine(net, train, optim, overrides):
    return build_engine(net, build_deepspeed_config(train, optim, CPU, 1, overrides), train, optim, CPU)


WIDTH = 6
PRECISIONS = ["fp32", *(["bf16"] if has_bf16() else []), *(["fp16"] if has_fp16() else [])]
ENGINES = [("fp32", 0)] + [(precision, stage) for precision in PRECISIONS for stage in (1, 2, 3)]
every_engine = pytest.mark.parametrize(("precision", "stage"), ENGINES)
needs_bf16 = pytest.mark.skipif(not has_bf16(), reason="this processor has no bf16 instructions")
needs_fp16 = pytest.mark.skipif(not has_fp16(), reason="this processor has no fp16 instructions (AVX512-FP16)")


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(name, value)
        patch.setenv("MASTER_PORT", str(distributed.free_port()))
        init_process_group(CPU)
        yield
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()


class Net(nn.Module):
    """Mean square of the output, times a factor. The parameters of the norm are not decayed, so Adam has two groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.Linear(5, WIDTH)

    def forward(self, x, factor=1.0):
        return self.outer(self.norm(self.inner(x.to(self.inner.weight.dtype)))).float().square().mean() * factor


def build(precision, stage, net=None, max_grad_norm=1.0, **zero):
    train = TrainConfig(global_batch_size=2, precision=precision)
    optim = OptimConfig(lr=0.01, max_grad_norm=max_grad_norm)
    return make_engine(net or Net(), train, optim, {"zero_optimization": {"stage": stage, **zero}})


def update(engine, seed, factor=1.0):
    """Make an update with a random batch. Returns the loss and the gradient norm."""
    torch.manual_seed(seed)
    loss = engine(torch.randn(2, WIDTH), factor)
    engine.backward(loss)
    engine.step()
    return loss.item(), float(engine.get_global_grad_norm())


def read_state(engine):
    """Return weights, moments and counters, as a checkpoint stores them."""
    return (
        optimizer_state.gather_weights(engine, keep=True),
        optimizer_state.gather_moments(engine, lambda index: True),
        optimizer_state.read_counters(engine),
    )


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
