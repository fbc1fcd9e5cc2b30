import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlpre.common.files import atomic_dir, atomic_write, hardlink_copy, lock_dir


def test_a_file_or_folder_appears_only_when_it_is_complete(tmp_path):
    for create in (atomic_write, atomic_dir):
        target = tmp_path / create.__name__
        with pytest.raises(RuntimeError), create(target) as partial:
            (partial / "a" if create is atomic_dir else partial).write_text("half")
            assert not target.exists()
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []


def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    for create in (atomic_write, atomic_dir):
        target = tmp_path / create.__name__
        with pytest.raises(OSError) as refusal, create(target), open("/dev/full", "w") as full:
            full.write("text")
        assert str(refusal.value) == f"[Errno 28] No space left on device: '{target}'"


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "a") as partial:
        partial.write_text("new")
        raise RuntimeError
    assert (tmp_path / "a").read_text() == "old"
    with atomic_write(tmp_path / "a") as partial:
        partial.write_text("new")
    assert (tmp_path / "a").read_text() == "new"


def test_temporary_folders_of_a_killed_process_are_removed(tmp_path):
    code = (
        "import os, signal, sys; from xlpre.common.files import atomic_dir\n"
        "with atomic_dir(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=False)
    assert [path.name.startswith(".store.partial-") for path in tmp_path.iterdir()] == [True]
    with atomic_dir(tmp_path / "store") as partial:
        assert partial.name.endswith(str(os.getpid()))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_one_process_locks_a_folder_until_it_exits(tmp_path):
    code = "import sys; from pathlib import Path; from xlpre.common.files import lock_dir\nlock_dir(Path(sys.argv[1]), 'wait for it')"
    lock = lock_dir(tmp_path / "run", "wait for it")
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert other.returncode != 0 and "run: wait for it" in other.stderr
    lock.close()
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False).returncode == 0


def test_a_read_only_folder_is_refused():
    with pytest.raises(ValueError, match="/proc/here cannot be written .* another folder"):
        lock_dir(Path("/proc/here"), "wait for it")


def test_a_folder_is_restored_if_its_writer_died_between_the_two_renames(tmp_path):
    (tmp_path / ".store.replaced-999999999").mkdir()
    (tmp_path / ".store.replaced-999999999" / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_dir(tmp_path / "store"):
        assert (tmp_path / "store" / "a").read_text() == "old"
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_hardlink_copy_shares_read_only_weights_and_nothing_else(tmp_path):
    (tmp_path / "from").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "from" / name).write_text("old")
    for _ in range(2):  # the second copy replaces the first
        hardlink_copy(tmp_path / "from", tmp_path / "to")
    (tmp_path / "to" / "config.json").write_text("edited")
    assert (tmp_path / "from" / "config.json").read_text() == "old"
    weights = tmp_path / "to" / "model.safetensors"
    assert weights.samefile(tmp_path / "from" / "model.safetensors") and not weights.stat().st_mode & 0o222


def test_a_hardlink_copy_adds_no_permissions(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "w.safetensors").write_text("weights")
    (tmp_path / "a" / "w.safetensors").chmod(0o640)
    hardlink_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "w.safetensors").stat().st_mode & 0o777 == 0o440


def test_without_hard_links_the_files_are_copied(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "model.safetensors").write_text("old")
    hardlink_copy(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "model.safetensors").read_text() == "old"
