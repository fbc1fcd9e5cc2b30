from hypothesis import given
from hypothesis import strategies as st

from finetune.data.features import pad, pair_to_row
from xlpre.text import special_tokens


@given(st.integers(0, 30), st.integers(1, 30), st.integers(4, 40))
def test_a_pair_loses_the_last_token_of_the_longer_text_until_it_fits(n_a, n_b, max_len):
    row = pair_to_row(range(100, 100 + n_a), range(200, 200 + n_b), max_len)
    while n_a + n_b > max_len - 3:
        n_a, n_b = (n_a - 1, n_b) if n_a > n_b else (n_a, n_b - 1)
    expected = [*range(100, 100 + n_a), special_tokens.SEP]
    expected += [*range(200, 200 + n_b), special_tokens.SEP] if n_b else []
    expected.append(special_tokens.CLS)
    assert row.input_ids.tolist() == expected
    assert row.segment_ids.tolist() == [0] * (n_a + 1) + ([1] * (n_b + 1) if n_b else []) + [2]


def test_rows_are_padded_on_either_side_to_the_longest_row():
    rows = [pair_to_row([10], [20], 7), pair_to_row([10], [], 7)]
    left, right = pad(rows, "left"), pad(rows, "right")
    assert left.input_ids.tolist() == [[10, 4, 20, 4, 3], [0, 0, 10, 4, 3]]
    assert left.segment_ids.tolist() == [[0, 0, 1, 1, 2], [4, 4, 0, 0, 2]]
    assert right.input_ids.tolist() == [[10, 4, 20, 4, 3], [10, 4, 3, 0, 0]]
    assert right.segment_ids.tolist() == [[0, 0, 1, 1, 2], [0, 0, 2, 3, 3]]
    assert left.padding_mask.tolist() == [[False] * 5, [True, True, False, False, False]]
    assert (left.padding_mask == right.padding_mask[:, ::-1]).all()
