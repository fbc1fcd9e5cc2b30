"""The data path equals the original's (zihangdai/xlnet data_utils.py): masks from ranks, spans, A and B, whole rows."""

import json

import numpy as np
import pytest

from tests.parity.goldens import files
from tests.parity.replay import MAX_SPAN, Replay
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.data.store import SplitData
from xlpre.data.window_layout import DataConfig, build_windows, split_pair
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import factorization_ranks
from xlpre.objectives.target_sampling import SpanSampler
from xlpre.text import special_tokens
from xlpre.text.sentence_boundaries import starts_word


def part_of(data, flags):
    """Text whose sentences are where the original's flags change."""
    ends = np.append(np.flatnonzero(flags[1:] != flags[:-1]) + 1, len(flags))
    return SplitData(data, ends, ends[-1:])


def masked(query, key):
    return ~(query[:, None] > key[None])


@pytest.mark.parametrize("path", files("data_local_perm.npz"))
def test_ranks_give_the_originals_mask_of_a_half(path):
    arrays = np.load(path)
    names = sorted({name.split("/")[0] for name in arrays.files if "/in/" in name})
    assert names
    for name in names:
        given = {key: arrays[f"{name}/in/{key}"] for key in ("inputs", "is_masked", "sigma")}
        special_mask = np.isin(given["inputs"], (special_tokens.SEP, special_tokens.CLS))
        target = given["is_masked"] & ~special_mask
        (query,), (key,) = factorization_ranks(target[None], special_mask[None], given["sigma"][None], base=0)
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
        special_mask = np.isin(rows[row], (special_tokens.SEP, special_tokens.CLS))
        target = is_masked[row] & ~special_mask
        halves = [(slice(0, reuse), 0), (slice(reuse, None), reuse + 1)]
        ranks = [
            factorization_ranks(target[None, h], special_mask[None, h], sigma[row, None, i], base)
            for i, (h, base) in enumerate(halves)
        ]
        query, key = (np.concatenate([rank[side][0] for rank in ranks]) for side in (0, 1))
        assert (masked(query, key) == expected[row]).all()
        if config["num_predict"]:
            wanted = arrays["feat/target"].reshape(len(rows), -1)[row]
            weight = arrays["feat/target_mask"].reshape(len(rows), -1)[row] > 0
            assert (rows[row][target] == wanted[weight]).all()


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
        text = DirectedText(part_of(data, arrays[config["sent_ids"]]))
        rng = Replay(json.loads(str(arrays[f"{case}/rng_log"])))
        begin = config["begin_idx"]
        pair = split_pair(text, begin, config["tot_len"], *rng.pair())
        assert (data[begin : pair.a_end] == arrays[f"{case}/a_data"]).all(), case
        assert (data[pair.b_begin : pair.b_end] == arrays[f"{case}/b_data"]).all(), case
        assert pair.label == arrays[f"{case}/label"], case
        assert rng.used_up, case
        compared += 1
    assert compared


def sampler_of(config, starts):
    k = config["mask_alpha"] / config["mask_beta"]
    max_span = config.get("max_gram", MAX_SPAN)
    return SpanSampler(ObjectiveConfig(partial_k=k, max_span=max_span, span_ends="as_released"), starts)


def sampled(sampler, starts, ids, goal, backward, draws):
    """Targets of one half; without a goal the original takes the spans up to the end and fills nothing in."""
    everything = np.ones((1, len(ids)), bool)
    if goal is not None:
        return sampler.sample(ids[None], everything, goal, np.array([backward]), draws)[0]
    order = slice(None, None, -1 if backward else 1)
    never_reached = len(ids) + MAX_SPAN
    return sampler.sample_spans(starts[ids[order]][None], everything, never_reached, draws)[0, order]


@pytest.mark.parametrize("path", [*files("data_sample_mask.npz"), *files("data_pipeline_*.npz")])
def test_words_begin_at_the_pieces_where_the_originals_do(path):
    arrays = np.load(path)
    assert [starts_word(piece) for piece in json.loads(str(arrays["pieces"]))] == arrays["is_start_piece"].tolist()


