import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xlpre.common import files
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


def test_a_link_stays_and_the_file_that_it_points_to_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder/file")
    for text in ("first", "second"):
        with atomic_write(tmp_path / "link") as partial:
            partial.write_text(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "folder/file").read_text() == text


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


@pytest.mark.parametrize(
    ("owner", "hours", "is_removed"),
    [
        ("{host}-{start}-999999999", 0, True),  # a process of this machine that has ended
        ("{host}-{start}-1", 99, False),  # that is running
        ("{host}-0123456789ab-1", 0, True),  # before this machine was restarted
        ("other-host-0123456789ab-999999999", 23, False),  # that may be running on another machine
        ("other-host-0123456789ab-1", 25, True),
        ("1234", 25, True),
    ],
)
def test_a_temporary_folder_is_removed_only_if_its_process_has_ended(tmp_path, owner, hours, is_removed):
    host, _, start = files.machine_id().rpartition("-")
    leftover = tmp_path / f".store.partial-{owner.format(host=host, start=start)}"
    leftover.mkdir()
    (leftover / "shard").write_text("half")
    for path in (leftover / "shard", leftover):
        os.utime(path, (time.time() - hours * 3600,) * 2)
    with atomic_dir(tmp_path / "store"):
        pass
    assert leftover.exists() != is_removed


WITHOUT_FLOCK = """
import fcntl, os, sys, time
from pathlib import Path
from xlpre.common import files

def flock(*args):
    raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))

fcntl.flock, files.LEASE_SECONDS = flock, 2.0
lock = files.lock_dir(Path(sys.argv[1]), "wait for it")
print("locked", flush=True)
if len(sys.argv) > 3:
    time.sleep(600)
lock.close()
"""


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_on_a_file_system_without_locks_is_locked_by_a_lease(tmp_path, number):
    command = [sys.executable, "-c", WITHOUT_FLOCK, str(tmp_path / "run"), str(number)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([*command, "wait"], **pipes)
    assert holder.stdout.readline() == "locked\n"
    if number == errno.ENOSYS:
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert other.returncode != 0 and "run: wait for it" in other.stderr
    holder.kill()
    assert holder.communicate()[1].count("file system without file locks") == 1
    after = subprocess.run(command, capture_output=True, text=True, check=False)
    assert after.returncode == 0 and after.stdout == "locked\n", after.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_other_errors_of_a_lock_are_raised_with_the_name_of_the_file(tmp_path, monkeypatch):
    def flock(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"\[Errno 5\].*\.lock"):
        lock_dir(tmp_path, "wait for it")


def test_a_read_only_folder_is_refused():
    with pytest.raises(ValueError, match="/proc/here cannot be written .* another folder"):
        lock_dir(Path("/proc/here"), "wait for it")


def test_a_folder_is_restored_if_its_writer_died_between_the_two_renames(tmp_path):
    replaced = tmp_path / f".store.replaced-{files.machine_id()}-999999999"
    replaced.mkdir()
    (replaced / "a").write_text("old")
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
