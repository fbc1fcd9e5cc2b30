"""What the tests of the GPU kernels compute, and where: in Triton's interpreter or on a GPU."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from xlpre.model.attention_mask import AttentionMeta
from xlpre.model.score_terms import ScoreTerms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or ON_GPU), reason="run by test_all_of_this_in_the_interpreter, under TRITON_INTERPRET=1"
)


class Unfelt(torch.autograd.Function):
    """A sum whose gradient its author left out: torch hands on None."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return None


PLACE = ("r_r_bias", "pos_key", "pos_offset")
STEP = ("r_s_bias", "segment_diff")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that tiny shapes have several of them, of sizes that divide nothing."""
    if not (INTERPRETED or ON_GPU):
        return
    from xlpre.model.kernels.triton import attention, panels, tiles

    for module in (attention, panels):
        monkeypatch.setattr(module, "GRANULE", 32)
    by_distance = dict.fromkeys(("score_places", "differentiate_place_queries"), (16, 16))
    tiles = {name: (tiles.Tile(*by_distance.get(name, (16, 32)), 4, 1),) * 4 for name in tiles.TILES}
    monkeypatch.setattr(tiles, "TILES", tiles)


def random_geometry(rng, *, n_tokens, n_memory, n_others, content, reach, n_batch=2):
    """Rows in their order, if any, and rows at any places; some see nothing."""
    n_content = n_tokens if content else 0
    n_rows, n_keys = n_content + n_others, n_memory + n_tokens
    positions = rng.integers(0, n_tokens, (n_batch, n_rows))
    positions[:, :n_content] = np.arange(n_content)
    ranks = rng.integers(0, 8, (n_batch, n_rows))
    ranks[:, rng.integers(0, n_rows)] = -1
    key_ranks = rng.integers(0, 8, (n_batch, n_keys))
    key_ranks[:, n_memory + n_tokens // 2 :] += 4  # so that some tiles are seen by few rows
    array = torch.from_numpy
    return AttentionMeta(
        array(ranks).int().to(DEVICE),
        array(key_ranks).int().to(DEVICE),
        array(rng.integers(0, 3, (n_batch, n_rows))).to(DEVICE),
        array(rng.integers(0, 3, (n_batch, n_keys))).to(DEVICE),
        array(positions).to(DEVICE),
        n_content,
        n_content if rng.random() < 0.5 else 0,
        reach,
        torch.tensor([0, 1], device=DEVICE),
        torch.zeros(2, n_keys + n_tokens, 4, device=DEVICE),
    )


def random_tensors(attn_meta, rng, n_head, width, dtype, without=()):
    """What scores are made of, keys and values, by name."""
    B, N = attn_meta.query_rank.shape
    K, R, H, E = attn_meta.n_keys, attn_meta.n_distances, n_head, width
    shapes = {
        "query": (B, N, H, E),
        **dict.fromkeys(("r_w_bias", "r_r_bias", "r_s_bias", "segment_diff"), (H, E)),
        "pos_key": (2, R, H, E),
        "pos_offset": (2, R, H),
        **dict.fromkeys(("key", "value"), (B, K, H, E)),
    }
    drawn = {name: torch.from_numpy(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return {name: x.to(DEVICE, dtype).requires_grad_() for name, x in drawn.items() if name not in without}


def attended(backend, attn_meta, tensors, dropout=0.0):
    parts = {name: x for name, x in tensors.items() if name not in ("key", "value")}
    scores = ScoreTerms(scale=tensors["key"].size(3) ** -0.5, **parts)
    prepared = replace(attn_meta, prepared=backend.prepare(attn_meta, tensors["query"]))
    return backend.attend(scores, tensors["key"], tensors["value"], prepared, dropout)


def outcome(backend, attn_meta, tensors):
    """The output and every gradient."""
    out = attended(backend, attn_meta, tensors)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    gradients = torch.autograd.grad((out.float() * weights).sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, gradients, strict=True))}


def small_case(dtype=torch.float32):
    rng = np.random.default_rng(5)
    attn_meta = random_geometry(rng, n_tokens=18, n_memory=15, n_others=4, content=True, reach=None)
    return attn_meta, random_tensors(attn_meta, rng, 2, 16, dtype, ("pos_offset",))
