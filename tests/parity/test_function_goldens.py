"""Single functions of the original XLNet (zihangdai/xlnet modeling.py) and what stands for them here."""

import re

import numpy as np
import pytest
import torch

from tests.parity.goldens import files
from tests.parity.xlnet import part_of
from xlpre.model.attention_mask import AttentionMeta, max_key_distance
from xlpre.model.feedforward import PLAIN
from xlpre.model.memory import append_columns
from xlpre.model.positions import sinusoid_table


def in_order(n_tokens, key_rank, max_distance) -> AttentionMeta:
    """The rows of a window, each seeing what comes before it and itself."""
    rows, n_keys = key_rank.shape
    places = torch.arange(n_tokens).expand(rows, -1)
    return AttentionMeta(
        query_rank=places + 1,
        key_rank=key_rank,
        row_segments=torch.zeros_like(places),
        key_segments=torch.zeros_like(key_rank),
        positions=places,
        n_content=n_tokens,
        n_self_visible=n_tokens,
        max_distance=max_distance,
        direction=torch.zeros(rows, dtype=torch.long),
        pos_encoding=torch.empty(2, n_keys + n_tokens, 0),
    )


def cases(path, name):
    found = part_of(dict(np.load(path)), name)
    assert found
    return found


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_scores_by_distance_are_aligned_as_rel_shift_does(path):
    arrays = cases(path, "rel_shift")
    for case in sorted({name.split("/")[0] for name in arrays}):
        T, M = map(int, re.search(r"q(\d+)_m(\d+)", case).groups())
        by_distance = torch.from_numpy(arrays[f"{case}/in"]).permute(2, 3, 0, 1)  # (B, H, T, R)
        expected = torch.from_numpy(arrays[f"{case}/out"]).permute(2, 3, 0, 1)
        K, B = M + T, by_distance.size(0)
        aligned = in_order(T, torch.zeros(B, K), None).rel_shift(by_distance)
        seen = torch.ones(T, K, dtype=torch.bool).tril(M if case.startswith("uni") else K)
        assert torch.equal(aligned[..., seen], expected[..., seen]), case


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_sinusoids_of_distances_equal_the_originals(path):
    for case, expected in cases(path, "pos_enc").items():
        T, K, kind, both, clamp = re.fullmatch(r"q(\d+)_k(\d+)_(bi|uni)_bidata(\d)_clamp(-?\d+)", case).groups()
        width, n_rows = expected.shape[2], len(expected)  # a causal model of the original has no distances below 0
        table = sinusoid_table(int(K), int(T), width, int(clamp), device=torch.device("cpu"), dtype=torch.float32)[
            :, :n_rows
        ]
        half = expected.shape[1] // 2
        np.testing.assert_allclose(table[0], expected[:, 0], atol=1e-6, err_msg=case)
        np.testing.assert_allclose(table[int(both)], expected[:, half], atol=1e-6, err_msg=case)


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_causal_ranks_give_the_originals_causal_mask(path):
    for case, expected in cases(path, "create_mask").items():
        T, M, same = map(int, re.fullmatch(r"q(\d+)_m(\d+)_same(\d)", case).groups())
        key_rank = torch.cat([torch.full((1, M), -1), torch.arange(T)[None]], dim=1)
        seen = in_order(T, key_rank, max_key_distance("same_length" if same else "all", M, M)).visible()
        assert torch.equal(~seen[0], torch.from_numpy(expected) > 0), case


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_memory_grows_as_the_originals(path):
    arrays = cases(path, "cache_mem")
    now, before = (torch.from_numpy(arrays[name]).transpose(0, 1)[None] for name in ("curr", "prev"))
    for case, expected in arrays.items():
        if case in ("curr", "prev"):
            continue
        length, reuse, previous = re.fullmatch(r"mem(\d+)_reuse(\w+)_prev(\d)", case).groups()
        reuse = 0 if reuse == "None" else int(reuse)
        kept = before[:, :, before.size(2) * (1 - int(previous)) :]  # nothing, or all of it
        columns = torch.nn.functional.pad(kept, (0, 0, int(length), 0))[:, :, -int(length) :]
        extended = append_columns(columns, now[:, :, : reuse or None])
        np.testing.assert_array_equal(extended[0, :, -len(expected) :].transpose(0, 1), expected, err_msg=case)


@pytest.mark.parametrize("path", files("xlnet_functions.npz"))
def test_gelu_is_the_originals(path):
    arrays = cases(path, "gelu")
    np.testing.assert_allclose(PLAIN["gelu"](torch.from_numpy(arrays["in"])), arrays["out"], atol=1e-6)
