"""benchmarks/speed/step.py and finetuning.py time only models that agree in loss and gradients."""

import json

import pytest
import torch

from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.tasks.registry import build_task
from tests.conftest import REPOSITORY
from xlpre.common.errors import InputError

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


@pytest.mark.parametrize("changes", [{"rows": 1}, {"rows": 3}, {"reuse_len": 27}, {"mem_len": 0}, {"n_head": 1}])
def test_implementations_agree_on_batches_of_any_size(step, changes):
    agreement, contenders = step
    c = {**contenders.DEFAULT, **SHAPE, **changes}
    contenders.check_config(["xlpre", "hf"], c)
    agreeing, failed = agreement.agreeing_contenders(["xlpre", "hf"], c)
    assert agreeing.keys() == {"xlpre", "hf"}, failed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": "32"}, 'window="32" is invalid: it must be an integer'),
        ({"optimizer": 1}, "optimizer=1 is invalid: it must be true or false"),
        ({"windw": 32}, "windw=32 is invalid: --config has no such key"),
        ({"reuse_len": 40}, "reuse_len=40 is invalid: .* Set reuse_len=16 window=32"),
        ({"d_model": 33}, "d_model=33 is invalid"),
        ({"attention": "foo"}, "attention=foo is invalid: it must be one of auto"),
        ({"dtype": "fp8"}, "dtype=fp8 is invalid: it must be one of fp32"),
        ({"device": "cuda:1"}, "device=cuda:1 is invalid: it must be one of cpu, cuda"),
        ({"compile": "layer"}, "compile=layer is invalid: it must be one of whole"),
        ({"rows": 0}, "rows=0 is invalid: it must be at least 1"),
        ({"vocab_size": 5}, "vocab_size=5 is invalid"),
    ],
)
def test_an_invalid_benchmark_configuration_is_refused(step, changes, message):
    _, contenders = step
    from benchmarks.common.json_config import read_json_config

    with pytest.raises(InputError, match=message):
        contenders.check_config(["xlpre"], read_json_config(json.dumps({**SHAPE, **changes}), contenders.DEFAULT))


def test_an_unknown_contender_is_refused(step):
    _, contenders = step
    for name in ("hfx", "xlpre:sdpa:blocks", "hf:sdpa", "foo"):
        with pytest.raises(InputError, match=r"is invalid: it must be (hf, hf-compile|one of whole)"):
            contenders.check_config([name], {**contenders.DEFAULT, **SHAPE})


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
