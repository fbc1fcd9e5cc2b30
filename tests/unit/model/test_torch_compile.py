"""torch.compile takes a whole model as one graph, whatever its settings."""

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory


@pytest.fixture(autouse=True)
def as_in_training(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    # without it, the eager model would draw other random numbers for dropout than the compiled one
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.1, "dropatt": 0.1},
        {"attention_backend": "auto"},
        {"cutoffs": [10, 30], "div_value": 2, "norm": "pre"},
        {"positions": "shaw", "n_positions": 20, "feed_forward": "swiglu"},
        {"next_sentence": True},
    ],
    ids=["published", "auto", "adaptive", "shaw", "next sentence"],
)
def test_a_model_is_one_graph_with_the_same_numbers(settings):
    model = make_model(**{"attention_backend": "sdpa", "n_layer": 1, **settings})
    batch, memory = random_batch(20, reuse=10), random_memory(model.config, 2, 12)
    results = []
    # fullgraph raises an error where the graph would break
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        loss, new_memory, *others = run(batch, memory)
        gradients = torch.autograd.grad(sum(others, start=loss), list(model.parameters()), allow_unused=True)
        results.append((loss, new_memory.hidden, *others, *(x for x in gradients if x is not None)))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
