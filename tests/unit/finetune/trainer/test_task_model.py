"""Fine-tuned model folders."""

import json

import pytest
import safetensors.torch
import torch

from finetune.config import TaskDataConfig
from finetune.tasks.registry import build_task
from finetune.trainer.task_model import TaskModel, open_task_model
from tests.conftest import write_folder
from xlpre.conversion.model_folder import load_folder
from xlpre.conversion.task_model_folder import TaskModelFolder, save_task_model


@pytest.fixture
def folder(tokenizer, tmp_path):
    """A fine-tuned model folder of a task with three classes."""
    task = build_task("classify", TaskDataConfig(text=["text"], labels=["a", "b", "c"]), "last")
    pretrained = load_folder(write_folder(tmp_path / "pretrained", tokenizer))
    weights = {name: p.detach() for name, p in TaskModel(pretrained.config, task).named_parameters()}
    content = {"task": task.name, "data": task.data_settings(), "pooling": "last", "labels": task.label_names}
    model = TaskModelFolder.from_finetuned(pretrained, pretrained.config, weights, content, {})
    save_task_model(tmp_path / "model", model)
    return tmp_path / "model"


def test_a_saved_folder_is_opened(folder):
    model, task = open_task_model(folder)
    assert task.label_names == ["a", "b", "c"] and model.head["logits_proj.bias"].shape == (3,)


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("logits_proj.weight", None, r"logits_proj.weight .* missing.* \(3, \d+\).*Copy"),
        ("logits_proj.bias", torch.zeros(1), r"logits_proj.bias .*\(1,\).* \(3,\).*Copy"),
        ("start.bias", torch.zeros(1), r"start.bias .*\(1,\).* missing.*Copy"),
    ],
)
def test_a_head_with_other_weights_than_the_task_needs_is_refused(folder, name, weight, message):
    head = safetensors.torch.load_file(folder / "head.safetensors") | {name: weight}
    safetensors.torch.save_file({key: x for key, x in head.items() if x is not None}, folder / "head.safetensors")
    with pytest.raises(ValueError, match=r"head.safetensors.*head_crc32c"):
        open_task_model(folder)
    task = json.loads((folder / "task.json").read_text())
    del task["head_crc32c"]
    (folder / "task.json").write_text(json.dumps(task))
    with pytest.raises(ValueError, match=message):
        open_task_model(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"maxseqlen": 9}, "task.json: .*'maxseqlen'.*'max_seq_len'"),
        ({"max_seq_len": None}, "task.json .*max_seq_len.*Copy"),
        ({"max_seq_len": "long"}, "task.json: .*max_seq_len"),
        ([], "task.json .*`data`"),
    ],
)
def test_unknown_missing_or_wrong_task_settings_are_refused(folder, data, message):
    task = json.loads((folder / "task.json").read_text())
    if data:
        data = {key: value for key, value in {**task["data"], **data}.items() if key != "max_seq_len" or value}
    (folder / "task.json").write_text(json.dumps({**task, "data": data}))
    with pytest.raises(ValueError, match=message):
        open_task_model(folder)


def test_a_folder_of_an_older_version_is_refused_in_one_sentence(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "format_version": 1}))
    with pytest.raises(ValueError, match=r"older format of xlpre"):
        open_task_model(folder)
