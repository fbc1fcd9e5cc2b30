import numpy as np
import pytest

from xlpre.data.rng import BLOCK_SIZE, RowRng


def numbers_of_row(seed, lane, step, n):
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, lane, step, 0])).random(n)


def test_the_stream_of_a_row_is_keyed_by_seed_lane_and_step():
    numbers = RowRng(5, [3, 0, 2**40], 77).uniform(9)
    assert numbers.shape == (3, 9)
    for row, lane in zip(numbers, [3, 0, 2**40], strict=True):
        assert (row == numbers_of_row(5, lane, 77, 9)).all()


@pytest.mark.parametrize(
    "sizes", [(BLOCK_SIZE, 4), (1, BLOCK_SIZE - 1, BLOCK_SIZE), (BLOCK_SIZE + 4, 8), (0, 1, 0, BLOCK_SIZE - 1)]
)
def test_numbers_generated_in_parts_continue_the_stream(sizes):
    rng = RowRng(1, [4, 9], 2)
    numbers = np.concatenate([rng.uniform(n) for n in sizes], axis=1)
    assert (numbers[1] == numbers_of_row(1, 9, 2, sum(sizes))).all()


@pytest.mark.parametrize("sizes", [(7, 2000, 5, BLOCK_SIZE), (BLOCK_SIZE - 3, 5, 5), (4001, 3)])
def test_no_number_is_returned_twice_and_rows_are_independent(sizes):
    three_rows, one_row = RowRng(1, [4, 9, 8], 2), RowRng(1, [9], 2)
    pairs = [(three_rows.uniform(n), one_row.uniform(n)) for n in sizes]
    assert all((rows[1] == row[0]).all() for rows, row in pairs)
    numbers = np.concatenate([rows.ravel() for rows, _ in pairs])
    assert len(np.unique(numbers)) == len(numbers)
