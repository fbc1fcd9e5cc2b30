"""Features that one process of each machine encodes and all processes of the machine map."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from finetune.data.features import Chunking, Features, pair_to_row
from finetune.data.qa_windows import SpanLabel, build_windows
from finetune.trainer import shared_features
from finetune.trainer.shared_features import encode_once_per_machine, map_features, write_features


def make_features(tokenizer):
    """Return features of a training split with labels, of a test split without, and windows of a context, which they share."""
    texts = [tokenizer.encode("ba be bi " * n) for n in range(1, 9)]
    rows = [pair_to_row(text, texts[0] if n % 2 else [], 16) for n, text in enumerate(texts)]
    labelled = [
        Features(n, (row, row), {"label": np.int64(n), "target": np.array([n, 0.5], np.float32)}, Chunking(8, 4))
        for n, row in enumerate(rows)
    ]
    context = tokenizer.encode_with_offsets("Ba be bi bo bu. " * 20)
    windows = list(build_windows(0, context, texts[0], 24, 8, SpanLabel(True, 3, 5)))
    return [labelled, [Features(n, (row,)) for n, row in enumerate(rows)], windows, []]


def assert_identical(one, other):
    """Compare values, types and dtypes."""
    assert type(one) is type(other)
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_identical(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_identical(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_identical(left, right)
    else:
        assert one == other


def test_mapped_features_are_identical_and_their_arrays_are_views_of_the_file(tokenizer, tmp_path):
    features = make_features(tokenizer)
    write_features(tmp_path / "features", features)
    mapped = map_features(tmp_path / "features")
    (tmp_path / "features").unlink()
    assert_identical(mapped, features)
    for one in [*mapped[0], *mapped[1]]:
        for row in one.rows:
            assert row.input_ids.base is not None and not row.input_ids.flags.writeable
            assert row.input_ids.flags.aligned
    windows = mapped[2]
    assert len(windows) > 1 and all(window.context is windows[0].context for window in windows)


class Job:
    """Threads that play the processes of a job. `machines` has the machine of each rank."""

    def __init__(self, machines, monkeypatch):
        self.machines, self._values = machines, [None] * len(machines)
        self._barrier, self._rank = threading.Barrier(len(machines), timeout=30), threading.local()
        monkeypatch.setattr(shared_features, "rank", lambda: self._rank.value)
        monkeypatch.setattr(shared_features, "machine_id", lambda: machines[self._rank.value])

    def all_gather(self, value):
        self._values[self._rank.value] = value
        self.barrier()
        values = list(self._values)
        self.barrier()
        return values

    def barrier(self):
        self._barrier.wait()

    def run(self, function):
        """Return the result of `function` or the error that it raises, by rank."""

        def run_rank(rank):
            self._rank.value = rank
            try:
                return function(rank)
            except Exception as error:  # noqa: BLE001 - a result of the test
                return error

        with ThreadPoolExecutor(len(self.machines)) as pool:
            return list(pool.map(run_rank, range(len(self.machines))))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_features.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("machines", [["a", "a"], ["a", "b", "a", "b", "a"]], ids=["one", "two, ranks alternate"])
def test_each_machine_encodes_once_and_leaves_no_file(tokenizer, temporary, monkeypatch, machines):
    job, features, encoded_by = Job(machines, monkeypatch), make_features(tokenizer), []

    def work(rank):
        return encode_once_per_machine(lambda: encoded_by.append(rank) or features, job)

    results = job.run(work)
    assert sorted(encoded_by) == sorted({machines.index(machine) for machine in machines})
    for result in results:
        assert_identical(result, features)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError("row 3 is invalid"), OSError(28, "No space left on device")])
def test_an_error_is_raised_in_all_processes(temporary, monkeypatch, error):
    job = Job(["a", "b", "b"], monkeypatch)

    def fail():
        raise error

    results = job.run(lambda rank: encode_once_per_machine(fail, job))
    assert all(isinstance(result, ValueError | OSError) and str(error) in str(result) for result in results)
    assert results[0] is error and list(temporary.iterdir()) == []
