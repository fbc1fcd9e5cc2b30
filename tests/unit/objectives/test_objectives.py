import numpy as np
import pytest

from tests.conftest import refused
from tests.unit.data.test_lanes import lanes_over
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import DataConfig, build_windows
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.permutation import factorization_ranks, order_of_chunks
from xlpre.objectives.registry import OBJECTIVES, build_objective
from xlpre.text import special_tokens


@pytest.fixture
def window_of(store):
    def make(config=None, seed=0, lane=0):
        config = config or DataConfig(seq_len=64, reuse_len=32)
        lanes = lanes_over(store.train, stride=config.reuse_len, lookahead=config.lookahead)
        return build_windows([lanes.location(lane, seed)], config, RowRng(seed, [lane], 0))

    return make


def build_row(name, window, tokenizer, seed=0, **settings):
    """Model inputs of one window, without the axis of rows."""
    objective = OBJECTIVES[name](ObjectiveConfig(name=name, **settings), tokenizer.starts_word)
    return first_row(objective.build_inputs(window, RowRng(seed, [0], 1)))


def first_row(inputs):
    (fields,) = zip(*vars(inputs).values(), strict=True)
    return type(inputs)(*fields)


def visible(row):
    return row.query_rank[:, None] > row.key_rank[None]


def test_context_sees_context_but_no_targets_or_special_tokens_of_its_part(window_of, tokenizer):
    for seed in range(20):
        window = window_of(seed=seed, lane=seed % 2)
        row = build_row("permutation", window, tokenizer, seed)
        hidden = window.special_mask[0].copy()
        hidden[row.target_positions] = True
        sees = visible(row)
        for part in (slice(0, 32), slice(32, 64)):
            context = np.flatnonzero(~hidden[part]) + part.start
            assert sees[np.ix_(context, context)].all()
            assert not sees[context][:, part][:, hidden[part]].any()


def test_the_reused_part_sees_nothing_of_the_rest_and_the_rest_sees_all_of_it(window_of, tokenizer):
    for name in ("permutation", "denoising"):
        sees = visible(build_row(name, window_of(), tokenizer))
        assert not sees[:32, 32:].any()
        assert sees[32:, :32].all()


def test_no_target_sees_itself_and_of_two_targets_exactly_one_sees_the_other(window_of, tokenizer):
    row = build_row("permutation", window_of(), tokenizer)
    positions = row.target_positions[row.target_positions >= 32]
    sees = visible(row)[np.ix_(positions, positions)]
    assert not sees.diagonal().any()
    assert (sees ^ sees.T)[~np.eye(len(positions), dtype=bool)].all()


def test_chunks_of_perm_size_are_ordered_from_left_to_right():
    target = np.ones((1, 21), bool)
    order = order_of_chunks(np.random.default_rng(0).permutation(8)[None], length=21)
    (query,), (key,) = factorization_ranks(target, target, order, base=5)
    for start, end in ((0, 8), (8, 16)):
        assert key[start:end].max() < key[end:].min()
    assert sorted(key) == list(range(5, 26)) and (query == key).all()


def test_windows_from_left_to_right_have_the_mask_of_a_causal_model(window_of, tokenizer):
    window = window_of(seed=2)
    row = build_row("permutation", window, tokenizer, left_to_right=1.0, perm_size=16)
    is_target = np.isin(np.arange(64), row.target_positions)
    assert (visible(row) == (np.tri(64, k=-1, dtype=bool) | np.diag(~is_target))).all()
    assert (row.target_positions == build_row("permutation", window, tokenizer).target_positions).all()


def test_independent_targets_see_the_context_and_no_target(window_of, tokenizer):
    window = window_of(seed=2)
    row = build_row("permutation", window, tokenizer, independent=1.0, perm_size=16)
    permuted = build_row("permutation", window, tokenizer, perm_size=16)
    is_target = np.isin(np.arange(64), row.target_positions)
    hidden = is_target | window.special_mask[0]
    sees = visible(row)
    for part in (slice(0, 32), slice(32, 64)):
        assert not sees[part, part][np.ix_(is_target[part], hidden[part])].any()
    assert (sees[np.ix_(~hidden, ~hidden)] == visible(permuted)[np.ix_(~hidden, ~hidden)]).all()
    assert (sees[np.ix_(is_target, ~hidden)] == visible(permuted)[np.ix_(is_target, ~hidden)]).all()


def test_orders_are_mixed_by_row_and_leave_the_random_orders_as_they_are(store, tokenizer):
    data = DataConfig(seq_len=64, reuse_len=32)
    lanes = lanes_over(store.train, stride=32, lookahead=data.lookahead)
    windows = build_windows([lanes.location(0, step) for step in range(200)], data, RowRng(0, range(200), 0))
    mixed, random, left_to_right, independent = (
        OBJECTIVES["permutation"](ObjectiveConfig(**shares), tokenizer.starts_word)
        .build_inputs(windows, RowRng(0, range(200), 1))
        .key_rank
        for shares in ({"left_to_right": 0.3, "independent": 0.2}, {}, {"left_to_right": 1.0}, {"independent": 1.0})
    )
    equal = np.stack([(mixed == ranks).all(axis=1) for ranks in (random, left_to_right, independent)])
    assert (equal.sum(axis=0) == 1).all()
    assert np.allclose(equal.mean(axis=1), [0.5, 0.3, 0.2], atol=0.1)


