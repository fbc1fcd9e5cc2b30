"""Numbers equal those of Hugging Face's XLNetLMHeadModel in both directions, with random weights."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch

from xlpre import data_loader
from xlpre.batch import Batch
from xlpre.conversion.hf import read_model
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder, save_huggingface
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.inference.scoring import score
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import OBJECTIVES

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
SHAPE = ModelConfig(
    vocab_size=300, n_layer=3, d_model=32, n_head=4, d_inner=64, mem_len=10, dropout=0.0, dropatt=0.0, init_std=0.1
)
B, T, M, P = 4, 24, 10, 6


@pytest.fixture
def folder(tokenizer):
    torch.manual_seed(3)
    weights = {name: p.detach().clone() for name, p in LanguageModel(SHAPE, True).named_parameters()}
    for name in weights:  # no weight keeps a neutral initial value
        weights[name] += 0.1 * torch.randn_like(weights[name])
    return ModelFolder(SHAPE, weights, tokenizer, "permutation", {"step": 7}, "xlpre")


def random_batch(seed: int, backward: bool, tokenizer) -> Batch:
    """Return a batch of the permutation objective. With `backward`, the second half of its rows runs from right to left."""
    rng = np.random.default_rng(seed)
    objective = OBJECTIVES["permutation"](ObjectiveConfig(partial_k=T / P), tokenizer.starts_word)
    special_mask = np.zeros((B, T), bool)
    special_mask[:, [-6, -2, -1]] = True
    windows = Windows(
        ids=np.where(special_mask, 4, rng.integers(9, 300, (B, T))),
        segments=np.tile(np.repeat([0, 1, 2], [T - 5, 4, 1]), (B, 1)),
        special_mask=special_mask,
        following=np.full(B, 7),
        backward=(np.arange(B) >= B // 2) & backward,
        visible_mem_len=np.full(B, M),
        pair_label=np.ones(B, np.int64),
        reuse_len=T // 2,
    )
    return data_loader.batch_from_inputs(windows, objective.build_inputs(windows, RowRng(seed, range(B), 0)))


def huggingface_inputs(batch: Batch, memory: Memory) -> dict:
    perm_mask = (~(batch.query_rank[:, :, None] > batch.key_rank[:, None])).float()
    return {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.segment_ids,
        "perm_mask": perm_mask,
        "target_mapping": torch.nn.functional.one_hot(batch.target_positions, T).float(),
        "mems": [hidden.transpose(0, 1) for hidden in memory.hidden],
        "use_mems": True,
        "output_hidden_states": True,
    }


def compare(native: LanguageModel, external, tokenizer, backward=False):
    memory = Memory(torch.randn(SHAPE.n_layer, B, M, SHAPE.d_model), torch.full((B,), M))
    for seed in range(2):  # two windows, the second with the memory of the first
        batch = random_batch(seed, backward, tokenizer)
        hidden, new_memory = native.backbone(batch, memory)
        logits = native.lm_head(hidden)
        with torch.no_grad():
            outputs = external(**huggingface_inputs(batch, memory))
        torch.testing.assert_close(logits.detach(), outputs.logits, atol=TOLERANCE, rtol=0)
        last_query = (
            outputs.hidden_states[-1][1] if isinstance(outputs.hidden_states[-1], tuple) else outputs.hidden_states[-1]
        )
        torch.testing.assert_close(hidden.detach(), last_query, atol=TOLERANCE, rtol=0)
        for hidden, mem in zip(new_memory.hidden, outputs.mems, strict=True):
            torch.testing.assert_close(hidden, mem.transpose(0, 1), atol=TOLERANCE, rtol=0)
        memory = new_memory


@pytest.mark.parametrize("backward", [False, True])
def test_an_exported_model_gives_the_same_numbers_in_huggingface(folder, tokenizer, tmp_path, backward):
    save_huggingface(tmp_path / "hf", folder)
    settings = {"reuse_len": T // 2, "bi_data": backward}
    external = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "hf", **settings).eval()
    compare(folder.model(), external, tokenizer, backward)


def test_a_model_with_shared_biases_gives_the_same_numbers_in_huggingface_and_back(tokenizer, tmp_path):
    shape = dataclasses.replace(SHAPE, untie_r=False)
    torch.manual_seed(4)
    weights = {name: p + 0.1 * torch.randn_like(p) for name, p in LanguageModel(shape, True).state_dict().items()}
    tied = ModelFolder(shape, weights, tokenizer, "permutation", {"step": 7}, "xlpre")
    save_huggingface(tmp_path / "hf", tied)
    external = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "hf", reuse_len=T // 2).eval()
    compare(tied.model(), external, tokenizer)
    compare(load_folder(tmp_path / "hf").model(), external, tokenizer)


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_an_imported_huggingface_model_gives_the_same_numbers(folder, tokenizer, tmp_path, activation):
    config = transformers.XLNetConfig(
        vocab_size=300,
        d_model=32,
        n_layer=3,
        n_head=4,
        d_inner=64,
        ff_activation=activation,
        mem_len=M,
        reuse_len=T // 2,
    )
    torch.manual_seed(5)
    external = transformers.XLNetLMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in external.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    external.save_pretrained(tmp_path / "hf")
    tokenizer.save(tmp_path / "hf" / "spiece.model")
    read = load_folder(tmp_path / "hf")
    assert read.kind == "huggingface" and read.objective == "permutation"
    compare(read.model(), external, tokenizer)


EQUIVALENT_SETTINGS = [
    {"clamp_len": 0},
    {"clamp_len": -3},
    {"ff_activation": "gelu_pytorch_tanh"},
    {"ff_activation": "gelu_fast"},
    {"vocab_size": None, "n_token": 300, "n_layer": None, "num_hidden_layers": 3, "d_model": None, "hidden_size": 32},
]


@pytest.mark.parametrize("changes", EQUIVALENT_SETTINGS)
def test_equivalent_settings_of_huggingface_are_read(folder, tokenizer, tmp_path, changes):
    save_huggingface(tmp_path / "hf", folder)
    (tmp_path / "hf" / "provenance.json").unlink()
    file = tmp_path / "hf" / "config.json"
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    external = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "hf", reuse_len=T // 2).eval()
    compare(load_folder(tmp_path / "hf").model(), external, tokenizer)


@pytest.mark.parametrize("save", [save_folder, save_huggingface])
def test_a_round_trip_is_the_identity(folder, tmp_path, save):
    save(tmp_path / "there", folder)
    back = load_folder(tmp_path / "there")
    assert dataclasses.replace(back.config) == folder.config and back.objective == folder.objective
    assert back.weights.keys() == folder.weights.keys()
    assert all(torch.equal(back.weights[name], weight) for name, weight in folder.weights.items())
    assert back.tokenizer.content == folder.tokenizer.content and back.provenance["step"] == 7


def test_a_round_trip_from_huggingface_is_the_identity(tokenizer, tmp_path):
    config = transformers.XLNetConfig(
        vocab_size=300, d_model=32, n_layer=2, n_head=4, d_inner=64, ff_activation="gelu_new"
    )
    external = transformers.XLNetLMHeadModel(config)
    external.save_pretrained(tmp_path / "first")
    tokenizer.save(tmp_path / "first" / "spiece.model")
    save_folder(tmp_path / "native", load_folder(tmp_path / "first"))
    save_huggingface(tmp_path / "second", load_folder(tmp_path / "native"))
    again = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "second")
    for name, tensor in external.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("objective", ["permutation", "denoising"])
def test_masking_each_token_in_huggingface_gives_the_pseudo_log_likelihood(objective, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds its cache
    folder = dataclasses.replace(folder, objective=objective)
    save_huggingface(tmp_path / "hf", folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    model.save_pretrained(tmp_path / "again")
    assert read_model(tmp_path / "again", json.loads((tmp_path / "again/config.json").read_text()))[2] == objective
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = ["one two three", "a longer text of several words"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    expected = score(folder.model(), folder.tokenizer, texts, "pll", objective=objective)
    for i, text_score in enumerate(expected):
        n = text_score.n_tokens
        start = inputs["input_ids"].size(1) - n - 2  # padding is on the left, <sep> <cls> on the right
        assert inputs["input_ids"][i, start:-2].tolist() == text_score.tokens.tolist()
        for j in range(n):
            masked = inputs["input_ids"][i : i + 1].clone()
            masked[0, start + j] = tokenizer.mask_token_id
            labels = torch.full_like(masked, -100)
            labels[0, start + j] = text_score.tokens[j]
            mask = inputs["attention_mask"][i : i + 1]
            with torch.no_grad():
                loss = model(masked, attention_mask=mask, labels=labels).loss
            assert loss.item() == pytest.approx(-text_score.token_log_likelihoods[0, j], abs=TOLERANCE)
    with torch.no_grad():
        exact = model(masked, attention_mask=mask, return_dict=False).logits
        rounded = model.bfloat16()(masked, attention_mask=mask).logits
    assert rounded.dtype == torch.bfloat16 and torch.allclose(rounded.float(), exact, atol=0.2)


def test_auto_model_and_auto_tokenizer_open_an_exported_folder(folder, tmp_path):
    save_huggingface(tmp_path / "hf", folder)
    model = transformers.AutoModel.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "XLNetModel"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Bako rime, tupi da."
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == folder.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("feed_forward", {"feed_forward": "geglu"}),
        ("positions", {"positions": "sinusoidal"}),
        ("norm", {"norm": "pre"}),
        ("relative_segments", {"relative_segments": False}),
        ("d_head", {"d_head": 10}),
        ("cutoffs", {"cutoffs": [50]}),
        ("attention_span", {"attention_span": "same_length"}),
    ],
)
def test_a_setting_that_huggingface_lacks_is_refused_by_its_key(folder, tmp_path, key, changes):
    shape = dataclasses.replace(SHAPE, **changes)
    weights = {name: p.detach() for name, p in LanguageModel(shape, True).named_parameters()}
    with pytest.raises(ValueError, match=f"model.{key}="):
        save_huggingface(tmp_path / "hf", dataclasses.replace(folder, config=shape, weights=weights))
    assert not list(tmp_path.iterdir())


def test_gelu_of_huggingface_is_read_as_the_tanh_approximation(folder, tmp_path):
    save_huggingface(tmp_path / "hf", folder)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "ff_activation": "gelu"}))
    with pytest.warns(UserWarning, match="gelu_new"):
        assert load_folder(tmp_path / "hf").config.feed_forward == "gelu"


@pytest.mark.parametrize("objective", ["permutation", "denoising"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_masked_language_model_can_be_loaded_in_half_precision(objective, dtype, tokenizer, tmp_path):
    model = LanguageModel(dataclasses.replace(SHAPE, vocab_size=len(tokenizer)), OBJECTIVES[objective].two_streams)
    save_huggingface(tmp_path / "exported", ModelFolder.from_model(model, tokenizer, objective))
    load = transformers.AutoModelForMaskedLM.from_pretrained
    half = load(tmp_path / "exported", trust_remote_code=True, dtype=dtype).eval()
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    ids = torch.tensor([[20, 6, 21, 4, 3]])
    expected = load(tmp_path / "exported", trust_remote_code=True).eval()(input_ids=ids).logits
    assert torch.allclose(half(input_ids=ids).logits.float(), expected, atol=0.05)


def test_a_memory_length_that_was_changed_after_the_export_is_used(folder, tmp_path):
    save_huggingface(tmp_path / "exported", folder)
    path = tmp_path / "exported" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mem_len": 77}))
    config = load_folder(tmp_path / "exported").config
    assert config.mem_len == 77 and config.dropatt == folder.config.dropatt
