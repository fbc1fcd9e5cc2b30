"""Model card: names instead of paths, and metadata that huggingface_hub reads."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard as HubCard

from finetune.config import FinetuneConfig, TaskDataConfig
from finetune.tasks.registry import build_task
from finetune.trainer.run_record import _benchmarks
from xlpre.conversion.model_card import (
    ModelCard,
    TrainingRecord,
    find_run,
    hub_dataset,
    hub_model,
    short_name,
    show_source,
)

CACHE = "/home/me/.cache/huggingface/hub/models--xlnet--xlnet-base-cased/snapshots/ceaa69c7bc5e"


def render(record):
    return ModelCard(
        "me/mine", "transformers", "text-classification", ["tag"], "Summary.", "Use.", "code", record
    ).render()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/runs/mine/model", "mine"),
        ("runs/mine/seed_2/best", "seed_2"),
        ("/home/me/exported/mine/", "mine"),
        ("/secret/texts/*.txt", "*.txt"),
        ("model", "model"),
        ("/", "unknown"),
    ],
)
def test_a_path_is_shortened_to_a_name(path, name):
    assert short_name(path) == name


def test_names_of_the_hub_are_recognized_and_local_folders_are_not(tmp_path, monkeypatch):
    assert hub_model(CACHE) == "xlnet/xlnet-base-cased"
    assert hub_model("runs/models--mine/model") is None and hub_model("") is None
    assert hub_dataset("hf:wikimedia/wikipedia/20231101.de") == "wikimedia/wikipedia"
    assert hub_dataset("hf:rajpurkar/squad_v2:train") == "rajpurkar/squad_v2"
    for local in ("hf:./folder", "hf:/home/me/folder", "hf:~/folder", "texts/*.txt", "docstrings"):
        assert hub_dataset(local) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private" / "data").mkdir(parents=True)
    assert hub_dataset("hf:private/data") is None and show_source("hf:private/data") == "`data`"
    assert show_source("hf:wikimedia/wikipedia/20231101.de") == "`hf:wikimedia/wikipedia/20231101.de`"


def test_scores_on_a_benchmark_are_metadata_and_scores_on_own_files_are_not():
    scores = {"dev/accuracy": 0.875, "dev/f1": 0.9, "dev/loss": 0.3}
    data = TaskDataConfig(dir="/home/me/glue")
    task = build_task("glue/sst-2", data, "last")
    config = FinetuneConfig(task="glue/sst-2", data=data)
    text = render(TrainingRecord(benchmarks=_benchmarks(config, task, scores), base_model="xlnet/xlnet-base-cased"))
    assert "/home/me" not in text
    card = HubCard(text).data
    assert card.base_model == "xlnet/xlnet-base-cased" and card.model_name == "mine"
    results = [
        (x.dataset_type, x.dataset_config, x.dataset_split, x.metric_type, x.metric_value) for x in card.eval_results
    ]
    assert results == [
        ("nyu-mll/glue", "sst2", "dev", "accuracy", 0.875),
        ("nyu-mll/glue", "sst2", "dev", "f1", 0.9),
    ]
    own = FinetuneConfig(task="glue/sst-2", data=TaskDataConfig(dir="/home/me/glue", dev=["mine.tsv"]))
    assert _benchmarks(own, task, scores) == []


def test_text_of_the_user_cannot_break_a_table():
    text = render(TrainingRecord(data={"Text": "`a|b\n.txt`"}, datasets=["owner/data"]))
    assert "| Text | `a\\|b .txt` |\n" in text and HubCard(text).data.datasets == ["owner/data"]
    assert "No evaluation of these weights is recorded" in text


def test_the_run_of_a_model_folder_is_found(tmp_path):
    run = tmp_path / "a" / "b" / "run"
    (run / "checkpoints" / "step_00000020" / "model").mkdir(parents=True)
    (run / "seed_1" / "best").mkdir(parents=True)
    (run / "config.yaml").touch()
    for folder in (run, run / "seed_1" / "best", run / "checkpoints" / "step_00000020" / "model"):
        assert find_run(folder) == run
    assert find_run(tmp_path) is None and find_run(Path("elsewhere")) is None
