"""Next-sentence prediction as an auxiliary head of the language model."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.unit.model.conftest import make_model, random_batch, random_memory
from xlpre.data.lanes import Lanes
from xlpre.data.store_builder import write_store
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective

SETTINGS = [
    {},
    {"norm": "pre", "positions": "shaw", "n_positions": 9},
    {"norm": "pre_keys", "positions": "learned", "n_positions": 20},
    {"cutoffs": [10, 30], "div_value": 2, "attention_span": "same_length", "mem_len": 5},
]


def model_pair(two_streams, **settings):
    """Models with the same weights, with and without next-sentence prediction."""
    model, plain = (make_model(two_streams, next_sentence=enabled, **settings) for enabled in (True, False))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
    return model, plain


@pytest.mark.parametrize("two_streams", [True, False])
@pytest.mark.parametrize("attention_backend", ["reference", "sdpa", "cpu"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_reading_cls_equals_a_full_last_layer_and_leaves_targets_unchanged(two_streams, attention_backend, settings):
    model, plain = model_pair(two_streams, attention_backend=attention_backend, **settings)
    batch, memory = random_batch(20, reuse=10), random_memory(model.config, 2, 5)
    batch.query_rank[:, -1] = batch.key_rank[:, -1]  # by its rank alone, it would not see itself
    hidden, _ = model.backbone(batch, memory)
    at_targets, _ = plain.backbone(batch, memory)
    plain.backbone.two_streams = False  # the content stream does not depend on it
    all_positions = torch.arange(20).expand(2, -1)
    content, _ = plain.backbone(dataclasses.replace(batch, target_positions=all_positions), memory)
    torch.testing.assert_close(hidden, torch.cat([content[:, -1:], at_targets], dim=1), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("two_streams", [True, False])
def test_next_sentence_loss_is_the_cross_entropy_of_the_label(two_streams):
    model, plain = model_pair(two_streams)
    batch, memory = random_batch(rows=4), random_memory(model.config, 4, 3)
    loss, _, label_loss = model(batch, memory)
    head = model.auxiliary_heads["next_sentence"]
    hidden, _ = model.backbone(batch, memory)
    pooled = torch.tanh(F.linear(hidden[:, 0], head.dense.weight, head.dense.bias))
    logits = pooled @ head.logits_proj.weight.T + head.logits_proj.bias
    expected = -logits.log_softmax(1)[torch.arange(4), batch.pair_label].mean()
    torch.testing.assert_close(label_loss, expected)
    torch.testing.assert_close(loss, plain(batch, memory)[0])
    scores = model.logits(batch, memory)
    torch.testing.assert_close(scores[0], plain.logits(batch, memory)[0])
    torch.testing.assert_close(scores[2], logits)


@pytest.mark.parametrize("two_streams", [True, False])
def test_next_sentence_loss_has_gradients_for_head_and_backbone_only(two_streams):
    model = make_model(two_streams, next_sentence=True)
    batch = random_batch()
    _, _, label_loss = model(batch, random_memory(model.config, 2, 3))
    label_loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    not_trained = {"lm_head.bias", "backbone.mask_embedding"}  # <cls> is read from the content stream
    assert trained == {name for name, _ in model.named_parameters()} - not_trained


def test_without_next_sentence_there_are_no_parameters_rows_or_losses_of_it():
    model, plain = make_model(next_sentence=True), make_model()
    more = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert more == {
        f"auxiliary_heads.next_sentence.{part}.{kind}"
        for part in ("dense", "logits_proj")
        for kind in ("weight", "bias")
    }
    batch, memory = random_batch(), random_memory(plain.config, 2, 3)
    loss, _ = plain(batch, memory)
    hidden, _ = plain.backbone(batch, memory)
    assert hidden.size(1) == batch.targets.size(1)
    losses = F.cross_entropy(plain.lm_head(hidden).flatten(0, 1), batch.targets.flatten())
    torch.testing.assert_close(loss, losses)


def test_next_sentence_does_not_change_the_initial_backbone():
    shape = ModelConfig(vocab_size=40, n_layer=1, d_model=8, n_head=2, d_inner=8, init_scheme="local", init_std=0.3)
    with_it, without = {}, {}
    for weights, enabled in ((with_it, True), (without, False)):
        torch.manual_seed(0)
        weights.update(LanguageModel(shape, True, enabled).named_parameters())
    assert all(torch.equal(with_it[name], value) for name, value in without.items())
    head = with_it["auxiliary_heads.next_sentence.dense.weight"]
    assert head.std().item() == pytest.approx(0.3, rel=0.3)
    assert not with_it["auxiliary_heads.next_sentence.dense.bias"].any()


def test_next_sentence_prediction_learns(tokenizer, tmp_path):
    rng = np.random.default_rng(0)
    subjects = rng.choice(["bada", "fefo", "gugi"], 200)  # one per document
    documents = [[" ".join([subject] * rng.integers(1, 3)) + "." for _ in range(40)] for subject in subjects]
    store = write_store(tmp_path / "store", documents, tokenizer, 0.1, {"source": "docstrings"}, {})
    data = DataConfig(store_dir="x", seq_len=24, reuse_len=4)
    objective = build_objective(ObjectiveConfig(next_sentence=True), data, tokenizer.starts_word)
    lanes = Lanes(store.train, 16, stride=4, lookahead=data.lookahead, windows_per_run=8, bidirectional=True, seed=0)
    loader = Loader(lanes, data, objective, seed=0)
    shape = ModelConfig(
        vocab_size=300, n_layer=2, d_model=32, n_head=2, d_inner=64, mem_len=0, dropout=0.0, dropatt=0.0, init_std=0.1
    )
    model, memory = LanguageModel(shape, True, next_sentence=True), initial_memory(shape, 16)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(40):
        loss, _, label_loss = model(loader.batch(step, range(16)), memory)
        optimizer.zero_grad()
        (loss + label_loss).backward()
        optimizer.step()
    unseen = [loader.batch(step, range(16)) for step in range(1000, 1010)]
    correct = [model.logits(batch, memory)[2].argmax(1) == batch.pair_label for batch in unseen]
    assert (
        torch.cat(correct).float().mean() > 0.65
    )  # half of the labels are 1, and a third of the others cannot be predicted
