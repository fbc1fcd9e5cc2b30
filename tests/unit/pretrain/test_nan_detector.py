"""What is not finite in an update is found where it is put."""

import dataclasses
import re

import pytest
import torch

from pretrain.replay import main, replay
from pretrain.trainer import nan_dump
from tests.unit.pretrain.conftest import SHAPE
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.training.distributed import seed_step


def ending(capsys, *words: object) -> str:
    """The last line that the command prints."""
    main([str(word) for word in words])
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_healthy_update_is_said_to_be_finite(precision, dump, capsys):
    assert re.match(
        r"all finite here: 2 micro-batches, largest \|gradient\| [\d.e-]+ of \S+; in the run it was not",
        ending(capsys, dump(), "--precision", precision, "--device", "cpu"),
    )


def test_a_weight_that_is_nan_is_named_with_the_module_it_spoils_first(dump, capsys):
    def change(model, met):
        model.backbone.layers[1].feed_forward.inner.weight[3, 4] = torch.nan

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert "weights: not finite: backbone.layers.1.feed_forward.inner.weight\n" in out
    assert "not finite first: the output of backbone.layers.1.feed_forward.inner, rows 0, 1, 2, 3 (" in out
    assert out.splitlines()[-1] == "not finite first: the weights, backbone.layers.1.feed_forward.inner.weight"


@pytest.mark.parametrize("unseen", [False, True])
def test_the_row_whose_memory_is_nan_is_named_with_its_text(unseen, dump, capsys, batch_at, tokenizer):
    def change(model, met):
        met[1][1].hidden[1, 2, 0, 5] = torch.nan
        met[1][1].valid[2] = 3 if unseen else 8

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "not finite first: the memory of row 2 (process 0, micro-batch 1)"
    batch = batch_at(1)
    ids = batch.input_ids[2].tolist()
    assert f"row 2     {tokenizer.decode(ids[::-1] if batch.backward[2] else ids)[:200]!r}" in out
    assert out.count("\n  row ") == 1


def test_an_overflow_of_a_layers_weights_is_found_in_that_layer(dump, capsys):
    def change(model, met):
        model.backbone.layers[1].attention.value.weight.fill_(3e38)

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert re.search(r"the output of backbone\.layers\.1\.attention\.value, .*largest \|weight\| 3e\+38\)", out)
    assert "backward  none" in out
    assert out.splitlines()[-1].startswith("not finite first: the output of backbone.layers.1.attention.value, rows")


def test_an_overflow_between_two_modules_is_found_in_the_one_around_them(dump, capsys):
    def change(model, met):
        model.backbone.layers[0].attention.query.weight.mul_(1e22)
        model.backbone.layers[0].attention.key.weight.mul_(1e22)

    assert "the output of backbone.layers.0.attention, rows" in ending(capsys, dump(change))


def test_a_single_row_that_overflows_is_told_from_the_others(dump, capsys):
    def change(model, met):
        met[0][1].hidden[0, 1] = 1e38
        model.backbone.layers[0].attention.key.weight.fill_(1.0)

    out = ending(capsys, dump(change))
    assert out == "not finite first: the output of backbone.layers.0.attention.key, row 1 (process 0, micro-batch 0)"


def test_a_gradient_that_overflows_on_the_way_back_is_found_where_it_does(dump, capsys):
    def change(model, met):
        layer = model.backbone.layers[1]
        layer.feed_forward.inner.weight.zero_()  # gelu is 0 here, its slope is not
        layer.feed_forward.inner.bias.zero_()
        layer.feed_forward.outer.weight.fill_(1e38)
        layer.feed_forward_norm.weight.fill_(1e4)

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert "forward   finite" in out and "loss      nan" not in out
    assert (
        "the gradient that backbone.layers.1.feed_forward.outer hands back to its inputs, row" in out.splitlines()[-1]
    )


def test_a_gradient_that_overflows_at_a_parameter_alone_is_named_by_it(batch_at):
    model = LanguageModel(SHAPE, two_streams=True)
    model.backbone.layers[0].feed_forward.inner.bias.register_hook(lambda gradient: gradient * torch.inf)
    one = replay(model, batch_at(0), initial_memory(SHAPE, 4))
    assert one.first == "the gradient of backbone.layers.0.feed_forward.inner.bias"
    assert one.bad == ["backbone.layers.0.feed_forward.inner.bias"]


def test_a_norm_that_overflows_though_no_gradient_does_is_said(batch_at):
    model = LanguageModel(SHAPE, two_streams=True)
    model.backbone.layers[0].feed_forward.inner.bias.register_hook(lambda gradient: gradient.new_full((24,), 1e25))
    one = replay(model, batch_at(0), initial_memory(SHAPE, 4))
    assert one.backward is None and not one.bad
    assert one.first == "the global gradient norm, 4.9e+25: finite, but its square is not in fp32"


def test_a_loss_without_targets_is_not_blamed_on_a_layer(batch_at):
    batch = batch_at(0)
    batch = dataclasses.replace(batch, target_weights=torch.zeros_like(batch.target_weights))
    one = replay(LanguageModel(SHAPE, two_streams=True), batch, initial_memory(SHAPE, 4))
    assert one.first == "the loss, of outputs that are finite"


@pytest.mark.parametrize(
    "settings",
    [
        {"positions": "learned", "n_positions": 40, "norm": "pre"},
        {"positions": "shaw", "n_positions": 40, "untie_r": False},
        {"cutoffs": [50, 120], "div_value": 2, "feed_forward": "swiglu"},
        {"mem_len": 0, "norm": "pre_keys"},
    ],
)
@pytest.mark.parametrize("next_sentence", [False, True])
def test_every_kind_of_model_can_be_replayed_with_gradients_as_without_watching(settings, next_sentence, batch_at):
    shape = dataclasses.replace(SHAPE, dropout=0.0, dropatt=0.0, **settings)
    model, batch, memory = LanguageModel(shape, True, next_sentence), batch_at(0), initial_memory(shape, 4)
    one = replay(model, batch, memory)
    watched = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss, _, *others = model(batch, memory)
    sum(others, start=loss).backward()
    assert one.first is None
    for parameter, gradient in zip(model.parameters(), watched, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-9)  # summed in another order


def test_dropout_is_that_of_the_step_and_the_process(dump, batch_at, capsys):
    path = dump()
    main([str(path)])
    losses = re.findall(r"loss +(\S+)", capsys.readouterr().out)
    folder, (share,) = nan_dump.read_dump(path)
    model = folder.model().train()
    seed_step(5, 122, 0)
    assert losses == [f"{model(*met)[0].item():.4g}" for met in share.micro_steps()]


def test_a_gpu_that_is_not_there_is_refused(dump):
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU here"):
        main([str(dump()), "--device", "cuda"])
