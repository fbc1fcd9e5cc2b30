"""What a pretraining starts from, without a process."""

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


@pytest.mark.parametrize("kind", ["ours", "huggingface"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_head_of_next_sentence_prediction_goes_on_where_the_folder_has_it(store, tokenizer, tmp_path, kind, wanted):
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {name: p.detach() for name, p in LanguageModel(shape, True, next_sentence=True).named_parameters()}
    folder = ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre")
    (save_folder if kind == "ours" else save_huggingface)(tmp_path / kind, folder)
    words = tiny_args(store, tmp_path, init=tmp_path / kind, objective__next_sentence=str(wanted).lower())
    start = RunInputs(load_config(PretrainConfig, None, words)).weight_init
    torch.manual_seed(1)
    begun = dict(LanguageModel(start.shape, True, wanted).named_parameters())
    torch.manual_seed(1)
    model = start.build_model(partial(LanguageModel, start.shape, True, wanted))
    for name, parameter in model.named_parameters():
        anew = kind == "huggingface" and name.startswith("auxiliary_heads.")
        assert torch.equal(parameter, (begun if anew else weights)[name])
    assert ("starts anew" in start.description) == (kind == "huggingface" and wanted)


def test_a_setting_in_a_file_counts_also_where_it_is_the_usual_one(store, tokenizer, tmp_path):
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer), mem_len=8, clamp_len=6, dropout=0.3)
    weights = {name: p.detach() for name, p in LanguageModel(shape, True).named_parameters()}
    save_folder(tmp_path / "model", ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre"))
    words = [word for word in tiny_args(store, tmp_path, init=tmp_path / "model") if not word.startswith("model.")]
    given = ExplicitKeys(file=frozenset({"model.mem_len", "model.n_layer", "model.clamp_len"}))
    start = RunInputs(load_config(PretrainConfig, None, words), given).weight_init
    assert start.shape == dataclasses.replace(shape, mem_len=384, clamp_len=-1)
    assert start.description.endswith(f"not as configured: n_layer={shape.n_layer} (12)")
