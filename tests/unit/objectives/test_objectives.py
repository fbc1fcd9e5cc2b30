import numpy as np
import pytest

from tests.unit.data.test_lanes import lanes_over
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import DataConfig, build_windows
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import factorization_ranks
from xlpre.objectives.registry import OBJECTIVES, build_objective
from xlpre.text import special_tokens


@pytest.fixture
def window_of(store):
    def make(config=None, seed=0, lane=0):
        config = config or DataConfig(seq_len=64, reuse_len=32)
        lanes = lanes_over(store.train, stride=config.reuse_len, lookahead=config.lookahead)
        return build_windows([lanes.location(lane, seed)], config, RowRng(seed, [lane], 0))

    return make


def example(name, window, tokenizer, seed=0, **settings):
    """The example of one window, without the axis of rows."""
    objective = OBJECTIVES[name](ObjectiveConfig(name=name, **settings), tokenizer.starts_word)
    return row_of(objective.build_inputs(window, RowRng(seed, [0], 1)))


def row_of(rows):
    (fields,) = zip(*vars(rows).values(), strict=True)
    return type(rows)(*fields)


def visible(one):
    return one.query_rank[:, None] > one.key_rank[None]


def test_context_sees_context_and_no_target_or_symbol_of_its_half(window_of, tokenizer):
    for seed in range(20):
        window = window_of(seed=seed, lane=seed % 2)
        one = example("permutation", window, tokenizer, seed)
        hidden = window.special_mask[0].copy()
        hidden[one.target_positions] = True
        sees = visible(one)
        for half in (slice(0, 32), slice(32, 64)):
            context = np.flatnonzero(~hidden[half]) + half.start
            assert sees[np.ix_(context, context)].all()
            assert not sees[context][:, half][:, hidden[half]].any()


def test_the_reused_half_sees_nothing_of_the_rest_and_the_rest_sees_all_of_it(window_of, tokenizer):
    for name in ("permutation", "denoising"):
        sees = visible(example(name, window_of(), tokenizer))
        assert not sees[:32, 32:].any()
        assert sees[32:, :32].all()


def test_no_target_sees_itself_and_of_two_one_sees_the_other(window_of, tokenizer):
    one = example("permutation", window_of(), tokenizer)
    at = one.target_positions[one.target_positions >= 32]
    sees = visible(one)[np.ix_(at, at)]
    assert not sees.diagonal().any()
    assert (sees ^ sees.T)[~np.eye(len(at), dtype=bool)].all()


def test_chunks_of_perm_size_are_ordered_from_left_to_right():
    target = np.ones((1, 21), bool)
    (query,), (key,) = factorization_ranks(target, ~target, np.random.default_rng(0).permutation(8)[None], base=5)
    for left, right in ((0, 8), (8, 16)):
        assert key[left:right].max() < key[right:].min()
    assert sorted(key) == list(range(5, 26)) and (query == key).all()


def test_denoising_hides_the_targets_that_permutation_would_predict(window_of, tokenizer):
    window = window_of(seed=3)
    hidden, ordered = (example(name, window, tokenizer, seed=5) for name in ("denoising", "permutation"))
    assert (hidden.target_positions == ordered.target_positions).all()
    assert (hidden.targets == ordered.targets).all()
    assert (ordered.input_ids == window.ids[0]).all()
    other = np.setdiff1d(np.arange(64), hidden.target_positions)
    assert (hidden.input_ids[other] == window.ids[0, other]).all()


def test_denoising_masks_four_targets_in_five(window_of, tokenizer):
    masked = kept = total = 0
    for seed in range(60):
        one = example("denoising", window_of(seed=seed), tokenizer, seed)
        now = one.input_ids[one.target_positions]
        masked, kept, total = (
            masked + (now == special_tokens.MASK).sum(),
            kept + (now == one.targets).sum(),
            total + len(now),
        )
    assert 0.75 < masked / total < 0.85 and 0.05 < kept / total < 0.16


def test_causal_predicts_each_next_token(store, window_of, tokenizer):
    window = window_of(DataConfig(seq_len=32, reuse_len=32))
    one = example("causal", window, tokenizer)
    assert (one.targets == np.append(window.ids[0, 1:], window.following)).all()
    assert (visible(one) == np.tril(np.ones((32, 32), bool))).all()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("window", "reuse_len"), [(64, 32), (41, 17)])
def test_an_example_has_as_many_targets_as_are_foretold(window_of, tokenizer, name, window, reuse_len):
    objective = OBJECTIVES[name](ObjectiveConfig(name=name, partial_k=5.0), tokenizer.starts_word)
    windows = window_of(DataConfig(seq_len=window, reuse_len=reuse_len))
    assert objective.build_inputs(windows, RowRng(0, [0], 1)).targets.shape == (1, objective.n_targets(window, reuse_len))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_says_whether_a_token_sees_what_stands_after_it(window_of, tokenizer, name):
    sees = visible(example(name, window_of(), tokenizer))
    assert np.triu(sees, 1).any() == OBJECTIVES[name].sees_ahead


def test_settings_that_cannot_work_name_the_way_out(tokenizer):
    with pytest.raises(ValueError, match=r"data.reuse_len \(256\) must equal data.seq_len; set data.reuse_len=512"):
        build_objective(ObjectiveConfig(name="causal"), DataConfig(), tokenizer.starts_word)
    with pytest.raises(ValueError, match=r"objective.partial_k \(1.0\) asks for 16 targets among the 13 tokens"):
        build_objective(ObjectiveConfig(partial_k=1.0), DataConfig(seq_len=32, reuse_len=16), tokenizer.starts_word)
    with pytest.raises(ValueError, match="must be at least 1"):
        ObjectiveConfig(max_span=0)
