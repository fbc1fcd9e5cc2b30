"""Model folders: round trips, provenance, models in memory."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from tests.unit.conversion.folders import WRITERS, make, write_release
from xlpre.conversion.model_folder import (
    ModelFolder,
    load_folder,
    resolve_model_dir,
    save_folder,
    save_huggingface,
    save_tensorflow,
)
from xlpre.text.tokenizer import TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("settings", [{}, {"untie_r": False}, {"feed_forward": "relu"}])
def test_a_model_survives_a_round_trip_bit_for_bit(kind, settings, tokenizer, tmp_path):
    if kind == "huggingface" and "untie_r" in settings:
        pytest.skip("Hugging Face stores biases per layer; tests/parity/test_huggingface.py compares the numbers")
    folder = make(tokenizer, **settings)
    WRITERS[kind](tmp_path / "there", folder)
    back = load_folder(tmp_path / "there")
    assert back.kind == kind and back.objective == "permutation"
    assert back.config.head_width == 8 and back.config.untie_r == folder.config.untie_r
    assert back.weights.keys() == folder.weights.keys()
    for name, weight in folder.weights.items():
        assert torch.equal(back.weights[name], weight), name
    assert back.tokenizer.sha256 == tokenizer.sha256
    for parameter, weight in zip(back.model().parameters(), folder.model().parameters(), strict=True):
        assert torch.equal(parameter, weight)


def test_every_kind_of_model_survives_in_a_native_folder(tokenizer, tmp_path):
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


def test_a_model_that_was_trained_with_the_kernels_of_a_gpu_opens_on_a_cpu(tokenizer, tmp_path):
    folder = make(tokenizer)
    on_gpu = dataclasses.replace(folder, config=dataclasses.replace(folder.config, attention_backend="triton"))
    save_folder(tmp_path / "model", on_gpu)
    settings = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    settings["model"]["attention_backend"] = "triton"  # as folders before had it
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    assert load_folder(tmp_path / "model").model().config.attention_backend == "auto"


def test_a_next_sentence_head_is_saved_in_native_folders_only(tokenizer, tmp_path):
    folder = make(tokenizer, next_sentence=True)
    save_folder(tmp_path / "native", folder)
    back = load_folder(tmp_path / "native")
    assert back.next_sentence and back.weights.keys() == folder.weights.keys()
    head = back.model().auxiliary_heads["next_sentence"]
    assert torch.equal(head.dense.weight, folder.weights["auxiliary_heads.next_sentence.dense.weight"])
    for save in (save_huggingface, save_tensorflow):
        save(tmp_path / "external", folder)
        loaded = load_folder(tmp_path / "external")
        assert not loaded.next_sentence and not loaded.model().auxiliary_heads
        assert loaded.weights.keys() == {name for name in folder.weights if not name.startswith("auxiliary_heads.")}
    fewer = {name: weight for name, weight in folder.weights.items() if not name.endswith("dense.bias")}
    save_folder(tmp_path / "cut", dataclasses.replace(folder, weights=fewer))
    with pytest.raises(ValueError, match=r"auxiliary_heads.next_sentence.dense.bias is missing"):
        load_folder(tmp_path / "cut")


def test_the_provenance_holds_vocabulary_step_special_ids_and_versions(tokenizer, tmp_path):
    save_folder(tmp_path / "model", make(tokenizer))
    provenance = json.loads((tmp_path / "model" / "provenance.json").read_text())
    assert provenance["vocabulary_sha256"] == tokenizer.sha256 and provenance["step"] == 3
    assert provenance["special_ids"]["<sep>"] == 4 and provenance["versions"]["torch"] and "revision" in provenance


@pytest.mark.parametrize("kind", ["xlpre", "huggingface"])
def test_a_folder_of_format_1_is_refused(kind, tokenizer, tmp_path):
    WRITERS[kind](tmp_path / "model", make(tokenizer))
    (tmp_path / "model" / "provenance.json").rename(tmp_path / "model" / "passport.json")
    config = tmp_path / "model" / "config.json"
    settings = json.loads(config.read_text())
    settings.pop("format_version", None)
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model is invalid: .*older format.*version that wrote it"):
        load_folder(tmp_path / "model")


@pytest.mark.parametrize("kind", ["xlpre", "huggingface"])
def test_a_vocabulary_other_than_that_of_the_provenance_is_refused_with_both_hashes(
    kind, tokenizer, documents, tmp_path
):
    WRITERS[kind](tmp_path / "model", make(tokenizer))
    other = train_tokenizer(documents, TokenizerConfig(vocab_size=250))
    other.save(tmp_path / "model" / "spiece.model")
    with pytest.raises(ValueError, match=f"{other.sha256[:12]}.*{tokenizer.sha256[:12]}"):
        load_folder(tmp_path / "model")


def test_a_vocabulary_of_another_size_is_refused_without_provenance(tokenizer, documents, tmp_path):
    path = write_release(tmp_path / "release", make(tokenizer))
    train_tokenizer(documents, TokenizerConfig(vocab_size=250)).save(path / "spiece.model")
    with pytest.raises(ValueError, match=r"250 pieces.* 300.*resize_token_embeddings\(250\)"):
        load_folder(path)


def test_weights_of_huggingface_may_be_shards_or_a_bin_file(tokenizer, tmp_path):
    folder = make(tokenizer)
    save_huggingface(tmp_path / "model", folder)
    single = tmp_path / "model" / "model.safetensors"
    arrays = safetensors.torch.load_file(single)
    single.unlink()
    torch.save(arrays, tmp_path / "model" / "pytorch_model.bin")
    assert torch.equal(load_folder(tmp_path / "model").weights["lm_head.bias"], folder.weights["lm_head.bias"])
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    index = {}
    for number, (name, tensor) in enumerate(arrays.items()):
        shard = f"model-{number % 2}.safetensors"
        index[name] = shard
        part = {n: t for i, (n, t) in enumerate(arrays.items()) if i % 2 == number % 2}
        safetensors.torch.save_file(part, tmp_path / "model" / shard)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(load_folder(tmp_path / "model").weights["lm_head.bias"], folder.weights["lm_head.bias"])
    (tmp_path / "model" / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="model-1.safetensors"):
        load_folder(tmp_path / "model")


def test_all_files_of_a_folder_have_the_same_permissions(tokenizer, tmp_path):
    for kind in ("xlpre", "huggingface"):
        WRITERS[kind](tmp_path / kind, make(tokenizer))
        assert len({file.stat().st_mode for file in (tmp_path / kind).iterdir()}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_of_any_precision_is_saved_in_fp32_with_its_provenance(tokenizer, tmp_path, dtype):
    model = make(tokenizer).model().to(dtype)
    save_folder(tmp_path / "there", ModelFolder.from_model(model, tokenizer, "permutation", step=3))
    back = load_folder(tmp_path / "there")
    assert back.provenance["step"] == 3 and {weight.dtype for weight in back.weights.values()} == {torch.float32}
    assert all(torch.equal(back.weights[name], p.float()) for name, p in model.named_parameters())


def test_from_model_copies_the_weights(tokenizer):
    model = make(tokenizer).model()
    folder = ModelFolder.from_model(model, tokenizer, "permutation")
    with torch.no_grad():
        model.backbone.mask_embedding.add_(1)
    assert not torch.equal(folder.weights["backbone.mask_embedding"], model.backbone.mask_embedding)


@pytest.mark.parametrize("objective", ["denoising", "causal", "custom"])
def test_from_model_refuses_an_objective_with_another_number_of_streams(tokenizer, objective):
    with pytest.raises(ValueError, match=rf"objective='{objective}'.*permutation"):
        ModelFolder.from_model(make(tokenizer).model(), tokenizer, objective)


def test_from_model_refuses_a_vocabulary_of_another_size(tokenizer, documents):
    other = train_tokenizer(documents, TokenizerConfig(vocab_size=200))
    with pytest.raises(ValueError, match="tokenizer.* 200 .* 300"):
        ModelFolder.from_model(make(tokenizer).model(), other, "permutation")


def test_a_state_dict_is_refused_in_favor_of_named_parameters(tokenizer, tmp_path):
    folder = make(tokenizer)
    folder = ModelFolder(folder.config, folder.model().state_dict(), tokenizer, "permutation", {}, "xlpre")
    with pytest.raises(ValueError, match=r"model.named_parameters\(\)"):
        save_folder(tmp_path / "there", folder)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", WRITERS)
def test_the_folder_of_a_run_stands_for_its_model_folder(kind, tokenizer, tmp_path):
    run, folder = tmp_path / "run", make(tokenizer)
    run.mkdir()
    (run / "config.yaml").write_text("name: mine\n")
    with pytest.raises(ValueError, match=r"run is invalid: the run has not saved a model yet\."):
        load_folder(run)
    WRITERS[kind](run / "model", folder)
    assert resolve_model_dir(run) == run / "model" == resolve_model_dir(run / "model")
    assert torch.equal(load_folder(run).weights["lm_head.bias"], folder.weights["lm_head.bias"])


def test_a_folder_inside_a_run_is_refused_with_the_folder_of_the_run(tokenizer, tmp_path):
    save_folder(tmp_path / "run" / "model", make(tokenizer))
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(
        ValueError, match=rf"checkpoints is invalid: it is not a model folder. Did you mean {tmp_path}/run\?"
    ):
        load_folder(tmp_path / "run" / "checkpoints")
