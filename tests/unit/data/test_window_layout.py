import dataclasses
import re

import numpy as np
import pytest

from tests.parity.replay import Replay
from tests.unit.data.test_lanes import lanes_over, split_of
from xlpre.data.lanes import DirectedText, WindowLocation
from xlpre.data.rng import RowRng
from xlpre.data.store import SplitData
from xlpre.data.window_layout import DataConfig, build_windows, split_pair
from xlpre.text import special_tokens


def windows(config, n=200, n_tokens=3000):
    lanes = lanes_over(
        split_without_special_tokens(n_tokens),
        n_lanes=4,
        stride=config.reuse_len,
        lookahead=config.lookahead,
        bidirectional=config.bidirectional,
    )
    for step in range(n):
        location = lanes.location(step % 4, step // 4)
        yield location, build_windows([location], config, RowRng(0, [0], step))


def split_without_special_tokens(n_tokens):
    data = split_of(n_tokens)
    return dataclasses.replace(data, tokens=data.tokens + 10)


def test_a_row_is_reused_a_sep_b_sep_cls():
    config = DataConfig(seq_len=33, reuse_len=12)
    for location, window in windows(config):
        assert window.ids.shape == window.segments.shape == (1, 33)
        ids, special_mask, text = window.ids[0], window.special_mask[0], location.text
        first_sep, second_sep = np.flatnonzero(special_mask)[:2]
        assert (ids[:first_sep] == text.tokens(location.begin, location.begin + first_sep)).all()
        assert list(ids[special_mask]) == [special_tokens.SEP, special_tokens.SEP, special_tokens.CLS]
        assert (window.segments[0] == np.repeat([0, 1, 2], [first_sep + 1, second_sep - first_sep, 1])).all()
        b = ids[first_sep + 1 : second_sep]
        assert (np.diff(b) == (-1 if window.backward else 1)).all()  # consecutive text in reading direction
        if window.pair_label:
            follows = text.tokens(location.begin + first_sep - 1, location.begin + first_sep + 1)
            assert b[0] > 0 and abs(int(b[0]) - int(follows[0])) < 200


def test_half_of_the_pairs_follow_each_other():
    labels = [window.pair_label for *_, window in windows(DataConfig(seq_len=64, reuse_len=32), n=1000)]
    assert 0.4 < np.mean(labels) < 0.55  # slightly less than half: without a sentence end, B cannot follow A


def test_without_pairs_a_window_is_a_sep_cls():
    for location, window in windows(DataConfig(seq_len=32, reuse_len=16, pairs=False), n=20):
        assert (window.ids[0, :30] == location.text.tokens(location.begin, location.begin + 30)).all()
        assert list(window.ids[0, 30:]) == [special_tokens.SEP, special_tokens.CLS]
        assert (window.special_mask[0] == (np.arange(32) >= 30)).all()


def test_a_completely_reused_window_is_plain_text():
    for location, window in windows(DataConfig(seq_len=32, reuse_len=32), n=20):
        assert (window.ids[0] == location.text.tokens(location.begin, location.begin + 32)).all()
        assert window.following == location.text.tokens(location.begin + 32, location.begin + 33)[0]


@pytest.mark.parametrize("total", [2, 3, 7, 40, 61])
def test_a_and_b_fill_the_row_exactly(total):
    text = DirectedText(split_of(1000))
    for seed in range(300):
        begin = seed * 3
        pair = split_pair(text, begin, total, *np.random.default_rng(seed).random(3))
        assert begin < pair.a_end and 0 <= pair.b_begin < pair.b_end <= 1000
        assert pair.a_end - begin + pair.b_end - pair.b_begin == total


@pytest.mark.parametrize(
    "settings",
    [
        {"reuse_len": 510},
        {"reuse_len": 0},
        {"seq_len": 1},
        {"seq_len": 8, "reuse_len": 9},
        {"seq_len": 8, "reuse_len": 4},
    ],
)
def test_a_window_without_room_is_refused_with_valid_remedies(settings):
    with pytest.raises(ValueError, match=r"data.reuse_len=\d+ is invalid: .* Set data.reuse_len=") as refusal:
        DataConfig(**settings)
    for remedy in str(refusal.value).split(" Set ")[1].split(", or "):
        DataConfig(**{key: int(value) for key, value in re.findall(r"data\.(\w+)=(\d+)", remedy)})


def test_a_window_reads_no_further_than_its_lookahead():
    config = DataConfig(seq_len=32, reuse_len=16)
    text = DirectedText(split_of(config.lookahead))
    for seed in range(100):
        assert build_windows([WindowLocation(text, 0, 0)], config, RowRng(seed, [0], 0)).ids.shape == (1, 32)


def test_a_random_b_leaves_out_the_last_token_of_the_text():
    text = DirectedText(SplitData(np.arange(20), np.array([12, 13, 20]), np.array([20])))
    draws = [["random.random", None, 0.1], ["random.choice", [12, 13], 12], ["random.randint", [0, 13], 13]]
    # otherwise B would extend to the sentence end at 20, and A would lose a token
    assert split_pair(text, 1, 17, *Replay(draws).pair()) == (12, 13, 19, 0)
