"""A fine-tuned folder that does not fit together is refused, by file and name."""

import json

import pytest
import safetensors.torch
import torch

from finetune.config import TaskDataConfig
from finetune.tasks.registry import build_task
from finetune.trainer.task_model import open_task_model
from finetune.trainer.task_model import TaskModel
from tests.conftest import write_folder
from xlpre.conversion.model_folder import load_folder
from xlpre.conversion.task_model import TaskModelFolder, save_task_model


@pytest.fixture
def folder(tokenizer, tmp_path):
    task = build_task("classify", TaskDataConfig(text=["text"], labels=["a", "b", "c"]), "last")
    before = load_folder(write_folder(tmp_path / "before", tokenizer))
    weights = {name: p.detach() for name, p in TaskModel(before.config, task).named_parameters()}
    facts = {"task": task.name, "data": task.data_settings(), "summary": "last", "labels": task.label_names}
    save_task_model(tmp_path / "model", TaskModelFolder.from_finetuned(before, before.config, weights, facts, {}))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("logits_proj.weight", None, r"logits_proj.weight in head.safetensors is not there, and in the head of classify \(3, "),
        (
            "logits_proj.bias",
            torch.zeros(1),
            r"logits_proj.bias in head.safetensors is \(1,\), and in the head of classify \(3,\)",
        ),
        (
            "start.bias",
            torch.zeros(1),
            r"start.bias in head.safetensors is \(1,\), and in the head of classify not there",
        ),
    ],
)
def test_a_head_that_is_not_the_tasks_is_refused(folder, name, weight, message):
    head = safetensors.torch.load_file(folder / "head.safetensors") | {name: weight}
    safetensors.torch.save_file({key: x for key, x in head.items() if x is not None}, folder / "head.safetensors")
    with pytest.raises(ValueError, match="head.safetensors is not as it was written .* remove head_crc32c"):
        open_task_model(folder)
    task = json.loads((folder / "task.json").read_text())
    del task["head_crc32c"]
    (folder / "task.json").write_text(json.dumps(task))
    with pytest.raises(ValueError, match=message):
        open_task_model(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"maxlen": 9}, "task.json: there is no setting 'maxlen'; did you mean 'max_len'"),
        ({"max_len": None}, "task.json: its data has no max_len; copy the file"),
        ({"max_len": "long"}, "task.json: .*max_len"),
        ([], "task.json must hold an object, and so must `data` in it"),
    ],
)
def test_settings_that_are_none_or_lack_are_refused(folder, data, message):
    task = json.loads((folder / "task.json").read_text())
    if data:
        data = {key: value for key, value in {**task["data"], **data}.items() if key != "max_len" or value}
    (folder / "task.json").write_text(json.dumps({**task, "data": data}))
    with pytest.raises(ValueError, match=message):
        open_task_model(folder)


def test_a_folder_as_it_was_written_is_opened(folder):
    model, task = open_task_model(folder)
    assert task.label_names == ["a", "b", "c"] and model.head["logits_proj.bias"].shape == (3,)
