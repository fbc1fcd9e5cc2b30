import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlpre.common.files import atomic_dir, atomic_write, hardlink_copy, lock_dir


def test_a_file_or_folder_appears_only_when_it_is_whole(tmp_path):
    for create in (atomic_write, atomic_dir):
        target = tmp_path / create.__name__
        with pytest.raises(RuntimeError), create(target) as partial:
            (partial / "a" if create is atomic_dir else partial).write_text("half")
            assert not target.exists()
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_with_what_was_to_be_written(tmp_path):
    for create in (atomic_write, atomic_dir):
        target = tmp_path / create.__name__
        with pytest.raises(OSError) as refusal, create(target), open("/dev/full", "w") as full:
            full.write("more than there is room for")
        assert str(refusal.value) == f"[Errno 28] No space left on device: '{target}'"


def test_an_older_one_stays_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "a") as partial:
        partial.write_text("new")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old"
    with atomic_write(tmp_path / "a") as partial:
        partial.write_text("new")
    assert (tmp_path / "a").read_text() == "new"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    code = "import os, signal, sys; from xlpre.common.files import atomic_dir\nwith atomic_dir(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=False)
    assert [path.name.startswith(".store.partial-") for path in tmp_path.iterdir()] == [True]
    with atomic_dir(tmp_path / "store") as partial:
        assert partial.name.endswith(str(os.getpid()))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_is_held_by_one_process_until_it_ends(tmp_path):
    code = "import sys; from pathlib import Path; from xlpre.common.files import lock_dir\nlock_dir(Path(sys.argv[1]), 'wait for it')"
    held = lock_dir(tmp_path / "run", "wait for it")
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert other.returncode != 0 and "run: wait for it" in other.stderr
    held.close()
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False).returncode == 0


def test_where_nothing_can_be_written_another_place_is_asked_for():
    with pytest.raises(ValueError, match="/proc/here: nothing can be written there .*; name another place"):
        lock_dir(Path("/proc/here"), "wait for it")


def test_a_folder_is_put_back_when_its_writer_died_between_the_two_renames(tmp_path):
    (tmp_path / ".store.replaced-999999999").mkdir()
    (tmp_path / ".store.replaced-999999999" / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_dir(tmp_path / "store"):
        assert (tmp_path / "store" / "a").read_text() == "old"
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_linked_copy_shares_its_weights_which_nobody_may_write_and_nothing_else(tmp_path):
    (tmp_path / "from").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "from" / name).write_text("old")
    for _ in range(2):  # it is replaced
        hardlink_copy(tmp_path / "from", tmp_path / "to")
    (tmp_path / "to" / "config.json").write_text("edited")
    assert (tmp_path / "from" / "config.json").read_text() == "old"
    weights = tmp_path / "to" / "model.safetensors"
    assert weights.samefile(tmp_path / "from" / "model.safetensors") and not weights.stat().st_mode & 0o222


def test_a_linked_copy_makes_nothing_readable_that_was_not(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "w.safetensors").write_text("weights")
    (tmp_path / "a" / "w.safetensors").chmod(0o640)
    hardlink_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "w.safetensors").stat().st_mode & 0o777 == 0o440


def test_without_hard_links_a_linked_copy_is_a_copy(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "model.safetensors").write_text("old")
    hardlink_copy(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "model.safetensors").read_text() == "old"
