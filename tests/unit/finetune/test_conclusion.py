import numpy as np
import pytest

from finetune.config import TaskDataConfig
from finetune.data.examples import Example, Split
from finetune.data.features import Features
from finetune.tasks.registry import build_task
from finetune.trainer.finalize import _write_tests


@pytest.mark.parametrize("truths", [(0, 1, None), (0, 1, 1), (None, None, None)])
def test_a_test_file_with_the_truth_in_some_rows_is_said_to_be_unmeasured(tmp_path, capsys, truths):
    task = build_task("classify", TaskDataConfig(text=["text"], labels=["a", "b"]), "last")
    examples = [Example(str(number), ("ba",), truth, "here") for number, truth in enumerate(truths)]
    items = [Features(number, ()) for number in range(3)]
    outputs = {"logits": np.eye(2, dtype=np.float32)[[0, 1, 1]], "loss": np.ones(3)}
    predictions, scores = _write_tests(task, tmp_path / "predictions", [Split("mine", examples, items)], [outputs])
    said = capsys.readouterr().out
    assert len(predictions["mine"]) == 3 and bool(scores) == (None not in truths)
    assert ("warning: mine is answered and not measured: the truth of 2 of its 3 examples" in said) == (
        None in truths and 0 in truths
    )
