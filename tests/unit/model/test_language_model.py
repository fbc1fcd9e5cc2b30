"""LanguageModel as a torch module: precisions, autocast, inference mode, copies, pickling, threads."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.model.memory import Memory

POSITIONS = [{}, {"positions": "shaw", "n_positions": 20}, {"positions": "sinusoidal"}, {"cutoffs": [10, 30], "div_value": 2}]  # fmt: skip
NAMES = ["published", "shaw", "sinusoidal", "adaptive"]


def step(model, memory):
    """The loss of a step, its gradients as one vector, and memory after it."""
    loss, memory = model(random_batch(20, reuse=10), memory)
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.detach(), torch.cat([x.flatten() for x in gradients if x is not None]), memory


@pytest.mark.parametrize("attention_backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", POSITIONS, ids=NAMES)
def test_autocast_changes_a_step_only_by_rounding_and_keeps_memory_in_fp32(settings, dtype, attention_backend):
    model = make_model(attention_backend=attention_backend, **settings)
    memory = random_memory(model.config, 2, 12)
    loss, gradient, after = step(model, memory)
    with torch.autocast("cpu", dtype):
        rounded_loss, rounded_gradient, rounded_after = step(model, memory)
    assert rounded_loss.item() == pytest.approx(loss.item(), rel=0.02)
    assert (rounded_gradient - gradient).norm() < 0.05 * gradient.norm()
    assert rounded_after.hidden.dtype == torch.float32 and torch.allclose(rounded_after.hidden, after.hidden, atol=0.2)


def test_autocast_has_no_effect_in_fp64():
    model, batch = make_model().double(), random_batch()
    memory = random_memory(model.config, 2, 6)
    memory = Memory(memory.hidden.double(), memory.valid)
    expected = model.logits(batch, memory)[0]
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model.backbone(batch, memory)
    assert torch.equal(hidden, model.backbone(batch, memory)[0]) and expected.dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False])
def test_a_kv_cache_can_enter_and_leave_autocast(inside):
    model, batch = make_model().eval(), random_batch()
    memory = random_memory(model.config, 2, 6)
    expected = model.logits(batch, memory)[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        cache = model.backbone.to_kv_cache(memory)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        logits = model.logits(batch, cache)[0]
    assert torch.allclose(logits.float(), expected, atol=0.1 * float(expected.std()))


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copy_model", [copy.deepcopy, save_and_load, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_gives_the_same_logits_and_keeps_its_own_weights_tied(copy_model):
    model, batch = make_model().eval(), random_batch()
    memory = random_memory(model.config, 2, 6)
    other = copy_model(model)
    assert torch.equal(other.logits(batch, memory)[0], model.logits(batch, memory)[0])
    assert other.lm_head.weight is other.backbone.word_embedding.weight is not model.lm_head.weight


def test_a_state_dict_restores_the_model():
    model, other = make_model(seed=0), make_model(seed=1)
    other.load_state_dict(model.state_dict())
    memory = random_memory(model.config, 2, 6)
    assert torch.equal(other(random_batch(), memory)[0], model(random_batch(), memory)[0])


def test_threads_can_share_one_model():
    model = make_model().eval()
    memory = random_memory(model.config, 2, 6)

    def read(seed):
        with torch.inference_mode():
            return model.logits(random_batch(seed=seed), model.backbone.to_kv_cache(memory))[0]

    expected = [read(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as threads:
        assert all(map(torch.equal, threads.map(read, range(12)), expected))
