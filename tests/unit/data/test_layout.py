import numpy as np
import pytest

from tests.parity.replay import Replay
from tests.unit.data.test_lanes import lanes_over, part_of
from xlpre.data.lanes import Place, Text
from xlpre.data.layout import DataConfig, lay_out, split_pair
from xlpre.data.store import Part
from xlpre.text import symbols

RNG = np.random.default_rng


def windows(config, n=200, n_tokens=3000):
    lanes = lanes_over(
        Part_without_symbols(n_tokens),
        n_lanes=4,
        stride=config.reuse_len,
        reach=config.reach,
        bidirectional=config.bidirectional,
    )
    for step in range(n):
        place = lanes.place(step % 4, step // 4)
        yield lanes.text(place), place, lay_out(lanes.text(place), place, config, RNG(step))


def Part_without_symbols(n_tokens):  # noqa: N802
    part = part_of(n_tokens)
    return type(part)(part.tokens + 10, part.sentence_ends)


def test_a_row_is_reused_a_sep_b_sep_cls():
    config = DataConfig(window=33, reuse_len=12)
    for text, place, window in windows(config):
        first_sep, second_sep = np.flatnonzero(window.functional)[:2]
        assert len(window.ids) == 33
        assert (window.ids[:first_sep] == text.tokens(place.begin, place.begin + first_sep)).all()
        assert list(window.ids[window.functional]) == [symbols.SEP, symbols.SEP, symbols.CLS]
        assert (window.segments == np.repeat([0, 1, 2], [first_sep + 1, second_sep - first_sep, 1])).all()
        b = window.ids[first_sep + 1 : second_sep]
        assert (np.diff(b) == (-1 if place.backward else 1)).all()  # one stretch of text, in reading direction
        if window.pair_label:
            follows = text.tokens(place.begin + first_sep - 1, place.begin + first_sep + 1)
            assert b[0] > 0 and abs(int(b[0]) - int(follows[0])) < 200


def test_half_of_the_pairs_follow_each_other():
    labels = [window.pair_label for *_, window in windows(DataConfig(window=64, reuse_len=32), n=1000)]
    assert 0.4 < np.mean(labels) < 0.55  # a stretch without a sentence end cannot follow: a little under half


def test_without_pairs_a_is_alone():
    for text, place, window in windows(DataConfig(window=32, reuse_len=16, pairs=False), n=20):
        assert (window.ids[:30] == text.tokens(place.begin, place.begin + 30)).all()
        assert list(window.ids[30:]) == [symbols.SEP, symbols.CLS]


def test_a_window_that_is_all_reused_is_plain_text():
    for text, place, window in windows(DataConfig(window=32, reuse_len=32), n=20):
        assert (window.ids == text.tokens(place.begin, place.begin + 32)).all()
        assert window.following == text.tokens(place.begin + 32, place.begin + 33)[0]


@pytest.mark.parametrize("total", [2, 3, 7, 40, 61])
def test_a_and_b_fill_the_row_exactly(total):
    text = Text(part_of(1000))
    for seed in range(300):
        begin = seed * 3
        (a, a_end), (b, b_end), _ = split_pair(text, begin, total, RNG(seed))
        assert a == begin and a < a_end and b < b_end
        assert a_end - a + b_end - b == total
        assert b >= 0 and b_end <= 1000


@pytest.mark.parametrize(
    "settings", [{"reuse_len": 510}, {"reuse_len": 0}, {"window": 1}, {"window": 8, "reuse_len": 9}]
)
def test_a_window_without_room_names_the_way_out(settings):
    with pytest.raises(ValueError, match=r"data.reuse_len .* set data.reuse_len="):
        DataConfig(**settings)


def test_the_row_reaches_no_further_than_it_says():
    config = DataConfig(window=32, reuse_len=16)
    text = Text(part_of(config.reach))
    for seed in range(100):
        assert len(lay_out(text, Place(0, False, False), config, RNG(seed)).ids) == 32


def test_b_from_elsewhere_leaves_the_last_token_of_the_text_out():
    text = Text(Part(np.arange(20), np.array([12, 13, 20])))
    draws = [["random.random", None, 0.1], ["random.choice", [12, 13], 12], ["random.randint", [0, 13], 13]]
    # B may grow to the sentence's end at 20, which would cost A a token
    assert split_pair(text, 1, 17, Replay(draws)) == ((1, 12), (13, 19), 0)
