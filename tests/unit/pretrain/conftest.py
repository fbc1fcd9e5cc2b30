"""Fixtures: batches of the test store, and the dump (a folder with the inputs and states) of a step of a tiny model."""

from pathlib import Path

import pytest
import torch

from pretrain.trainer import nonfinite_dump
from tests.unit.model.conftest import random_memory
from xlpre.batch import Batch
from xlpre.conversion.model_folder import ModelFolder
from xlpre.data.lanes import Lanes
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import DataConfig, build_windows
from xlpre.data_loader import batch_from_inputs
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective

SHAPE = ModelConfig(vocab_size=300, n_layer=2, d_model=16, n_head=2, d_inner=24, mem_len=8)
DATA = DataConfig(store_dir="x", seq_len=32, reuse_len=16)
METADATA = {"seed": 5, "step": 122, "world_size": 1, "precision": "torch.float32"}


@pytest.fixture
def batch_at(store, tokenizer):
    """Return a function that builds the batch of a step: four rows (lanes, which read consecutive windows), two of them backward."""
    objective = build_objective(ObjectiveConfig(), DATA, tokenizer.starts_word)
    lanes = Lanes(store.train, 4, stride=16, lookahead=DATA.lookahead, windows_per_run=4, bidirectional=True, seed=0)

    def make(step: int) -> Batch:
        rng = RowRng(0, range(4), step)
        windows = build_windows([lanes.location(lane, step) for lane in range(4)], DATA, rng)
        return batch_from_inputs(windows, objective.build_inputs(windows, rng))

    return make


@pytest.fixture
def dump(tokenizer, batch_at, tmp_path):
    """Return a function that applies `change` to the model and the micro-steps, dumps a step, and returns the folder of the dump."""

    def make(change=lambda model, micro_steps: None, **metadata: object) -> Path:
        torch.manual_seed(0)
        model = LanguageModel(SHAPE, two_streams=True)
        micro_steps = [(batch_at(step), random_memory(SHAPE, 4, SHAPE.mem_len, seed=step)) for step in range(2)]
        with torch.no_grad():
            change(model, micro_steps)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        folder = ModelFolder(SHAPE, weights, tokenizer, "permutation", {"step": 122}, "xlpre")
        path = nonfinite_dump.dump_dir(tmp_path / "run", 122)
        nonfinite_dump.write_rank_dump(path, 0, micro_steps, folder, {**METADATA, **metadata})
        return path

    return make
