import contextlib
import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from xlpre.common import os_errors
from xlpre.common.files import atomic_dir, write_bytes
from xlpre.training import checkpoint, checkpoint_writer
from xlpre.training.checkpoint_writer import CheckpointWriter, SaveError
from xlpre.training.distributed import Comm
from xlpre.training.optimizer_state import load_state


class Engine:
    """Stand-in for a DeepSpeed engine without ZeRO."""

    def __init__(self, updates):
        torch.manual_seed(updates)
        self.module, self.skipped_steps = nn.Linear(4, 3), 2
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for _ in range(updates):
            self.module(torch.randn(2, 4)).square().mean().backward()
            self.optimizer.step()

    def zero_optimization_stage(self):
        return 0


def write_model(step, path, weights):
    content = io.BytesIO()
    torch.save(weights, content)
    with atomic_dir(path) as partial:
        return {"weights": write_bytes(partial / "weights", content.getvalue())}


def write_to_full_disk(step, path, weights):
    path.mkdir(exist_ok=True)
    (path / "half").write_text("")
    raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(os_errors, "RETRY_SECONDS", (0, 0))


def memories(seed=0):
    torch.manual_seed(seed)
    lane_ranges = [range(2), range(2, 3)]
    return [(lanes, torch.randn(2, len(lanes), 5, 4).bfloat16(), torch.tensor(list(lanes))) for lanes in lane_ranges]


@pytest.fixture
def save(tmp_path):
    def make(step, keep_last=2, keep_every=None, engine=None, write_model=write_model):
        resumed = checkpoint.find_latest_valid(tmp_path / "all")
        writer = CheckpointWriter(tmp_path / "all", Comm(), keep_last, keep_every, resumed=resumed)
        writer.begin(step, engine or Engine(0), memories(), {"seed": 1}, write_model)
        writer.close()
        return tmp_path / "all"

    return make


def names(folder):
    return [path.name for path in checkpoint.list_complete(folder)]