@pytest.mark.parametrize("path", files("data_sample_mask.npz"))
def test_spans_as_released_are_the_originals(path):
    arrays = np.load(path)
    starts = arrays["is_start_piece"]
    cases = sorted(name.split("/")[0] for name in arrays.files if name.endswith("/mask"))
    assert cases
    for case in cases:
        config = json.loads(str(arrays[f"{case}/config"]))
        rng = Replay(json.loads(str(arrays[f"{case}/rng_log"])), config["max_gram"])
        sampler = sampler_of(config, starts)
        ids = arrays[f"{case}/seg"]
        ours = sampled(sampler, starts, ids, config["goal_num_predict"], config["reverse"], rng.spans(len(ids)))
        assert (ours == (arrays[f"{case}/mask"] > 0)).all(), case
        assert rng.used_up, case


@pytest.mark.parametrize("path", files("data_sample_mask.npz"))
def test_spans_as_released_are_as_long_and_as_frequent_as_the_originals(path):
    arrays = np.load(path)
    starts, n_theirs, n_ours, length = arrays["is_start_piece"], 3000, 3000, 256
    sampler = sampler_of({"mask_alpha": 6, "mask_beta": 1}, starts)
    # the file does not say what text it drew on: ordinary pieces, each as often as another, agree with it
    ids = np.random.default_rng(0).integers(len(special_tokens.SPECIAL_TOKENS), len(starts), (n_ours, length))
    draws = sampler.draw_numbers(length, RowRng(0, range(n_ours), 0))
    chosen = sampler.sample(ids, np.ones(ids.shape, bool), 43, np.zeros(n_ours, bool), draws)
    both = 1 / n_theirs + 1 / n_ours
    frequency = chosen.mean(0)
    off = (frequency - arrays["stats/position_freq"]) / np.sqrt(frequency * (1 - frequency) * both)
    assert np.abs(off).max() < 4.5 and (off**2).mean() < 1.35  # standard deviations; four of the mean of 256 squares
    edges = np.diff(np.pad(chosen.astype(int), ((0, 0), (1, 1))))
    rows, begins = np.nonzero(edges == 1)
    lengths = np.nonzero(edges == -1)[1] - begins
    for n in range(1, 7):
        a_row = np.bincount(rows[lengths == n], minlength=n_ours)
        theirs = arrays["stats/run_length_hist"][n] / n_theirs
        assert abs(a_row.mean() - theirs) < 4 * np.sqrt(a_row.var() * both), n


def lanes_of(arrays, config):
    """The text of each row: with bi_data a core's second half reads what its first half reads, backward."""
    backward = (False, True) if config["bi_data"] else (False,)
    n_lanes, cores = config["bsz_per_host"] // len(backward), config["num_core_per_host"]
    length = len(arrays["stream/data"]) // n_lanes
    data, flags = (
        arrays[f"stream/{name}"][: n_lanes * length].reshape(n_lanes, length) for name in ("data", "sent_ids")
    )
    parts = [part_of(*lane) for lane in zip(data, flags, strict=True)]
    of_core = [parts[i : i + n_lanes // cores] for i in range(0, n_lanes, n_lanes // cores)]
    return [DirectedText(part, way) for core in of_core for way in backward for part in core]


class PairDraws:
    """A replay as the draws of a layout."""

    def __init__(self, replay):
        self._replay = replay

    def uniform(self, n):
        assert n == 3
        return np.array([self._replay.pair()], dtype=object)


@pytest.mark.parametrize("path", files("data_pipeline_*.npz"))
def test_rows_and_their_spans_are_the_originals(path):
    arrays = np.load(path)
    config = json.loads(str(arrays["config"]))
    starts, reuse = arrays["is_start_piece"], config["reuse_len"]
    rng, sampler = Replay(json.loads(str(arrays["rng_log"]))), sampler_of(config, starts)
    data = DataConfig(seq_len=config["seq_len"], reuse_len=reuse)
    total = config["num_predict"]
    goals = (None, None) if total is None else (total - total // 2, total // 2)
    assert config["num_batch"]
    for step in range(config["num_batch"]):
        for row, text in enumerate(lanes_of(arrays, config)):
            window = build_windows([WindowLocation(text, step * reuse, 0)], data, PairDraws(rng))
            assert (window.ids[0] == arrays["row/input"][step, row]).all()
            assert (window.segments[0] == arrays["row/seg_id"][step, row]).all()
            assert window.pair_label == arrays["row/label"][step, row]
            halves = zip((window.ids[0, :reuse], window.ids[0, reuse:]), goals, strict=True)
            ours = [sampled(sampler, starts, ids, goal, text.backward, rng.spans(len(ids))) for ids, goal in halves]
            assert (np.concatenate(ours) == (arrays["row/is_masked"][step, row] > 0)).all()
