"""The dump of an update comes back as it was, or is refused."""

import dataclasses
import os

import pytest
import safetensors.torch
import torch

from pretrain.replay import main
from pretrain.trainer import nan_dump
from tests.unit.model.conftest import random_memory
from tests.unit.pretrain.conftest import ABOUT, SHAPE
from xlpre.batch import Batch
from xlpre.model.memory import Memory, initial_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_survives_a_round_trip_bit_for_bit(dtype, dump, batch_at):
    kept = []

    def change(model, met):
        met[1][1].hidden[0, 2, 3, 4] = torch.nan
        met[:] = [(batch, Memory(memory.hidden.to(dtype), memory.valid)) for batch, memory in met]
        met.append((met[0][0], initial_memory(model.config, 4, mem_len=0, dtype=dtype)))
        kept.extend(met)

    path = dump(change, precision=str(dtype))
    _, (share,) = nan_dump.read_dump(path)
    assert (share.seed, share.step, share.process, share.precision) == (5, 122, 0, dtype)
    back = list(share.micro_steps())
    assert len(back) == 3
    for (batch, memory), (was_batch, was_memory) in zip(back, kept, strict=True):
        for field in dataclasses.fields(Batch):
            value, was = getattr(batch, field.name), getattr(was_batch, field.name)
            assert value == was if field.name == "reuse_len" else value.dtype == was.dtype and torch.equal(value, was)
        assert memory.hidden.dtype == dtype and torch.equal(memory.valid, was_memory.valid)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(memory.hidden.view(bits), was_memory.hidden.view(bits))


def test_a_folder_that_is_not_whole_is_refused_in_a_sentence(dump, tmp_path):
    def refusal(path) -> str:
        with pytest.raises(ValueError) as caught:
            main([str(path)])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    path = dump()
    assert "there is no such folder" in refusal(tmp_path / "none")
    assert f"did you mean {path}?" in refusal(tmp_path / "run")
    assert f"did you mean {path}?" in refusal(tmp_path / "run" / "not_finite")
    assert "no process_000.safetensors" in refusal(path / "model")
    file = path / "process_000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert f"{file}: cut or damaged" in refusal(path)
    file.write_bytes(b"")
    assert f"{file}: cut or damaged" in refusal(path)
    safetensors.torch.save_file({"x": torch.zeros(1)}, file)
    assert f"{file}: not a share of an update" in refusal(path)
    file.write_bytes(whole)
    os.truncate(path / "model" / "model.safetensors", 1000)
    assert "model.safetensors is not as it was written" in refusal(path)


def test_the_share_of_every_process_must_be_there_and_of_the_same_update(dump, batch_at, capsys):
    path = dump(world_size=2)
    with pytest.raises(ValueError, match=r"process_001\.safetensors is missing; copy it"):
        main([str(path)])
    met = [(batch_at(step), random_memory(SHAPE, 4, 8)) for step in range(2)]
    nan_dump.write_rank_dump(path, 1, met, None, {**ABOUT, "world_size": 2, "step": 121})
    with pytest.raises(ValueError, match=r"process_001\.safetensors: of another update than"):
        main([str(path)])
    met[1][1].hidden[:, 3] = torch.inf
    nan_dump.write_rank_dump(path, 1, met, None, {**ABOUT, "world_size": 2})
    main([str(path)])
    assert (
        capsys.readouterr().out.splitlines()[-1] == "not finite first: the memory of row 3 (process 1, micro-batch 1)"
    )
