"""Joint probabilities of fillings equal chains of separate passes; search, samples and ranking follow them."""

import math

import numpy as np
import pytest
import torch

from tests.unit.model.conftest import make_model
from xlpre.batch import HIDDEN_RANK, make_batch
from xlpre.inference import fill
from xlpre.inference.cloze import predict_blanks
from xlpre.inference.filling import ORDERS
from xlpre.model.memory import initial_memory
from xlpre.text.special_tokens import CLS, MASK, SEP
from xlpre.text.table_tokenizer import ByteTokenizer, WordTokenizer

WORDS = WordTokenizer(["a", "b", "c"])
V, N_SPECIAL = len(WORDS), 9
ROUNDING = 1e-4  # log-probabilities in float32, from matrix products of other shapes
TEXT = "a ____ b c ____ a ____"
BLANKS = [1, 4, 6]
OBJECTIVES = ["permutation", "denoising"]
ALL_TOKENS = [np.array([token]) for token in range(V)]


def build(objective, **settings):
    return make_model(objective == "permutation", vocab_size=V, **settings).eval()


@torch.no_grad()
def distributions(model, filled, blanks):
    """Return the distribution (V,) at each missing blank of TEXT, from a pass of its own that is written down token by token.

    Args:
        model: model.
        filled: tokens that are filled in, by position, in their order.
        blanks: positions of the blanks.
    """
    ids = [*WORDS.encode("a a b c a a a"), SEP, CLS]
    missing = [position for position in blanks if position not in filled]
    for position in blanks:
        ids[position] = filled.get(position, MASK)
    result = {}
    for target in missing:
        query, key = [1] * len(ids), [0] * len(ids)
        if model.backbone.two_streams:
            for rank, position in enumerate(filled, 1):
                query[position] = key[position] = rank
            for position in missing:
                query[position], key[position] = len(filled) + 1, HIDDEN_RANK
        batch = make_batch(
            torch.tensor([ids]),
            torch.tensor([query], dtype=torch.int32),
            torch.tensor([key], dtype=torch.int32),
            torch.tensor([[target]]),
            segment_ids=torch.tensor([[0] * (len(ids) - 1) + [2]]),
        )
        logits = model.logits(batch, initial_memory(model.config, 1, mem_len=0))[0]
        result[target] = logits[0, 0].double().log_softmax(-1).numpy()
    return result


def chain(model, order, tokens, blanks=BLANKS):
    """Joint log-probability of one filling, and its order, from separate passes."""
    filled, total, chosen = {}, 0.0, []
    while len(filled) < len(blanks):
        predicted = distributions(model, filled, blanks)
        if order == "confident":
            position = max(predicted, key=lambda p: predicted[p][N_SPECIAL:].max())
        elif order == "left-to-right":
            position = min(predicted)
        else:
            position = order[len(filled)]
        token = tokens[blanks.index(position)]
        total += predicted[position][token]
        filled[position] = token
        chosen.append(blanks.index(position))
    return total, tuple(chosen)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_joint_log_probability_equals_a_chain_of_separate_passes(objective, order):
    model = build(objective)
    options = [[np.array([9]), np.array([11])], [np.array([10])], [np.array([9]), np.array([3])]]
    (fillings,) = fill(model, WORDS, [TEXT], objective=objective, order=order, options=options)
    assert len(fillings) == 4
    for filling in fillings:
        tokens = [int(blank[0]) for blank in filling.tokens]
        steps = [BLANKS[i] for i in filling.order] if order == "random" else order
        expected, chosen = chain(model, steps, tokens)
        assert filling.log_probability == pytest.approx(expected, abs=ROUNDING) and filling.order == chosen
        independent = distributions(model, {}, BLANKS)
        expected = sum(independent[position][token] for position, token in zip(BLANKS, tokens, strict=True))
        assert filling.independent_log_probability == pytest.approx(expected, abs=ROUNDING)


