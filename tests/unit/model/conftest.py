import numpy as np
import pytest
import torch

from xlpre.batch import Batch
from xlpre.data.layout import Window
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import Permutation

VOCAB = 40


def make_model(two_streams=True, seed=0, **settings) -> LanguageModel:
    """A model with large random weights, so that nothing is small by chance."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "n_layer": 2,
        "d_model": 16,
        "n_head": 2,
        "d_inner": 24,
        "dropout": 0.0,
        "dropatt": 0.0,
    }
    model = LanguageModel(ModelConfig(**{**shape, **settings}), two_streams)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture
def model_of():
    return make_model


def random_batch(length=13, reuse=6, rows=2, seed=0, backward=None, continues=True, **settings) -> Batch:
    """Permutation rows of random tokens, the last three of them symbols."""
    objective = Permutation(
        ObjectiveConfig(**{"partial_k": 3.0, **settings}), np.random.default_rng(seed).random(VOCAB) < 0.7
    )
    examples, windows = [], []
    for row in range(rows):
        rng = np.random.default_rng([seed, row])
        functional = np.zeros(length, bool)
        functional[-2:] = reuse < length - 3
        segments = np.where(np.arange(length) < length - 4, 0, 1)
        segments[-1] = 2
        direction = bool(rng.integers(2)) if backward is None else backward
        window = Window(rng.integers(9, VOCAB, length), segments, functional, 9, direction, continues, 1, reuse)
        windows.append(window)
        examples.append(objective.example(window, rng))
    stack = lambda arrays: torch.from_numpy(np.stack(arrays))  # noqa: E731
    targets = stack([e.targets for e in examples])
    return Batch(
        input_ids=stack([e.input_ids for e in examples]),
        segment_ids=stack([w.segments for w in windows]),
        query_rank=stack([e.query_rank for e in examples]),
        key_rank=stack([e.key_rank for e in examples]),
        target_positions=stack([e.target_positions for e in examples]),
        targets=targets,
        target_weights=torch.ones(targets.shape),
        backward=torch.tensor([w.backward for w in windows]),
        continues=torch.tensor([w.continues for w in windows]),
        pair_label=torch.ones(rows, dtype=torch.long),
        reuse_len=reuse,
    )


def random_memory(config: ModelConfig, rows: int, length: int, valid: int | None = None, seed: int = 0) -> Memory:
    torch.manual_seed(seed)
    hidden = torch.randn(config.n_layer, rows, length, config.d_model)
    return Memory(hidden, torch.full((rows,), length if valid is None else valid))
