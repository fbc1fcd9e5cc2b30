"""All tasks by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from finetune.config import TaskDataConfig
from finetune.tasks.base import Task
from finetune.tasks.custom import build_classification, build_regression
from finetune.tasks.glue import LAYOUTS, build_glue
from finetune.tasks.race import LEVELS, build_race
from finetune.tasks.ranking import build_ranking
from finetune.tasks.squad import VERSIONS, build_squad
from finetune.tasks.text_classification import CORPORA, build_corpus
from xlpre.model.pooling import Summary

Build = Callable[[str, TaskDataConfig, Summary], Task]
FILES, COLUMNS, TREC = ("train", "dev", "test"), ("text", "labels", "label_scale"), ("queries", "documents", "qrels")
# of each family: how it is built, and which settings of files and columns it has no use for
FAMILIES: list[tuple[tuple[str, ...], Build, tuple[str, ...]]] = [
    (tuple(LAYOUTS), build_glue, (*COLUMNS, *TREC)),
    (tuple(LEVELS), build_race, (*FILES, *COLUMNS, *TREC)),
    (tuple(VERSIONS), build_squad, (*COLUMNS, *TREC)),
    (("imdb", *CORPORA), build_corpus, (*FILES, *COLUMNS, *TREC)),
    (("classify",), build_classification, ("label_scale", *TREC)),
    (("regress",), build_regression, ("labels", *TREC)),
    (("rank",), build_ranking, COLUMNS),
]
NAMES = [name for names, _, _ in FAMILIES for name in names]


def build_task(name: str, data: TaskDataConfig, summary: Summary) -> Task:
    """The task called `name`.

    Raises:
        ValueError: there is none, or `data` does not fit it.
    """
    for names, build, unused in FAMILIES:
        if name in names:
            for key in unused:
                if getattr(data, key):
                    raise ValueError(f"data.{key}={getattr(data, key)} has no effect on task={name}; leave it out")
            return build(name, data, summary)
    last = {task.rpartition("/")[2]: task for task in NAMES}
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.6)
    near = near or [last[word] for word in difflib.get_close_matches(name.lower().rpartition("/")[2], last, n=1)]
    raise ValueError(
        f"task={name}: there is no such task; "
        + (f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}")
    )
