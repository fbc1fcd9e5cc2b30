"""Models as the original TensorFlow release: round trips, files, refusals."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from pretrain.export import main
from tests.parity.goldens import GOLDENS
from tests.unit.conversion.folders import make
from xlpre.conversion import hf, tf
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder, save_tensorflow
from xlpre.conversion.tf_checkpoint import read_checkpoint, write_checkpoint
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import meta_model
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer

# variables of a model with one layer, from the original graph
LAYER = "model/transformer/layer_0"
SHAPES = {
    "model/lm_loss/bias": (300,),
    "model/transformer/word_embedding/lookup_table": (300, 16),
    "model/transformer/mask_emb/mask_emb": (1, 1, 16),
    "model/transformer/r_w_bias": (1, 2, 8),
    "model/transformer/r_r_bias": (1, 2, 8),
    "model/transformer/r_s_bias": (1, 2, 8),
    "model/transformer/seg_embed": (1, 2, 2, 8),
    **{f"{LAYER}/rel_attn/{name}/kernel": (16, 2, 8) for name in "qkvro"},
    **{f"{LAYER}/{part}/LayerNorm/{name}": (16,) for part in ("rel_attn", "ff") for name in ("gamma", "beta")},
    f"{LAYER}/ff/layer_1/kernel": (16, 24),
    f"{LAYER}/ff/layer_1/bias": (24,),
    f"{LAYER}/ff/layer_2/kernel": (24, 16),
    f"{LAYER}/ff/layer_2/bias": (16,),
}


def random_folder(seed: int, tokenizer: SentencePieceTokenizer) -> ModelFolder:
    """Return a random model folder that the original can represent."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    shape = ModelConfig(
        vocab_size=300,
        n_layer=int(rng.integers(1, 4)),
        d_model=12,
        n_head=int(rng.choice([1, 2, 3])),
        d_head=int(rng.choice([4, 5])),
        d_inner=int(rng.integers(1, 30)),
        feed_forward=str(rng.choice(["gelu", "relu"])),
        mem_len=int(rng.integers(0, 9)),
        clamp_len=[None, 7][rng.integers(2)],
        relative_segments=seed % 2 == 0,
        untie_r=seed % 4 < 2,
        dropout=float(rng.random()),
        dropatt=float(rng.random()),
        init_scheme=str(rng.choice(["published", "local"])),
        init_std=float(rng.random()),
    )
    weights = {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in meta_model(shape, two_streams=True).named_parameters()
    }
    vocabulary = SentencePieceTokenizer(tokenizer.content, "", str(rng.choice(["none", "cased", "uncased"])))
    objective = str(rng.choice(["permutation", "causal", "denoising"]))
    return ModelFolder(shape, weights, vocabulary, objective, {"step": seed, "store": "abc"}, "xlpre")


@pytest.mark.parametrize("seed", range(12))
def test_a_model_survives_a_round_trip_through_a_release(seed, tokenizer, tmp_path):
    folder = random_folder(seed, tokenizer)
    save_tensorflow(tmp_path / "there", folder)
    back = load_folder(tmp_path / "there")
    assert back.kind == "tensorflow" and back.config == folder.config and back.objective == folder.objective
    assert back.weights.keys() == folder.weights.keys()
    assert all(torch.equal(back.weights[name], weight) for name, weight in folder.weights.items())
    assert back.tokenizer.content == tokenizer.content and back.tokenizer.preprocess == folder.tokenizer.preprocess
    assert back.provenance.items() >= folder.provenance.items()


def test_a_release_has_the_files_settings_and_variables_of_the_original(tokenizer, tmp_path):
    save_tensorflow(tmp_path / "there", make(tokenizer, n_layer=1))
    files = {file.name for file in (tmp_path / "there").iterdir()}
    checkpoint = {"xlnet_model.ckpt.index", "xlnet_model.ckpt.data-00000-of-00001"}
    assert files == checkpoint | {"xlnet_config.json", "spiece.model", "provenance.json"}
    assert json.loads((tmp_path / "there/xlnet_config.json").read_text()) == {
        "n_layer": 1,
        "d_model": 16,
        "n_head": 2,
        "d_head": 8,
        "d_inner": 24,
        "n_token": 300,
        "ff_activation": "gelu",
        "untie_r": True,
    }
    arrays = read_checkpoint(tmp_path / "there/xlnet_model.ckpt")
    assert {name: array.shape for name, array in arrays.items()} == SHAPES
    assert {array.dtype for array in arrays.values()} == {np.dtype("f4")}


