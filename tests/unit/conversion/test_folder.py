"""Folders of models: round trips, and what they say of themselves."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from tests.unit.conversion.folders import KINDS, make, write_release
from xlpre.conversion.model_folder import load_folder, save_folder, save_huggingface, save_tensorflow
from xlpre.text.tokenizer import train
from xlpre.text.tokenizer_config import TokenizerConfig


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"untie_r": False}, {"feed_forward": "relu"}])
def test_a_model_survives_a_round_trip_bit_for_bit(kind, settings, tokenizer, tmp_path):
    if kind == "huggingface" and "untie_r" in settings:
        pytest.skip("in Hugging Face's each layer has its own; tests/parity/test_huggingface.py compares the numbers")
    folder = make(tokenizer, **settings)
    KINDS[kind](tmp_path / "there", folder)
    back = load_folder(tmp_path / "there")
    assert back.kind == kind and back.objective == "permutation"
    assert back.config.head_width == 8 and back.config.untie_r == folder.config.untie_r
    assert back.weights.keys() == folder.weights.keys()
    for name, weight in folder.weights.items():
        assert torch.equal(back.weights[name], weight), name
    assert back.tokenizer.sha256 == tokenizer.sha256
    for parameter, weight in zip(back.model().parameters(), folder.model().parameters(), strict=True):
        assert torch.equal(parameter, weight)


def test_every_kind_of_model_survives_in_our_own_folder(tokenizer, tmp_path):
    for number, settings in enumerate(
        (
            {"positions": "shaw", "n_positions": 7},
            {"positions": "learned", "n_positions": 7, "norm": "pre"},
            {"cutoffs": [50, 120], "div_value": 2, "tie_projections": [False, True, True]},
            {"feed_forward": "swiglu", "relative_segments": False},
        )
    ):
        folder = make(tokenizer, **settings)
        save_folder(tmp_path / str(number), folder)
        back = load_folder(tmp_path / str(number))
        assert back.config == folder.config and all(torch.equal(back.weights[n], w) for n, w in folder.weights.items())


def test_the_head_of_next_sentence_prediction_stays_in_our_own_folder_alone(tokenizer, tmp_path):
    folder = make(tokenizer, next_sentence=True)
    save_folder(tmp_path / "ours", folder)
    back = load_folder(tmp_path / "ours")
    assert back.next_sentence and back.weights.keys() == folder.weights.keys()
    head = back.model().auxiliary_heads["next_sentence"]
    assert torch.equal(head.dense.weight, folder.weights["auxiliary_heads.next_sentence.dense.weight"])
    for save in (save_huggingface, save_tensorflow):
        save(tmp_path / "theirs", folder)
        left = load_folder(tmp_path / "theirs")
        assert not left.next_sentence and not left.model().auxiliary_heads
        assert left.weights.keys() == {name for name in folder.weights if not name.startswith("auxiliary_heads.")}
    fewer = {name: weight for name, weight in folder.weights.items() if not name.endswith("dense.bias")}
    save_folder(tmp_path / "cut", dataclasses.replace(folder, weights=fewer))
    with pytest.raises(ValueError, match=r"auxiliary_heads.next_sentence.dense.bias is missing from the weights"):
        load_folder(tmp_path / "cut")


def test_a_passport_says_what_made_the_folder(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    passport = json.loads((tmp_path / "model" / "provenance.json").read_text())
    assert passport["vocabulary_sha256"] == tokenizer.sha256 and passport["step"] == 3
    assert passport["special_ids"]["<sep>"] == 4 and passport["versions"]["torch"] and "revision" in passport


@pytest.mark.parametrize("kind", ["xlpre", "huggingface"])
def test_another_vocabulary_is_refused_with_both_hashes(kind, tokenizer, documents, tmp_path):
    KINDS[kind](tmp_path / "model", make(tokenizer))
    other = train(documents, TokenizerConfig(vocab_size=250))
    other.save(tmp_path / "model" / "spiece.model")
    with pytest.raises(ValueError, match=f"{other.sha256[:12]}.*{tokenizer.sha256[:12]}"):
        load_folder(tmp_path / "model")


def test_a_vocabulary_of_another_size_is_refused_where_no_passport_tells(tokenizer, documents, tmp_path):
    path = write_release(tmp_path / "release", make(tokenizer))
    train(documents, TokenizerConfig(vocab_size=250)).save(path / "spiece.model")
    with pytest.raises(ValueError, match=r"250 pieces, the model 300; .*resize_token_embeddings\(250\)"):
        load_folder(path)


def test_the_weights_of_huggingface_may_be_shards_or_an_old_bin(tokenizer, tmp_path):
    folder = make(tokenizer)
    save_huggingface(tmp_path / "model", folder)
    single = tmp_path / "model" / "model.safetensors"
    found = safetensors.torch.load_file(single)
    single.unlink()
    torch.save(found, tmp_path / "model" / "pytorch_model.bin")
    assert torch.equal(load_folder(tmp_path / "model").weights["lm_head.bias"], folder.weights["lm_head.bias"])
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    index = {}
    for number, (name, tensor) in enumerate(found.items()):
        shard = f"model-{number % 2}.safetensors"
        index[name] = shard
        part = {n: t for i, (n, t) in enumerate(found.items()) if i % 2 == number % 2}
        safetensors.torch.save_file(part, tmp_path / "model" / shard)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(load_folder(tmp_path / "model").weights["lm_head.bias"], folder.weights["lm_head.bias"])
    (tmp_path / "model" / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="model-1.safetensors"):
        load_folder(tmp_path / "model")


def test_all_files_are_as_readable_as_each_other(tokenizer, tmp_path):
    for kind in ("xlpre", "huggingface"):
        KINDS[kind](tmp_path / kind, make(tokenizer))
        assert len({file.stat().st_mode for file in (tmp_path / kind).iterdir()}) == 1
