import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import Windows
from xlpre.data_loader import batch_from_inputs
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import Memory
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import Permutation

VOCAB = 40


def make_model(two_streams=True, seed=0, next_sentence=False, **settings) -> LanguageModel:
    """Build a tiny model with random weights that are large, so that each term of the attention score affects the outputs."""
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
    model = LanguageModel(ModelConfig(**{**shape, **settings}), two_streams, next_sentence)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


UNLIMITED = 10**6  # visible_mem_len: all columns of memory


def random_batch(length=13, reuse=6, rows=2, seed=0, backward=None, visible_mem_len=UNLIMITED, **settings) -> Batch:
    """Build a permutation batch of random tokens. By default, each row ends with two special tokens."""
    objective = Permutation(
        ObjectiveConfig(**{"partial_k": 3.0, **settings}), np.random.default_rng(seed).random(VOCAB) < 0.7
    )
    rng = np.random.default_rng(seed)
    special_mask = np.zeros((rows, length), bool)
    special_mask[:, -2:] = reuse < length - 3
    segments = np.where(np.arange(length) < length - 4, 0, 1)
    segments[-1] = 2
    windows = Windows(
        ids=rng.integers(9, VOCAB, (rows, length)),
        segments=np.tile(segments, (rows, 1)),
        special_mask=special_mask,
        following=np.full(rows, 9),
        backward=rng.random(rows) < 0.5 if backward is None else np.full(rows, backward),
        visible_mem_len=np.full(rows, visible_mem_len),
        pair_label=np.arange(rows) % 2,
        reuse_len=reuse,
    )
    return batch_from_inputs(windows, objective.build_inputs(windows, RowRng(seed, range(rows), 0)))


def random_memory(config: ModelConfig, rows: int, length: int, valid: int | None = None, seed: int = 0) -> Memory:
    """Build recurrent memory with `length` random positions, of which the last `valid` are valid (default: all)."""
    torch.manual_seed(seed)
    hidden = torch.randn(config.n_layer, rows, length, config.d_model)
    return Memory(hidden, torch.full((rows,), length if valid is None else valid))
