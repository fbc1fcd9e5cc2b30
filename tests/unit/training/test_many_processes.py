"""File operations of a checkpoint that many processes write and read, simulated one process after another."""

import builtins
import os
from collections import Counter

import pytest
import torch
from torch import nn

from xlpre.common.safetensors_io import write_tensors
from xlpre.data_loader import assign_lanes
from xlpre.training import checkpoint, checkpoint_writer
from xlpre.training.checkpoint_writer import CheckpointWriter
from xlpre.training.optimizer_state import _read_elements

MICRO_STEPS = 2


class Engine:
    """Stand-in for a DeepSpeed engine without ZeRO, after one update of 40 parameters."""

    def __init__(self):
        self.module, self.skipped_steps = nn.Sequential(*(nn.Linear(2, 3) for _ in range(20))), 0
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        sum(parameter.sum() for parameter in self.module.parameters()).backward()
        self.optimizer.step()

    def zero_optimization_stage(self):
        return 0


class SimulatedComm:
    """Collectives of a process whose peers run before or after it."""

    def __init__(self, processes):
        self.processes = processes

    def all_gather(self, value):
        return [[lane for lanes in lanes_of(rank, self.processes) for lane in lanes] for rank in range(self.processes)]

    def broadcast(self, value):
        return value

    def call_on_rank_zero(self, function):
        return function() if os.environ["RANK"] == "0" else ["step_00000001"]

    def all_reduce_sum(self, *values):
        return values


def write_model(step, path, weights):
    path.mkdir()
    return {"model.safetensors": write_tensors(path / "model.safetensors", weights)}


def lanes_of(rank, processes, micro_steps=MICRO_STEPS):
    return assign_lanes(rank, processes, 1, micro_steps)


def memories_of(rank, processes):
    groups = lanes_of(rank, processes)
    return [(lanes, torch.full((1, 1, 1, 1), float(lanes[0])), torch.tensor([lanes[0]])) for lanes in groups]


@pytest.fixture(scope="module", params=[64, pytest.param(1024, marks=pytest.mark.long)])
def processes(request):
    return request.param


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, engine, processes):
    """Return the folder of a checkpoint that all processes wrote."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "fsync", lambda path: None)
        patch.setenv("WORLD_SIZE", str(processes))
        writers, entries = [], {}
        for rank in range(processes):
            patch.setenv("RANK", str(rank))
            writers.append(CheckpointWriter(folder, SimulatedComm(processes), 2))
            writers[rank].begin(1, engine, memories_of(rank, processes), {}, write_model)
            written, failure = writers[rank]._work.result()
            assert not failure
            entries |= written
            writers[rank]._thread.shutdown()
        writers[0]._complete(entries)
    return folder


@pytest.fixture
def operations(monkeypatch):
    """Count calls that a network file system answers."""
    counts = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((builtins, "open"), (os, "open"), (os, "stat"), (os, "scandir"), (checkpoint, "safe_open")):
        count(owner, name)
    monkeypatch.setattr("io.open", builtins.open)  # pathlib's
    return counts


def test_a_few_processes_write_the_moments(folder, processes):
    names = [path.name for path in (folder / "step_00000001").iterdir()]
    writers = sorted(int(name[8:-12]) for name in names if name.startswith("moments_"))
    assert writers == list(range(0, processes, processes // 16))
    assert sum(name.startswith("lanes_") for name in names) == processes


@pytest.mark.parametrize(("stage", "most"), [(2, 16), (3, 32)])
@pytest.mark.parametrize("rank", [0, 1, 40, -1])
def test_a_process_resumes_with_a_few_file_operations(
    folder, engine, processes, operations, monkeypatch, rank, stage, most
):
    """However many processes there are. Rank 0 looks at every file, too."""
    rank %= processes
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for _ in range(3):  # whether the run is finished, its format and its shape
        newest, _ = checkpoint.read_newest_manifest(folder)
    saved = checkpoint.find_latest_valid(folder, SimulatedComm(processes))
    assert saved == newest
    manifest = checkpoint.read_manifest(saved)
    assert set(checkpoint.saved_weights(saved)) == set(dict(engine.module.named_parameters()))
    moments = checkpoint.saved_moments(saved, manifest)
    position = rank * sum(p.numel() for p in engine.module.parameters()) // processes  # of its part of a flat buffer
    for name, parameter in engine.module.named_parameters():
        holds, position = position in range(parameter.numel()), position - parameter.numel()
        for key in ("exp_avg", "exp_avg_sq"):
            expected = engine.optimizer.state[parameter][key]
            if stage == 3:
                element = rank % parameter.numel()
                assert (
                    _read_elements(moments[f"{name}/{key}"], parameter.shape, element, 1) == expected.flatten()[element]
                )
            elif holds:
                assert torch.equal(moments[f"{name}/{key}"][:], expected)
    memories = checkpoint.read_lane_memory(saved, manifest, lanes_of(rank, processes))
    for (lanes, hidden, valid), (read_hidden, read_valid) in zip(memories_of(rank, processes), memories, strict=True):
        assert torch.equal(read_hidden, hidden) and torch.equal(read_valid, valid), lanes
    assert operations.total() <= most + (processes + 32 if rank == 0 else 0), operations


@pytest.mark.parametrize(("factor", "micro_steps", "files"), [(0.5, 4, 2), (2, 1, 1), (1, 2, 1)])
def test_other_processes_open_the_files_of_their_lanes_only(folder, processes, operations, factor, micro_steps, files):
    saved = folder / "step_00000001"
    manifest = checkpoint.read_manifest(saved)
    lanes = lanes_of(30, int(processes * factor), micro_steps)
    memories = checkpoint.read_lane_memory(saved, manifest, lanes)
    assert [valid.tolist() for _, valid in memories] == [[*group] for group in lanes]
    assert operations["safe_open"] == files
