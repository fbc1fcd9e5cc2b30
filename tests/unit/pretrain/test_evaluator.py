import dataclasses
import json
import math
import re
from unittest import mock

import numpy as np
import pytest
import torch

from pretrain.config import EvalConfig, PretrainConfig
from pretrain.trainer import evaluator
from pretrain.trainer.config_warnings import backward_text_warning, small_validation_text_warning
from pretrain.trainer.logger import TrainLogger
from tests.conftest import refused
from tests.unit.model.conftest import make_model
from xlpre.data.store import SplitData
from xlpre.data.store_builder import write_store
from xlpre.data.window_layout import DataConfig
from xlpre.inference import evaluation, order_consistency, score
from xlpre.model.backbone import Backbone
from xlpre.model.config import MemoryConfig, ModelConfig
from xlpre.model.memory import KVCache
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES
from xlpre.training.config import PretrainOptimConfig
from xlpre.training.distributed import Comm
from xlpre.training.lr_schedule import ScheduleConfig


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("mem_len", [None, 0, 40])
def test_the_result_is_the_same_with_and_without_a_kv_cache(store, tokenizer, monkeypatch, name, mem_len):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=32 if name == "causal" else 16),
        objective=ObjectiveConfig(name=name),
        memory=MemoryConfig(at_document_end="cut"),
        eval=EvalConfig(batch_size=4, num_windows=12, mem_len=mem_len),
    )
    evaluate = evaluator.Evaluator(config, store, tokenizer, Comm()).evaluate
    model = make_model(two_streams=OBJECTIVES[name].two_streams, vocab_size=store.vocab_size, mem_len=16)
    to_kv_cache, caches = Backbone.to_kv_cache, []
    monkeypatch.setattr(Backbone, "to_kv_cache", lambda *args: caches.append(to_kv_cache(*args)) or caches[0])
    result = evaluate(model)
    monkeypatch.setattr(Backbone, "to_kv_cache", lambda backbone, memory: memory)
    expected = evaluate(model)
    assert isinstance(caches[0], KVCache)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)  # float32
    assert (result.unigram_loss, result.n_targets) == (expected.unigram_loss, expected.n_targets)
    assert model.training


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("n_tokens", [29, 45, 61, 62, 100, 300, 2000])
def test_the_lanes_of_an_evaluation_share_no_text(store, monkeypatch, n_tokens, bidirectional):
    reuse_len, lookahead = 16, 30
    if n_tokens < lookahead:
        n_tokens = lookahead  # one window
    ends = np.array([n_tokens])
    monkeypatch.setattr(store, "validation", SplitData(np.arange(n_tokens), ends, ends))
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=reuse_len, bidirectional=bidirectional),
        eval=EvalConfig(batch_size=8, num_windows=12),
    )
    lanes, n_windows = evaluator.val_lanes(config, store)
    locations = [lanes.location(lane, step) for lane in range(lanes.n_lanes) for step in range(n_windows)]
    counts = np.zeros(n_tokens, int)
    for location in locations:
        counts[location.text.tokens(location.begin, location.begin + reuse_len)] += 1
    n_twice = (counts == 2).sum()  # a backward window at the start of the text begins later
    assert counts.max() <= 2 and n_twice <= (lookahead - reuse_len if bidirectional else 0)
    assert len(locations) == min(8 * 12, max(1, (n_tokens - lookahead) // reuse_len // lanes.n_lanes * lanes.n_lanes))


@pytest.mark.parametrize("name", ["permutation", "denoising"])
def test_next_sentence_accuracy_does_not_change_the_loss(store, tokenizer, name):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=16),
        objective=ObjectiveConfig(name=name, next_sentence=True),
        eval=EvalConfig(batch_size=4, num_windows=12),
    )
    evaluate = evaluator.Evaluator(config, store, tokenizer, Comm())
    shape = {"two_streams": name == "permutation", "vocab_size": store.vocab_size, "mem_len": 16}
    model, plain = make_model(**shape, next_sentence=True), make_model(**shape)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(weights[key])
        model.auxiliary_heads["next_sentence"].logits_proj.weight.zero_()
        model.auxiliary_heads["next_sentence"].logits_proj.bias.copy_(torch.tensor([0.0, 1.0]))
    result, expected = evaluate.evaluate(model), evaluate.evaluate(plain)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)  # float32
    assert (result.accuracy, result.n_targets) == (expected.accuracy, expected.n_targets)
    assert expected.auxiliary_accuracy == {}
    labels = [evaluate._loader.batch(step, range(4)).pair_label for step in range(evaluate._n_windows)]
    fraction = torch.cat(labels).double().mean().item()
    assert result.auxiliary_accuracy == {"next_sentence": pytest.approx(fraction)}  # the head always predicts label 1


