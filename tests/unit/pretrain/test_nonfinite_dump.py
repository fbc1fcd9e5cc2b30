"""The dump of a step survives a round trip, and damaged dumps are refused."""

import dataclasses
import os

import pytest
import safetensors.torch
import torch

from pretrain.replay import main
from pretrain.trainer import nonfinite_dump
from tests.unit.model.conftest import random_memory
from tests.unit.pretrain.conftest import METADATA, SHAPE
from xlpre.batch import Batch
from xlpre.model.memory import Memory, initial_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dump_survives_a_round_trip_bit_for_bit(dtype, dump, batch_at):
    written = []

    def change(model, micro_steps):
        micro_steps[1][1].hidden[0, 2, 3, 4] = torch.nan
        micro_steps[:] = [(batch, Memory(memory.hidden.to(dtype), memory.valid)) for batch, memory in micro_steps]
        micro_steps.append((micro_steps[0][0], initial_memory(model.config, 4, mem_len=0, dtype=dtype)))
        written.extend(micro_steps)

    path = dump(change, precision=str(dtype))
    _, (rank_dump,) = nonfinite_dump.read_dump(path)
    assert (rank_dump.seed, rank_dump.step, rank_dump.rank, rank_dump.precision) == (5, 122, 0, dtype)
    read = list(rank_dump.micro_steps())
    assert len(read) == 3
    for (batch, memory), (written_batch, written_memory) in zip(read, written, strict=True):
        for field in dataclasses.fields(Batch):
            value, expected = getattr(batch, field.name), getattr(written_batch, field.name)
            if field.name == "reuse_len":
                assert value == expected
            else:
                assert value.dtype == expected.dtype and torch.equal(value, expected)
        assert memory.hidden.dtype == dtype and torch.equal(memory.valid, written_memory.valid)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(memory.hidden.view(bits), written_memory.hidden.view(bits))


def test_a_damaged_dump_is_refused_in_one_line(dump, tmp_path):
    def refusal(path) -> str:
        with pytest.raises(ValueError) as caught:
            main([str(path)])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    path = dump()
    assert "there is no such folder" in refusal(tmp_path / "none")
    assert f"Did you mean {path}?" in refusal(tmp_path / "run")
    assert f"Did you mean {path}?" in refusal(tmp_path / "run" / "nonfinite")
    assert "no rank_000.safetensors" in refusal(path / "model")
    file = path / "rank_000.safetensors"
    intact = file.read_bytes()
    file.write_bytes(intact[:-100])
    assert f"{file} is damaged" in refusal(path)
    file.write_bytes(b"")
    assert f"{file} is damaged" in refusal(path)
    safetensors.torch.save_file({"x": torch.zeros(1)}, file)
    assert f"{file} is invalid: it is not a dump" in refusal(path)
    file.write_bytes(intact)
    os.truncate(path / "model" / "model.safetensors", 1000)
    assert "model.safetensors is damaged" in refusal(path)


def test_the_dumps_of_all_ranks_must_exist_and_belong_to_the_same_step(dump, batch_at, capsys):
    path = dump(world_size=2)
    with pytest.raises(ValueError, match=r"rank_001\.safetensors is missing. Copy it"):
        main([str(path)])
    micro_steps = [(batch_at(step), random_memory(SHAPE, 4, 8)) for step in range(2)]
    nonfinite_dump.write_rank_dump(path, 1, micro_steps, None, {**METADATA, "world_size": 2, "step": 121})
    with pytest.raises(ValueError, match=r"rank_001\.safetensors is invalid: .*another step"):
        main([str(path)])
    micro_steps[1][1].hidden[:, 3] = torch.inf
    nonfinite_dump.write_rank_dump(path, 1, micro_steps, None, {**METADATA, "world_size": 2})
    main([str(path)])
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "first non-finite value: the memory of row 3 (rank 1, micro-batch 1)"
    )
