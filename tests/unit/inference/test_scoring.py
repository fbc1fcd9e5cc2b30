"""Log-likelihoods equal those of separate passes, and probabilities sum to 1."""

import itertools

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.batch import make_batch
from xlpre.inference import order_consistency, score
from xlpre.inference.batches import masked_batch
from xlpre.inference.scoring import sample_order
from xlpre.model.memory import initial_memory
from xlpre.text.special_tokens import CLS, EOD, MASK, SEP

V = 12
ROUNDING = 1e-4  # sums of log-probabilities in float32, from matrix products of other shapes
MODES = [("permutation", "any-order"), ("permutation", "pll"), ("denoising", "pll"), ("causal", "causal")]


class Ids:
    """Vocabulary of texts that are given as token ids."""

    def __init__(self, size=V):
        self.size = size

    def __len__(self):
        return self.size

    def decode(self, ids):
        return " ".join(map(str, ids))


def build(objective, **settings):
    return make_model(objective == "permutation", vocab_size=V, **settings).eval()


def random_texts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(9, V, length) for length in lengths]


@torch.no_grad()
def log_probability(model, ids, query_rank, key_rank, position, token, segments):
    """Log-probability of a token at one position, from a pass of its own."""
    batch = make_batch(
        torch.tensor(ids)[None],
        torch.tensor(query_rank, dtype=torch.int32)[None],
        torch.tensor(key_rank, dtype=torch.int32)[None],
        torch.tensor([[position]]),
        segment_ids=torch.tensor(segments)[None],
    )
    logits, _ = model.logits(batch, initial_memory(model.config, 1, mem_len=0))
    return float(logits[0, 0].double().log_softmax(-1)[token])


def test_an_order_equals_one_pass_per_token_in_which_later_tokens_are_unknown():
    model, (text,) = build("permutation"), random_texts(5)
    scores = score(model, Ids(), [text], "any-order", n_orders=3)[0].token_log_likelihoods
    for index in range(3):
        order = sample_order(5, index, seed=1, window=512)
        for position in range(5):
            ids = [*np.where(order < order[position], text, MASK), SEP, CLS]
            ranks = [*order + 1, 0, 0]
            expected = log_probability(model, ids, [*order + 1, 1, 1], ranks, position, text[position], [0] * 6 + [2])
            assert scores[index, position] == pytest.approx(expected, abs=ROUNDING)


def test_the_first_order_runs_from_left_to_right_and_equal_lengths_share_the_others():
    assert sample_order(5, 0, seed=7, window=3).tolist() == [0, 1, 2, 0, 1]
    orders = [sample_order(6, index, seed=1, window=512).tolist() for index in range(4)]
    assert all(sorted(order) == [*range(6)] for order in orders)
    assert orders[1] != orders[2] and orders[1] != sample_order(6, 1, seed=2, window=512).tolist()


@pytest.mark.parametrize("window", [512, 2], ids=["one window", "two windows"])
@pytest.mark.parametrize(("objective", "mode"), [("permutation", "any-order"), ("causal", "causal")])
def test_the_probabilities_of_all_texts_of_three_tokens_sum_to_1(objective, mode, window):
    model = build(objective, mem_len=4)
    texts = [np.array(text) for text in itertools.product(range(V), repeat=3)]
    scores = score(model, Ids(), texts, mode, objective=objective, n_orders=4, window=window)
    by_order = np.stack([text.by_order for text in scores])
    assert by_order.shape == (V**3, 4 if mode == "any-order" else 1)
    np.testing.assert_allclose(np.exp(by_order).sum(0), 1, rtol=1e-5)
    if mode == "any-order":
        assert len({tuple(np.round(row, 4)) for row in by_order.T}) > 1  # the orders differ


@pytest.mark.parametrize("objective", ["permutation", "denoising"])
@pytest.mark.parametrize("window", [512, 3], ids=["one window", "two windows"])
def test_pll_gives_a_distribution_at_each_position_that_does_not_depend_on_its_token(objective, window):
    model, (text,) = build(objective, mem_len=4), random_texts(5)
    for position in range(5):
        variants = [np.where(np.arange(5) == position, token, text) for token in range(V)]
        scores = score(model, Ids(), variants, "pll", objective=objective, window=window)
        assert np.exp([s.token_log_likelihoods[0, position] for s in scores]).sum() == pytest.approx(1, rel=1e-5)


