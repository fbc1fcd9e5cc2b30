import math

import pytest
import torch

from pretrain.config import EvalConfig, PretrainConfig
from pretrain.trainer import evaluator
from tests.unit.model.conftest import make_model
from xlpre.data.window_layout import DataConfig
from xlpre.model.backbone import Backbone
from xlpre.model.memory import KVCache, MemoryConfig
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES
from xlpre.training.distributed import Comm


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("mem_len", [None, 0, 40])
def test_what_is_measured_does_not_depend_on_how_memory_is_kept(store, tokenizer, monkeypatch, name, mem_len):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=32 if name == "causal" else 16),
        objective=ObjectiveConfig(name=name),
        memory=MemoryConfig(at_document_end="cut"),
        eval=EvalConfig(batch_size=4, num_windows=12, mem_len=mem_len),
    )
    evaluation = evaluator.Evaluator(config, store, tokenizer, Comm())
    model = make_model(two_streams=OBJECTIVES[name].two_streams, vocab_size=store.vocab_size, mem_len=16)
    to_kv_cache, caches = Backbone.to_kv_cache, []
    monkeypatch.setattr(Backbone, "to_kv_cache", lambda *args: caches.append(to_kv_cache(*args)) or caches[0])
    found = evaluation(model)
    monkeypatch.setattr(Backbone, "to_kv_cache", lambda backbone, memory: memory)
    expected = evaluation(model)
    assert isinstance(caches[0], KVCache)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)  # float32
    assert (found.unigram, found.n_targets) == (expected.unigram, expected.n_targets)
    assert model.training


@pytest.mark.parametrize("name", ["permutation", "denoising"])
def test_next_sentences_are_measured_beside_the_loss_which_stays_that_of_the_targets(store, tokenizer, name):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=16),
        objective=ObjectiveConfig(name=name, next_sentence=True),
        eval=EvalConfig(batch_size=4, num_windows=12),
    )
    evaluation = evaluator.Evaluator(config, store, tokenizer, Comm())
    shape = {"two_streams": name == "permutation", "vocab_size": store.vocab_size, "mem_len": 16}
    model, plain = make_model(**shape, next_sentence=True), make_model(**shape)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(weights[key])
        model.auxiliary_heads["next_sentence"].logits_proj.weight.zero_()
        model.auxiliary_heads["next_sentence"].logits_proj.bias.copy_(torch.tensor([0.0, 1.0]))
    found, expected = evaluation(model), evaluation(plain)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)  # float32
    assert (found.accuracy, found.n_targets, expected.auxiliary) == (expected.accuracy, expected.n_targets, {})
    labels = [evaluation._loader.batch(step, range(4)).pair_label for step in range(evaluation._windows)]
    follow = torch.cat(labels).double().mean().item()
    assert found.auxiliary == {"next_sentence": pytest.approx(follow)}  # the head always says that B follows


def test_bits_a_byte_are_those_of_the_text_that_the_targets_stand_for(store, tokenizer, monkeypatch):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=16), eval=EvalConfig(batch_size=2, num_windows=3)
    )
    met = []
    monkeypatch.setattr(
        evaluator, "target_losses", lambda logits, targets: met.append(targets) or torch.ones(targets.shape)
    )
    found = evaluator.Evaluator(config, store, tokenizer, Comm())(make_model(vocab_size=store.vocab_size, mem_len=16))
    targets = torch.cat([batch.flatten() for batch in met]).tolist()
    text = [tokenizer.pieces[i].replace("▁", " ") if i > 8 else "|" for i in targets]
    assert found.loss == 1
    assert found.bits_per_byte == pytest.approx(len(targets) / math.log(2) / len("".join(text).encode()))