def test_weights_moments_and_counters_are_restored(save):
    engine, other = Engine(3), Engine(1)
    folder = save(7, engine=engine) / "step_00000007"
    manifest = checkpoint.read_manifest(folder)
    moments = checkpoint.saved_moments(folder, manifest)
    weights = torch.load(folder / "model" / "weights")
    load_state(other, weights, moments, manifest["counters"])
    assert other.skipped_steps == 2 and manifest["counters"]["updates"] == 3
    for parameter, restored in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(parameter, restored)
        state, restored_state = engine.optimizer.state[parameter], other.optimizer.state[restored]
        assert all(torch.equal(state[key], restored_state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_the_memory_of_a_lane_is_read_whichever_micro_step_wrote_it(save):
    folder = save(7) / "step_00000007"
    (_, first, _), (_, second, _) = memories()
    manifest = checkpoint.read_manifest(folder)
    ((hidden, valid),) = checkpoint.read_lane_memory(folder, manifest, [[2, 1]])
    assert torch.equal(hidden, torch.stack([second[:, 0], first[:, 1]], 1)) and valid.tolist() == [2, 1]


def test_the_last_checkpoints_are_kept(save):
    for step in (5, 10, 20, 100):
        folder = save(step)
    assert names(folder) == ["step_00000020", "step_00000100"]
    assert checkpoint.read_manifest(checkpoint.find_latest_valid(folder, Comm()))["step"] == 100


def test_checkpoints_are_ordered_by_step(tmp_path):
    for name in ("step_100000000", "step_99999999", "step_00000007"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.list_all(tmp_path)] == ["step_00000007", "step_99999999", "step_100000000"]
    assert [path.name for path in checkpoint.list_incomplete(tmp_path, tmp_path / "step_99999999")] == [
        "step_100000000"
    ]


def test_a_folder_without_a_manifest_or_with_a_cut_or_missing_file_is_not_a_checkpoint(save):
    folder = save(1, keep_last=9)
    for step in (2, 3, 4, 5):
        save(step, keep_last=9)
    (folder / "step_00000002" / "manifest.json").unlink()
    (folder / "step_00000003" / "lanes_000.safetensors").write_bytes(b"x" * 98)
    (folder / "step_00000004" / "model" / "weights").unlink()
    (folder / "step_00000005" / "manifest.json").write_text(json.dumps({"step": 5})[:-3])
    assert names(folder) == ["step_00000001"]


def test_an_incomplete_checkpoint_of_the_same_step_is_replaced(save, tmp_path):
    (tmp_path / "all" / "step_00000007").mkdir(parents=True)
    (tmp_path / "all" / "step_00000007" / "half").write_text("")
    folder = save(7)
    assert names(folder) == ["step_00000007"] and not (folder / "step_00000007" / "half").exists()


def test_incomplete_checkpoints_are_removed_once_there_is_a_newer_one(save):
    for step in (1, 2, 3, 4):
        folder = save(step, keep_last=9)
    for step in (1, 2, 4):
        (folder / f"step_{step:08d}" / "manifest.json").unlink()
    CheckpointWriter(folder, Comm(), 9)  # of the resumed run
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000004"]
    save(5, keep_last=9)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000005"]


def damage(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["moments_000.safetensors", "lanes_000.safetensors", "model/weights"])
def test_a_checkpoint_with_a_changed_byte_is_skipped(save, name):
    save(1, engine=Engine(1))
    folder = save(2, engine=Engine(2))
    damage(folder / "step_00000002" / name)
    latest = checkpoint.find_latest_valid(folder, Comm())
    assert latest.name == "step_00000001"
    assert [path.name for path in checkpoint.list_incomplete(folder, latest)] == ["step_00000002"]


def test_a_checkpoint_that_the_disk_cannot_read_is_skipped(save, monkeypatch):
    save(1)
    folder, compute_crc32c = save(2), checkpoint.compute_crc32c

    def fail(file):
        if file == folder / "step_00000002/lanes_000.safetensors":
            raise OSError(5, "Input/output error")
        return compute_crc32c(file)

    monkeypatch.setattr(checkpoint, "compute_crc32c", fail)
    assert checkpoint.find_latest_valid(folder, Comm()).name == "step_00000001"


def test_a_run_with_damaged_checkpoints_only_is_refused(save):
    folder = save(1)
    damage(folder / "step_00000001" / "lanes_000.safetensors")
    with pytest.raises(ValueError, match="no valid checkpoint: files of step_00000001 .* under another name"):
        checkpoint.find_latest_valid(folder, Comm())


def test_copies_and_other_files_of_the_user_are_ignored(save):
    folder = save(2)
    copies = {"step_00000002.good", "step_00000009 (copy)", "step_best"}
    for name in copies:
        shutil.copytree(folder / "step_00000002", folder / name)
    (folder / "step_00000099").write_text("notes")
    assert checkpoint.find_latest_valid(folder, Comm()).name == "step_00000002"
    for step in (4, 6):
        save(step, keep_last=2)
    assert {path.name for path in folder.iterdir()} == copies | {"step_00000099", "step_00000004", "step_00000006"}


def test_the_best_weights_stay_in_every_later_checkpoint_and_become_the_result(tmp_path):
    folder, engines = tmp_path / "all", {step: Engine(step) for step in (1, 2, 3, 4)}

    def weights_in(path):
        return torch.load(path / "weights")["weight"]

    def save(writer, step):
        writer.begin(step, engines[step], memories(), {}, write_model)
        writer.finish()
        return folder / f"step_{step:08d}"

    writer = CheckpointWriter(folder, Comm(), 1)
    assert not (save(writer, 1) / "best").exists()
    writer.keep_best(2, engines[2])
    assert torch.equal(weights_in(save(writer, 3) / "best"), engines[2].module.weight)
    writer.close()
    resumed = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.find_latest_valid(folder))
    assert torch.equal(weights_in(save(resumed, 4) / "best"), engines[2].module.weight) and names(folder) == [
        "step_00000004"
    ]
    resumed.write_best(tmp_path / "result", write_model)
    assert torch.equal(weights_in(tmp_path / "result"), engines[2].module.weight)
    resumed.keep_best(4, engines[4])
    shutil.rmtree(tmp_path / "result")
    resumed.write_best(tmp_path / "result", write_model)
    assert torch.equal(weights_in(tmp_path / "result"), engines[4].module.weight)


@pytest.mark.parametrize("step", [9, 12])
def test_a_damaged_checkpoint_is_removed_once_its_steps_were_repeated(save, step):
    for earlier in (8, 10):
        folder = save(earlier)
    damage(folder / "step_00000010/lanes_000.safetensors")
    resumed = checkpoint.find_latest_valid(folder, Comm())
    published = []
    writer = CheckpointWriter(folder, Comm(), 1, publish=published.append, resumed=resumed)
    writer.begin(step, Engine(0), memories(), {}, write_model)
    assert {resumed, folder / "step_00000010"} < set(folder.iterdir()), "removed before the new one is complete"
    writer.close()
    assert names(folder) == [f"step_{step:08d}"] == [path.name for path in published]


def test_the_error_of_a_full_disk_names_the_valid_checkpoint(save):
    for step in (8, 10):
        folder = save(step)
    damage(folder / "step_00000010/lanes_000.safetensors")
    writer = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.find_latest_valid(folder, Comm()))
    writer.begin(9, Engine(0), memories(), {}, write_to_full_disk)
    with pytest.raises(ValueError, match="latest valid checkpoint is step_00000008"):
        writer.finish()


