import json

import pytest

from xlpre.training import checkpoint
from xlpre.training.distributed import Talk


class Engine:
    """DeepSpeed's, as far as saving goes."""

    def save_checkpoint(self, folder, tag, save_latest):
        from pathlib import Path

        path = Path(folder) / tag
        path.mkdir()
        (path / "states.pt").write_bytes(b"x" * 99)


@pytest.fixture
def save(tmp_path):
    def make(step, keep_last=2, keep_every=None):
        checkpoint.save(tmp_path / "all", Engine(), Talk(), step, [], {"seed": 1}, keep_last, keep_every)
        return tmp_path / "all"

    return make


def names(folder):
    return [path.name for path in checkpoint.complete(folder)]


def test_the_newest_whole_ones_are_kept(save):
    for step in (5, 10, 20, 100):
        folder = save(step)
    assert names(folder) == ["step_00000020", "step_00000100"]
    assert checkpoint.facts_of(checkpoint.newest(folder, Talk()))["step"] == 100


def test_one_without_a_manifest_or_with_a_file_cut_or_gone_is_no_checkpoint(save):
    folder = save(1, keep_last=9)
    for step in (2, 3, 4, 5):
        save(step, keep_last=9)
    (folder / "step_00000002" / "manifest.json").unlink()
    (folder / "step_00000003" / "states.pt").write_bytes(b"x" * 98)
    (folder / "step_00000004" / "states.pt").unlink()
    (folder / "step_00000005" / "manifest.json").write_text(json.dumps({"step": 5})[:-3])
    assert names(folder) == ["step_00000001"]


def test_an_unfinished_one_of_the_same_step_is_written_again(save, tmp_path):
    (tmp_path / "all" / "step_00000007").mkdir(parents=True)
    (tmp_path / "all" / "step_00000007" / "half").write_text("")
    assert names(save(7)) == ["step_00000007"]


@pytest.mark.parametrize("name", ["states.pt", "process_000.pt"])
def test_one_with_a_changed_byte_is_passed_over(save, name):
    save(1)
    folder = save(2)
    file = folder / "step_00000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    found = checkpoint.newest(folder, Talk())
    assert found.name == "step_00000001"
    assert [path.name for path in checkpoint.unfinished(folder, found)] == ["step_00000002"]


def test_every_so_many_are_kept_for_good(save):
    for step in range(10, 80, 10):
        folder = save(step, keep_last=1, keep_every=30)
    assert names(folder) == ["step_00000030", "step_00000060", "step_00000070"]
