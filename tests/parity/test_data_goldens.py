"""Masks from ranks, spans, segments A and B, and whole rows equal the original (zihangdai/xlnet data_utils.py)."""

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
from xlpre.objectives.permutation import factorization_ranks, order_of_chunks
from xlpre.objectives.target_sampling import SpanSampler
from xlpre.text import special_tokens
from xlpre.text.sentence_boundaries import starts_word


def split_from_flags(data, flags):
    """Text whose sentences end where the flags of the original change."""
    ends = np.append(np.flatnonzero(flags[1:] != flags[:-1]) + 1, len(flags))
    return SplitData(data, ends, ends[-1:])


def ranks_of(is_target, special_mask, order, base):
    """Query and key ranks of one part of a window, (L,) each."""
    chunks = order_of_chunks(order[None], len(is_target))
    (query,), (key,) = factorization_ranks(is_target[None], (is_target | special_mask)[None], chunks, base)
    return query, key


def mask_of(query, key):
    return ~(query[:, None] > key[None])


@pytest.mark.parametrize("path", files("data_local_perm.npz"))
def test_ranks_give_the_mask_of_a_window_part(path):
    arrays = np.load(path)
    names = sorted({name.split("/")[0] for name in arrays.files if "/in/" in name})
    assert names
    for name in names:
        inputs = {key: arrays[f"{name}/in/{key}"] for key in ("inputs", "is_masked", "sigma")}
        special_mask = np.isin(inputs["inputs"], (special_tokens.SEP, special_tokens.CLS))
        target = inputs["is_masked"] & ~special_mask
        query, key = ranks_of(target, special_mask, inputs["sigma"], base=0)
        assert (mask_of(query, key) == (arrays[f"{name}/out/perm_mask"] > 0)).all(), name
        assert (target == (arrays[f"{name}/out/target_mask"] > 0)).all(), name


@pytest.mark.parametrize("path", files("data_pipeline_*.npz"))
def test_ranks_give_mask_and_targets_of_a_window(path):
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
        parts = [(slice(0, reuse), 0), (slice(reuse, None), reuse + 1)]
        ranks = [
            ranks_of(target[part], special_mask[part], sigma[row, i], base) for i, (part, base) in enumerate(parts)
        ]
        query, key = (np.concatenate([rank[side] for rank in ranks]) for side in (0, 1))
        assert (mask_of(query, key) == expected[row]).all()
        if config["num_predict"]:
            expected_targets = arrays["feat/target"].reshape(len(rows), -1)[row]
            weight = arrays["feat/target_mask"].reshape(len(rows), -1)[row] > 0
            assert (rows[row][target] == expected_targets[weight]).all()


@pytest.mark.parametrize("path", files("data_split_ab.npz"))
def test_segments_a_and_b_equal_the_original(path):
    arrays = np.load(path)
    data = arrays["data"]
    cases = sorted({name.split("/")[0] for name in arrays.files if name.endswith("/is_none")})
    compared = 0
    for case in cases:
        config = json.loads(str(arrays[f"{case}/config"]))
        if bool(arrays[f"{case}/is_none"]):
            continue  # the original stops where a sentence reaches the end of the file; here the sentence is cut
        text = DirectedText(split_from_flags(data, arrays[config["sent_ids"]]))
        rng = Replay(json.loads(str(arrays[f"{case}/rng_log"])))
        start = config["begin_idx"]
        pair = split_pair(text, start, config["tot_len"], *rng.pair())
        assert (data[start : pair.a_end] == arrays[f"{case}/a_data"]).all(), case
        assert (data[pair.b_begin : pair.b_end] == arrays[f"{case}/b_data"]).all(), case
        assert pair.label == arrays[f"{case}/label"], case
        assert rng.is_exhausted, case
        compared += 1
    assert compared


def build_sampler(config, starts):
    k = config["mask_alpha"] / config["mask_beta"]
    max_span = config.get("max_gram", MAX_SPAN)
    return SpanSampler(ObjectiveConfig(partial_k=k, max_span=max_span, span_ends="as_released"), starts)


def sample(sampler, starts, ids, n_targets, backward, numbers):
    """Targets of one part. Without `n_targets`, the original samples spans up to the end and fills nothing in."""
    allowed = np.ones((1, len(ids)), bool)
    if n_targets is not None:
        return sampler.sample(ids[None], allowed, n_targets, np.array([backward]), numbers)[0]
    order = slice(None, None, -1 if backward else 1)
    unlimited = len(ids) + MAX_SPAN
    return sampler.sample_spans(starts[ids[order]][None], allowed, unlimited, numbers)[0, order]


@pytest.mark.parametrize("path", [*files("data_sample_mask.npz"), *files("data_pipeline_*.npz")])
def test_words_start_at_the_same_tokens_as_in_the_original(path):
    arrays = np.load(path)
    assert [starts_word(piece) for piece in json.loads(str(arrays["pieces"]))] == arrays["is_start_piece"].tolist()


