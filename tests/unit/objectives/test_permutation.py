import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.permutation import hidden_from
from xlpre.objectives.permutation import factorization_ranks


@st.composite
def halves(draw):
    """Targets, functional tokens (never targets) and an order within chunks, of one half of a window: each (1, L)."""
    length = draw(st.integers(1, 40))
    kinds = draw(st.lists(st.sampled_from(["context", "target", "functional"]), min_size=length, max_size=length))
    order = draw(st.permutations(range(draw(st.integers(1, length)))))
    return np.array([[k == "target" for k in kinds]]), np.array([[k == "special_mask" for k in kinds]]), np.array([order])


@given(halves(), st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_ranks_hide_what_the_originals_rule_hides(half, base):
    target, special_mask, order = half
    (query,), (key,) = factorization_ranks(target, special_mask, order, base)
    hidden = ~(query[:, None] > key[None, :])
    assert hidden.tolist() == hidden_from(target[0].tolist(), special_mask[0].tolist(), order[0].tolist())


@given(halves(), halves())
@settings(max_examples=50, deadline=None)
def test_the_rest_sees_all_of_the_reused_part_which_sees_nothing_of_the_rest(first, second):
    (reused_query,), (reused_key,) = factorization_ranks(*first, base=0)
    (rest_query,), (rest_key,) = factorization_ranks(*second, base=first[0].size + 1)
    assert (rest_query[:, None] > reused_key[None, :]).all()
    assert not (reused_query[:, None] > rest_key[None, :]).any()


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_the_ranks_of_rows_together_are_those_of_each_alone(rows, length, size, seed):
    rng = np.random.default_rng(seed)
    target, special_mask = rng.random((2, rows, length)) < 0.3
    places = rng.random((rows, min(size, length))).argsort(axis=1)
    together = factorization_ranks(target, special_mask, places, 7)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = factorization_ranks(target[one], special_mask[one], places[one], 7)
        assert all((a[one] == b).all() and a.dtype == np.int32 for a, b in zip(together, alone, strict=True))
