"""Random attention metadata and tensors for the tests of the backends, and where Triton kernels run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.kernels.selfcheck.fixtures import AttentionCase

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
needs_triton = pytest.mark.skipif(
    not (INTERPRETED or ON_GPU), reason="run by test_interpreter.py under TRITON_INTERPRET=1"
)
# files whose tests need a GPU or the interpreter: all of this folder but two
TRITON_FILES = sorted(
    path.name
    for path in (Path(__file__).parent / "triton").glob("test_*.py")
    if path.name not in ("test_interpreter.py", "test_registers.py")
)
POSITION_TERMS = ("r_r_bias", "pos_key", "pos_offset")
SEGMENT_TERMS = ("r_s_bias", "segment_diff")


def run_in_interpreter(*args: str) -> None:
    """Run pytest with `args` in Triton's interpreter, in a process of its own: TRITON_INTERPRET is read at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=Path(__file__).parents[4], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]


def long_except(values, *fast):
    """Return parameters that are long tests except `fast`, because the interpreter takes seconds for each.

    A tuple gives the values of several parameters.
    """
    values = list(values)
    assert all(value in values for value in fast)
    marks = [() if value in fast else pytest.mark.long for value in values]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)
        for value, mark in zip(values, marks, strict=True)
    ]


class SumWithoutGradient(torch.autograd.Function):
    """A sum whose backward pass returns None."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, d_out):
        return None


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small tiles, so that tiny shapes have several of them, partly filled."""
    if not (INTERPRETED or ON_GPU):
        return
    from xlpre.model.kernels.triton import attention, panels, tiles

    for module in (attention, panels):
        monkeypatch.setattr(module, "TILE_MULTIPLE", 32)
    by_distance = dict.fromkeys(("position_scores", "backward_position_query"), (16, 16))
    small = {name: (tiles.Tile(*by_distance.get(name, (16, 32)), 4, 1),) * 4 for name in tiles.TILES}
    monkeypatch.setattr(tiles, "TILES", small)


def random_meta(rng, *, n_tokens, n_memory, n_others, has_content, max_distance, n_batch=2):
    """Content rows in order, if any, then rows at random positions. Some rows see no key."""
    n_content = n_tokens if has_content else 0
    n_rows, n_keys = n_content + n_others, n_memory + n_tokens
    positions = rng.integers(0, n_tokens, (n_batch, n_rows))
    positions[:, :n_content] = np.arange(n_content)
    query_rank = rng.integers(0, 8, (n_batch, n_rows))
    query_rank[:, rng.integers(0, n_rows)] = -1
    key_rank = rng.integers(0, 8, (n_batch, n_keys))
    key_rank[:, n_memory + n_tokens // 2 :] += 4  # so that few rows see some of the tiles
    return AttentionMeta(
        query_rank=torch.from_numpy(query_rank).int().to(DEVICE),
        key_rank=torch.from_numpy(key_rank).int().to(DEVICE),
        row_segments=torch.from_numpy(rng.integers(0, 3, (n_batch, n_rows))).to(DEVICE),
        key_segments=torch.from_numpy(rng.integers(0, 3, (n_batch, n_keys))).to(DEVICE),
        positions=torch.from_numpy(positions).to(DEVICE),
        n_content=n_content,
        n_self_visible=n_content if rng.random() < 0.5 else 0,
        max_distance=max_distance,
        direction=torch.tensor([0, 1], device=DEVICE),
        pos_encoding=torch.zeros(2, n_keys + n_tokens, 4, device=DEVICE),
    )


def random_tensors(meta, rng, n_head, head_width, dtype, without=()):
    """Score terms, keys and values by name."""
    (B, N), K, R, H, E = meta.query_rank.shape, meta.n_keys, meta.n_distances, n_head, head_width
    shapes = {
        "query": (B, N, H, E),
        **dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias", "segment_diff"), (H, E)),
        "pos_key": (2, R, H, E),
        "pos_offset": (2, R, H),
        **dict.fromkeys(("key", "value"), (B, K, H, E)),
    }
    arrays = {name: torch.from_numpy(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return {name: x.to(DEVICE, dtype).requires_grad_() for name, x in arrays.items() if name not in without}


def attend(backend, meta, tensors, dropout=0.0):
    """The output of a backend. Gradients reach `tensors`."""
    return AttentionCase(tensors, backend.prepare(meta, tensors["key"].dtype)).output(dropout)


def output_and_gradients(backend, meta, tensors, dropout=0.0):
    """The output and all gradients by name, with the same dropout in each call."""
    torch.manual_seed(0)
    out = attend(backend, meta, tensors, dropout)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    gradients = torch.autograd.grad((out.float() * weights).sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, gradients, strict=True))}


def small_case(dtype=torch.float32):
    rng = np.random.default_rng(5)
    meta = random_meta(rng, n_tokens=18, n_memory=15, n_others=4, has_content=True, max_distance=None)
    return meta, random_tensors(meta, rng, 2, 16, dtype, ("pos_offset",))
