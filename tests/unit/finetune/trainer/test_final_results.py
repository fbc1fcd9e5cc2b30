import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Split
from finetune.data.features import Features
from finetune.tasks.registry import build_task
from finetune.trainer.final_results import _write_test_predictions


@pytest.mark.parametrize("labels", [(0, 1, None), (0, 1, 1), (None, None, None)])
def test_a_test_file_is_evaluated_if_all_rows_have_labels_and_some_labels_give_a_warning(tmp_path, capsys, labels):
    task = build_task("classify", TaskDataConfig(text=["text"], labels=["a", "b"]), "last")
    examples = [Example(str(number), ("ba",), label, "location") for number, label in enumerate(labels)]
    features = [Features(number, ()) for number in range(3)]
    outputs = {"logits": np.eye(2, dtype=np.float32)[[0, 1, 1]], "loss": np.ones(3)}
    splits = [Split("mine", examples, features)]
    predictions, metrics = _write_test_predictions(task, tmp_path / "predictions", splits, [outputs])
    printed = capsys.readouterr().out
    assert len(predictions["mine"]) == 3 and bool(metrics) == (None not in labels)
    has_some_labels = None in labels and 0 in labels
    assert ("warning: mine is not evaluated: only 2 of its 3" in printed) == has_some_labels
