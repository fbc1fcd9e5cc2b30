"""Damaged and invalid model folders are refused with a one-line error."""

import dataclasses
import json
import os
import pickle
import re
import shutil

import pytest
import torch

from tests.unit.conversion.folders import WRITERS, make
from xlpre.conversion.model_folder import MASKED_LM_CODE, load_folder, save_folder, save_huggingface


def test_a_weight_of_a_wrong_shape_is_named(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    content["model"]["d_inner"] = 32
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"feed_forward.* \(24,.*\(32,"):
        load_folder(tmp_path / "model")


def test_a_missing_or_unexpected_weight_is_named(tokenizer, tmp_path):
    folder = make(tokenizer)
    weights = folder.weights
    fewer = {name: w for name, w in weights.items() if name != "lm_head.bias"}
    for changed, problem in (
        (fewer, "lm_head.bias is missing"),
        ({**weights, "extra": torch.zeros(1)}, "extra is not in"),
    ):
        save_folder(tmp_path / "model", dataclasses.replace(folder, weights=changed))
        with pytest.raises(ValueError, match=problem):
            load_folder(tmp_path / "model")


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_truncated_file_is_named(kind, keep, tokenizer, tmp_path):
    WRITERS[kind](tmp_path / "intact", make(tokenizer))
    for file in sorted((tmp_path / "intact").iterdir()):
        if file.name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", MASKED_LM_CODE.name):
            continue  # read by transformers only
        truncated = tmp_path / f"truncated_{file.name}"
        shutil.copytree(tmp_path / "intact", truncated)
        size = file.stat().st_size
        os.truncate(truncated / file.name, int(size * keep))
        with pytest.raises(ValueError, match=str(truncated)) as caught:
            load_folder(truncated)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_file_is_named(kind, tokenizer, tmp_path):
    WRITERS[kind](tmp_path / "intact", make(tokenizer))
    required = {
        "xlpre": ["config.json", "model.safetensors", "spiece.model", "provenance.json"],
        "huggingface": ["config.json", "model.safetensors", "spiece.model"],
        "tensorflow": ["xlnet_model.ckpt.index", "xlnet_model.ckpt.data-00000-of-00001"],
    }[kind]
    for name in required:
        without = tmp_path / f"without_{name}"
        shutil.copytree(tmp_path / "intact", without)
        (without / name).unlink()
        with pytest.raises(ValueError, match=str(without)):
            load_folder(without)


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was executed')",))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_place_of_weights_is_not_executed(name, tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / name).write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match="Nothing was loaded"):
        load_folder(tmp_path / "model")
    torch.save({"transformer.mask_emb": Hostile()}, tmp_path / "model" / name)  # the same in torch's own format
    with pytest.raises(ValueError, match="Nothing was loaded"):
        load_folder(tmp_path / "model")


INVALID = {
    "huggingface": [
        ("config.json", {"attn_type": "both"}),
        ("config.json", {"attn_type": "uni", "same_length": True}),
        ("config.json", {"d_model": "wide"}),
        ("config.json", {"n_layer": None}),
        ("config.json", {"dropout": None}),
        ("config.json", {"ff_activation": "silu"}),
        ("config.json", {"vocab_size": 299}),
        ("provenance.json", {"preprocess": "foo"}),
        ("provenance.json", {"vocabulary_sha256": 7}),
        ("provenance.json", {"model": 3}),
    ],
    "xlpre": [
        ("config.json", {"objective": "guessing"}),
        ("config.json", {"model": {"positions": "somewhere"}}),
        ("config.json", {"model": {"n_layer": "two"}}),
        ("config.json", {"model": {"unknown": 1}}),
        ("config.json", {"model": {"init_scheme": "${"}}),
        ("config.json", {"model": 7}),
        ("provenance.json", {"preprocess": None}),
    ],
    "tensorflow": [("xlnet_config.json", {"d_model": "wide"}), ("xlnet_config.json", {"n_layer": 3})],
}


@pytest.mark.parametrize(
    ("kind", "file", "changes"), [(kind, *case) for kind, cases in INVALID.items() for case in cases]
)
def test_invalid_contents_are_refused_in_one_line(kind, file, changes, tokenizer, tmp_path):
    WRITERS[kind](tmp_path / "model", make(tokenizer))
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


INVALID_SETTINGS = {
    "config.json": [
        ("dropout", None),
        ("clamp_len", 1.5),
        ("n_layer", 2.5),
        ("n_head", True),
        ("n_head", 3),
        ("mem_len", -1),
    ],
    "xlnet_config.json": [("n_layer", None), ("d_inner", 0), ("n_head", "two")],
}


@pytest.mark.parametrize(
    ("file", "key", "value"), [(file, *case) for file, cases in INVALID_SETTINGS.items() for case in cases]
)
def test_an_invalid_setting_is_named_with_its_file(file, key, value, tokenizer, tmp_path):
    WRITERS["huggingface" if file == "config.json" else "tensorflow"](tmp_path / "model", make(tokenizer))
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
def test_invalid_weights_are_refused_by_the_path_of_their_folder(content, tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(content, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_folder(tmp_path / "model")


def test_modified_weights_are_refused_unless_the_checksum_is_removed(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    file, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # the value stays finite
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged.*remove weights_crc32c"):
        load_folder(tmp_path / "model")
    settings = json.loads(config.read_text())
    del settings["weights_crc32c"]
    config.write_text(json.dumps(settings))
    load_folder(tmp_path / "model")


@pytest.mark.parametrize("kind", WRITERS)
def test_nonfinite_weights_are_refused_by_name(kind, tokenizer, tmp_path):
    folder = make(tokenizer)
    folder.weights["backbone.word_embedding.weight"][3, 1] = torch.nan
    WRITERS[kind](tmp_path / "model", folder)
    with pytest.raises(ValueError, match=r"the weight \S*embedding.weight has .* NaN"):
        load_folder(tmp_path / "model")


def test_shards_of_a_bin_file_are_refused_with_a_remedy(tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "model" / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(ValueError, match="sharded pytorch_model.bin files.*safetensors"):
        load_folder(tmp_path / "model")


def test_a_shard_outside_of_the_folder_is_refused(tokenizer, tmp_path):
    save_huggingface(tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"transformer.mask_emb": "../outside.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside of the folder"):
        load_folder(tmp_path / "model")


@pytest.mark.parametrize(
    ("path", "reason"), [("nowhere", "there is no such folder"), ("a_file", "not a folder"), ("empty", "TensorFlow")]
)
def test_a_path_without_a_model_is_refused_with_the_reason(path, reason, tmp_path):
    (tmp_path / "a_file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=reason):
        load_folder(tmp_path / path)


def test_a_folder_of_an_unknown_kind_is_refused_with_the_known_kinds(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="xlpre.*Hugging Face.*TensorFlow"):
        load_folder(tmp_path)
