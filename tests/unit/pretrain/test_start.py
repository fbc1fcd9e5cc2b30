"""What a pretraining starts from, without a process."""

import dataclasses

import pytest
import torch

from pretrain.config import PretrainConfig
from pretrain.foundation import Foundation
from tests.conftest import TINY
from tests.integration.conftest import tiny_words
from xlpre.config import load
from xlpre.exchange.folder import ModelFolder, save_folder, save_huggingface
from xlpre.model.language_model import LanguageModel


@pytest.mark.parametrize("kind", ["ours", "huggingface"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_head_of_next_sentence_prediction_goes_on_where_the_folder_has_it(store, tokenizer, tmp_path, kind, wanted):
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {name: p.detach() for name, p in LanguageModel(shape, True, next_sentence=True).named_parameters()}
    folder = ModelFolder(shape, weights, tokenizer, "permutation", {}, "xlpre")
    (save_folder if kind == "ours" else save_huggingface)(tmp_path / kind, folder)
    words = tiny_words(store, tmp_path, init=tmp_path / kind, objective__next_sentence=str(wanted).lower())
    start = Foundation(load(PretrainConfig, None, words), ()).start
    model = LanguageModel(start.shape, True, wanted)
    begun = {name: parameter.clone() for name, parameter in model.named_parameters()}
    start.put_weights(model)
    for name, parameter in model.named_parameters():
        anew = kind == "huggingface" and name.startswith("auxiliary.")
        assert torch.equal(parameter, (begun if anew else weights)[name])
    assert ("starts anew" in start.about) == (kind == "huggingface" and wanted)
