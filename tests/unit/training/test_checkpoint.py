import json
import shutil

import pytest
import torch
from torch import nn

from xlpre.training import checkpoint
from xlpre.training.checkpoint_writer import CheckpointWriter
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
    path.mkdir()
    torch.save(weights, path / "weights")


def write_to_full_disk(step, path, weights):
    path.mkdir()
    (path / "half").write_text("")
    raise OSError(28, "No space left on device")


def memories(seed=0):
    torch.manual_seed(seed)
    lane_ranges = [range(2), range(2, 3)]
    return [(lanes, torch.randn(2, len(lanes), 5, 4).bfloat16(), torch.tensor(list(lanes))) for lanes in lane_ranges]


@pytest.fixture
def save(tmp_path):
    def make(step, keep_last=2, keep_every=None, engine=None):
        writer = CheckpointWriter(tmp_path / "all", Comm(), keep_last, keep_every)
        writer.begin(step, engine or Engine(0), memories(), {"seed": 1}, write_model)
        writer.close()
        return tmp_path / "all"

    return make


def names(folder):
    return [path.name for path in checkpoint.list_complete(folder)]


def test_weights_moments_and_counters_are_restored(save):
    engine, other = Engine(3), Engine(1)
    folder = save(7, engine=engine) / "step_00000007"
    moments, manifest = checkpoint.SavedMoments(folder), checkpoint.read_manifest(folder)
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
    hidden, valid = checkpoint.read_lane_memory(folder, [2, 1])
    assert torch.equal(hidden, torch.stack([second[:, 0], first[:, 1]], 1)) and valid.tolist() == [2, 1]


def test_the_last_checkpoints_are_kept(save):
    for step in (5, 10, 20, 100):
        folder = save(step)
    assert names(folder) == ["step_00000020", "step_00000100"]
    assert checkpoint.read_manifest(checkpoint.find_resume_checkpoint(folder, Comm()))["step"] == 100


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
    latest = checkpoint.find_resume_checkpoint(folder, Comm())
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
    assert checkpoint.find_resume_checkpoint(folder, Comm()).name == "step_00000001"


def test_a_run_with_damaged_checkpoints_only_is_refused(save):
    folder = save(1)
    damage(folder / "step_00000001" / "lanes_000.safetensors")
    with pytest.raises(ValueError, match="no valid checkpoint: files of step_00000001 .* remove"):
        checkpoint.find_resume_checkpoint(folder, Comm())


def test_copies_and_other_files_of_the_user_are_ignored(save):
    folder = save(2)
    copies = {"step_00000002.good", "step_00000009 (copy)", "step_best"}
    for name in copies:
        shutil.copytree(folder / "step_00000002", folder / name)
    (folder / "step_00000099").write_text("notes")
    assert checkpoint.find_resume_checkpoint(folder, Comm()).name == "step_00000002"
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
    resumed = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.latest_valid(folder))
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
    resumed = checkpoint.find_resume_checkpoint(folder, Comm())
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
    writer = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.find_resume_checkpoint(folder, Comm()))
    writer.begin(9, Engine(0), memories(), {}, write_to_full_disk)
    with pytest.raises(ValueError, match="latest valid checkpoint is step_00000008"):
        writer.finish()


def test_checkpoints_at_multiples_of_keep_every_are_never_removed(save):
    for step in range(10, 80, 10):
        folder = save(step, keep_last=1, keep_every=30)
    assert names(folder) == ["step_00000030", "step_00000060", "step_00000070"]


def test_a_full_disk_leaves_the_previous_checkpoint_only(save):
    folder = save(1)
    writer = CheckpointWriter(folder, Comm(), 2)
    writer.begin(2, Engine(0), memories(), {}, write_to_full_disk)
    with pytest.raises(ValueError, match=r"could not be written .*No space left.* step_00000001.* Free disk space"):
        writer.finish()
    assert [path.name for path in folder.iterdir()] == ["step_00000001"] == names(folder)


def test_changes_of_the_weights_during_writing_are_not_saved(save, tmp_path):
    engine, weights = Engine(2), {}
    writer = CheckpointWriter(tmp_path / "all", Comm(), 2)
    original = engine.module.weight.detach().clone()
    writer.begin(1, engine, memories(), {}, lambda step, path, gathered: (path.mkdir(), weights.update(gathered)))
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
    assert checkpoint.find_resume_checkpoint(folder, Comm()).name == "step_00000001"
