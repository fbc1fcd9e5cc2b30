import json
import pickle

import pytest
import torch

from xlpre.exchange.folder import load_folder, save_folder
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel


@pytest.fixture
def folder(tmp_path, tokenizer):
    def make(**settings):
        shape = ModelConfig(vocab_size=len(tokenizer), n_layer=2, d_model=16, n_head=2, d_inner=24, **settings)
        model = LanguageModel(shape, two_streams=True)
        weights = dict(model.named_parameters())
        save_folder(tmp_path / "model", weights, shape, tokenizer, objective="permutation", passport={"step": 3})
        return tmp_path / "model", model

    return make


@pytest.mark.parametrize("untie_r", [True, False])
def test_a_model_survives_a_round_trip_bit_for_bit(folder, tokenizer, untie_r):
    path, model = folder(untie_r=untie_r)
    loaded = load_folder(path)
    assert loaded.tokenizer.sha256 == tokenizer.sha256 and loaded.model.config == model.config
    for (name, ours), theirs in zip(model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_cut_weights_file_is_refused(folder):
    path, _ = folder()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="model.safetensors: does not fit its config.json"):
        load_folder(path)


def test_weights_of_another_shape_are_refused_by_name(folder):
    path, _ = folder()
    content = json.loads((path / "config.json").read_text())
    content["model"]["d_inner"] = 32
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"feed_forward.* is \(24,.*the config says \(32,"):
        load_folder(path)


def test_another_vocabulary_is_refused_with_both_hashes(folder, documents, tokenizer):
    from xlpre.text.tokenizer import TokenizerConfig, train

    path, _ = folder()
    other = train(documents, TokenizerConfig(vocab_size=250))
    other.save(path / "spiece.model")
    with pytest.raises(ValueError, match=f"{other.sha256[:12]}.*{tokenizer.sha256[:12]}"):
        load_folder(path)


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was executed')",))


def test_a_pickle_in_place_of_the_weights_is_not_executed(folder):
    path, _ = folder()
    (path / "model.safetensors").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match="model.safetensors"):
        load_folder(path)
