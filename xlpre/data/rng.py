"""Draws: the random numbers of a batch. Each row has a stream of its own, keyed by (seed, lane, step), so that it does not matter
which rows are drawn together, in what order, or by whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK = 1280  # numbers drawn at once for each row: a little more than a window of 512 takes


class RowRng:
    """The streams of B rows, by one counter-based generator that is set to each of them in turn.

    Args:
        seed: of all draws.
        lanes: the lane of each row.
        step: of all rows.
    """

    def __init__(self, seed: int, lanes: Sequence[int], step: int) -> None:
        self._lanes = lanes
        self._philox = np.random.Philox(key=seed, counter=[0, 0, step, 0])
        self._generator, self._state = np.random.Generator(self._philox), self._philox.state
        self._block = np.empty((len(lanes), 0))
        self._n_drawn = 0

    def uniform(self, n: int) -> np.ndarray:
        """The next `n` numbers of each row's stream, from 0 to 1: (B, n) float64."""
        if n > self._block.shape[1]:
            self._block = self._next_block(max(n, BLOCK))
        drawn, self._block = self._block[:, :n], self._block[:, n:]
        return drawn

    def _next_block(self, n: int) -> np.ndarray:
        block, counter = np.empty((len(self._lanes), n)), self._state["state"]["counter"]
        counter[0] = self._n_drawn // 4  # a count makes four numbers
        for row, lane in zip(block, self._lanes, strict=True):
            counter[1] = lane
            self._philox.state = self._state  # a new generator would take ten times as long
            self._generator.random(out=row)
        self._n_drawn += n + -n % 4
        return block
