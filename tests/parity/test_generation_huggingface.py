"""Generated tokens equal those of Hugging Face's `generate`, and the choice of tokens equals that of its logits processors."""

import dataclasses

import pytest
import torch

from tests.conftest import TINY
from xlpre.conversion.model_folder import ModelFolder, save_huggingface
from xlpre.inference import GenerationConfig, generate
from xlpre.inference.generation import encode_prompt
from xlpre.inference.token_sampling import keep_top_k, keep_top_p, penalize_repetition
from xlpre.model.language_model import LanguageModel
from xlpre.text.special_tokens import EOD, EOP

transformers = pytest.importorskip("transformers")
PROMPTS = ["", "Ba di bu ke lo.", "Mi ta.", "Ke lo mi ta ba di bu."]


@pytest.fixture(scope="module")
def folder(tokenizer):
    torch.manual_seed(3)
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {
        name: p.detach() + 0.3 * torch.randn_like(p) for name, p in LanguageModel(shape, True).named_parameters()
    }
    return ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre")


@pytest.fixture(scope="module")
def external(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "hf"
    save_huggingface(path, folder)
    return transformers.XLNetLMHeadModel.from_pretrained(path).eval()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens_are_those_of_huggingface(folder, external, penalty):
    # Hugging Face reads the whole text for each token: its tokens see each other, and one query row predicts the next
    config = GenerationConfig(24, temperature=0, free_len=1, mem_len=64, repetition_penalty=penalty)
    outputs = generate(folder.model(), folder.tokenizer, PROMPTS, config)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.from_numpy(encode_prompt(folder.tokenizer, prompt))[None]
        expected = external.generate(
            ids,
            do_sample=False,
            max_new_tokens=24,
            suppress_tokens=[*range(EOD)],
            begin_suppress_tokens=[] if prompt else [EOD, EOP],
            repetition_penalty=penalty,
            eos_token_id=EOD,
            pad_token_id=5,
            use_mems=False,
        )[0, ids.size(1) :]
        assert output.tokens == expected.tolist()
    assert len({token for output in outputs for token in output.tokens}) > 4


@pytest.mark.parametrize("rows", [1, 5])
def test_filters_and_penalty_equal_the_logits_processors_of_huggingface(rows):
    logits, ids = torch.randn(rows, 50), torch.randint(50, (rows, 12))
    seen = torch.zeros(rows, 50, dtype=torch.bool).scatter_(1, ids, True)
    for k in (1, 3, 50):
        expected = transformers.TopKLogitsWarper(k)(ids, logits.clone())
        assert torch.equal(keep_top_k(logits, k), expected)
    for p in (0.01, 0.3, 0.9, 0.999):
        expected = transformers.TopPLogitsWarper(p)(ids, logits.clone())
        assert torch.equal(keep_top_p(logits, p), expected)
        assert (expected > -torch.inf).sum(1).max() > (1 if p > 0.5 else 0)
    for penalty in (0.7, 1.0, 1.8):
        expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
        assert torch.equal(penalize_repetition(logits, seen, penalty), expected)
