"""Initial weights of a run, without a process group."""

import dataclasses
from functools import partial

import pytest
import torch

from pretrain.config import PretrainConfig
from pretrain.trainer.inputs import RunInputs
from tests.conftest import TINY
from tests.integration.conftest import tiny_args
from xlpre.config.cli import ExplicitKeys
from xlpre.config.loader import load_config
from xlpre.conversion.model_folder import ModelFolder, save_folder, save_huggingface
from xlpre.model.language_model import LanguageModel


@pytest.mark.parametrize("kind", ["native", "huggingface"])
@pytest.mark.parametrize("next_sentence", [True, False])
def test_the_head_of_next_sentence_prediction_is_loaded_if_the_folder_has_it(
    store, tokenizer, tmp_path, kind, next_sentence
):
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {name: p.detach() for name, p in LanguageModel(shape, True, next_sentence=True).named_parameters()}
    folder = ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre")
    (save_folder if kind == "native" else save_huggingface)(tmp_path / kind, folder)
    args = tiny_args(store, tmp_path, init_from=tmp_path / kind, objective__next_sentence=str(next_sentence).lower())
    weight_init = RunInputs(load_config(PretrainConfig, None, args)).weight_init
    torch.manual_seed(1)
    new = dict(LanguageModel(weight_init.model_config, True, next_sentence).named_parameters())
    torch.manual_seed(1)
    model = weight_init.build_model(partial(LanguageModel, weight_init.model_config, True, next_sentence))
    for name, parameter in model.named_parameters():
        is_new = kind == "huggingface" and name.startswith("auxiliary_heads.")
        assert torch.equal(parameter, (new if is_new else weights)[name])
    assert ("gets new weights" in weight_init.description) == (kind == "huggingface" and next_sentence)


def test_a_setting_of_the_config_file_counts_even_if_it_equals_the_default(store, tokenizer, tmp_path):
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer), mem_len=8, clamp_len=6, dropout=0.3)
    weights = {name: p.detach() for name, p in LanguageModel(shape, True).named_parameters()}
    save_folder(tmp_path / "model", ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre"))
    args = [arg for arg in tiny_args(store, tmp_path, init_from=tmp_path / "model") if not arg.startswith("model.")]
    explicit_keys = ExplicitKeys(file=frozenset({"model.mem_len", "model.n_layer", "model.clamp_len"}))
    weight_init = RunInputs(load_config(PretrainConfig, None, args), explicit_keys).weight_init
    assert weight_init.model_config == dataclasses.replace(shape, mem_len=384, clamp_len=None)
    assert weight_init.description.endswith(f"instead of the configured ones: n_layer={shape.n_layer} (12)")
