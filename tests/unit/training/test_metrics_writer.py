import errno
import importlib
import json
import math
import os
import re
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from xlpre.training.metrics_writer import MetricsWriter, check_wandb_installed, format_duration, read_metrics

FAKE_WANDB = """
import json, pathlib
calls = pathlib.Path(__file__).with_name("calls.jsonl")

def record(**call):
    with open(calls, "a") as file:
        file.write(json.dumps(call) + "\\n")

class Run:
    def log(self, data, step):
        record(log=data, step=step)

    def finish(self):
        record(finish=True)

def init(**settings):
    record(init=settings)
    return Run()
"""


@pytest.fixture
def read_calls(tmp_path, monkeypatch):
    """Install a stand-in for wandb, and return a function that reads its calls."""
    path = tmp_path / "library"
    path.mkdir()
    (path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(path)
    yield lambda: [json.loads(line) for line in (path / "calls.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def write(folder, first_step, *lines, **settings):
    writer = MetricsWriter(folder, first_step, **settings)
    for step, values in lines:
        writer.write(step, **values)
    writer.close()


def parse_strict(text):
    """Parse JSON lines, without NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_the_command_tensorboard_can_be_imported():  # 2.20 needs pkg_resources, which setuptools 81 removed
    assert importlib.import_module("tensorboard.main").run_main
    assert importlib.import_module("tensorboard.data.server_ingester").SubprocessServerDataIngester


def test_a_number_that_is_not_finite_is_null_in_json_and_itself_in_tensorboard(tmp_path):
    values = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5, "mfu": None}
    write(tmp_path, 0, (1, values))
    as_null = [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "mfu": None}]
    assert parse_strict((tmp_path / "metrics.jsonl").read_text()) == read_metrics(tmp_path) == as_null
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {"loss", "grad_norm", "lr"}
    assert math.isnan(board.Scalars("loss")[0].value) and math.isinf(board.Scalars("grad_norm")[0].value)


def test_a_line_for_which_the_disk_is_full_is_written_later(tmp_path, capsys):
    writer, file = MetricsWriter(tmp_path, 0), tmp_path / "metrics.jsonl"
    writer.write(1, loss=3.0)
    file.rename(tmp_path / "written")
    file.symlink_to("/dev/full")
    writer.write(2, loss=2.0)
    assert re.search(r"No space left on device: '.*/metrics.jsonl'.* step 2 are written later", capsys.readouterr().err)
    (tmp_path / "written").replace(file)
    writer.close()
    assert [line["loss"] for line in read_metrics(tmp_path)] == [3.0, 2.0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_an_error_of_tensorboard_does_not_end_the_run(tmp_path, capsys, monkeypatch, number):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, loss=3.0)

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "add_scalar", fail)
        writer.write(2, loss=2.0)
    writer.write(3, loss=1.0)
    writer.close()
    assert capsys.readouterr().err.count("TensorBoard gets no more values") == 1
    assert [line["loss"] for line in read_metrics(tmp_path)] == [3.0, 2.0, 1.0]


def test_the_line_of_an_evaluation_that_is_repeated_is_removed(tmp_path):
    lines = [{"step": 4, "lr": 0.1}, {"step": 4, "val_loss": 3.0}, {"step": 6, "lr": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    MetricsWriter(tmp_path, 4).close()
    assert read_metrics(tmp_path) == lines[:2]
    MetricsWriter(tmp_path, 4, evaluation_due=True).close()
    assert read_metrics(tmp_path) == lines[:1]


def test_another_error_of_the_file_system_names_the_file(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError, match=r"/metrics.jsonl"):
        writer.write(1, loss=2.0)


def test_earlier_lines_are_rewritten_as_strict_json(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.0}\n')
    write(tmp_path, 1)
    assert parse_strict((tmp_path / "metrics.jsonl").read_text()) == [{"step": 1, "loss": None}]


def test_metrics_are_sent_to_weights_and_biases(tmp_path, read_calls):
    check_wandb_installed("mine")
    settings = {"optim": {"lr": 0.1}}
    write(tmp_path, 0, (2, {"loss": 1.5, "mfu": None}), project="mine", run_name="run", settings=settings)
    (init, log, finish) = read_calls()
    expected = {"project": "mine", "name": "run", "resume": "allow", "dir": str(tmp_path), "config": settings}
    assert {key: value for key, value in init["init"].items() if key != "id"} == expected
    assert log == {"log": {"loss": 1.5}, "step": 2} and finish == {"finish": True}


def test_a_resumed_run_continues_its_charts_and_a_new_run_does_not(tmp_path, read_calls):
    for step in (0, 5, 0):
        write(tmp_path, step, project="mine")
    first, resumed, new = [call["init"]["id"] for call in read_calls() if "init" in call]
    assert first == resumed != new


def test_only_rank_zero_writes(tmp_path, read_calls, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    write(tmp_path / "run", 0, (1, {"loss": 1.0}), project="mine")
    assert not (tmp_path / "run").exists() and not (tmp_path / "library" / "calls.jsonl").exists()


@pytest.mark.parametrize("has_folder_of_that_name", [False, True])
def test_a_missing_wandb_library_is_reported_on_every_process(tmp_path, monkeypatch, has_folder_of_that_name):
    if has_folder_of_that_name:
        (tmp_path / "wandb").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("RANK", "1")
    check_wandb_installed(None)
    with pytest.raises(
        ValueError, match="train.wandb=mine is invalid: .* `pip install wandb`, or set train.wandb=null"
    ):
        check_wandb_installed("mine")
    sys.modules.pop("wandb", None)


def test_a_cut_last_line_is_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("damage", [b'{"st', b"\0" * 9, b'{"step": 2\xff}', b'{"loss": 3}', b'{"step": null}'])
def test_a_damaged_line_is_moved_to_another_file_and_reported(tmp_path, capsys, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 \(remove this line\): "):
        read_metrics(tmp_path)
    write(tmp_path, 5, (6, {}))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 6]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damage + b"\n"
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"warning: {path}, line 2: ") and f"{path}.damaged" in warning


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (7_980, "2 h 13 min"),
        (86_399.9, "1 d 0 h"),
        (1.1e7, "127 d 7 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, expected):
    assert format_duration(seconds) == expected
