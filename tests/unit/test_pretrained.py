"""`xlpre.load`: the methods give the results of the functions, and calls that do not fit the model are refused."""

import dataclasses

import numpy as np
import pytest
import torch

import xlpre
from tests.conftest import TINY
from xlpre import inference
from xlpre.conversion.model_folder import ModelFolder, save_folder
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.registry import OBJECTIVES


@pytest.fixture(params=["permutation", "denoising", "causal"])
def lm(request, tokenizer, tmp_path):
    torch.manual_seed(0)
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    model = LanguageModel(shape, OBJECTIVES[request.param].two_streams)
    save_folder(tmp_path / "model", ModelFolder.from_model(model, tokenizer, request.param))
    return xlpre.load(tmp_path / "model")


def test_the_methods_have_the_results_of_the_functions(lm, tokenizer):
    texts, arguments = ["Ba di bu.", "Di ba."], (lm.model, lm.tokenizer)
    scores = [score.log_likelihood for score in lm.score(texts)]
    assert scores == [score.log_likelihood for score in inference.score(*arguments, texts, objective=lm.objective)]
    assert torch.equal(lm.embed(texts), inference.embed(*arguments, texts, objective=lm.objective))
    long_texts, windows = [" ".join(texts * 4)], {"seq_len": 16, "partial_k": 4}
    expected = inference.evaluate(*arguments, long_texts, objective=lm.objective, **windows)
    assert lm.evaluate(long_texts, **windows).to_json() == expected.to_json()
    if lm.objective != "denoising":
        config = inference.GenerationConfig(max_new_tokens=5, seed=3)
        expected = inference.generate(*arguments, texts, config, objective=lm.objective)
        assert lm.generate(texts, max_new_tokens=5, seed=3, batch_size=1) == expected
    if lm.objective != "causal":
        expected = inference.fill(*arguments, ["Ba ____."], objective=lm.objective)
        assert [filling.text for filling in lm.fill(["Ba ____."])[0]] == [filling.text for filling in expected[0]]
        assert lm.predict_blanks("Ba ____.").predictions == inference.predict_blanks(*arguments, "Ba ____.").predictions


def test_calls_that_do_not_fit_the_objective_are_refused(lm):
    if lm.objective == "causal":
        for call in (lm.predict_blanks, lambda text: lm.fill([text])):
            with pytest.raises(ValueError, match="causal"):
                call("Ba ____.")
    if lm.objective == "denoising":
        with pytest.raises(ValueError, match="denoising model cannot continue a text"):
            lm.generate(["Ba"])
    if lm.objective == "permutation":
        expected = inference.order_consistency(lm.model, lm.tokenizer, ["Ba di bu."], n_orders=2)
        assert lm.order_consistency(["Ba di bu."], n_orders=2).std_per_token == expected.std_per_token
    else:
        with pytest.raises(ValueError, match="mode=any-order is invalid for a"):
            lm.order_consistency(["Ba di bu."])


def test_invalid_token_ids_and_seeds_are_refused(lm):
    for ids in ([-1], [10**6]):
        with pytest.raises(ValueError, match="token id .* is invalid"):
            lm.score([np.array(ids)])
    with pytest.raises(ValueError, match="seed=-1 is invalid"):
        lm.score(["Ba di."], seed=-1)
    if lm.objective == "causal":
        with pytest.raises(ValueError, match="token id 1000000 is invalid"):
            lm.generate([np.array([10**6])])
    else:
        with pytest.raises(ValueError, match="top_k=0 is invalid"):
            lm.predict_blanks("Ba ____.", top_k=0)
        n_pieces = len(lm.predict_blanks("Ba ____.", top_k=10**6).predictions[0])
        assert n_pieces == len(lm.tokenizer) - 9  # no special tokens


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'xlpre' has no attribute 'lode'"):
        xlpre.lode  # noqa: B018


def test_an_unknown_device_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device='gpu' is invalid: it must be cpu or cuda"):
        xlpre.load(tmp_path, device="gpu")
