import json
import math
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from xlpre.training.metrics import MetricsWriter, check_wandb_installed, format_duration, read_metrics

FAKE = """
import json, pathlib
said = pathlib.Path(__file__).with_name("said.jsonl")

def say(**words):
    with open(said, "a") as file:
        file.write(json.dumps(words) + "\\n")

class Run:
    def log(self, data, step):
        say(log=data, step=step)

    def finish(self):
        say(finish=True)

def init(**words):
    say(init=words)
    return Run()
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What a stand-in for the library was told so far."""
    path = tmp_path / "library"
    path.mkdir()
    (path / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(path)
    yield lambda: [json.loads(line) for line in (path / "said.jsonl").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def write(folder, first_step, *lines, **more):
    log = MetricsWriter(folder, first_step, **more)
    for step, values in lines:
        log.write(step, **values)
    log.close()


def strictly(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_number_that_is_not_finite_is_null_for_programs_and_itself_on_tensorboard(tmp_path):
    values = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5, "mfu": None}
    write(tmp_path, 0, (1, values))
    as_null = [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5, "mfu": None}]
    assert strictly((tmp_path / "metrics.jsonl").read_text()) == read_metrics(tmp_path) == as_null
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {"loss", "grad_norm", "lr"}
    assert math.isnan(board.Scalars("loss")[0].value) and math.isinf(board.Scalars("grad_norm")[0].value)


def test_a_full_disk_is_said_with_the_file(tmp_path):
    log = MetricsWriter(tmp_path, 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/metrics.jsonl'"):
        log.write(1, loss=2.0)


def test_lines_of_before_that_are_kept_are_json_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 3.0}\n')
    write(tmp_path, 1)
    assert strictly((tmp_path / "metrics.jsonl").read_text()) == [{"step": 1, "loss": None}]


def test_metrics_also_go_to_weights_and_biases(tmp_path, said):
    check_wandb_installed("mine")
    settings = {"optim": {"lr": 0.1}}
    write(tmp_path, 0, (2, {"loss": 1.5, "mfu": None}), project="mine", name="run", settings=settings)
    (init, log, finish) = said()
    asked = {"project": "mine", "name": "run", "resume": "allow", "dir": str(tmp_path), "config": settings}
    assert {key: value for key, value in init["init"].items() if key != "id"} == asked
    assert log == {"log": {"loss": 1.5}, "step": 2} and finish == {"finish": True}


def test_a_run_that_goes_on_continues_its_chart_and_one_that_starts_over_has_another(tmp_path, said):
    for step in (0, 5, 0):
        write(tmp_path, step, project="mine")
    first, again, over = [line["init"]["id"] for line in said() if "init" in line]
    assert first == again != over


def test_only_process_0_writes(tmp_path, said, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    write(tmp_path / "run", 0, (1, {"loss": 1.0}), project="mine")
    assert not (tmp_path / "run").exists() and not (tmp_path / "library" / "said.jsonl").exists()


@pytest.mark.parametrize("a_folder_of_that_name", [False, True])
def test_a_missing_library_is_one_sentence_on_every_process(tmp_path, monkeypatch, a_folder_of_that_name):
    if a_folder_of_that_name:
        (tmp_path / "wandb").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("RANK", "1")
    check_wandb_installed("")
    with pytest.raises(ValueError, match="train.wandb=mine needs .* `pip install wandb`, or leave train.wandb empty"):
        check_wandb_installed("mine")
    sys.modules.pop("wandb", None)


def test_a_last_line_that_was_cut_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("damage", [b'{"st', b"\0" * 9, b'{"step": 2\xff}', b'{"loss": 3}', b'{"step": null}'])
def test_a_run_goes_on_without_a_damaged_line_which_is_kept_apart_and_said(tmp_path, capsys, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 \(take the line out\): "):
        read_metrics(tmp_path)
    write(tmp_path, 5, (6, {}))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3, 6]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damage + b"\n"
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"warning: {path}, line 2: ") and said.endswith("and the run goes on without it")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (7_980, "2 h 13 min"),
        (86_399.9, "1 d 0 h"),
        (1.1e7, "127 d 7 h"),
    ],
)
def test_a_duration_has_two_units(seconds, words):
    assert format_duration(seconds) == words