@torch.no_grad()
def test_pll_equals_one_cloze_per_token():
    model, (text,) = build("permutation"), random_texts(6)
    losses = [
        float(model(masked_batch(text, [position]), initial_memory(model.config, 1, mem_len=0))[0])
        for position in range(6)
    ]
    actual = score(model, Ids(), [text], "pll")[0].token_log_likelihoods[0]
    np.testing.assert_allclose(actual, np.negative(losses), atol=ROUNDING)


def test_a_causal_score_equals_one_pass_per_token_after_eod():
    model, (text,) = build("causal"), random_texts(5)
    actual = score(model, Ids(), [text], objective="causal")[0].token_log_likelihoods[0]
    for position in range(5):
        ids = [EOD, *text[:position]]
        ranks = np.arange(position + 1)
        expected = log_probability(model, ids, ranks + 1, ranks, position, text[position], [0] * (position + 1))
        assert actual[position] == pytest.approx(expected, abs=ROUNDING)


def test_windows_with_enough_memory_give_the_causal_scores_of_one_window():
    model, texts = build("causal"), random_texts(11, 9, 7, 2)
    expected = score(model, Ids(), texts, objective="causal")
    actual = score(model, Ids(), texts, objective="causal", window=3, mem_len=12)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.token_log_likelihoods, b.token_log_likelihoods, atol=ROUNDING)


@pytest.mark.parametrize(("objective", "mode"), MODES)
@pytest.mark.parametrize("settings", [{}, {"positions": "learned", "n_positions": 20}], ids=["relative", "learned"])
def test_a_score_does_not_depend_on_the_other_texts_or_the_batch_size(objective, mode, settings):
    model = build(objective, mem_len=4, **settings)
    texts = random_texts(3, 1, 9, 3, 5, 8)
    texts.append(texts[0])
    single = [score(model, Ids(), [text], mode, objective=objective, window=4)[0] for text in texts]
    for batch_tokens in (1, 60, 100_000):
        together = score(model, Ids(), texts, mode, objective=objective, window=4, batch_tokens=batch_tokens)
        for a, b in zip(together, single, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.token_log_likelihoods, b.token_log_likelihoods, atol=ROUNDING)
    assert together[0].log_likelihood == together[-1].log_likelihood


@pytest.mark.parametrize(("objective", "mode"), MODES)
@pytest.mark.parametrize(
    ("window", "n_prefix", "settings"),
    [
        (512, 3, {}),
        (512, 1, {}),
        (4, 3, {}),
        (512, 3, {"attention_span": "same_length", "mem_len": 2}),
        (512, 3, {"positions": "sinusoidal"}),
    ],
    ids=str,
)
def test_a_text_after_a_prefix_has_the_scores_of_the_end_of_one_longer_text(
    objective, mode, window, n_prefix, settings
):
    model, (prefix, *texts) = build(objective, **settings), random_texts(n_prefix, 2, 5, 2)
    arguments = {"objective": objective, "n_orders": 1, "window": window, "mem_len": 8}
    after_prefix = score(model, Ids(), texts, mode, prefix=prefix, **arguments)
    joined = score(model, Ids(), [np.concatenate([prefix, text]) for text in texts], mode, **arguments)
    for text, actual, expected in zip(texts, after_prefix, joined, strict=True):
        assert actual.tokens.tolist() == text.tolist()
        assert actual.token_log_likelihoods == pytest.approx(expected.token_log_likelihoods[:, n_prefix:], abs=ROUNDING)


def test_no_text_has_no_score():
    model = make_model(two_streams=False, vocab_size=V)
    assert score(model, Ids(), [], objective="causal", prefix=np.array([8, 9])) == []


def test_a_prefix_comes_first_in_every_order():
    model, (prefix,) = build("permutation"), random_texts(3)
    assert sample_order(7, 1, seed=1, window=512, n_prefix=3)[:3].tolist() == [0, 1, 2]
    assert (sample_order(7, 1, 1, 512, 3)[3:] == 3 + sample_order(4, 1, 1, 512)).all()
    assert [sorted(sample_order(7, 1, 1, 4, n)[4:]) for n in (0, 3, 5)] == [[0, 1, 2]] * 3
    texts = [np.array(ids) for ids in itertools.product(range(V), repeat=2)]
    scores = score(model, Ids(), texts, "any-order", prefix=prefix, n_orders=3)
    total = np.logaddexp.reduce([x.by_order for x in scores])
    assert total == pytest.approx(0, abs=ROUNDING)