@pytest.mark.parametrize("path", files("data_sample_mask.npz"))
def test_released_spans_equal_the_original(path):
    arrays = np.load(path)
    starts = arrays["is_start_piece"]
    cases = sorted(name.split("/")[0] for name in arrays.files if name.endswith("/mask"))
    assert cases
    for case in cases:
        config = json.loads(str(arrays[f"{case}/config"]))
        rng = Replay(json.loads(str(arrays[f"{case}/rng_log"])), config["max_gram"])
        sampler = build_sampler(config, starts)
        ids = arrays[f"{case}/seg"]
        is_target = sample(sampler, starts, ids, config["goal_num_predict"], config["reverse"], rng.spans(len(ids)))
        assert (is_target == (arrays[f"{case}/mask"] > 0)).all(), case
        assert rng.is_exhausted, case


@pytest.mark.parametrize("path", files("data_sample_mask.npz"))
def test_released_spans_have_the_lengths_and_frequencies_of_the_original(path):
    arrays = np.load(path)
    starts, n_recorded, n_sampled, length = arrays["is_start_piece"], 3000, 3000, 256
    sampler = build_sampler({"mask_alpha": 6, "mask_beta": 1}, starts)
    # the text of the recorded numbers is unknown; uniform ordinary tokens agree with them
    ids = np.random.default_rng(0).integers(len(special_tokens.SPECIAL_TOKENS), len(starts), (n_sampled, length))
    numbers = sampler.draw_numbers(length, RowRng(0, range(n_sampled), 0))
    is_target = sampler.sample(ids, np.ones(ids.shape, bool), 43, np.zeros(n_sampled, bool), numbers)
    both = 1 / n_recorded + 1 / n_sampled
    frequency = is_target.mean(0)
    deviation = (frequency - arrays["stats/position_freq"]) / np.sqrt(frequency * (1 - frequency) * both)
    assert (
        np.abs(deviation).max() < 4.5 and (deviation**2).mean() < 1.35
    )  # four standard deviations of the mean of 256 squares
    edges = np.diff(np.pad(is_target.astype(int), ((0, 0), (1, 1))))
    rows, starts = np.nonzero(edges == 1)
    lengths = np.nonzero(edges == -1)[1] - starts
    for n in range(1, 7):
        per_row = np.bincount(rows[lengths == n], minlength=n_sampled)
        expected = arrays["stats/run_length_hist"][n] / n_recorded
        assert abs(per_row.mean() - expected) < 4 * np.sqrt(per_row.var() * both), n


def lane_texts(arrays, config):
    """Text of each row. With bi_data, the second half of a core reads the text of the first half backward."""
    backward = (False, True) if config["bi_data"] else (False,)
    n_lanes, cores = config["bsz_per_host"] // len(backward), config["num_core_per_host"]
    length = len(arrays["stream/data"]) // n_lanes
    data, flags = (
        arrays[f"stream/{name}"][: n_lanes * length].reshape(n_lanes, length) for name in ("data", "sent_ids")
    )
    parts = [split_from_flags(*lane) for lane in zip(data, flags, strict=True)]
    by_core = [parts[i : i + n_lanes // cores] for i in range(0, n_lanes, n_lanes // cores)]
    return [DirectedText(part, direction) for core in by_core for direction in backward for part in core]


class PairRng:
    """A replay with the interface of RowRng."""

    def __init__(self, replay):
        self._replay = replay

    def uniform(self, n):
        assert n == 3
        return np.array([self._replay.pair()], dtype=object)


@pytest.mark.parametrize("path", files("data_pipeline_*.npz"))
def test_rows_and_spans_equal_the_original(path):
    arrays = np.load(path)
    config = json.loads(str(arrays["config"]))
    starts, reuse = arrays["is_start_piece"], config["reuse_len"]
    rng, sampler = Replay(json.loads(str(arrays["rng_log"]))), build_sampler(config, starts)
    data = DataConfig(seq_len=config["seq_len"], reuse_len=reuse)
    total = config["num_predict"]
    counts = (None, None) if total is None else (total - total // 2, total // 2)
    assert config["num_batch"]
    for step in range(config["num_batch"]):
        for row, text in enumerate(lane_texts(arrays, config)):
            window = build_windows([WindowLocation(text, step * reuse, 0)], data, PairRng(rng))
            assert (window.ids[0] == arrays["row/input"][step, row]).all()
            assert (window.segments[0] == arrays["row/seg_id"][step, row]).all()
            assert window.pair_label == arrays["row/label"][step, row]
            parts = zip((window.ids[0, :reuse], window.ids[0, reuse:]), counts, strict=True)
            is_target = [sample(sampler, starts, ids, n, text.backward, rng.spans(len(ids))) for ids, n in parts]
            assert (np.concatenate(is_target) == (arrays["row/is_masked"][step, row] > 0)).all()
