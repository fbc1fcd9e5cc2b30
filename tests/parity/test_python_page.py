"""docs/python.md does what it says, and Hugging Face finds the same hidden states."""

import re

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY, write_folder
from xlpre.conversion.model_folder import load_folder, save_huggingface
from xlpre.inference.cloze import masked_batch

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5  # products of other shapes, in fp32


@pytest.fixture(scope="module")
def names(tokenizer, store, tmp_path_factory):
    """What the page's code leaves behind, run from its first line to its last."""
    home = tmp_path_factory.mktemp("page")
    write_folder(home / "runs/quickstart/model", tokenizer)
    (home / "stores").mkdir()
    (home / "stores/quickstart").symlink_to(store.path)
    found = {}
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.chdir(home)
        torch.manual_seed(0)
        for block in re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/python.md").read_text("utf-8"), re.DOTALL):
            exec(block, found)
        found["trained_folder"] = load_folder("runs/own/model")
    return found


@torch.no_grad()
def test_blanks_hidden_states_and_scores_are_what_the_page_says(names, tokenizer, tmp_path):
    assert len(names["best"]) == 5
    assert names["logits"].shape == (len(names["tokens"]), 1, len(tokenizer))  # of the last that the page computes
    save_huggingface(tmp_path / "exported", names["folder"])
    theirs = transformers.XLNetModel.from_pretrained(tmp_path / "exported").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "The name of the function."
    expected = theirs(**words(text, return_tensors="pt")).last_hidden_state
    found, _ = names["encoder"](names["whole"](np.array(tokenizer.encode(text))), names["nothing"])
    assert torch.allclose(found, expected, atol=TOLERANCE)
    assert torch.allclose(names["means"][0], expected[0].mean(0), atol=TOLERANCE)
    tokens, score = names["tokens"], 0.0
    for place in range(len(tokens)):
        logits, _ = names["model"].logits(masked_batch(tokens, [place]), names["nothing"])
        score += float(logits[0, 0].log_softmax(-1)[tokens[place]])
    assert names["score"] == pytest.approx(score, rel=1e-4) and names["again"] == pytest.approx(score, rel=1e-4)


def test_a_long_text_is_read_to_its_end_with_memory(names):
    assert torch.cat(names["read"], dim=1).shape[:2] == (1, len(names["tokens"]))
    assert names["memory"].valid.item() == min(len(names["tokens"]), names["folder"].config.mem_len)


def test_the_loop_learns_and_its_model_is_a_folder(names, store):
    assert names["loss"] < np.log(store.vocab_size) - 0.2 and names["loss_of_own"] < np.log(store.vocab_size) - 0.2
    weights = names["trained_folder"].weights
    assert all(torch.equal(weights[name], p) for name, p in names["trained"].named_parameters())


def test_a_head_reaches_the_weights_and_transformers_hands_them_back(names):
    names["scores"].sum().backward()
    assert names["scores"].shape == (2, 2) and names["classifier"].backbone.word_embedding.weight.grad.abs().sum() > 0
    assert all(torch.equal(weight, names["folder"].weights[name]) for name, weight in names["back"].weights.items())