def test_checkpoints_at_multiples_of_keep_every_are_never_removed(save):
    for step in range(10, 80, 10):
        folder = save(step, keep_last=1, keep_every=30)
    assert names(folder) == ["step_00000030", "step_00000060", "step_00000070"]


def test_a_full_disk_leaves_the_previous_checkpoint_only(save):
    folder = save(1)
    writer = CheckpointWriter(folder, Comm(), 2, resumed=checkpoint.find_latest_valid(folder))
    writer.begin(2, Engine(0), memories(), {}, write_to_full_disk)
    with pytest.raises(ValueError, match=r"could not be written .*No space left.* step_00000001.* Free disk space"):
        writer.finish()
    assert [path.name for path in folder.iterdir()] == ["step_00000001"] == names(folder)


def test_changes_of_the_weights_during_writing_are_not_saved(save, tmp_path):
    engine, weights = Engine(2), {}
    writer = CheckpointWriter(tmp_path / "all", Comm(), 2)
    original = engine.module.weight.detach().clone()
    writer.begin(1, engine, memories(), {}, lambda step, path, gathered: weights.update(gathered) or {})
    with torch.no_grad():
        engine.module.weight.zero_()
    writer.finish()
    assert torch.equal(weights["weight"], original)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seed": 1', '"seed": 2'),
        ('"counters"', '"counterz"'),
        ('"crc32c"', '"crc33c"'),
        ('"bytes"', '"bytez"'),
        ("{", "["),
        ("1", "\udcff"),  # not UTF-8
    ],
)
def test_a_checkpoint_with_a_changed_manifest_is_skipped(save, old, new):
    save(1)
    folder = save(2)
    manifest = folder / "step_00000002/manifest.json"
    text = manifest.read_text()
    assert old in text
    manifest.write_bytes(text.replace(old, new, 1).encode(errors="surrogateescape"))
    assert names(folder) == ["step_00000001"]
    assert checkpoint.find_latest_valid(folder, Comm()).name == "step_00000001"


class FailingDisk:
    """Disk whose next accesses through `write` fail."""

    def __init__(self, number, failures):
        self.number, self.failures = number, failures

    def write(self, step, path, weights):
        if self.failures:
            self.failures -= 1
            raise OSError(self.number, os.strerror(self.number))
        return write_model(step, path, weights)


def test_a_save_is_tried_again(save):
    disk = FailingDisk(errno.EIO, failures=2)
    assert names(save(1, write_model=disk.write)) == ["step_00000001"]


