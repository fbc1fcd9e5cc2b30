"""torch.compile takes a whole model as one graph: nothing in it is left to Python, whatever the model's settings."""

import pytest
import torch

from tests.unit.model.conftest import make_model, random_batch, random_memory


@pytest.fixture(autouse=True)
def as_in_training(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    # dropout draws otherwise where nothing is compiled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.1, "dropatt": 0.1},
        {"cutoffs": [10, 30], "div_value": 2, "norm": "pre"},
        {"positions": "shaw", "n_positions": 20, "feed_forward": "swiglu"},
        {"next_sentence": True},
    ],
    ids=["published", "adaptive", "shaw", "next sentence"],
)
def test_a_model_is_one_graph_of_the_same_numbers(settings):
    model = make_model(attention_backend="sdpa", n_layer=1, **settings)
    batch, memory = random_batch(20, reuse=10), random_memory(model.config, 2, 12)
    found = []
    for run in (
        model,
        torch.compile(model, backend="aot_eager", fullgraph=True),
    ):  # which raises where a graph would end
        torch.manual_seed(1)
        loss, remembered, *others = run(batch, memory)
        gradients = torch.autograd.grad(sum(others, start=loss), list(model.parameters()), allow_unused=True)
        found.append((loss, remembered.hidden, *others, *(x for x in gradients if x is not None)))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)
