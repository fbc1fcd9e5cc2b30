"""No speed without agreement: which models benchmarks/speed/step.py and finetuning.py refuse to time."""

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
    """The modules of `benchmarks/` that say who agrees."""
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from benchmarks.common import agreement, contenders

    return agreement, contenders


@pytest.mark.parametrize("name", ["terms.position.key.weight", "query.weight"])
def test_one_wrong_gradient_among_many_keeps_a_model_out(step, monkeypatch, name):
    """Those of attention are a thousandth or less of the norm of all gradients, which would not show it."""
    agreement, contenders = step
    loss = contenders.Xlpre.loss

    def wrong(one):
        one.model.get_parameter(f"backbone.layers.1.attention.{name}").register_hook(torch.neg)
        return loss(one)

    names = ["xlpre:sdpa", "hf"]
    c = {**contenders.DEFAULT, **SHAPE}
    assert agreement.agreeing_contenders(names, c)[0].keys() == set(names)
    monkeypatch.setattr(contenders.Xlpre, "loss", wrong)
    found, failed = agreement.agreeing_contenders(names, c)
    assert found.keys() == {"hf"}
    assert f"those of backbone.layers.1.attention.{name} differ" in failed["xlpre:sdpa"]


def test_another_loss_keeps_a_model_out(step, monkeypatch):
    agreement, contenders = step
    loss = contenders.Xlpre.loss
    monkeypatch.setattr(contenders.Xlpre, "loss", lambda one: loss(one) + 0.001)
    _, failed = agreement.agreeing_contenders(["xlpre", "hf"], {**contenders.DEFAULT, **SHAPE})
    assert "losses do not agree" in failed["xlpre"]


@pytest.mark.parametrize("task", ["glue/mrpc", "squad/1.1"])
def test_a_fine_tuning_has_the_gradients_of_hugging_faces_and_a_wrong_one_among_them_is_named(step, task):
    from benchmarks.speed import finetuning
    from benchmarks.speed import finetuning_contenders as contenders

    shape = {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 64, "vocab_size": 100}
    c = {**finetuning.DEFAULT, **shape, "dropout": 0.0}
    of = build_task(task, TaskDataConfig(), "last")
    items = finetuning.random_items(task, c, 8, 128)
    dealer = LengthBucketSampler(items, of.padding_side, 0, 1, 128)
    ours, (theirs, _) = contenders.both(c, of)
    expected = contenders.met_of(ours, ours(dealer.micro_steps(1, 0, 4, 1)[0]))
    of_hf = contenders.HuggingFace(theirs, ours.shape, of, items, dealer, 4, None)
    assert expected[1].keys() == {name for name, _ in ours.named_parameters()} - {
        "backbone.mask_embedding",
        contenders.APART,
    }
    assert step[0].describe_difference(of_hf.met(), expected) == ""
    theirs.get_parameter("transformer.layer.1.rel_attn.r").register_hook(torch.neg)
    assert "those of backbone.layers.1.attention.terms.position.key.weight differ" in step[0].describe_difference(of_hf.met(), expected)