def test_shared_biases_are_one_variable_each_and_segments_are_optional(tokenizer, tmp_path):
    save_tensorflow(tmp_path / "there", make(tokenizer, untie_r=False, relative_segments=False))
    arrays = read_checkpoint(tmp_path / "there/xlnet_model.ckpt")
    root = "model/transformer/"
    biases = {name: array.shape for name, array in arrays.items() if name.startswith(f"{root}r_")}
    assert biases == {f"{root}r_w_bias": (2, 8), f"{root}r_r_bias": (2, 8)} and f"{root}seg_embed" not in arrays


def test_the_original_release_survives_a_round_trip_bit_for_bit(tmp_path):
    release = GOLDENS / "tf_release_untie"
    if not release.is_dir():
        pytest.skip(f"no {release.name} in {GOLDENS}; set XLPRE_GOLDENS")
    tf.write_model(tmp_path, *tf.read_model(release))
    again, first = (read_checkpoint(folder / tf.CHECKPOINT) for folder in (tmp_path, release))
    assert again.keys() == {name for name in first if not name.endswith(("/Adam", "/Adam_1", "global_step"))}
    assert all(np.array_equal(array, first[name]) for name, array in again.items())
    assert json.loads((tmp_path / tf.CONFIG_FILE).read_text()) == json.loads((release / tf.CONFIG_FILE).read_text())


@pytest.mark.parametrize("check", [hf.check_expressible, tf.check_expressible])
def test_a_future_setting_is_refused_unless_it_has_its_default(check):
    @dataclasses.dataclass(frozen=True)
    class FutureConfig(ModelConfig):
        cap: float = 0.0

    check(FutureConfig(cap=0.0))
    with pytest.raises(ValueError, match=r"model\.cap=30\.0 .* must be 0\.0"):
        check(FutureConfig(cap=30.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"feed_forward": "geglu"},
        {"norm": "pre"},
        {"norm_eps": 1e-6},
        {"attention_span": "same_length"},
        {"positions": "sinusoidal"},
        {"cutoffs": [50]},
        {"d_embed": 8},
        {"scale_embedding": True},
        {"tie_embedding": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_setting_that_the_original_lacks_is_refused_and_nothing_is_written(changes, tokenizer, tmp_path):
    save_folder(tmp_path / "native", make(tokenizer, **changes))
    ((key, value),) = changes.items()
    with pytest.raises(ValueError) as caught:
        main([str(tmp_path / "native"), str(tmp_path / "there"), "--tf"])
    assert f"model.{key}={value} is invalid for the original's" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["native"]


def test_a_full_disk_leaves_no_partial_folder(tokenizer, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tf, "write_checkpoint", full)
    with pytest.raises(OSError, match="no space left"):
        save_tensorflow(tmp_path / "there", make(tokenizer))
    assert not list(tmp_path.iterdir())


def test_an_incomplete_segment_encoding_is_a_missing_variable(tokenizer, tmp_path):
    save_tensorflow(tmp_path / "there", make(tokenizer))
    arrays = read_checkpoint(tmp_path / "there" / tf.CHECKPOINT)
    del arrays["model/transformer/seg_embed"]
    write_checkpoint(tmp_path / "there" / tf.CHECKPOINT, arrays)
    with pytest.raises(ValueError, match="the variable model/transformer/seg_embed is missing"):
        load_folder(tmp_path / "there")


def test_the_vocabulary_must_be_that_of_the_provenance(tokenizer, documents, tmp_path):
    save_tensorflow(tmp_path / "there", make(tokenizer))
    other = train_tokenizer(documents, TokenizerConfig(vocab_size=250))
    other.save(tmp_path / "there" / "spiece.model")
    with pytest.raises(ValueError, match=f"{other.sha256[:12]}.*{tokenizer.sha256[:12]}"):
        load_folder(tmp_path / "there")
    (tmp_path / "there" / "spiece.model").unlink()
    with pytest.raises(ValueError, match="spiece.model cannot be read"):
        load_folder(tmp_path / "there")


def test_hf_and_tf_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match=r"--tf is invalid: --hf is set, too\."):
        main([str(tmp_path / "native"), str(tmp_path / "there"), "--hf", "--tf"])


def test_a_release_without_provenance_is_exported_with_provenance(tokenizer, tmp_path, capsys):
    folder = dataclasses.replace(make(tokenizer), provenance={})
    save_tensorflow(tmp_path / "first", folder)
    (tmp_path / "first" / "provenance.json").unlink()
    main([str(tmp_path / "first"), str(tmp_path / "second"), "--tf", "--preprocess", "uncased"])
    assert f"written to {tmp_path / 'second'} for the original's TensorFlow code" in capsys.readouterr().out
    assert load_folder(tmp_path / "first").tokenizer.preprocess == "cased"
    assert load_folder(tmp_path / "second").tokenizer.preprocess == "uncased"