def test_failed_saves_are_skipped_until_too_many_in_a_row_failed(save, capsys):
    folder = save(1)
    writer, disk = (
        CheckpointWriter(folder, Comm(), 2, resumed=checkpoint.find_latest_valid(folder), max_failed=3),
        FailingDisk(errno.ESTALE, failures=0),
    )
    outcomes = []
    for step, failures in ((2, 9), (3, 9), (4, 0), (5, 9), (6, 9), (7, 9)):
        disk.failures = failures
        writer.begin(step, Engine(0), memories(), {}, disk.write)
        try:
            writer.finish()
            outcomes.append("warned" if capsys.readouterr().err.startswith("warning: ") else "saved")
        except SaveError as error:
            outcomes.append("ended")
            assert error.errno == errno.ESTALE and "run the same command again" in str(error)
    assert outcomes == ["warned", "warned", "saved", "warned", "warned", "ended"]
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000004"] == names(folder)


@pytest.mark.parametrize(
    ("owner", "name", "latest"),
    [
        (Path, "mkdir", "step_00000001"),
        (checkpoint_writer, "write_text", "step_00000001"),  # of the manifest
        (checkpoint_writer, "_remove", "step_00000002"),  # of an older checkpoint
    ],
)
def test_an_error_in_any_phase_of_a_save_leaves_a_valid_checkpoint_and_nothing_unfinished(
    save, monkeypatch, owner, name, latest
):
    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    folder = save(1)
    writer = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.find_latest_valid(folder), max_failed=9)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        writer.begin(2, Engine(0), memories(), {}, write_model)
        writer.finish()
    valid = checkpoint.find_latest_valid(folder, Comm())
    assert valid.name == latest and not [path.name for path in folder.iterdir() if path.name > latest]
    writer.begin(3, Engine(0), memories(), {}, write_model)
    writer.close()
    assert [path.name for path in folder.iterdir()] == ["step_00000003"] == names(folder)


@pytest.mark.parametrize("newer", [False, True])
def test_the_best_weights_of_a_failed_save_are_in_the_next_checkpoint(save, newer):
    folder, engines = save(1), [Engine(0), Engine(1), Engine(2)]
    writer = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.find_latest_valid(folder), max_failed=9)
    writer.keep_best(2, engines[1])
    writer.begin(2, engines[1], memories(), {}, write_to_full_disk)
    if newer:  # while the failing save is in progress
        writer.keep_best(3, engines[2])
    writer.finish()
    writer.begin(4, engines[0], memories(), {}, write_model)
    writer.close()
    saved = torch.load(folder / "step_00000004" / "best" / "weights")
    assert torch.equal(saved["weight"], engines[1 + newer].module.weight)
    assert checkpoint.is_valid(folder / "step_00000004")


def test_a_last_save_that_failed_is_an_error_only_if_work_would_be_lost(save):
    for needs_last in (True, False):
        writer = CheckpointWriter(save(1), Comm(), 2, max_failed=9)
        writer.begin(2, Engine(0), memories(), {}, write_to_full_disk)
        with pytest.raises(SaveError) if needs_last else contextlib.nullcontext():
            writer.close(needs_last)


def test_everything_of_a_checkpoint_is_on_disk_before_an_older_one_is_removed(save, monkeypatch):
    folder, synced, removed = save(1), {}, []
    real_fsync, remove = os.fsync, checkpoint_writer._remove

    def fsync(descriptor):
        real_fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[os.fstat(descriptor).st_ino] = path.stat().st_mtime_ns

    def checked_remove(old):
        new = folder / "step_00000002"
        for path in [folder.parent, folder, new, *new.rglob("*")]:
            status = path.stat()
            assert synced.get(status.st_ino) == status.st_mtime_ns, f"{path} changed after it was synced, or never was"
        removed.append(old.name)
        remove(old)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(checkpoint_writer, "_remove", checked_remove)
    writer = CheckpointWriter(folder, Comm(), 1)
    writer.begin(2, Engine(0), memories(), {}, write_model)
    writer.close()
    assert removed == ["step_00000001"]