def test_bits_per_byte_are_relative_to_the_text_of_the_targets(store, tokenizer, monkeypatch):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=16), eval=EvalConfig(batch_size=2, num_windows=3)
    )
    batches = []
    monkeypatch.setattr(
        evaluation, "target_losses", lambda logits, targets: batches.append(targets) or torch.ones(targets.shape)
    )
    model = make_model(vocab_size=store.vocab_size, mem_len=16)
    result = evaluator.Evaluator(config, store, tokenizer, Comm()).evaluate(model)
    targets = torch.cat([batch.flatten() for batch in batches]).tolist()
    text = [tokenizer.pieces[i].replace("▁", " ") if i > 8 else "|" for i in targets]
    assert result.loss == 1
    assert result.bits_per_byte == pytest.approx(len(targets) / math.log(2) / len("".join(text).encode()))


@pytest.mark.parametrize(
    ("name", "train_k", "val_k", "expected"),
    [
        ("permutation", 2.0, 6.0, r"1 in 6 tokens, training 1 in 2\. .* can be below"),
        ("denoising", 7.5, 6.0, r"1 in 6 tokens, training 1 in 7\.5\. .* can be above"),
        ("permutation", 2.0, None, "^$"),
        ("permutation", 6.0, 6.0, "^$"),
        ("causal", 2.0, 6.0, "^$"),
    ],
)
def test_the_note_on_targets_names_both_fractions_if_they_differ(name, train_k, val_k, expected):
    objective = ObjectiveConfig(name=name, partial_k=train_k)
    note = evaluator.target_fraction_note(PretrainConfig(objective=objective, eval=EvalConfig(partial_k=val_k)))
    assert re.search(expected, note)


@pytest.mark.parametrize(
    ("loss", "tokens", "step", "expected"),
    [
        (
            6.85,
            600_000,
            500,
            r"after 0\.6 M .* try model\.init_scheme=local, then model\.norm=pre, then optim\.lr=1e-3\.",
        ),
        (6.75, 600_000, 500, "^$"),  # has left the baseline
        (6.85, 400_000, 500, "^$"),  # has hardly read anything
        (6.85, 600_000, 40, "^$"),  # in the warm-up
    ],
)
def test_a_model_that_stays_at_word_frequencies_is_reported_with_a_remedy(loss, tokens, step, expected):
    config = PretrainConfig(
        optim=PretrainOptimConfig(lr=2e-3), schedule=ScheduleConfig(warmup_steps=40), model=ModelConfig()
    )
    result = evaluator.EvalResult(loss, 6.87, 0.0, 2.0, 100, {})
    assert re.search(expected, evaluator.plateau_warning(config, result, step, tokens))


def test_a_small_validation_text_is_reported(store, documents, tokenizer, tmp_path):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=16), eval=EvalConfig(batch_size=2, num_windows=3)
    )
    n_windows = (len(store.validation) - config.data.lookahead) // config.data.reuse_len // 2
    assert not small_validation_text_warning(config, store)
    for windows, expected in ((n_windows, ""), (n_windows + 1, f"{len(store.validation):,} tokens (")):
        changed = dataclasses.replace(config, eval=EvalConfig(batch_size=2, num_windows=windows))
        assert expected in small_validation_text_warning(changed, store)
        assert evaluator.val_lanes(changed, store)[1] == n_windows
        assert bool(small_validation_text_warning(changed, store)) == bool(expected)
    few = write_store(tmp_path / "few", documents[:300], tokenizer, 0.01, {"source": "docstrings"}, {})
    n_documents = few.meta["val_n_documents"]
    assert 0 < n_documents < 16
    warning = small_validation_text_warning(config, few)
    assert re.match(
        rf"warning: the validation text has {n_documents} documents?\b.*; val loss will be noisy\. Raise", warning
    )


def test_only_a_causal_model_of_reversed_text_gets_a_warning():
    def warning(objective: str, bidirectional: bool) -> str:
        data = DataConfig(store_dir="x", seq_len=32, reuse_len=32, bidirectional=bidirectional)
        return backward_text_warning(PretrainConfig(data=data, objective=ObjectiveConfig(name=objective)))

    assert "Set data.bidirectional=false" in warning("causal", True)
    assert not warning("causal", False) and not warning("permutation", True)


