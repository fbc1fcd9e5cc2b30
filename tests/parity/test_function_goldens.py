"""Single functions of the original XLNet (zihangdai/xlnet modeling.py) and their equivalents."""

import re

import numpy as np
import pytest
import torch

from tests.parity.goldens import files
from tests.parity.xlnet import select
from xlpre.model.attention_mask import AttentionMeta, max_key_distance
from xlpre.model.feedforward import PLAIN
from xlpre.model.memory import append_columns
from xlpre.model.positions import sinusoid_table


def causal_meta(n_tokens, key_rank, max_distance) -> AttentionMeta:
    """Rows of a window in order, which see the keys before them and themselves."""
    rows, n_keys = key_rank.shape
    positions = torch.arange(n_tokens).expand(rows, -1)
    return AttentionMeta(
        query_rank=positions + 1,
        key_rank=key_rank,
        row_segments=torch.zeros_like(positions),
        key_segments=torch.zeros_like(key_rank),
        positions=positions,
        n_content=n_tokens,
        n_self_visible=n_tokens,
        max_distance=max_distance,
        direction=torch.zeros(rows, dtype=torch.long),
        pos_encoding=torch.empty(2, n_keys + n_tokens, 0),
    )


def cases(path, name):
    arrays = select(dict(np.load(path)), name)
    assert arrays
    return arrays


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_rel_shift_equals_the_original(path):
    arrays = cases(path, "rel_shift")
    for case in sorted({name.split("/")[0] for name in arrays}):
        T, M = map(int, re.search(r"q(\d+)_m(\d+)", case).groups())
        by_distance = torch.from_numpy(arrays[f"{case}/in"]).permute(2, 3, 0, 1)  # (B, H, T, R)
        expected = torch.from_numpy(arrays[f"{case}/out"]).permute(2, 3, 0, 1)
        K, B = M + T, by_distance.size(0)
        by_key = causal_meta(T, torch.zeros(B, K), None).rel_shift(by_distance)
        is_visible = torch.ones(T, K, dtype=torch.bool).tril(M if case.startswith("uni") else K)
        assert torch.equal(by_key[..., is_visible], expected[..., is_visible]), case


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_sinusoids_of_distances_equal_the_original(path):
    for case, expected in cases(path, "pos_enc").items():
        T, K, kind, both, clamp = re.fullmatch(r"q(\d+)_k(\d+)_(bi|uni)_bidata(\d)_clamp(-?\d+)", case).groups()
        width, n_rows = expected.shape[2], len(expected)  # a causal model of the original has no distances below 0
        table = sinusoid_table(
            int(K),
            int(T),
            width,
            int(clamp) if int(clamp) > 0 else None,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )[:, :n_rows]
        half = expected.shape[1] // 2
        np.testing.assert_allclose(table[0], expected[:, 0], atol=1e-6, err_msg=case)
        np.testing.assert_allclose(table[int(both)], expected[:, half], atol=1e-6, err_msg=case)


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_causal_ranks_give_the_causal_mask_of_the_original(path):
    for case, expected in cases(path, "create_mask").items():
        T, M, same = map(int, re.fullmatch(r"q(\d+)_m(\d+)_same(\d)", case).groups())
        key_rank = torch.cat([torch.full((1, M), -1), torch.arange(T)[None]], dim=1)
        visible = causal_meta(T, key_rank, max_key_distance("same_length" if same else "all", M, M)).visible()
        assert torch.equal(~visible[0], torch.from_numpy(expected) > 0), case


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_memory_update_equals_the_original(path):
    arrays = cases(path, "cache_mem")
    new, old = (torch.from_numpy(arrays[name]).transpose(0, 1)[None] for name in ("curr", "prev"))
    for case, expected in arrays.items():
        if case in ("curr", "prev"):
            continue
        length, reuse, previous = re.fullmatch(r"mem(\d+)_reuse(\w+)_prev(\d)", case).groups()
        reuse = 0 if reuse == "None" else int(reuse)
        memory = old[:, :, old.size(2) * (1 - int(previous)) :]  # empty or complete
        columns = torch.nn.functional.pad(memory, (0, 0, int(length), 0))[:, :, -int(length) :]
        updated = append_columns(columns, new[:, :, : reuse or None])
        np.testing.assert_array_equal(updated[0, :, -len(expected) :].transpose(0, 1), expected, err_msg=case)


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_gelu_equals_the_original(path):
    arrays = cases(path, "gelu")
    np.testing.assert_allclose(PLAIN["gelu"](torch.from_numpy(arrays["in"])), arrays["out"], atol=1e-6)
