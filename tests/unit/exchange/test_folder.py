"""Folders of models: round trips, recognition on sight, and everything that must be refused with nothing loaded."""

import dataclasses
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from xlpre.exchange import tf
from xlpre.exchange.folder import ModelFolder, load_folder, save_folder, save_huggingface, save_release
from xlpre.exchange.layouts import to_theirs
from xlpre.exchange.tensor_bundle import write_bundle
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.text.tokenizer import TokenizerConfig, train

SHAPE = ModelConfig(vocab_size=300, n_layer=2, d_model=16, n_head=2, d_inner=24)


def make(tokenizer, next_sentence=False, **settings) -> ModelFolder:
    shape = dataclasses.replace(SHAPE, **settings)
    weights = {name: p.detach() for name, p in LanguageModel(shape, True, next_sentence).named_parameters()}
    return ModelFolder(shape, weights, tokenizer, "permutation", {"step": 3}, "xlpre")


def write_release(path: Path, folder: ModelFolder) -> Path:
    """The folder as the original's TensorFlow release, optimizer slots included."""
    arrays = to_theirs(tf.weights_of(folder.config), folder.weights, folder.config)
    slots = {f"{name}/adam_m": np.zeros(2, np.float32) for name in arrays}
    path.mkdir()
    write_bundle(
        path / tf.CHECKPOINT,
        {**{n: a.numpy() for n, a in arrays.items()}, **slots, "global_step": np.int64(7)},
    )
    settings = {theirs: getattr(folder.config, ours) for theirs, ours in tf.SETTINGS.items()}
    (path / tf.CONFIG).write_text(json.dumps({**settings, "d_head": folder.config.head_width}))
    folder.tokenizer.save(path / "spiece.model")
    return path


KINDS = {"xlpre": save_folder, "huggingface": save_huggingface, "tensorflow": write_release}


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
    head = back.model().auxiliary["next_sentence"]
    assert torch.equal(head.dense.weight, folder.weights["auxiliary.next_sentence.dense.weight"])
    for save in (save_huggingface, save_release):
        save(tmp_path / "theirs", folder)
        left = load_folder(tmp_path / "theirs")
        assert not left.next_sentence and not left.model().auxiliary
        assert left.weights.keys() == {name for name in folder.weights if not name.startswith("auxiliary.")}
    fewer = {name: weight for name, weight in folder.weights.items() if not name.endswith("dense.bias")}
    save_folder(tmp_path / "cut", dataclasses.replace(folder, weights=fewer))
    with pytest.raises(ValueError, match=r"auxiliary.next_sentence.dense.bias is missing from the weights"):
        load_folder(tmp_path / "cut")


