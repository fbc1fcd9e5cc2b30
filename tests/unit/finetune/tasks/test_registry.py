"""Tasks are built by name; names and settings that do not fit are refused."""

import pytest

from finetune.config import TaskDataConfig
from finetune.tasks.registry import TASK_NAMES, build_task
from tests.unit.finetune.conftest import build


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("glue/mprc", "glue/mrpc"), ("mrpc", "glue/mrpc"), ("GLUE/CoLA", "glue/cola"), ("sst2", "glue/sst-2"), ("race/low", "race")],
)  # fmt: skip
def test_a_misspelt_task_suggests_the_nearest_name(name, nearest):
    with pytest.raises(ValueError, match=f"task={name} .*Did you mean {nearest}"):
        build_task(name, TaskDataConfig(), "last")


def test_an_unknown_task_lists_all_names():
    with pytest.raises(ValueError, match="task=zzzzzz .*glue/cola.*rank"):
        build_task("zzzzzz", TaskDataConfig(), "last")


@pytest.mark.parametrize("name", [name for name in TASK_NAMES if name not in ("classify", "regress", "rank")])
def test_an_official_task_without_its_folder_names_the_files_it_needs(name, tmp_path):
    with pytest.raises(ValueError, match="data.dir=.* no such folder.* contains"):
        build(name, tmp_path / "no").read_split("train")
    with pytest.raises(ValueError, match="data.dir=.* Set data.dir"):
        build(name, "").read_split("train")


def test_unused_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.text=.* task=glue/cola"):
        build("glue/cola", tmp_path, text=["a"])
    with pytest.raises(ValueError, match="data.null_score_threshold=0.0 is invalid: task=squad/1.1 does not use it"):
        build("squad/1.1", tmp_path, null_score_threshold=0.0)
    with pytest.raises(ValueError, match="data.doc_stride=32 is invalid: task=race"):
        build("race", tmp_path, doc_stride=32)
    with pytest.raises(ValueError, match="model.pooling=first is invalid with task=squad/2.0"):
        build_task("squad/2.0", TaskDataConfig(dir=str(tmp_path)), "first")
    with pytest.raises(ValueError, match="data.train=.* task=race"):
        build("race", tmp_path, train=["a"])
