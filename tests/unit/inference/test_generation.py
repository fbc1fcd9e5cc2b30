"""Generated tokens come from the logits of the whole text, and texts, samples and stop strings are independent of each other."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conftest import refused
from tests.unit.model.conftest import make_model
from xlpre.batch import HIDDEN_RANK, make_batch
from xlpre.inference import GenerationConfig, generate, generation
from xlpre.inference.generation import _Output, build_reader, encode_prompt, hides_space, piece_bytes
from xlpre.inference.token_readers import CausalReader, PermutationReader
from xlpre.inference.token_sampling import TokenSampler
from xlpre.model.memory import initial_memory
from xlpre.text.special_tokens import EOD, EOP, MASK
from xlpre.text.table_tokenizer import ByteTokenizer, CharacterTokenizer

V = 40
ROUNDING = {"atol": 2e-5, "rtol": 1e-4}  # matrix products of other shapes in float32


@pytest.fixture(autouse=True)
def without_gradient():
    with torch.no_grad():
        yield


def build(objective, vocab_size=V, **settings):
    return make_model(objective == "permutation", vocab_size=vocab_size, **settings).eval()


def random_text(length, rows=2):
    return torch.from_numpy(np.random.default_rng(0).integers(9, V, (rows, length)))


def read(reader, text, n_prompt):
    """Return the logits (B, T - n_prompt + 1, V) of all tokens after the prompt, and of the token after the text."""
    logits = [reader.start(text[:, :n_prompt]), *(reader.step(token) for token in text[:, n_prompt:].unbind(1))]
    return torch.stack(logits, dim=1)


def uncached_logits(model, text, n_context):
    """Return the logits (B, V) of the token after a text. Its first tokens see each other, the others those before them."""
    rows, length = text.shape
    ranks = torch.arange(length + 1, dtype=torch.int32).sub(n_context - 1).clamp(min=0).repeat(rows, 1)
    key_rank = ranks.clone()
    if model.backbone.two_streams:
        query_rank, target = ranks.clone(), length
        query_rank[:, :n_context] = 1
        key_rank[:, -1] = HIDDEN_RANK
        text = torch.cat([text, torch.full_like(text[:, :1], MASK)], 1)
    else:
        ranks, key_rank, target = ranks[:, :-1], key_rank[:, :-1], length - 1
        query_rank = ranks + 1
    batch = make_batch(text, query_rank, key_rank, torch.full((rows, 1), target))
    return model.logits(batch, initial_memory(model.config, rows, mem_len=0))[0][:, 0]


@pytest.mark.parametrize("positions", ["relative", "sinusoidal"])
@pytest.mark.parametrize("window", [3, 128])
def test_cached_logits_of_a_causal_model_equal_uncached_ones(positions, window):
    model, text = build("causal", positions=positions), random_text(13)
    if (
        positions == "sinusoidal"
    ):  # positions count from the end of the window, so cached states differ in deeper layers
        model = build("causal", positions=positions, n_layer=1)
    actual = read(CausalReader(model, 16, window), text, 7)
    for n in range(7, 14):
        torch.testing.assert_close(actual[:, n - 7], uncached_logits(model, text[:, :n], 1), **ROUNDING)


@pytest.mark.parametrize("objective", ["causal", "permutation"])
def test_a_reader_forgets_its_text_when_it_starts_again(objective):
    model, text = build(objective), random_text(13)
    reader = CausalReader(model, 16, 4) if objective == "causal" else PermutationReader(model, 16, 4, 3)
    first, second = (read(reader, part, 5) for part in (text, text.flip(1)))
    torch.testing.assert_close(read(reader, text, 5), first, rtol=0, atol=0)
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize("settings", [{"positions": "sinusoidal"}, {"positions": "learned", "n_positions": 20}])
def test_a_model_with_absolute_positions_does_not_generate(settings):
    with pytest.raises(ValueError, match=f"model.positions={settings['positions']} is invalid for generation"):
        build_reader(build("causal", **settings), "causal", GenerationConfig())


def test_cached_logits_of_a_permutation_model_equal_those_of_a_factorization_order_from_left_to_right():
    model, text, n_prompt, free_len = build("permutation"), random_text(15), 6, 4
    actual = read(PermutationReader(model, 0, 32, free_len), text, n_prompt)
    for n in range(n_prompt, 16):
        n_context = n_prompt + (n - n_prompt) // free_len * free_len
        torch.testing.assert_close(actual[:, n - n_prompt], uncached_logits(model, text[:, :n], n_context), **ROUNDING)


@pytest.mark.parametrize("free_len", [1, 3])
def test_a_long_text_of_a_permutation_model_moves_into_memory(free_len):
    # with one layer, keys are token embeddings, so it does not matter in which window a token was read
    model, text = build("permutation", n_layer=1), random_text(21)
    actual = read(PermutationReader(model, 32, 6, free_len), text, 14)
    for n in range(14, 22):
        torch.testing.assert_close(actual[:, n - 14], uncached_logits(model, text[:, :n], n), **ROUNDING)
    short = read(PermutationReader(model, 3, 6, free_len), text, 14)
    assert not torch.allclose(short, actual, atol=1e-3)


def test_a_causal_model_sees_exactly_the_tokens_in_memory_in_a_cache_of_constant_size():
    model, text = build("causal", n_layer=1), random_text(30)
    reader = CausalReader(model, 5, 4)
    actual = read(reader, text, 12)
    assert reader._cache.mem_len == 5
    assert len(reader._cache.window_terms) <= 2  # of the prompt's windows and of single tokens
    for n in range(13, 31):
        torch.testing.assert_close(actual[:, n - 12], uncached_logits(model, text[:, n - 6 : n], 1), **ROUNDING)


@pytest.mark.parametrize("objective", ["causal", "permutation"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_sample_depends_neither_on_other_samples_nor_on_other_prompts(objective, temperature, tokenizer):
    model = build(objective, len(tokenizer), mem_len=8)
    config = GenerationConfig(12, temperature, num_samples=3, free_len=3)
    prompts = ["Ba di bu.", "", "Ke lo bu mi.", "Ba di bu.", "Lo di ke."]
    together = generate(model, tokenizer, prompts, config, objective=objective)
    assert [c.prompt for c in together] == [prompt for prompt in prompts for _ in range(3)]
    one = dataclasses.replace(config, num_samples=1)
    for index, prompt in enumerate(prompts):
        alone = generate(model, tokenizer, [prompt], config, objective=objective)
        assert alone == together[3 * index : 3 * index + 3]
        assert alone[:1] == generate(model, tokenizer, [prompt], one, objective=objective)
    n_different = len({tuple(c.tokens) for c in together[:3]})
    assert n_different == (1 if temperature == 0 else 3)
    if temperature:
        other = generate(model, tokenizer, prompts, dataclasses.replace(config, seed=2), objective=objective)
        assert other != together and torch.initial_seed() == 0  # the global generator is not used


def test_greedy_tokens_are_the_most_likely_ones_after_the_whole_text(tokenizer):
    model = build("causal", len(tokenizer), mem_len=64)
    (output,) = generate(model, tokenizer, ["Ba di bu."], GenerationConfig(10, temperature=0), objective="causal")
    text = torch.from_numpy(encode_prompt(tokenizer, "Ba di bu."))[None]
    for token in output.tokens:
        logits = uncached_logits(model, text, 1)
        logits[:, [*range(EOD)]] = -torch.inf
        assert logits.argmax() == token
        text = torch.cat([text, torch.tensor([[token]])], 1)


def test_samples_have_the_probabilities_of_the_softmax():
    logits = torch.tensor([[9.0] * 9 + [1.0, 0.0, 2.0, -1.0, -torch.inf]])
    logits[:, [EOD, EOP]] = torch.tensor([0.5, 0.2])
    n = 4000
    sampler = TokenSampler(torch.zeros(n, 1, dtype=torch.int64), [(3, i) for i in range(n)], 14, 0.8, None, 1, 1)
    counts = sampler.next_tokens(logits.expand(n, -1)).bincount(minlength=14)
    logits[:, :EOD] = -torch.inf
    p = (logits[0] / 0.8).softmax(0)
    assert ((counts - n * p).abs() <= 4 * (n * p * (1 - p)).sqrt()).all()


def test_special_tokens_are_not_generated_but_end_the_document_or_the_line(tokenizer):
    model, n_special = build("causal", len(tokenizer), mem_len=8), 9
    model.lm_head.bias[:n_special] += 1000
    for token in (EOD, EOP):
        model.lm_head.bias[token] -= 1000
    outputs = generate(model, tokenizer, ["Ba di."], GenerationConfig(40, num_samples=8), objective="causal")
    assert {token for c in outputs for token in c.tokens if token < n_special} <= {EOD, EOP}
    model.lm_head.bias[EOP] += 2000
    (lines,) = generate(model, tokenizer, ["Ba di."], GenerationConfig(3), objective="causal")
    assert lines.text == "\n\n\n" and lines.tokens == [EOP] * 3 and lines.finish_reason == "length"
    model.lm_head.bias[EOD] += 4000
    (end,) = generate(model, tokenizer, ["Ba di."], GenerationConfig(3), objective="causal")
    assert end.text == "" and end.tokens == [EOD] and end.finish_reason == "eod"
    (document,) = generate(model, tokenizer, [""], GenerationConfig(3), objective="causal")
    assert document.text and document.tokens[0] > EOP and document.tokens[1:] == [EOD]


def test_padding_is_a_document_before_the_prompt(tokenizer):
    model = build("permutation", len(tokenizer), mem_len=8)
    config = GenerationConfig(8, temperature=0, padding="Ke lo mi.")
    (padded,) = generate(model, tokenizer, ["Ba di"], config)
    ids = np.concatenate([tokenizer.encode("Ke lo mi."), encode_prompt(tokenizer, "Ba di")])
    (expected,) = generate(model, tokenizer, [ids], GenerationConfig(8, temperature=0))
    assert padded.tokens == expected.tokens and padded.text == expected.text and padded.prompt == "Ba di"
    (plain,) = generate(model, tokenizer, ["Ba di"], GenerationConfig(8, temperature=0))
    assert plain.tokens != padded.tokens


def test_words_of_the_padding_are_not_repetitions(tokenizer, monkeypatch):
    seen = []
    monkeypatch.setattr(
        generation, "TokenSampler", lambda prompts, *rest: seen.append(prompts) or TokenSampler(prompts, *rest)
    )
    generate(build("permutation", len(tokenizer)), tokenizer, ["Ba di"], GenerationConfig(1, padding="Ke lo mi."))
    assert seen[0].tolist() == [encode_prompt(tokenizer, "Ba di").tolist()]


def test_the_text_of_tokens_is_that_of_the_tokenizer(tokenizer):
    pieces, rng = piece_bytes(tokenizer), np.random.default_rng(0)
    for at_line_start in (True, False):
        output, tokens = _Output(pieces, at_line_start, (), None), rng.integers(9, len(tokenizer), 50)
        if not at_line_start:
            tokens = np.insert(tokens, 0, np.flatnonzero(tokenizer.starts_word)[50])
        for token in tokens.tolist():
            output.append(token)
        assert output.text.removeprefix(" ") == tokenizer.decode(tokens).removeprefix(" ")
    assert encode_prompt(tokenizer, "").tolist() == [EOD]
    first, second = tokenizer.encode("Ba di."), tokenizer.encode("Ke.")
    assert encode_prompt(tokenizer, "Ba di.\n\nKe.").tolist() == [EOD, *first, EOP, *second]
    assert encode_prompt(tokenizer, "Ba di.\nKe.\n").tolist() == [EOD, *first, EOP, *second, EOP]
    assert encode_prompt(tokenizer, np.array([9, 10])).tolist() == [EOD, 9, 10]


def test_a_prompt_that_ends_with_a_space_gets_no_second_one(tokenizer):
    ids = encode_prompt(tokenizer, "ba di ")
    output = _Output(piece_bytes(tokenizer), hides_space(tokenizer, ids, "ba di "), (), None)
    for token in tokenizer.encode("bu ba"):
        output.append(token)
    assert output.text == "bu ba"


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_text_of_bytes_and_characters_is_kept_as_it_is(kind):
    text = " A  b\n\n\u00fcber <0x0A> \u4e2d\U0001f600.\n"
    tokenizer = ByteTokenizer() if kind == "bytes" else CharacterTokenizer(["\n", *sorted({*text} - {"\n"})])
    ids, parts = encode_prompt(tokenizer, text), []
    assert ids[0] == EOD and tokenizer.decode(ids[1:]) == text
    output = _Output(piece_bytes(tokenizer), hides_space(tokenizer, ids[:1], ""), (), parts.append)
    for token in ids[1:].tolist():
        output.append(token)
    assert output.text == "".join(parts) == text
    if kind == "bytes":
        output.append(ids[-1] - 10 + 0xC3)  # the first byte of a character
        output.finish("length")
        assert output.text == text + "\ufffd"


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        ([" a", "b", "c", "d"], ["bc"], " a", "stop"),
        ([" a", "b", "cab", "d"], ["ca", "bca"], " a", "stop"),
        ([" ab", "ab", "ac", "d"], ["abac"], " ab", "stop"),
        ([" a", "b", "c"], ["bd", "cc"], " abc", "length"),
        ([" a", "b\n", "c"], ["\n"], " ab", "stop"),
        ([" a b a b"], ["b"], " a ", "stop"),
    ],
)
def test_stop_strings_end_the_text_across_tokens_and_are_never_reported(tokens, stop, text, reason):
    parts = []
    output = _Output([b""] * 9 + [token.encode() for token in tokens], False, stop, parts.append)
    for token in range(9, 9 + len(tokens)):
        output.append(token)
        assert text.startswith("".join(parts))
    output.finish("length")
    assert (output.text, output.finish_reason, "".join(parts)) == (text, reason, text)


def test_parts_of_the_text_are_reported_as_soon_as_they_are_final():
    parts = []
    output = _Output([b""] * 9 + [b"x", b"a", b"b", b"y"], False, ["abc"], parts.append)
    for token in (9, 10, 11, 12):
        output.append(token)
    assert parts == ["x", "aby"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("num_samples", 0),
        ("mem_len", 0),
        ("free_len", 0),
        ("seed", -1),
        ("temperature", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused(key, value):
    with pytest.raises(ValueError) as error:
        GenerationConfig(**{key: value})
    refused(error, key, value)


def test_a_tiny_temperature_is_greedy(tokenizer):
    model = build("causal", len(tokenizer))
    tiny, greedy = (
        generate(model, tokenizer, ["Ba."], GenerationConfig(6, temperature=t), objective="causal") for t in (1e-40, 0)
    )
    assert tiny[0].tokens == greedy[0].tokens


def test_models_and_prompts_that_do_not_fit_are_refused(tokenizer):
    model = build("causal", len(tokenizer))
    with pytest.raises(ValueError, match=r"fill\.py"):
        generate(model, tokenizer, ["Ba."], objective="denoising")
    with pytest.raises(ValueError, match="has one stream"):
        generate(model, tokenizer, ["Ba."])
    with pytest.raises(ValueError, match="must be a list"):
        generate(model, tokenizer, "Ba.", objective="causal")
    with pytest.raises(ValueError, match="a text or its token ids"):
        generate(model, tokenizer, [[0.5]], objective="causal")
    with pytest.raises(ValueError, match="300 pieces, but the model has vocab_size 40"):
        generate(build("causal"), tokenizer, ["Ba."], objective="causal")
    with pytest.raises(ValueError, match="batch_size=0 is invalid"):
        generate(model, tokenizer, ["Ba."], objective="causal", batch_size=0)
    with pytest.raises(ValueError, match="temperature=inf is invalid: it must be finite"):
        GenerationConfig(temperature=float("inf"))
    with pytest.raises(ValueError, match="stop='x' is invalid"):
        GenerationConfig(stop="x")
