"""benchmarks/speed/step.py and finetuning.py time only models that agree in loss and gradients."""

import pytest
import torch

from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.tasks.registry import build_task
from tests.conftest import REPOSITORY

SHAPE = {
    "n_layer": 2,
    "d_model": 32,
    "window": 32,
    "mem_len": 16,
    "reuse_len": 16,
    "rows": 2,
    "vocab_size": 100,
    "d_inner": 64,
}


@pytest.fixture
def step(monkeypatch):
    """Return the modules of `benchmarks/` that compare models."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from benchmarks.common import agreement, contenders

    return agreement, contenders


@pytest.mark.parametrize("name", ["terms.position.key.weight", "query.weight"])
def test_a_single_wrong_gradient_excludes_an_implementation_from_the_benchmark(step, monkeypatch, name):
    """Attention gradients are at most a thousandth of the global norm, which would hide the error."""
    agreement, contenders = step
    loss = contenders.Xlpre.loss

    def negated_gradient(contender):
        contender.model.get_parameter(f"backbone.layers.1.attention.{name}").register_hook(torch.neg)
        return loss(contender)

    names = ["xlpre:sdpa", "hf"]
    c = {**contenders.DEFAULT, **SHAPE}
    assert agreement.agreeing_contenders(names, c)[0].keys() == set(names)
    monkeypatch.setattr(contenders.Xlpre, "loss", negated_gradient)
    agreeing, failed = agreement.agreeing_contenders(names, c)
    assert agreeing.keys() == {"hf"}
    assert f"those of backbone.layers.1.attention.{name} differ" in failed["xlpre:sdpa"]


def test_another_loss_excludes_an_implementation_from_the_benchmark(step, monkeypatch):
    agreement, contenders = step
    loss = contenders.Xlpre.loss
    monkeypatch.setattr(contenders.Xlpre, "loss", lambda contender: loss(contender) + 0.001)
    _, failed = agreement.agreeing_contenders(["xlpre", "hf"], {**contenders.DEFAULT, **SHAPE})
    assert "losses do not agree" in failed["xlpre"]


@pytest.mark.parametrize("task", ["glue/mrpc", "squad/1.1"])
def test_fine_tuning_gradients_equal_those_of_hugging_face_and_a_wrong_one_is_named(step, task):
    from benchmarks.speed import finetuning
    from benchmarks.speed import finetuning_contenders as contenders

    shape = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": 100}
    c = {**finetuning.DEFAULT, **shape, "dropout": 0.0}
    task = build_task(task, TaskDataConfig(), "last")
    features = finetuning.random_features(task.name, c, 8, 128)
    sampler = LengthBucketSampler(features, task.padding_side, 0, 1, 128)
    model, (hf_model, _) = contenders.make_models(c, task)
    expected = contenders.compute_gradients(model, model(sampler.micro_steps(1, 0, 4, 1)[0]))
    excluded = {"backbone.mask_embedding", contenders.EXCLUDED}
    assert expected[1].keys() == {name for name, _ in model.named_parameters()} - excluded
    contender = contenders.HuggingFace(hf_model, model.model_config, task, features, sampler, 4, None)
    agreement, _ = step
    assert agreement.describe_difference(contender.loss_and_gradients(), expected) == ""
    hf_model.get_parameter("transformer.layer.1.rel_attn.r").register_hook(torch.neg)
    difference = agreement.describe_difference(contender.loss_and_gradients(), expected)
    assert "those of backbone.layers.1.attention.terms.position.key.weight differ" in difference
