"""The code of docs/python.md runs, and its hidden states equal those of Hugging Face."""

import re

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY, write_folder
from xlpre.conversion.model_folder import load_folder, save_huggingface
from xlpre.inference.batches import masked_batch

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5  # matrix products of other shapes in fp32


@pytest.fixture(scope="module")
def names(tokenizer, store, tmp_path_factory):
    """Names defined by the code of the page."""
    home = tmp_path_factory.mktemp("page")
    write_folder(home / "runs/quickstart/model", tokenizer)
    (home / "stores").mkdir()
    (home / "stores/quickstart").symlink_to(store.path)
    namespace = {}
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.chdir(home)
        torch.manual_seed(0)
        for block in re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/python.md").read_text("utf-8"), re.DOTALL):
            exec(block, namespace)
        namespace["trained_folder"] = load_folder("runs/custom/model")
    return namespace


@torch.no_grad()
def test_predictions_hidden_states_and_scores_are_as_documented(names, tokenizer, tmp_path):
    assert len(names["best"]) == 5
    assert names["logits"].shape == (len(names["tokens"]), 1, len(tokenizer))  # the last logits of the page
    save_huggingface(tmp_path / "exported", names["folder"])
    hf_model = transformers.XLNetModel.from_pretrained(tmp_path / "exported").eval()
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = "The name of the function."
    expected = hf_model(**hf_tokenizer(text, return_tensors="pt")).last_hidden_state
    hidden, _ = names["encoder"](names["unmasked_batch"](np.array(tokenizer.encode(text))), names["no_memory"])
    assert torch.allclose(hidden, expected, atol=TOLERANCE)
    assert torch.allclose(names["vectors"][0], expected[0].mean(0), atol=TOLERANCE)
    tokens, score = names["tokens"], 0.0
    for position in range(len(tokens)):
        logits, _ = names["model"].logits(masked_batch(tokens, [position]), names["no_memory"])
        score += float(logits[0, 0].log_softmax(-1)[tokens[position]])
    assert names["likely"].log_likelihood == pytest.approx(score, rel=1e-4) and names["pll"] == pytest.approx(
        score, rel=1e-4
    )
    assert names["left_to_right"] < 0 < names["spread"] and names["consistency"] > 0
    assert names["chain_rule"].n_targets == names["numbers"]["n_tokens"] and min(names["held_out"]) > 0
    assert names["numbers"]["mode"] == "objective" and names["numbers"]["bits_per_target_byte"] > 0


def test_a_long_text_is_read_window_by_window(names):
    assert torch.cat(names["states"], dim=1).shape[:2] == (1, len(names["tokens"]))
    assert names["memory"].valid.item() == min(len(names["tokens"]), names["folder"].config.mem_len)


def test_the_training_loop_learns_and_saves_a_model_folder(names, store):
    assert names["loss"] < np.log(store.vocab_size) - 0.2 and names["custom_loss"] < np.log(store.vocab_size) - 0.2
    weights = names["trained_folder"].weights
    assert all(torch.equal(weights[name], p) for name, p in names["trained"].named_parameters())


def test_a_head_trains_the_backbone_and_weights_survive_a_round_trip_through_transformers(names):
    names["scores"].sum().backward()
    assert names["scores"].shape == (2, 2) and names["classifier"].backbone.word_embedding.weight.grad.abs().sum() > 0
    assert all(torch.equal(weight, names["folder"].weights[name]) for name, weight in names["reloaded"].weights.items())
