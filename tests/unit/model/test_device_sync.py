"""A step never waits for the device. Torch's meta device takes the place of a GPU."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.data.batching import MicroStep, PaddedBatch
from finetune.tasks.sequence import SequenceTask
from finetune.trainer.task_model import TaskModel
from tests.unit.model.conftest import make_model, random_batch
from xlpre.model.config import ModelConfig
from xlpre.model.memory import initial_memory
from xlpre.model.task_heads import ClassificationHead

META = torch.device("meta")
SYNCHRONIZING = ("aten._local_scalar_dense", "aten.nonzero", "aten.repeat_interleave.Tensor")


class TensorCreationRecorder(TorchFunctionMode):
    """Records tensors created from Python numbers, which are copied to the device."""

    def __init__(self, calls):
        super().__init__()
        self._calls = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.tensor, torch.as_tensor):
            self._calls.append(function.__name__)
        return function(*args, **(kwargs or {}))


class SyncRecorder(TorchDispatchMode):
    """Records created tensors, operations on the CPU and operations that read values."""

    def __init__(self):
        super().__init__()
        self.calls, self.n_operations = [], 0
        self._creation_recorder = TensorCreationRecorder(self.calls)

    def __enter__(self):
        self._creation_recorder.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._creation_recorder.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        self.n_operations += 1
        if any(x.device != META for x in tensors) or str(function).startswith(SYNCHRONIZING):
            self.calls.append(str(function))
        return out


def to_meta_fp16(model: nn.Module) -> nn.Module:
    return model.half().to_empty(device=META)


@pytest.mark.parametrize("attention_backend", ["sdpa", "triton"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"positions": "shaw", "n_positions": 20}, {"positions": "sinusoidal"}, {"next_sentence": True}],
    ids=["published", "shaw", "sinusoidal", "next sentence"],
)
def test_a_pretraining_step_never_waits_for_the_device(attention_backend, settings):
    if attention_backend == "triton":
        pytest.importorskip("triton", reason="triton is installed with the tests on Linux (x86-64)")
    model = to_meta_fp16(
        make_model(attention_backend=attention_backend, dropout=0.1, dropatt=0.1, mem_len=12, **settings)
    )
    batch = random_batch(20, reuse=10).to(META)
    memory = initial_memory(model.config, 2, device=META, dtype=torch.float16)
    with SyncRecorder() as recorder:
        loss, memory_after, *others = model(batch, memory)
        sum(others, start=loss).backward()
    assert recorder.n_operations > 100 and not recorder.calls
    assert loss.dtype == torch.float32 and memory_after.hidden.dtype == torch.float16
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float16}


class ThreeClassTask:
    """Classification task with three classes."""

    def __init__(self, pooling):
        self._pooling = pooling

    def build_head(self, config):
        return ClassificationHead(config, 3, self._pooling)

    head_positions, compute_losses = SequenceTask.head_positions, SequenceTask.compute_losses


@pytest.mark.parametrize("pooling", ["last", "first", "mean", "text_mean", "attn"])
def test_a_fine_tuning_step_never_waits_for_the_device(pooling):
    shape = ModelConfig(vocab_size=40, n_layer=1, d_model=16, n_head=2, d_inner=24, mem_len=8, attention_backend="sdpa")
    model = to_meta_fp16(TaskModel(shape, ThreeClassTask(pooling)))
    ids = torch.empty(4, 16, dtype=torch.int64, device=META)
    batch = PaddedBatch(ids, ids, ids.bool(), {"label": ids[:, 0]}, np.arange(4))
    with SyncRecorder() as recorder:
        loss = model(MicroStep([batch], 1.0))
        loss.backward()
    assert recorder.n_operations > 50 and not recorder.calls
    assert loss.dtype == torch.float32
