"""The data path equals the original's (zihangdai/xlnet data_utils.py): masks from ranks, the split of A and B, the row."""

import json

import numpy as np
import pytest

from tests.parity.goldens import files
from xlpre.data.lanes import Text
from xlpre.data.layout import split_pair
from xlpre.data.store import Part
from xlpre.objectives.permutation import ranks_of
from xlpre.text import symbols


def masked(query, key):
    return ~(query[:, None] > key[None])


@pytest.mark.parametrize("path", files("data_local_perm.npz"))
def test_ranks_give_the_originals_mask_of_a_half(path):
    arrays = np.load(path)
    names = sorted({name.split("/")[0] for name in arrays.files if "/in/" in name})
    assert names
    for name in names:
        given = {key: arrays[f"{name}/in/{key}"] for key in ("inputs", "is_masked", "sigma")}
        functional = np.isin(given["inputs"], (symbols.SEP, symbols.CLS))
        target = given["is_masked"] & ~functional
        query, key = ranks_of(target, functional, given["sigma"], base=0)
        assert (masked(query, key) == (arrays[f"{name}/out/perm_mask"] > 0)).all(), name
        assert (target == (arrays[f"{name}/out/target_mask"] > 0)).all(), name


@pytest.mark.parametrize("path", files("data_pipeline_*.npz"))
def test_ranks_give_the_originals_mask_and_targets_of_a_window(path):
    arrays = np.load(path)
    config = json.loads(str(arrays["config"]))
    reuse = config["reuse_len"]
    rows = arrays["row/input"].reshape(-1, config["seq_len"])
    is_masked = arrays["row/is_masked"].reshape(rows.shape) > 0
    sigma = arrays["sigma"].reshape(len(rows), 2, -1)
    expected = arrays["feat/perm_mask"].reshape(len(rows), *rows.shape[1:], rows.shape[1]) > 0
    for row in range(len(rows)):
        functional = np.isin(rows[row], (symbols.SEP, symbols.CLS))
        target = is_masked[row] & ~functional
        halves = [(slice(0, reuse), 0), (slice(reuse, None), reuse + 1)]
        ranks = [ranks_of(target[h], functional[h], sigma[row, i], base) for i, (h, base) in enumerate(halves)]
        query, key = (np.concatenate([rank[side] for rank in ranks]) for side in (0, 1))
        assert (masked(query, key) == expected[row]).all()
        if config["num_predict"]:
            wanted = arrays["feat/target"].reshape(len(rows), -1)[row]
            weight = arrays["feat/target_mask"].reshape(len(rows), -1)[row] > 0
            assert (rows[row][target] == wanted[weight]).all()


class Replay:
    """Draws recorded from the original, in the shape of a numpy generator."""

    def __init__(self, log):
        self._log = list(log)

    def random(self):
        kind, _, value = self._log.pop(0)
        assert kind == "random.random"
        return value

    def integers(self, high):
        kind, given, value = self._log.pop(0)
        if kind == "random.choice":
            assert len(given) == high
            return given.index(value)
        assert kind == "random.randint" and given == [0, high - 1]
        return value


@pytest.mark.parametrize("path", files("data_split_ab.npz"))
def test_a_and_b_are_split_as_the_original_splits_them(path):
    arrays = np.load(path)
    data = arrays["data"]
    cases = sorted({name.split("/")[0] for name in arrays.files if name.endswith("/is_none")})
    compared = 0
    for case in cases:
        config = json.loads(str(arrays[f"{case}/config"]))
        if bool(arrays[f"{case}/is_none"]):
            continue  # the original gives the file up where a sentence reaches its end; here it is cut there
        flags = arrays[config["sent_ids"]]
        ends = np.append(np.flatnonzero(flags[1:] != flags[:-1]) + 1, len(flags))
        rng = Replay(json.loads(str(arrays[f"{case}/rng_log"])))
        (a, a_end), (b, b_end), label = split_pair(Text(Part(data, ends)), config["begin_idx"], config["tot_len"], rng)
        assert (data[a:a_end] == arrays[f"{case}/a_data"]).all(), case
        assert (data[b:b_end] == arrays[f"{case}/b_data"]).all(), case
        assert label == arrays[f"{case}/label"], case
        assert not rng._log
        compared += 1
    assert compared