def test_order_consistency_is_measured_on_demand_and_logged(store, tokenizer, monkeypatch):
    data = DataConfig(store_dir="x", seq_len=32, reuse_len=16)
    model = make_model(vocab_size=store.vocab_size, mem_len=16)
    results = [
        evaluator.Evaluator(
            PretrainConfig(data=data, eval=EvalConfig(batch_size=2, num_windows=3, order_consistency=count)),
            store,
            tokenizer,
            Comm(),
        ).evaluate(model)
        for count in (0, 5)
    ]
    assert dataclasses.replace(results[1], order_std=None) == results[0] and results[0].order_std is None
    sentences = evaluation.sample_sentences(store.validation, 5, 512)
    expected = order_consistency(model, tokenizer, sentences)
    assert results[1].order_std == expected.std_per_token > 0
    lines = []
    logger = mock.Mock(spec=[], _read_totals=lambda: (7, 0.0), _progress=mock.Mock(train_seconds=1.0))
    logger.write_line = lambda text, metrics: lines.append((text, metrics))
    for result in results:
        TrainLogger.write_evaluation(logger, result)
    (plain, plain_metrics), (text, metrics) = lines
    assert metrics == {**plain_metrics, "val_order_std": results[1].order_std}
    assert text == f"{plain}, {expected.std_per_token:.3f} nats per token between orders"


@pytest.mark.parametrize(("name", "prefix"), [*((name, "") for name in OBJECTIVES), ("causal", "Ba di. Ke lo.")])
def test_minimal_pairs_are_judged_as_by_the_scoring_command_and_logged(name, prefix, store, tokenizer, tmp_path):
    texts = [tokenizer.decode(ids) for ids in evaluation.sample_sentences(store.validation, 24, 12)]
    path = tmp_path / "pairs.jsonl"
    pairs = zip(texts[::2], texts[1::2], strict=True)
    path.write_text("".join(json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in pairs))
    reuse_len = 32 if name == "causal" else 16
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=reuse_len),
        objective=ObjectiveConfig(name=name),
        eval=EvalConfig(batch_size=2, num_windows=3, minimal_pairs=[str(path)], minimal_pairs_prefix=prefix),
    )
    model = make_model(vocab_size=store.vocab_size, mem_len=16, two_streams=OBJECTIVES[name].two_streams)
    result = evaluator.Evaluator(config, store, tokenizer, Comm()).evaluate(model)
    scores = score(model, tokenizer, texts, objective=name, prefix=prefix)
    n_correct = sum(
        good.log_likelihood > bad.log_likelihood for good, bad in zip(scores[::2], scores[1::2], strict=True)
    )
    assert result.minimal_pairs == pytest.approx(100 * n_correct / 12)
    lines = []
    logger = mock.Mock(spec=[], _read_totals=lambda: (7, 0.0), _progress=mock.Mock(train_seconds=1.0))
    logger.write_line = lambda text, metrics: lines.append((text, metrics))
    TrainLogger.write_evaluation(logger, result)
    ((text, metrics),) = lines
    assert metrics["val_minimal_pairs"] == result.minimal_pairs
    assert text.endswith(f", {result.minimal_pairs:.1f} % of minimal pairs")


def test_minimal_pairs_that_do_not_exist_are_refused(store, tokenizer):
    config = PretrainConfig(
        data=DataConfig(store_dir="x", seq_len=32, reuse_len=16), eval=EvalConfig(minimal_pairs=["none.jsonl"])
    )
    with pytest.raises(ValueError, match=r"eval.minimal_pairs: none.jsonl is invalid: there is no such file"):
        evaluator.Evaluator(config, store, tokenizer, Comm())


def test_a_prefix_of_minimal_pairs_without_tokens_is_refused(store, tokenizer, tmp_path):
    (tmp_path / "pairs.jsonl").touch()
    config = EvalConfig(minimal_pairs=[str(tmp_path / "pairs.jsonl")], minimal_pairs_prefix=" ")
    with pytest.raises(ValueError, match=r"eval.minimal_pairs_prefix=' ' is invalid: it needs at least one token"):
        evaluator.read_minimal_pairs(config, tokenizer)


@pytest.mark.parametrize(("name", "value"), [("causal", 5), ("denoising", 1), ("permutation", -1)])
def test_order_consistency_needs_a_permutation_model(name, value):
    with pytest.raises(ValueError) as error:
        PretrainConfig(objective=ObjectiveConfig(name=name), eval=EvalConfig(order_consistency=value))
    refused(error, "eval.order_consistency", value, r"Set (eval\.order_consistency=)?0")


@pytest.mark.parametrize("span", ["same_length", "exclude_self_slot"])
def test_a_limited_attention_span_needs_memory(span):
    with pytest.raises(ValueError, match=rf"attention_span.*{span}|{span}.*attention_span"):
        PretrainConfig(model=ModelConfig(mem_len=0, attention_span=span))