def test_a_byte_that_the_disk_changed_during_writing_is_noticed(save):
    save(1)

    def write_and_damage(step, path, weights):
        entries = write_model(step, path, weights)
        damage(path / "weights")
        return entries

    folder = save(2, write_model=write_and_damage)
    assert checkpoint.find_latest_valid(folder, Comm()).name == "step_00000001"


@pytest.mark.parametrize("name", ["compute_crc32c", "read_manifest"])
def test_a_checkpoint_is_not_taken_for_damaged_because_the_file_system_fails_for_now(save, monkeypatch, name):
    folder = save(1)

    def fail(*args):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoint, name, fail)
    with pytest.raises(OSError, match="Stale file handle"):
        checkpoint.find_latest_valid(folder, Comm())


def save_twice(folder, keep_old_memory):
    for step in (1, 2):
        writer = CheckpointWriter(folder, Comm(), 2, keep_old_memory=keep_old_memory)
        writer.begin(step, Engine(1), memories(step), {}, write_model)
        writer.close()


@pytest.mark.parametrize("keep_old_memory", [True, False])
def test_memory_is_kept_in_all_checkpoints_or_in_the_newest(tmp_path, keep_old_memory):
    save_twice(tmp_path, keep_old_memory)
    old, new = checkpoint.list_complete(tmp_path)
    assert checkpoint.is_valid(old) and checkpoint.is_valid(new)
    assert checkpoint.has_memory(checkpoint.read_manifest(new))
    assert checkpoint.has_memory(checkpoint.read_manifest(old)) == keep_old_memory
    assert len([*old.glob("lanes_*")]) == int(keep_old_memory)


class Killed(BaseException):
    """End of a process."""


@pytest.mark.parametrize("calls_before", range(8))
def test_a_kill_at_any_time_of_the_removal_of_old_memory_leaves_valid_checkpoints(tmp_path, monkeypatch, calls_before):
    calls = 0

    def kill_at(owner, name):
        original = getattr(owner, name)

        def replacement(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > calls_before:
                raise Killed
            return original(*args, **kwargs)

        patch.setattr(owner, name, replacement)

    original = checkpoint_writer._remove_memory

    def remove_memory(path):
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "write_text")):
            kill_at(owner, name)
        original(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_remove_memory", remove_memory)
        with contextlib.suppress(Killed):
            save_twice(tmp_path, keep_old_memory=False)
    old, new = checkpoint.list_complete(tmp_path)
    assert checkpoint.is_valid(new) and checkpoint.has_memory(checkpoint.read_manifest(new))
    assert checkpoint.is_valid(old) and (calls > calls_before) == (calls_before < 6)
    writer = CheckpointWriter(tmp_path, Comm(), 2, resumed=new, keep_old_memory=False)
    writer.begin(3, Engine(1), memories(3), {}, write_model)
    writer.close()
    assert [*tmp_path.rglob("lanes_*")] == [tmp_path / "step_00000003/lanes_000.safetensors"]


def test_damaged_best_weights_are_dropped_if_every_checkpoint_shares_them(tmp_path, capsys):
    folder = tmp_path / "all"
    writer = CheckpointWriter(folder, Comm(), 2)
    for step in (1, 2, 3):
        if step == 2:
            writer.keep_best(1, Engine(1))
        writer.begin(step, Engine(step), memories(), {"best_val_loss": 2.0}, write_model)
        writer.finish()
    writer.close()
    for step in (2, 3):  # in a run, the files are hard links
        damage(folder / f"step_{step:08d}/best/weights")
    assert not checkpoint.is_valid(folder / "step_00000003")
    resumed = checkpoint.find_latest_valid(folder, Comm())
    assert resumed.name == "step_00000003" and not (resumed / "best").exists() and checkpoint.is_valid(resumed)
    assert checkpoint.read_manifest(resumed)["best_val_loss"] is None
    assert "the best weights in" in capsys.readouterr().err
    writer = CheckpointWriter(folder, Comm(), 1, resumed=resumed)
    writer.begin(4, Engine(4), memories(), {}, write_model)
    writer.close()
    assert names(folder) == ["step_00000004"] and not (folder / "step_00000004/best").exists()
