"""A model in memory becomes a folder."""

import pytest
import torch

from tests.unit.conversion.folders import make
from xlpre.conversion.from_model import folder_of
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.text.tokenizer import train
from xlpre.text.tokenizer_config import TokenizerConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_of_any_precision_is_saved_in_fp32_with_what_is_said_of_it(tokenizer, tmp_path, dtype):
    model = make(tokenizer).model().to(dtype)
    save_folder(tmp_path / "there", folder_of(model, tokenizer, "permutation", step=3))
    back = load_folder(tmp_path / "there")
    assert back.provenance["step"] == 3 and {weight.dtype for weight in back.weights.values()} == {torch.float32}
    assert all(torch.equal(back.weights[name], p.float()) for name, p in model.named_parameters())


def test_its_weights_are_a_copy(tokenizer):
    model = make(tokenizer).model()
    folder = folder_of(model, tokenizer, "permutation")
    with torch.no_grad():
        model.backbone.mask_embedding.add_(1)
    assert not torch.equal(folder.weights["backbone.mask_embedding"], model.backbone.mask_embedding)


@pytest.mark.parametrize("objective", ["denoising", "causal", "own"])
def test_an_objective_of_another_stream_or_none_is_refused(tokenizer, objective):
    with pytest.raises(ValueError, match=rf"objective \('{objective}'\) .* must be permutation$"):
        folder_of(make(tokenizer).model(), tokenizer, objective)


def test_another_vocabulary_is_refused(tokenizer, documents):
    other = train(documents, TokenizerConfig(vocab_size=200))
    with pytest.raises(ValueError, match="the vocabulary has 200 pieces, the model 300"):
        folder_of(make(tokenizer).model(), other, "permutation")


def test_a_state_dict_is_refused_with_what_to_take_instead(tokenizer, tmp_path):
    folder = make(tokenizer)
    of_state = ModelFolder(folder.config, folder.model().state_dict(), tokenizer, "permutation", {}, "xlpre")
    with pytest.raises(ValueError, match=r"take model.named_parameters\(\)"):
        save_folder(tmp_path / "there", of_state)
    assert not list(tmp_path.iterdir())
