import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.reference.permutation import hidden_from
from xlpre.objectives.permutation import factorization_ranks, order_of_chunks


@st.composite
def window_parts(draw):
    """Targets, special tokens (never targets) and an order within chunks, for one part of a window, (1, L) each."""
    length = draw(st.integers(1, 40))
    kinds = draw(st.lists(st.sampled_from(["context", "target", "special"]), min_size=length, max_size=length))
    order = draw(st.permutations(range(draw(st.integers(1, length)))))
    return np.array([[k == "target" for k in kinds]]), np.array([[k == "special" for k in kinds]]), np.array([order])


def ranks(is_target, special_mask, order, base):
    return factorization_ranks(is_target, is_target | special_mask, order_of_chunks(order, is_target.shape[1]), base)


@given(window_parts(), st.integers(0, 300))
@settings(max_examples=examples(150))
def test_ranks_hide_what_the_rule_of_the_original_hides(part, base):
    target, special_mask, order = part
    (query,), (key,) = ranks(target, special_mask, order, base)
    hidden = ~(query[:, None] > key[None, :])
    assert hidden.tolist() == hidden_from(target[0].tolist(), special_mask[0].tolist(), order[0].tolist())


@given(window_parts(), window_parts())
@settings(max_examples=examples(50))
def test_ranks_let_the_rest_see_the_reused_part_but_not_vice_versa(first, second):
    (reused_query,), (reused_key,) = ranks(*first, base=0)
    (rest_query,), (rest_key,) = ranks(*second, base=first[0].size + 1)
    assert (rest_query[:, None] > reused_key[None, :]).all()
    assert not (reused_query[:, None] > rest_key[None, :]).any()


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 30), st.integers(0, 10**6))
@settings(max_examples=examples(50))
def test_ranks_of_several_rows_equal_those_of_single_rows(rows, length, size, seed):
    rng = np.random.default_rng(seed)
    target, special_mask = rng.random((2, rows, length)) < 0.3
    order = rng.random((rows, min(size, length))).argsort(axis=1)
    all_rows = ranks(target, special_mask, order, 7)
    for row in range(rows):
        i = slice(row, row + 1)
        single_row = ranks(target[i], special_mask[i], order[i], 7)
        assert all((a[i] == b).all() and a.dtype == np.int32 for a, b in zip(all_rows, single_row, strict=True))
