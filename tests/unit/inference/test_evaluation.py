"""Evaluation on held-out text: every token is predicted once, from the same context whatever the batch, and the numbers are as defined."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.batch import make_batch
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.data.store_builder import build_store
from xlpre.data.window_layout import DataConfig, build_windows
from xlpre.data_loader import batch_from_inputs
from xlpre.inference import evaluate, evaluation
from xlpre.inference.evaluation import (
    EVAL_SEED,
    EvalSettings,
    Evaluation,
    HeldOutText,
    build_evaluator,
    encode_text,
    fixed_objective,
    sample_sentences,
    stored_text,
)
from xlpre.inference.scoring import score
from xlpre.model.memory import initial_memory
from xlpre.text import special_tokens
from xlpre.text.corpus import TextConfig, read_documents
from xlpre.text.table_tokenizer import ByteTokenizer


@pytest.fixture
def text(tokenizer, documents) -> HeldOutText:
    return encode_text(tokenizer, documents[:10])


def build(tokenizer, objective, **shape):
    return make_model(objective == "permutation", vocab_size=len(tokenizer), **{"mem_len": 16, **shape}).eval()


def settings_of(objective, mem_len=16, **more):
    data = DataConfig(seq_len=16, reuse_len=16 if objective == "causal" else 8, bidirectional=False)
    return EvalSettings("causal" if objective == "causal" else "objective", data, mem_len, **more)


def losses_of(model, tokenizer, text, settings, objective):
    """Return the loss of an evaluation, as a sum over the text."""
    evaluator = build_evaluator(model, tokenizer, text, settings, objective)
    return evaluator.result([evaluator.evaluate_unit(unit) for unit in range(evaluator.n_units)])


def test_the_loss_of_a_causal_model_equals_one_pass_over_the_whole_text(tokenizer, text):
    model, ids = build(tokenizer, "causal", attention_span="same_length"), np.array(text.data.tokens, np.int64)
    result = evaluate(model, tokenizer, text, objective="causal", seq_len=len(ids), mem_len=0)
    inputs = torch.from_numpy(np.append(special_tokens.EOD, ids[:-1]))[None]
    places = torch.arange(len(ids))[None]
    batch = make_batch(inputs, (places + 1).int(), places.int(), places, targets=torch.from_numpy(ids)[None])
    with torch.no_grad():
        logits, _ = model.logits(batch, initial_memory(model.config, 1, mem_len=0))
    expected = torch.nn.functional.cross_entropy(logits[0], batch.targets[0])
    assert result.loss == pytest.approx(float(expected), rel=1e-5)
    assert result.accuracy == pytest.approx(float((logits[0].argmax(-1) == batch.targets[0]).double().mean()))
    assert result.n_targets == len(ids)
    # with limited attention, memory of the same length connects windows exactly in a model of one layer
    shallow = build(tokenizer, "causal", n_layer=1, attention_span="same_length", mem_len=16)
    whole, windows = (
        evaluate(shallow, tokenizer, text, objective="causal", seq_len=seq_len, mem_len=16) for seq_len in (len(ids), 8)
    )
    assert windows.loss == pytest.approx(whole.loss, rel=1e-5) and windows.n_targets == len(ids)


@pytest.mark.parametrize("objective", ["causal", "permutation", "denoising"])
@pytest.mark.parametrize(("mem_len", "cut"), [(0, False), (5, False), (16, False), (16, True), (40, False)])
def test_the_result_is_that_of_reading_the_text_in_one_row(tokenizer, text, monkeypatch, objective, mem_len, cut):
    model = build(tokenizer, objective)
    settings = settings_of(objective, mem_len, at_document_end="cut" if cut else "carry")
    monkeypatch.setattr(evaluation, "MIN_PART_LEN", 10**6)
    expected = losses_of(model, tokenizer, text, settings, objective)  # one part
    monkeypatch.setattr(evaluation, "MIN_PART_LEN", 0)
    for batch_size, max_parts in ((1, 5), (3, 5), (64, 20)):
        monkeypatch.setattr(evaluation, "MAX_PARTS", max_parts)
        result = losses_of(model, tokenizer, text, dataclasses.replace(settings, batch_size=batch_size), objective)
        assert result.n_targets == expected.n_targets and result.n_target_bytes == expected.n_target_bytes
        assert result.loss == pytest.approx(expected.loss, rel=2e-6), (batch_size, max_parts)
    if objective == "causal":
        assert expected.n_targets == len(text.data)
    without = losses_of(model, tokenizer, text, dataclasses.replace(settings, mem_len=0), objective)
    assert (without.loss == expected.loss) == (mem_len == 0)  # memory counts


def test_parts_that_read_too_few_windows_again_differ(tokenizer, text, monkeypatch):
    """The number of windows that are read again is needed, so that the test above could fail."""
    model, settings = build(tokenizer, "causal"), settings_of("causal")
    expected = losses_of(model, tokenizer, text, settings, "causal")
    monkeypatch.setattr(evaluation, "MIN_PART_LEN", 0)
    exact = build_evaluator(model, tokenizer, text, settings, "causal")
    assert exact._n_warm == 2
    exact._n_warm = 1
    few = exact.result([exact.evaluate_unit(unit) for unit in range(exact.n_units)])
    assert abs(few.loss / expected.loss - 1) > 1e-5


def test_the_targets_of_an_objective_are_those_of_its_windows(tokenizer, text):
    model, settings = build(tokenizer, "permutation"), settings_of("permutation", mem_len=0, partial_k=3.0)
    result = losses_of(model, tokenizer, text, settings, "permutation")
    objective = fixed_objective("permutation", 3.0, None, settings.data, tokenizer)
    losses = []
    for window in range((len(text.data) - settings.data.lookahead) // 8 + 1):
        rng = RowRng(EVAL_SEED, [window], 0)
        windows = build_windows([WindowLocation(DirectedText(text.data), 8 * window, 0)], settings.data, rng)
        batch = batch_from_inputs(windows, objective.build_inputs(windows, rng))
        with torch.no_grad():
            losses.append(float(model(batch, initial_memory(model.config, 1, mem_len=0))[0]))
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.n_targets == len(losses) * 5 and result.perplexity is None and result.bits_per_byte is None


@pytest.mark.parametrize(
    ("objective", "mode"), [("permutation", "pll"), ("permutation", "any-order"), ("denoising", "pll")]
)
def test_documents_are_scored_like_texts(tokenizer, documents, monkeypatch, objective, mode):
    monkeypatch.setattr(evaluation, "CHUNK_TOKENS", 40)
    text, model = encode_text(tokenizer, documents[:5]), build(tokenizer, objective)
    result = evaluate(
        model, tokenizer, text, mode, objective=objective, seq_len=34, n_orders=2, batch_size=2, mem_len=16
    )
    scores = score(model, tokenizer, text.documents(), mode, objective=objective, n_orders=2, window=32, mem_len=16)
    assert result.loss_sum == pytest.approx(-sum(x.log_likelihood for x in scores), rel=1e-5)
    assert result.n_targets == len(text.data) and result.accuracy is None


def test_the_numbers_are_as_defined():
    """Two lines in one document: 'ab ü' and 'c', whose six tokens have a total loss of 12 nats."""
    text = HeldOutText(None, n_bytes=5 + 1 + 1 + 1 + 1, n_characters=4 + 1 + 1 + 1 + 1, n_words=3, unknown_fraction=0.0)
    result = Evaluation(EvalSettings("causal", DataConfig(), 0), text, 12.0, 6, 9, 3)
    assert result.loss == 2 and result.perplexity == pytest.approx(math.exp(2)) and result.accuracy == 0.5
    assert result.bits_per_byte == pytest.approx(12 / math.log(2) / 9)
    assert result.bits_per_character == pytest.approx(12 / math.log(2) / 8)
    assert result.word_perplexity == pytest.approx(math.exp(4))


def test_spaces_that_no_token_predicts_do_not_count(tokenizer):
    model = build(tokenizer, "causal")
    spaced, plain = (
        evaluate(model, tokenizer, [text], objective="causal", seq_len=16)
        for text in ("   Ba  di.\n  Ke ba.", "Ba di.\nKe ba.")
    )
    assert spaced.to_json() == plain.to_json()


def test_bytes_characters_and_words_are_those_of_the_text(tokenizer):
    text = encode_text(tokenizer, [["Ba di ü", "c."], ["\N{SNOWMAN} ke."]])
    assert (text.n_bytes, text.n_characters, text.n_words) == (8 + 2 + 7 + 5, 7 + 2 + 5 + 5, 6)
    assert [int(tokens[-1]) for tokens in text.documents()] == [special_tokens.EOD] * 2
    assert text.data.document_ends[-1] == len(text.data) and 0 < text.unknown_fraction < 0.3


def test_a_store_counts_the_text_that_its_tokens_decode_to(store, tokenizer, documents):
    stored = stored_text(store, tokenizer)
    lines = [
        tokenizer.decode(ids)
        for ids in np.split(store.validation.tokens, np.flatnonzero(store.validation.tokens == special_tokens.EOP))
    ]
    validation = [document for document in documents if " ".join(document) in " ".join(lines)]
    again = encode_text(tokenizer, validation)
    np.testing.assert_array_equal(stored.data.tokens, again.data.tokens)
    for name in ("n_bytes", "n_characters", "n_words"):
        assert getattr(stored, name) == getattr(again, name), name


def test_bits_per_byte_of_bytes_are_bits_per_token(tmp_path):
    """As published for enwik8: all bytes of a verbatim text, and nothing else."""
    content = "Ba  di \N{SNOWMAN}\n\n ke\nlo."
    (tmp_path / "text").write_text(content, "utf-8")
    tokenizer = ByteTokenizer()
    (tmp_path / "copy").write_text(content, "utf-8")
    config = TextConfig(source=str(tmp_path / "text"), line_type="verbatim", val_source=str(tmp_path / "copy"))
    text = encode_text(tokenizer, read_documents(config), line_type="verbatim")
    stored = stored_text(build_store(tmp_path / "store", config, tokenizer), tokenizer)
    model = make_model(two_streams=False, vocab_size=len(tokenizer), mem_len=8)
    for source in (text, stored):
        result = evaluate(model, tokenizer, source, objective="causal", seq_len=8)
        assert result.n_targets == source.n_bytes == len(content.encode()) and source.n_characters == len(content)
        assert result.bits_per_byte == pytest.approx(result.loss / math.log(2)) and source.n_words == 5


def test_bytes_that_are_not_utf8_count_once(tmp_path):
    for name in ("text", "copy"):
        (tmp_path / name).write_bytes("größe für alle".encode("latin-1"))
    config = TextConfig(source=str(tmp_path / "text"), line_type="verbatim", val_source=str(tmp_path / "copy"))
    stored = stored_text(build_store(tmp_path / "store", config, ByteTokenizer()), ByteTokenizer())
    assert (stored.n_bytes, stored.n_characters, stored.n_words) == (14, 14, 3)


def test_a_limit_keeps_whole_documents(store, tokenizer, documents):
    lengths = [len(tokenizer.encode_document(document)[0]) for document in documents[:10]]
    for limit in (1, lengths[0], lengths[0] + 1, 10**9):
        n_kept = min(10, int(np.searchsorted(np.cumsum(lengths), limit)) + 1)
        text = encode_text(tokenizer, documents[:10], max_tokens=limit)
        assert [len(tokens) for tokens in text.documents()] == lengths[:n_kept]
    stored = stored_text(store, tokenizer, max_tokens=100)
    assert len(stored.data) == store.validation.document_ends[len(stored.data.document_ends) - 1] >= 100
    assert stored.data.sentence_ends[-1] == len(stored.data)


def test_sentences_are_sampled_without_special_tokens(store):
    sentences = sample_sentences(store.validation, 12, 20)
    assert len(sentences) == 12 and all(5 <= len(s) <= 20 and s.min() > special_tokens.EOP for s in sentences)
    assert sample_sentences(store.validation, 0, 20) == []


@pytest.mark.parametrize(
    ("objective", "arguments", "message"),
    [
        (
            "permutation",
            {"mode": "causal"},
            r"mode=causal is invalid for a permutation model: .* Choose any-order with one",
        ),
        (
            "denoising",
            {"mode": "any-order"},
            r"mode=any-order is invalid for a denoising model: .* Choose objective or pll",
        ),
        ("causal", {"mode": "pll"}, r"mode=pll is invalid for a causal model: .* Choose causal\."),
        ("permutation", {"seq_len": 9}, r"seq_len=9 is invalid: it must be at least 10"),
        ("causal", {"mem_len": -1, "seq_len": 16}, r"mem_len=-1 is invalid: it must be at least 0"),
        ("permutation", {"seq_len": 5000}, r"has [\d,]+ tokens, but a window of seq_len=5000 needs 4,998\. Give more"),
        ("causal", {"texts": ["", "\n"]}, r"the text is invalid: it is empty"),
        ("causal", {"texts": "Ba di."}, r"texts='Ba di\.' is invalid: it must be a list"),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(tokenizer, objective, arguments, message):
    model = build(tokenizer, objective)
    with pytest.raises(ValueError, match=message):
        evaluate(model, tokenizer, **{"texts": ["Ba di.\nKe lo."], "objective": objective, **arguments})
