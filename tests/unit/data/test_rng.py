import numpy as np
import pytest

from xlpre.data.rng import BLOCK_SIZE, RowRng


def of_one_row(seed, lane, step, n):
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, lane, step, 0])).random(n)


def test_a_row_draws_from_a_stream_keyed_by_seed_lane_and_step():
    drawn = RowRng(5, [3, 0, 2**40], 77).uniform(9)
    assert drawn.shape == (3, 9)
    for row, lane in zip(drawn, [3, 0, 2**40], strict=True):
        assert (row == of_one_row(5, lane, 77, 9)).all()


@pytest.mark.parametrize("sizes", [(BLOCK_SIZE, 4), (1, BLOCK_SIZE - 1, BLOCK_SIZE), (BLOCK_SIZE + 4, 8), (0, 1, 0, BLOCK_SIZE - 1)])
def test_numbers_that_are_drawn_bit_by_bit_go_on_where_the_last_ended(sizes):
    rng = RowRng(1, [4, 9], 2)
    together = np.concatenate([rng.uniform(n) for n in sizes], axis=1)
    assert (together[1] == of_one_row(1, 9, 2, sum(sizes))).all()


@pytest.mark.parametrize("sizes", [(7, 2000, 5, BLOCK_SIZE), (BLOCK_SIZE - 3, 5, 5), (4001, 3)])
def test_no_number_is_handed_out_twice_and_rows_do_not_know_of_each_other(sizes):
    many, alone = RowRng(1, [4, 9, 8], 2), RowRng(1, [9], 2)
    drawn = [(many.uniform(n), alone.uniform(n)) for n in sizes]
    assert all((rows[1] == row[0]).all() for rows, row in drawn)
    everything = np.concatenate([rows.ravel() for rows, _ in drawn])
    assert len(np.unique(everything)) == len(everything)