def test_joint_log_probabilities_depend_on_the_order():
    model = build("permutation")
    options = [[np.array([9])], [np.array([10])], [np.array([11])]]
    values = [fill(model, WORDS, [TEXT], order="random", options=options, seed=seed)[0][0] for seed in range(6)]
    assert len({filling.order for filling in values}) > 1
    by_order = {filling.order: round(filling.log_probability, 4) for filling in values}
    assert len({*by_order.values()}) == len(by_order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_probabilities_of_all_fillings_of_two_blanks_sum_to_1(objective, order):
    model = build(objective)
    (fillings,) = fill(
        model, WORDS, ["a ____ b ____"], objective=objective, order=order, options=[ALL_TOKENS, ALL_TOKENS]
    )
    assert len(fillings) == V**2
    assert sum(math.exp(filling.log_probability) for filling in fillings) == pytest.approx(1, rel=1e-5)
    assert sum(math.exp(filling.independent_log_probability) for filling in fillings) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_beam_of_full_width_and_the_ranking_of_options_equal_exhaustive_search(objective, order):
    model = build(objective)
    settings = {"objective": objective, "order": order}
    (searched,) = fill(model, WORDS, [TEXT], beam=27, **settings)
    (ranked,) = fill(model, WORDS, [TEXT], options=[["a", "b", "c"]] * 3, **settings)
    assert [filling.answers for filling in searched] == [filling.answers for filling in ranked]
    values = [filling.log_probability for filling in searched]
    np.testing.assert_allclose(values, [filling.log_probability for filling in ranked], atol=ROUNDING)
    assert len(values) == 27 and values == sorted(values, reverse=True)
    assert searched[0].text == "a {} b c {} a {}".format(*searched[0].answers)


def test_lengths_are_compared_by_the_log_probability_per_piece():
    model = build("permutation")
    (fillings,) = fill(model, WORDS, ["a ____{1,2} b ____"], beam=1000)
    assert {filling.n_pieces for filling in fillings} == {2, 3} and len(fillings) == 9 + 27
    means = [filling.log_probability / filling.n_pieces for filling in fillings]
    assert means == sorted(means, reverse=True)
    (by_joint,) = fill(model, WORDS, ["a ____{1,2} b ____"], beam=1000, length_penalty=0)
    values = [filling.log_probability for filling in by_joint]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_joint_distribution_without_special_tokens(order, temperature):
    model, text, n = build("permutation"), "a ____ b ____ c", 4000
    (samples,) = fill(model, WORDS, [text], order=order, num_samples=n, temperature=temperature, seed=3)
    (ranked,) = fill(model, WORDS, [text], order=order, options=[["a", "b", "c"]] * 2, seed=3)
    steps = {filling.answers: [values[0] for values in filling.token_log_probabilities] for filling in ranked}
    scaled = {answers: np.array(values) / temperature for answers, values in steps.items()}
    first = {filling.answers: filling.order[0] for filling in ranked}

    def normalizer(answers, blank):
        """Probability of all words in a blank, given the blank before it in the order."""
        other = 1 - blank
        same = {a: v for a, v in scaled.items() if blank == first[answers] or a[other] == answers[other]}
        return sum(math.exp(v) for v in {a[blank]: values[blank] for a, values in same.items()}.values())

    expected = {
        answers: math.prod(math.exp(values[blank]) / normalizer(answers, blank) for blank in (0, 1))
        for answers, values in scaled.items()
    }
    assert len({*first.values()}) == 1 and sum(expected.values()) == pytest.approx(1)
    counts = dict.fromkeys(expected, 0)
    for sample in samples:
        counts[sample.answers] += 1
    chi_square = sum((counts[a] - n * p) ** 2 / (n * p) for a, p in expected.items())
    assert chi_square < 26.1  # 8 degrees of freedom, one in a thousand
    assert samples[0].log_probability == pytest.approx(sum(steps[samples[0].answers]), abs=ROUNDING)


def test_samples_draw_the_lengths_uniformly_and_repeat_with_the_seed():
    model = build("permutation")
    draw = {seed: fill(model, WORDS, ["a ____{1,3} b"], num_samples=300, seed=seed)[0] for seed in (1, 2)}
    lengths = np.bincount([sample.n_pieces for sample in draw[1]])
    assert (lengths[1:] > 70).all() and len(lengths) == 4
    again = fill(model, WORDS, ["a ____{1,3} b"], num_samples=300, seed=1)[0]
    assert [sample.text for sample in again] == [sample.text for sample in draw[1]]
    assert [sample.text for sample in again] != [sample.text for sample in draw[2]]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_single_blank_equals_the_independent_prediction(objective):
    model = build(objective)
    (fillings,) = fill(model, WORDS, ["a ____ b c"], objective=objective)
    (expected,) = predict_blanks(model, WORDS, "a ____ b c").predictions
    assert [filling.answers[0] for filling in fillings] == [word for word, _ in expected[:3]]
    for filling, (_, probability) in zip(fillings, expected, strict=False):
        assert math.exp(filling.log_probability) == pytest.approx(probability, rel=1e-4)
        assert filling.independent_log_probability == pytest.approx(filling.log_probability, abs=ROUNDING)


@pytest.mark.parametrize("text", ["____ a b", "a b ____", "____", "____ ____{2}"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_blanks_at_the_edges_are_filled_in(text, objective):
    (fillings,) = fill(build(objective), WORDS, [text], objective=objective, beam=3)
    assert len(fillings) == 3 and all("_" not in filling.text for filling in fillings)


@pytest.mark.parametrize("batch_tokens", [1, 40, 100_000])
def test_a_filling_does_not_depend_on_the_batch_size_or_other_texts(batch_tokens):
    model, texts = build("permutation"), [TEXT, "a ____{1,2} b", "____ c"]
    expected = [fill(model, WORDS, [text], order="confident")[0] for text in texts]
    actual = fill(model, WORDS, texts, order="confident", batch_tokens=batch_tokens)
    for one, other in zip(expected, actual, strict=True):
        assert [f.text for f in one] == [f.text for f in other]
        np.testing.assert_allclose([f.log_probability for f in one], [f.log_probability for f in other], atol=ROUNDING)


def test_text_around_a_blank_is_kept_and_an_answer_joins_the_word_before_it(tokenizer):
    model = make_model(vocab_size=len(tokenizer)).eval()
    pieces = tokenizer.pieces
    start = next(i for i, piece in enumerate(pieces) if piece[0] == "▁" and len(piece) > 2)
    inside = next(i for i, piece in enumerate(pieces[9:], 9) if piece.isalpha())
    options = [[np.array([start]), np.array([inside])]]
    (fillings,) = fill(model, tokenizer, ["Ba “di”   ____, bu."], options=options)
    by_answer = {filling.answers[0]: filling.text for filling in fillings}
    assert by_answer[pieces[start][1:]] == f"Ba “di”   {pieces[start][1:]}, bu."
    assert by_answer["-" + pieces[inside]] == f"Ba “di”{pieces[inside]}, bu."


def test_an_option_after_a_letter_continues_the_word(tokenizer):
    model = make_model(vocab_size=len(tokenizer)).eval()
    (spaced,), (joined,) = (fill(model, tokenizer, [text], options=[["di"]])[0] for text in ("Ba ____.", "Ba____."))
    assert spaced.tokens[0].tolist() == tokenizer.encode("di") and spaced.text == "Ba di."
    assert joined.text == "Badi." and not tokenizer.pieces[joined.tokens[0][0]].startswith("▁")


def test_missing_characters_have_a_given_number_of_pieces():
    model = make_model(vocab_size=265).eval()
    (fillings,) = fill(model, ByteTokenizer(), ["a ____{2} b"], beam=4)
    assert len(fillings) == 4
    for filling in fillings:
        assert filling.n_pieces == 2 and filling.text.startswith("a ") and filling.text.endswith(" b")
    (ranked,) = fill(model, ByteTokenizer(), ["a ____ b"], options=[["é", "abc"]])
    assert {filling.text: filling.n_pieces for filling in ranked} == {"a é b": 2, "a abc b": 3}
    with pytest.raises(
        ValueError, match=r"a blank is one token, not a word. Write the number of bytes, such as ____\{5\}"
    ):
        fill(model, ByteTokenizer(), ["a ____ b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "causal"}, "objective='causal' is invalid: the model has two streams"),
        ({"texts": TEXT}, "texts=.* must be a list of texts"),
        ({"texts": ["a b"]}, "it has no blank. Mark a missing word with ____"),
        ({"texts": ["a ____{0} b"]}, r"____\{0\} is invalid: the number of pieces .* Write ____\{3\} or ____\{1,4\}"),
        ({"texts": ["a ____{4,2} b"]}, r"____\{4,2\} is invalid"),
        ({"texts": ["a ____{1, } b"]}, r"____\{1, is invalid"),
        ({"texts": ["a ____{1-2} b"]}, r"____\{1-2\} is invalid"),
        ({"texts": ["a ____{3000} b"]}, "tokens is invalid: the limit is 2,048. Shorten it"),
        ({"texts": ["a ____{1,99} b ____{1,99}"]}, "9,801 combinations of lengths.* Write shorter ranges"),
        ({"order": "right-to-left"}, "order='right-to-left' is invalid: it must be one of left-to-right, confident, random"),
        ({"beam": 0}, "beam=0 is invalid"),
        ({"num_samples": 0}, "num_samples=0 is invalid"),
        ({"temperature": 0.0}, "temperature=0.0 is invalid: it must be above 0"),
        ({"temperature": math.inf}, "temperature=inf is invalid: it must be above 0 and finite"),
        ({"seed": -1}, "seed=-1 is invalid"),
        ({"options": [[], ["a"], ["a"]]}, "a blank has no answers"),
        ({"length_penalty": -1}, "length_penalty=-1 is invalid"),
        ({"options": [["a"]]}, "one list of answers for each blank, and .* has 3 blanks"),
        ({"options": ["a", "b", "c"]}, "one list of answers for each blank, and .* has 3 blanks"),
        ({"options": [["a"]] * 3, "num_samples": 2}, "num_samples=2 is invalid with options"),
        ({"options": [["a", " "]] * 3}, "options=' ' is invalid: it has no tokens"),
        ({"options": [["a", "x"]] * 3}, "options='x' is invalid: the vocabulary does not have a word of it"),
        ({"options": [[np.array([99])]] * 3}, "token id 99 is invalid: ids are 0 to 11"),
        ({"options": [[[[1], [2, 3]]]] * 3}, r"options=\[\[1\], \[2, 3\]\] is invalid: it must be a text or its token ids"),
        ({"options": [["a"] * 30] * 3}, "27,000 combinations, and the limit is 10,000"),
        ({"texts": ["a ____{2}"], "options": [["a"]]}, "invalid with options, which have their own lengths"),
        ({"tokenizer": WordTokenizer(["a"])}, "tokenizer is invalid: it has 10 pieces"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(settings, message):
    arguments = {"tokenizer": WORDS, "texts": [TEXT], **settings}
    with pytest.raises(ValueError, match=message):
        fill(build("permutation"), **arguments)


def test_a_causal_model_is_refused_with_the_commands_that_fit():
    with pytest.raises(ValueError, match=r"a causal model does not see the text after a blank.*generate.py.*score.py"):
        fill(build("causal"), WORDS, [TEXT], objective="causal")
