"""Registry of all tasks by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from finetune.config import TaskDataConfig
from finetune.tasks.base import Task
from finetune.tasks.custom import build_classification, build_regression
from finetune.tasks.glue import GLUE_LAYOUTS, build_glue
from finetune.tasks.race import RACE_LEVELS, build_race
from finetune.tasks.ranking import build_ranking
from finetune.tasks.squad import build_squad
from finetune.tasks.text_classification import CSV_CORPORA, build_corpus
from xlpre.common.errors import InputError
from xlpre.model.pooling import Pooling


@dataclass(frozen=True)
class TaskFamily:
    """Tasks that are built in the same way.

    Attributes:
        names: values of the setting `task`.
        build: builds one of the tasks.
        unused_settings: settings in `data` that these tasks do not use.
    """

    names: tuple[str, ...]
    build: Callable[[str, TaskDataConfig, Pooling], Task]
    unused_settings: tuple[str, ...]


FILES, TREC = ("train", "dev", "test"), ("queries", "documents", "qrels")
COLUMNS = ("text", "label", "labels", "label_scale")
RACE, SQUAD = ("max_option_len",), ("max_question_len", "doc_stride", "max_answer_len", "null_score_threshold")
FAMILIES = (
    TaskFamily(tuple(GLUE_LAYOUTS), build_glue, (*COLUMNS, *TREC, *RACE, *SQUAD)),
    TaskFamily(tuple(RACE_LEVELS), build_race, (*FILES, *COLUMNS, *TREC, *SQUAD)),
    TaskFamily(("squad/1.1",), build_squad, (*COLUMNS, *TREC, *RACE, "null_score_threshold")),
    TaskFamily(("squad/2.0",), build_squad, (*COLUMNS, *TREC, *RACE)),
    TaskFamily(("imdb", *CSV_CORPORA), build_corpus, (*FILES, *COLUMNS, *TREC, *RACE, *SQUAD)),
    TaskFamily(("classify",), build_classification, ("label_scale", *TREC, *RACE, *SQUAD)),
    TaskFamily(("regress",), build_regression, ("labels", *TREC, *RACE, *SQUAD)),
    TaskFamily(("rank",), build_ranking, (*COLUMNS, *RACE, *SQUAD)),
)
TASK_NAMES = tuple(name for family in FAMILIES for name in family.names)


def build_task(name: str, data: TaskDataConfig, pooling: Pooling) -> Task:
    """Build a task.

    Args:
        name: value of the setting `task`.
        data: settings of its examples.
        pooling: pooling of a row into one vector, for tasks that pool.

    Raises:
        InputError: an unknown name, or a setting that the task does not use.
    """
    for family in FAMILIES:
        if name in family.names:
            for key in family.unused_settings:
                if getattr(data, key) != TaskDataConfig.__dataclass_fields__[key].default:
                    raise InputError(
                        f"data.{key}={getattr(data, key)} is invalid: task={name} does not use it. Leave it out."
                    )
            return family.build(name, data, pooling)
    suggestion = _closest_name(name)
    raise InputError(
        f"task={name} is invalid: there is no such task. "
        + (f"Did you mean {suggestion}?" if suggestion else f"Tasks: {', '.join(TASK_NAMES)}.")
    )


def _closest_name(name: str) -> str | None:
    """Return the task name most similar to `name`, which may lack the benchmark before the slash. None: no name is similar."""
    matches = difflib.get_close_matches(name.lower(), TASK_NAMES, n=1, cutoff=0.6)
    by_short_name = {task.rpartition("/")[2]: task for task in TASK_NAMES}
    short_matches = difflib.get_close_matches(name.lower().rpartition("/")[2], by_short_name, n=1)
    return next(iter([*matches, *(by_short_name[match] for match in short_matches)]), None)