def test_a_score_has_mean_and_spread_over_orders_and_counts_unknown_tokens():
    model = build("permutation")
    (text,) = score(model, Ids(), [np.array([9, 0, 10, 0])], "any-order", n_orders=5)
    assert text.n_tokens == 4 and text.n_unknown == 2 and text.text == "9 0 10 0"
    assert text.log_likelihood == pytest.approx(np.mean(text.by_order))
    assert text.std == pytest.approx(np.std(text.by_order, ddof=1)) and text.std > 0
    assert score(model, Ids(), [np.array([9])], "any-order", n_orders=1)[0].std is None


def test_order_consistency_is_the_spread_per_token():
    model, texts = build("permutation"), random_texts(4, 7)
    scores = score(model, Ids(), texts, "any-order", n_orders=6, seed=3)
    actual = order_consistency(model, Ids(), texts, n_orders=6, seed=3)
    assert actual.std_per_token == pytest.approx(sum(s.std for s in scores) / 11) and actual.n_tokens == 11
    # one token has only one order
    assert order_consistency(model, Ids(), random_texts(1)).std_per_token == pytest.approx(0, abs=1e-6)


def test_text_is_encoded_and_progress_is_reported(tokenizer):
    model = make_model(vocab_size=len(tokenizer)).eval()
    progress = []
    scores = score(
        model,
        tokenizer,
        ["Ba di bu.", "Ba.", "\N{SNOWMAN}"],
        "pll",
        batch_tokens=8,
        report_progress=lambda *n: progress.append(n),
    )
    assert [s.tokens.tolist() for s in scores[:2]] == [tokenizer.encode("Ba di bu."), tokenizer.encode("Ba.")]
    assert scores[2].n_unknown == 1 and scores[0].n_unknown == 0
    total = sum(s.n_tokens for s in scores)
    assert progress[-1] == (total, total) and progress == sorted(progress) and len(progress) > 1
    assert score(model, tokenizer, []) == []


@pytest.mark.parametrize(
    ("objective", "settings", "message"),
    [
        ("permutation", {"mode": "causal"}, "mode=causal is invalid for a permutation model.* Choose any-order with one order"),
        ("denoising", {"mode": "any-order"}, "mode=any-order is invalid for a denoising model.* Choose pll"),
        ("causal", {"mode": "pll"}, "mode=pll is invalid for a causal model.* Choose causal"),
        ("permutation", {"mode": "mlm"}, "mode=mlm is invalid for a permutation model: its modes are pll, any-order"),
        ("permutation", {"n_orders": 0}, "n_orders=0 is invalid"),
        ("permutation", {"window": 0}, "window=0 is invalid"),
        ("permutation", {"texts": [np.array([9]), np.array([], int)]}, r"texts\[1\]=.* is invalid: a text needs at least one token"),
        ("permutation", {"texts": [[[1], [2, 3]]]}, r"texts\[0\]=.* is invalid: it must be a text or its token ids"),
        ("permutation", {"texts": "abc"}, "texts='abc' is invalid: it must be a list of texts"),
        ("permutation", {"tokenizer": Ids(V + 1)}, "tokenizer is invalid: it has 13 pieces, but the model has vocab_size 12"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_with_the_mode_that_fits(objective, settings, message):
    arguments = {"tokenizer": Ids(), "texts": random_texts(2), "objective": objective, **settings}
    with pytest.raises(ValueError, match=message):
        score(build(objective), **arguments)


def test_a_model_with_one_stream_needs_its_objective():
    with pytest.raises(
        ValueError,
        match="objective=None is invalid: the model has one stream. Set objective to 'denoising' or 'causal'",
    ):
        score(build("causal"), Ids(), random_texts(2))
    with pytest.raises(
        ValueError, match="objective='causal' is invalid: the model has two streams. Set objective to 'permutation'"
    ):
        score(build("permutation"), Ids(), random_texts(2), objective="causal")


@pytest.mark.parametrize("n_orders", [1, 0])
def test_a_spread_needs_two_orders_and_a_text(n_orders):
    with pytest.raises(ValueError, match=f"n_orders={n_orders} is invalid"):
        order_consistency(build("permutation"), Ids(), random_texts(2), n_orders)
    with pytest.raises(ValueError, match="texts=.. is invalid"):
        order_consistency(build("permutation"), Ids(), [])
