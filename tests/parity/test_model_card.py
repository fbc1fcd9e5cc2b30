"""The code of model cards runs as printed, and computes what xlpre computes."""

import re

import pytest
import torch
from huggingface_hub import ModelCard

from finetune.config import TaskDataConfig
from finetune.export import main as export_task
from finetune.tasks.registry import build_task
from finetune.trainer.inference import predict_lines
from pretrain.export import main as export_model
from tests.parity.test_huggingface_heads import QUESTION, SHAPE, make_finetuned
from xlpre.batch import make_batch
from xlpre.conversion.model_folder import ModelFolder, save_folder
from xlpre.conversion.task_model_folder import load_task_model, save_task_model
from xlpre.inference.cloze import cloze_batch, predict_blanks
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.objectives.registry import OBJECTIVES

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5
FILE = {"one": "A text.", "two": "Its second text."}


def run_card(folder):
    """Run the code of a card as its reader would, in the parent folder. Return the names that it defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.DOTALL)
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        exec(code, names)
    return names


@pytest.fixture(params=OBJECTIVES)
def language_model(request, tokenizer, tmp_path):
    """Folder of a model with random weights, for each objective."""
    torch.manual_seed(4)
    model = LanguageModel(SHAPE, OBJECTIVES[request.param].two_streams).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = ModelFolder.from_model(model, tokenizer, request.param)
    save_folder(tmp_path / "source", folder)
    return folder, tmp_path


@torch.no_grad()
def test_the_code_of_a_language_model_predicts_the_same_in_both_libraries(language_model, tokenizer):
    folder, home = language_model
    export_model([str(home / "source"), str(home / "external"), "--hf"])
    export_model([str(home / "source"), str(home / "native")])
    external, native, model = run_card(home / "external"), run_card(home / "native"), folder.model()
    if folder.objective == "causal":
        tokens = torch.tensor([tokenizer.encode("The beginning of a")])
        key_rank = torch.arange(tokens.size(1), dtype=torch.int32)[None]
        batch = make_batch(tokens, key_rank + 1, key_rank, key_rank[:, -1:].long())
        assert isinstance(native["lm"].model, LanguageModel) and isinstance(native["continuation"], str)
    else:
        batch = cloze_batch("A text with one ____ word.", tokenizer, model.backbone.two_streams)
        expected = predict_blanks(model, tokenizer, "A text with one ____ word.").predictions[0]
        assert native["predictions"] == expected
        if folder.objective == "permutation":
            export_model([str(home / "source"), str(home / "release"), "--tf"])
            assert run_card(home / "release")["predictions"] == expected
    logits, *_ = model.logits(batch, initial_memory(folder.config, 1, mem_len=0))
    assert logits.std() > 0.1 and len(external["predictions"]) == 5
    torch.testing.assert_close(external["logits"], logits[0, 0], atol=TOLERANCE, rtol=1e-4)


def test_the_metadata_names_a_pipeline_that_opens_the_model(language_model):
    folder, home = language_model
    export_model([str(home / "source"), str(home / "external"), "--hf"])
    data = ModelCard.load(home / "external" / "README.md").data
    assert data.library_name == "transformers" and data.license is None and data.language is None
    pipeline = transformers.pipeline(data.pipeline_tag, model=str(home / "external"), trust_remote_code=True)
    texts = ["A <mask> text", "Another <mask> text, which is longer"][: 1 if folder.objective == "causal" else 2]
    results = pipeline(texts, batch_size=8)  # more rows than the model has layers
    assert len(results) == len(texts)
    if folder.objective != "causal":
        expected = predict_blanks(folder.model(), folder.tokenizer, "A ____ text").predictions[0][0]
        assert results[0][0]["score"] == pytest.approx(expected[1], rel=1e-3)
    export_model([str(home / "source"), str(home / "native")])
    data = ModelCard.load(home / "native" / "README.md").data
    assert data.library_name == "xlpre"
    assert data.pipeline_tag == (None if folder.objective == "causal" else "fill-mask")


@pytest.mark.parametrize(
    ("task", "settings", "pipeline_tag"),
    [
        ("classify", {"text": ["one"], "labels": ["good", "bad"]}, "text-classification"),
        ("classify", {"text": ["one", "two"], "labels": ["good", "bad"]}, "text-classification"),
        ("regress", {"text": ["one", "two"], "label_scale": [3.5, 0.25]}, "text-classification"),
        ("race", {}, "multiple-choice"),
        ("squad/2.0", {}, "question-answering"),
    ],
)
def test_the_code_of_a_fine_tuned_model_predicts_what_xlpre_predicts(task, settings, pipeline_tag, tokenizer, tmp_path):
    built = build_task(task, TaskDataConfig(**settings), "last")
    save_task_model(tmp_path / "source", make_finetuned(tokenizer, built, "last"))
    export_task([str(tmp_path / "source"), str(tmp_path / "exported")])
    assert ModelCard.load(tmp_path / "exported" / "README.md").data.pipeline_tag == pipeline_tag
    names = run_card(tmp_path / "exported")
    saved = load_task_model(tmp_path / "source")
    if task == "race":
        fields = {"article": names["passage"], "question": names["question"], "options": names["options"]}
        (expected,) = predict_lines(saved, built, [("", {**QUESTION, **fields})])
        assert names["probabilities"].tolist() == pytest.approx(expected["probabilities"], abs=TOLERANCE)
    elif task == "squad/2.0":
        assert isinstance(names["answer"], str) and names["outputs"].start_top_index.shape == (1, 5)
    else:
        (expected,) = predict_lines(saved, built, [("", {name: FILE[name] for name in settings["text"]})])
        if task == "regress":
            assert names["value"] == pytest.approx(expected["prediction"], abs=TOLERANCE)
        else:
            assert names["label"] == expected["prediction"]
            assert names["probabilities"].tolist() == pytest.approx(
                [*expected["probabilities"].values()], abs=TOLERANCE
            )
