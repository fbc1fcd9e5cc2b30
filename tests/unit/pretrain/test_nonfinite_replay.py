"""The detector and `pretrain/replay.py` find the first non-finite value."""

import dataclasses
import re

import pytest
import torch

from pretrain.replay import main
from pretrain.tools.nonfinite_replay import replay
from pretrain.trainer import nonfinite_dump
from tests.unit.pretrain.conftest import SHAPE
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.training.distributed import seed_step


def last_line(capsys, *args: object) -> str:
    """Return the last line that the command prints."""
    main([str(arg) for arg in args])
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_healthy_step_is_reported_as_finite(precision, dump, capsys):
    assert re.match(
        r"all values are finite here: 2 micro-batches, largest \|gradient\| [\d.e-]+, of \S+. In the run they were not",
        last_line(capsys, dump(), "--precision", precision, "--device", "cpu"),
    )


def test_a_nan_weight_is_named_with_the_first_affected_module(dump, capsys):
    def change(model, micro_steps):
        model.backbone.layers[1].feed_forward.inner.weight[3, 4] = torch.nan

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert "weights: not finite: backbone.layers.1.feed_forward.inner.weight\n" in out
    assert "first non-finite value: the output of backbone.layers.1.feed_forward.inner, rows 0, 1, 2, 3 (" in out
    assert out.splitlines()[-1] == "first non-finite value: the weights, backbone.layers.1.feed_forward.inner.weight"


@pytest.mark.parametrize("masked", [False, True])
def test_the_row_of_a_nan_in_memory_is_named_with_its_text(masked, dump, capsys, batch_at, tokenizer):
    def change(model, micro_steps):
        micro_steps[1][1].hidden[1, 2, 0, 5] = torch.nan
        micro_steps[1][1].valid[2] = 3 if masked else 8

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "first non-finite value: the memory of row 2 (rank 0, micro-batch 1)"
    batch = batch_at(1)
    ids = batch.input_ids[2].tolist()
    assert f"row 2     {tokenizer.decode(ids[::-1] if batch.backward[2] else ids)[:200]!r}" in out
    assert out.count("\n  row ") == 1


def test_an_overflow_by_the_weights_of_a_layer_is_found_in_that_layer(dump, capsys):
    def change(model, micro_steps):
        model.backbone.layers[1].attention.value.weight.fill_(3e38)

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert re.search(r"the output of backbone\.layers\.1\.attention\.value, .*largest \|weight\| 3e\+38\)", out)
    assert "backward  skipped" in out
    assert out.splitlines()[-1].startswith(
        "first non-finite value: the output of backbone.layers.1.attention.value, rows"
    )


def test_an_overflow_between_two_modules_is_found_in_their_parent(dump, capsys):
    def change(model, micro_steps):
        model.backbone.layers[0].attention.query.weight.mul_(1e22)
        model.backbone.layers[0].attention.key.weight.mul_(1e22)

    assert "the output of backbone.layers.0.attention, rows" in last_line(capsys, dump(change))


def test_the_only_row_that_overflows_is_named(dump, capsys):
    def change(model, micro_steps):
        micro_steps[0][1].hidden[0, 1] = 1e38
        model.backbone.layers[0].attention.key.weight.fill_(1.0)

    out = last_line(capsys, dump(change))
    assert out == "first non-finite value: the output of backbone.layers.0.attention.key, row 1 (rank 0, micro-batch 0)"


def test_an_overflow_in_the_backward_pass_is_found_in_its_module(dump, capsys):
    def change(model, micro_steps):
        layer = model.backbone.layers[1]
        layer.feed_forward.inner.weight.zero_()  # gelu is 0 here, its slope is not
        layer.feed_forward.inner.bias.zero_()
        layer.feed_forward.outer.weight.fill_(1e38)
        layer.feed_forward_norm.weight.fill_(1e4)

    main([str(dump(change))])
    out = capsys.readouterr().out
    assert "forward   finite" in out and "loss      nan" not in out
    assert "the outgoing gradient of backbone.layers.1.feed_forward.outer, row" in out.splitlines()[-1]


def test_an_overflow_of_a_parameter_gradient_is_named_by_the_parameter(batch_at):
    model = LanguageModel(SHAPE, two_streams=True)
    model.backbone.layers[0].feed_forward.inner.bias.register_hook(lambda gradient: gradient * torch.inf)
    result = replay(model, batch_at(0), initial_memory(SHAPE, 4))
    assert result.first == "the gradient of backbone.layers.0.feed_forward.inner.bias"
    assert result.nonfinite_parameters == ["backbone.layers.0.feed_forward.inner.bias"]


def test_an_overflow_of_the_squared_norm_is_reported(batch_at):
    model = LanguageModel(SHAPE, two_streams=True)
    model.backbone.layers[0].feed_forward.inner.bias.register_hook(lambda gradient: gradient.new_full((24,), 1e25))
    result = replay(model, batch_at(0), initial_memory(SHAPE, 4))
    assert result.backward is None and not result.nonfinite_parameters
    assert result.first == "the square of the global gradient norm 4.9e+25, in fp32"


def test_a_loss_without_targets_is_not_attributed_to_a_layer(batch_at):
    batch = batch_at(0)
    batch = dataclasses.replace(batch, target_weights=torch.zeros_like(batch.target_weights))
    result = replay(LanguageModel(SHAPE, two_streams=True), batch, initial_memory(SHAPE, 4))
    assert result.first == "the loss, computed from finite outputs"


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
def test_detection_does_not_change_the_gradients_of_any_kind_of_model(settings, next_sentence, batch_at):
    shape = dataclasses.replace(SHAPE, dropout=0.0, dropatt=0.0, **settings)
    model, batch, memory = LanguageModel(shape, True, next_sentence), batch_at(0), initial_memory(shape, 4)
    result = replay(model, batch, memory)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss, _, *auxiliary = model(batch, memory)
    sum(auxiliary, start=loss).backward()
    assert result.first is None
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-9)  # summed in another order


def test_dropout_is_that_of_the_step_and_the_rank(dump, batch_at, capsys):
    path = dump()
    main([str(path)])
    losses = re.findall(r"loss +(\S+)", capsys.readouterr().out)
    folder, (rank_dump,) = nonfinite_dump.read_dump(path)
    model = folder.model().train()
    seed_step(5, 122, 0)
    assert losses == [f"{model(*micro_step)[0].item():.4g}" for micro_step in rank_dump.micro_steps()]


def test_a_missing_gpu_is_refused(dump):
    with pytest.raises(ValueError, match="--device=cuda is invalid"):
        main([str(dump()), "--device", "cuda"])