def test_a_passport_says_what_made_the_folder(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    passport = json.loads((tmp_path / "model" / "passport.json").read_text())
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


def test_weights_of_another_shape_are_refused_by_name(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    content["model"]["d_inner"] = 32
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"feed_forward.* is \(24,.*the config says \(32,"):
        load_folder(tmp_path / "model")


def test_a_weight_too_many_or_too_few_is_named(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    file = tmp_path / "model" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    fewer = {name: w for name, w in weights.items() if name != "output.bias"}
    for changed, complaint in (
        (fewer, "output.bias is missing"),
        ({**weights, "extra": torch.zeros(1)}, "extra is not in"),
    ):
        safetensors.torch.save_file(changed, file)
        with pytest.raises(ValueError, match=complaint):
            load_folder(tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_cut_file_is_refused_by_its_name(kind, keep, tokenizer, tmp_path):
    KINDS[kind](tmp_path / "whole", make(tokenizer))
    for file in sorted((tmp_path / "whole").iterdir()):
        if file.name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            continue  # for others to read
        cut = tmp_path / f"cut_{file.name}"
        shutil.copytree(tmp_path / "whole", cut)
        size = file.stat().st_size
        os.truncate(cut / file.name, int(size * keep))
        with pytest.raises(ValueError, match=str(cut)) as caught:
            load_folder(cut)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_refused_by_its_name(kind, tokenizer, tmp_path):
    KINDS[kind](tmp_path / "whole", make(tokenizer))
    needed = {
        "xlpre": ["config.json", "model.safetensors", "spiece.model", "passport.json"],
        "huggingface": ["config.json", "model.safetensors", "spiece.model"],
        "tensorflow": ["xlnet_model.ckpt.index", "xlnet_model.ckpt.data-00000-of-00001"],
    }[kind]
    for name in needed:
        without = tmp_path / f"without_{name}"
        shutil.copytree(tmp_path / "whole", without)
        (without / name).unlink()
        with pytest.raises(ValueError, match=str(without)):
            load_folder(without)


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was executed')",))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_place_of_the_weights_is_not_executed(name, tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match="nothing was loaded"):
        load_folder(tmp_path / "model")
    torch.save({"transformer.mask_emb": Hostile()}, tmp_path / "model" / name)  # the same in torch's own format
    with pytest.raises(ValueError, match="nothing was loaded"):
        load_folder(tmp_path / "model")


def test_the_weights_of_huggingface_may_be_shards_or_an_old_bin(tokenizer, tmp_path):
    folder = make(tokenizer)
    save_huggingface(tmp_path / "model", folder)
    single = tmp_path / "model" / "model.safetensors"
    found = safetensors.torch.load_file(single)
    single.unlink()
    torch.save(found, tmp_path / "model" / "pytorch_model.bin")
    assert torch.equal(load_folder(tmp_path / "model").weights["output.bias"], folder.weights["output.bias"])
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    index = {}
    for number, (name, tensor) in enumerate(found.items()):
        shard = f"model-{number % 2}.safetensors"
        index[name] = shard
        part = {n: t for i, (n, t) in enumerate(found.items()) if i % 2 == number % 2}
        safetensors.torch.save_file(part, tmp_path / "model" / shard)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(load_folder(tmp_path / "model").weights["output.bias"], folder.weights["output.bias"])
    (tmp_path / "model" / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="model-1.safetensors"):
        load_folder(tmp_path / "model")


ODD = {
    "huggingface": [
        ("config.json", {"attn_type": "both"}),
        ("config.json", {"attn_type": "uni", "same_length": True}),
        ("config.json", {"d_model": "wide"}),
        ("config.json", {"n_layer": None}),
        ("config.json", {"dropout": None}),
        ("config.json", {"ff_activation": "silu"}),
        ("config.json", {"vocab_size": 299}),
        ("passport.json", {"preprocess": "foo"}),
        ("passport.json", {"vocabulary_sha256": 7}),
        ("passport.json", {"model": 3}),
    ],
    "xlpre": [
        ("config.json", {"objective": "guessing"}),
        ("config.json", {"model": {"positions": "somewhere"}}),
        ("config.json", {"model": {"n_layer": "two"}}),
        ("config.json", {"model": {"unknown": 1}}),
        ("config.json", {"model": {"attention": "${"}}),
        ("config.json", {"model": 7}),
        ("passport.json", {"preprocess": None}),
    ],
    "tensorflow": [("xlnet_config.json", {"d_model": "wide"}), ("xlnet_config.json", {"n_layer": 3})],
}


@pytest.mark.parametrize(("kind", "file", "changes"), [(kind, *odd) for kind, cases in ODD.items() for odd in cases])
def test_odd_contents_are_one_sentence(kind, file, changes, tokenizer, tmp_path):
    KINDS[kind](tmp_path / "model", make(tokenizer))
    path = tmp_path / "model" / file
    content = json.loads(path.read_text())
    inner = changes.get("model")
    path.write_text(
        json.dumps(
            {**content, "model": {**content["model"], **inner}} if isinstance(inner, dict) else {**content, **changes}
        )
    )
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        load_folder(tmp_path / "model")
    assert "\n" not in str(caught.value)


WRONG = {
    "config.json": [
        ("dropout", None),
        ("clamp_len", None),
        ("n_layer", 2.5),
        ("n_head", True),
        ("n_head", 3),
        ("mem_len", -1),
    ],
    "xlnet_config.json": [("n_layer", None), ("d_inner", 0), ("n_head", "two")],
}


@pytest.mark.parametrize(("file", "key", "value"), [(file, *wrong) for file, cases in WRONG.items() for wrong in cases])
def test_a_setting_that_no_model_can_have_is_named_with_its_file(file, key, value, tokenizer, tmp_path):
    KINDS["huggingface" if file == "config.json" else "tensorflow"](tmp_path / "model", make(tokenizer))
    path = tmp_path / "model" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*{key}") as caught:
        load_folder(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"a": 3},
        {1: torch.zeros(2)},
        {"transformer.mask_emb": torch.zeros(16)},
        {"lm_loss.weight": torch.zeros(300, 16)},
    ],
)
def test_odd_weights_are_one_sentence(content, tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(content, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_folder(tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_are_refused_by_name(kind, tokenizer, tmp_path):
    folder = make(tokenizer)
    folder.weights["backbone.embedding.weight"][3, 1] = torch.nan
    KINDS[kind](tmp_path / "model", folder)
    with pytest.raises(ValueError, match=r"the weight \S*embedding.weight has values that are not finite"):
        load_folder(tmp_path / "model")


def test_shards_of_an_old_bin_are_refused_with_a_way_out(tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "model" / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(ValueError, match="shards of pytorch_model.bin are not read; write the model as safetensors"):
        load_folder(tmp_path / "model")


def test_a_shard_outside_of_the_folder_is_refused(tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"transformer.mask_emb": "../outside.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lies outside of the folder"):
        load_folder(tmp_path / "model")


def test_all_files_are_as_readable_as_each_other(tokenizer, tmp_path):
    for kind in ("xlpre", "huggingface"):
        KINDS[kind](tmp_path / kind, make(tokenizer))
        assert len({file.stat().st_mode for file in (tmp_path / kind).iterdir()}) == 1


@pytest.mark.parametrize(
    ("path", "hint"), [("nowhere", "there is no such folder"), ("a_file", "not a folder"), ("empty", "TensorFlow")]
)
def test_what_is_no_folder_of_a_model_is_told_what_would_be(path, hint, tmp_path):
    (tmp_path / "a_file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=hint):
        load_folder(tmp_path / path)


def test_a_folder_that_is_none_of_the_three_is_told_which_there_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="xlpre.*Hugging Face.*TensorFlow"):
        load_folder(tmp_path)
