"""Scores equal those that Hugging Face's XLNetLMHeadModel computes from an exported folder, with perm_mask and target_mapping."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conftest import TINY
from xlpre.conversion.model_folder import ModelFolder, save_huggingface
from xlpre.inference import score
from xlpre.inference.scoring import sample_order
from xlpre.model.language_model import LanguageModel

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4  # log-probabilities in fp32, from matrix products of other shapes
TEXTS = ["Ba di bu ke lo.", "Mi ta.", "Ke lo mi ta ba di bu."]


@pytest.fixture(scope="module")
def folder(tokenizer):
    torch.manual_seed(3)
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {
        name: p.detach() + 0.1 * torch.randn_like(p) for name, p in LanguageModel(shape, True).named_parameters()
    }
    return ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre")


@pytest.fixture(scope="module")
def external(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "hf"
    save_huggingface(path, folder)
    return transformers.XLNetLMHeadModel.from_pretrained(path).eval(), transformers.AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def huggingface_scores(external, text: str, visible: np.ndarray) -> np.ndarray:
    """Return the log-probability of each token of `text <sep> <cls>`, given the tokens that `visible` (T + 2, T + 2) shows to it."""
    model, tokenizer = external
    inputs = tokenizer(text, return_tensors="pt")
    length = inputs.input_ids.size(1)
    logits = model(
        **inputs,
        perm_mask=torch.from_numpy(~visible)[None].float(),
        target_mapping=torch.eye(length)[None],
        use_mems=False,
    ).logits
    return logits[0].log_softmax(-1).gather(1, inputs.input_ids[0][:, None])[:-2, 0].numpy()


def test_every_order_gives_the_scores_of_huggingface(folder, external):
    for text, actual in zip(
        TEXTS, score(folder.model(), folder.tokenizer, TEXTS, "any-order", n_orders=4), strict=True
    ):
        for index in range(4):
            place = np.append(sample_order(actual.n_tokens, index, seed=1, window=512) + 1, [0, 0])
            visible = place[:, None] > place
            visible[-2:, -2:] = True  # <sep> and <cls> see each other
            expected = huggingface_scores(external, text, visible)
            np.testing.assert_allclose(actual.token_log_likelihoods[index], expected, atol=TOLERANCE)


def test_pll_gives_the_scores_of_huggingface(folder, external):
    for text, actual in zip(TEXTS, score(folder.model(), folder.tokenizer, TEXTS, "pll"), strict=True):
        for position in range(actual.n_tokens):
            visible = np.ones((actual.n_tokens + 2, actual.n_tokens + 2), bool)
            visible[:, position] = False
            expected = huggingface_scores(external, text, visible)[position]
            assert actual.token_log_likelihoods[0, position] == pytest.approx(expected, abs=TOLERANCE)