def test_denoising_and_permutation_sample_the_same_targets(window_of, tokenizer):
    window = window_of(seed=3)
    masked, permuted = (build_row(name, window, tokenizer, seed=5) for name in ("denoising", "permutation"))
    assert (masked.target_positions == permuted.target_positions).all()
    assert (masked.targets == permuted.targets).all()
    assert (permuted.input_ids == window.ids[0]).all()
    other = np.setdiff1d(np.arange(64), masked.target_positions)
    assert (masked.input_ids[other] == window.ids[0, other]).all()


def test_denoising_masks_80_percent_of_the_targets(window_of, tokenizer):
    masked = unchanged = total = 0
    for seed in range(60):
        row = build_row("denoising", window_of(seed=seed), tokenizer, seed)
        inputs = row.input_ids[row.target_positions]
        masked, unchanged, total = (
            masked + (inputs == special_tokens.MASK).sum(),
            unchanged + (inputs == row.targets).sum(),
            total + len(inputs),
        )
    assert 0.75 < masked / total < 0.85 and 0.05 < unchanged / total < 0.16


def test_causal_predicts_every_next_token(store, window_of, tokenizer):
    window = window_of(DataConfig(seq_len=32, reuse_len=32))
    row = build_row("causal", window, tokenizer)
    assert (row.targets == np.append(window.ids[0, 1:], window.following)).all()
    assert (visible(row) == np.tril(np.ones((32, 32), bool))).all()


@pytest.mark.parametrize("seq_len", [32, 33])
def test_the_half_loss_predicts_the_tokens_after_the_middle_and_changes_nothing_else(window_of, tokenizer, seq_len):
    window = window_of(DataConfig(seq_len=seq_len, reuse_len=seq_len))
    half, full = (build_row("causal", window, tokenizer, loss_on=value) for value in ("second_half", "all"))
    assert half.target_positions.tolist() == list(range(seq_len // 2, seq_len))
    assert (half.targets == full.targets[seq_len // 2 :]).all()
    assert (visible(half) == visible(full)).all() and (half.input_ids == full.input_ids).all()


def test_the_half_loss_needs_the_causal_objective():
    refused(pytest.raises(ValueError, ObjectiveConfig, loss_on="second_half"), "objective.loss_on", "second_half")


def test_shares_of_orders_are_fractions_and_need_the_permutation_objective():
    refused(pytest.raises(ValueError, ObjectiveConfig, left_to_right=1.5), "objective.left_to_right", "1.5")
    refused(
        pytest.raises(ValueError, ObjectiveConfig, independent=0.7, left_to_right=0.6), "objective.independent", "0.7"
    )
    refused(pytest.raises(ValueError, ObjectiveConfig, name="causal", independent=0.5), "objective.independent", "0.5")


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("seq_len", "reuse_len"), [(64, 32), (41, 17)])
def test_n_targets_is_the_number_of_targets(window_of, tokenizer, name, seq_len, reuse_len):
    objective = OBJECTIVES[name](ObjectiveConfig(name=name, partial_k=5.0), tokenizer.starts_word)
    windows = window_of(DataConfig(seq_len=seq_len, reuse_len=reuse_len))
    assert objective.build_inputs(windows, RowRng(0, [0], 1)).targets.shape == (
        1,
        objective.n_targets(seq_len, reuse_len),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_sees_ahead_tells_whether_a_token_sees_later_tokens(window_of, tokenizer, name):
    sees = visible(build_row(name, window_of(), tokenizer))
    assert np.triu(sees, 1).any() == OBJECTIVES[name].sees_ahead


def test_impossible_settings_are_refused_with_a_remedy(tokenizer):
    with pytest.raises(ValueError, match=r"data.reuse_len=256 .* Set data.reuse_len=512"):
        build_objective(ObjectiveConfig(name="causal"), DataConfig(), tokenizer.starts_word)
    with pytest.raises(
        ValueError,
        match=r"objective.partial_k=1.0 .* 16 targets .* only 13 tokens there\. Set objective.partial_k=1\.3 ",
    ):
        build_objective(ObjectiveConfig(partial_k=1.0), DataConfig(seq_len=32, reuse_len=16), tokenizer.starts_word)
    build_objective(ObjectiveConfig(partial_k=1.3), DataConfig(seq_len=32, reuse_len=16), tokenizer.starts_word)
    with pytest.raises(ValueError, match="objective.max_span=0 .* at least 1"):
        ObjectiveConfig(max_span=0)
