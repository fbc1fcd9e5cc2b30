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
    """As DeepSpeed's is without ZeRO."""

    def __init__(self, updates):
        torch.manual_seed(updates)
        self.module, self.skipped_steps = nn.Linear(4, 3), 2
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for _ in range(updates):
            self.module(torch.randn(2, 4)).square().mean().backward()
            self.optimizer.step()

    def zero_optimization_stage(self):
        return 0


def write_model(path, weights):
    path.mkdir()
    torch.save(weights, path / "weights")


def full(path, weights):
    path.mkdir()
    (path / "half").write_text("")
    raise OSError(28, "No space left on device")


def memories(seed=0):
    torch.manual_seed(seed)
    lanes = [range(2), range(2, 3)]
    return [(group, torch.randn(2, len(group), 5, 4).bfloat16(), torch.tensor(list(group))) for group in lanes]


@pytest.fixture
def save(tmp_path):
    def make(step, keep_last=2, keep_every=None, engine=None, facts=None):
        writer = CheckpointWriter(tmp_path / "all", Comm(), keep_last, keep_every)
        writer.begin(step, engine or Engine(0), memories(), facts or {"seed": 1}, write_model)
        writer.close()
        return tmp_path / "all"

    return make


def names(folder):
    return [path.name for path in checkpoint.list_complete(folder)]


def test_what_was_saved_is_what_is_read(save):
    engine, other = Engine(3), Engine(1)
    folder = save(7, engine=engine) / "step_00000007"
    moments, facts = checkpoint.SavedMoments(folder), checkpoint.read_manifest(folder)
    weights = torch.load(folder / "model" / "weights")
    load_state(other, weights, moments, facts["counters"])
    assert other.skipped_steps == 2 and facts["counters"]["updates"] == 3
    for parameter, same in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(parameter, same)
        state, again = engine.optimizer.state[parameter], other.optimizer.state[same]
        assert all(torch.equal(state[key], again[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_lanes_take_their_memory_along_however_they_are_dealt(save):
    folder = save(7) / "step_00000007"
    (_, first, valid), (_, second, _) = memories()
    hidden, columns = checkpoint.read_lane_memory(folder, [2, 1])
    assert torch.equal(hidden, torch.stack([second[:, 0], first[:, 1]], 1)) and columns.tolist() == [2, 1]


def test_the_newest_whole_ones_are_kept(save):
    for step in (5, 10, 20, 100):
        folder = save(step)
    assert names(folder) == ["step_00000020", "step_00000100"]
    assert checkpoint.read_manifest(checkpoint.find_resume_checkpoint(folder, Comm()))["step"] == 100


def test_one_without_a_manifest_or_with_a_file_cut_or_gone_is_no_checkpoint(save):
    folder = save(1, keep_last=9)
    for step in (2, 3, 4, 5):
        save(step, keep_last=9)
    (folder / "step_00000002" / "manifest.json").unlink()
    (folder / "step_00000003" / "lanes_000.safetensors").write_bytes(b"x" * 98)
    (folder / "step_00000004" / "model" / "weights").unlink()
    (folder / "step_00000005" / "manifest.json").write_text(json.dumps({"step": 5})[:-3])
    assert names(folder) == ["step_00000001"]


def test_an_unfinished_one_of_the_same_step_is_written_again(save, tmp_path):
    (tmp_path / "all" / "step_00000007").mkdir(parents=True)
    (tmp_path / "all" / "step_00000007" / "half").write_text("")
    folder = save(7)
    assert names(folder) == ["step_00000007"] and not (folder / "step_00000007" / "half").exists()


def test_what_a_kill_left_of_one_goes_when_a_newer_one_is_there(save):
    for step in (1, 2, 3, 4):
        folder = save(step, keep_last=9)
    for step in (1, 2, 4):
        (folder / f"step_{step:08d}" / "manifest.json").unlink()
    CheckpointWriter(folder, Comm(), 9)  # of the next start
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000004"]
    save(5, keep_last=9)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000003", "step_00000005"]


def damage(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["moments_000.safetensors", "lanes_000.safetensors", "model/weights"])
def test_one_with_a_changed_byte_is_passed_over(save, name):
    save(1, engine=Engine(1))
    folder = save(2, engine=Engine(2))
    damage(folder / "step_00000002" / name)
    found = checkpoint.find_resume_checkpoint(folder, Comm())
    assert found.name == "step_00000001"
    assert [path.name for path in checkpoint.list_incomplete(folder, found)] == ["step_00000002"]


def test_one_with_a_part_that_the_disk_cannot_read_is_passed_over(save, monkeypatch):
    save(1)
    folder, whole = save(2), checkpoint.compute_crc32c

    def fail(file):
        if file == folder / "step_00000002/lanes_000.safetensors":
            raise OSError(5, "Input/output error")
        return whole(file)

    monkeypatch.setattr(checkpoint, "compute_crc32c", fail)
    assert checkpoint.find_resume_checkpoint(folder, Comm()).name == "step_00000001"


def test_a_run_whose_every_checkpoint_is_damaged_does_not_begin_anew(save):
    folder = save(1)
    damage(folder / "step_00000001" / "lanes_000.safetensors")
    with pytest.raises(ValueError, match="step_00000001 have files .* remove them to begin again"):
        checkpoint.find_resume_checkpoint(folder, Comm())


def test_what_someone_put_beside_them_is_neither_read_nor_counted_nor_removed(save):
    folder = save(2)
    theirs = {"step_00000002.good", "step_00000009 (copy)", "step_best"}
    for name in theirs:
        shutil.copytree(folder / "step_00000002", folder / name)
    (folder / "step_00000099").write_text("notes")
    assert checkpoint.find_resume_checkpoint(folder, Comm()).name == "step_00000002"
    for step in (4, 6):
        save(step, keep_last=2)
    assert {path.name for path in folder.iterdir()} == theirs | {"step_00000099", "step_00000004", "step_00000006"}


@pytest.mark.parametrize("step", [9, 12])
def test_what_was_passed_over_as_damaged_goes_when_its_steps_were_made_again(save, step):
    for before in (8, 10):
        folder = save(before)
    damage(folder / "step_00000010/lanes_000.safetensors")
    found = checkpoint.find_resume_checkpoint(folder, Comm())
    published = []
    writer = CheckpointWriter(folder, Comm(), 1, publish=published.append, resumed=found)
    writer.begin(step, Engine(0), memories(), {}, write_model)
    assert {found, folder / "step_00000010"} < set(folder.iterdir()), "nothing goes before there is something new"
    writer.close()
    assert names(folder) == [f"step_{step:08d}"] == [path.name for path in published]


def test_a_full_disk_names_the_checkpoint_that_was_read_not_a_damaged_one(save):
    for step in (8, 10):
        folder = save(step)
    damage(folder / "step_00000010/lanes_000.safetensors")
    writer = CheckpointWriter(folder, Comm(), 1, resumed=checkpoint.find_resume_checkpoint(folder, Comm()))
    writer.begin(9, Engine(0), memories(), {}, full)
    with pytest.raises(ValueError, match="step_00000008 is good"):
        writer.finish()


def test_every_so_many_are_kept_for_good(save):
    for step in range(10, 80, 10):
        folder = save(step, keep_last=1, keep_every=30)
    assert names(folder) == ["step_00000030", "step_00000060", "step_00000070"]


def test_a_disk_that_is_full_leaves_the_checkpoint_before_and_nothing_else(save):
    folder = save(1)
    writer = CheckpointWriter(folder, Comm(), 2)
    writer.begin(2, Engine(0), memories(), {}, full)
    with pytest.raises(ValueError, match=r"could not be written .*No space left.* step_00000001 is good"):
        writer.finish()
    assert [path.name for path in folder.iterdir()] == ["step_00000001"] == names(folder)


def test_what_is_saved_is_what_was_there_when_it_began(save, tmp_path):
    engine, weights = Engine(2), {}
    writer = CheckpointWriter(tmp_path / "all", Comm(), 2)
    before = engine.module.weight.detach().clone()
    writer.begin(1, engine, memories(), {}, lambda path, given: (path.mkdir(), weights.update(given)))
    with torch.no_grad():
        engine.module.weight.zero_()
    writer.finish()
    assert torch.equal(weights["weight"], before)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('"seed": 1', '"seed": 2'),
        ('"counters"', '"counterz"'),
        ('"crc32c"', '"crc33c"'),
        ('"bytes"', '"bytez"'),
        ("{", "["),
        ("1", "\udcff"),  # no UTF-8
    ],
)
def test_a_checkpoint_whose_manifest_has_another_byte_is_none(save, was, now):
    save(1)
    folder = save(2)
    manifest = folder / "step_00000002/manifest.json"
    text = manifest.read_text()
    assert was in text
    manifest.write_bytes(text.replace(was, now, 1).encode(errors="surrogateescape"))
    assert names(folder) == ["step_00000001"]
    assert checkpoint.find_resume_checkpoint(folder, Comm()).name == "step_00000001"
