"""Random numbers of a batch.

Each row has its own stream of numbers, keyed by (seed, lane, step), where a lane is the text that a row reads, step after step. The numbers
of a row do not depend on the other rows of the batch, on their order, or on the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK_SIZE = 1280  # numbers generated at a time for each row; a window of 512 tokens needs slightly fewer


class RowRng:
    """Random number streams of B rows.

    One counter-based generator (Philox) serves all rows: it is set to the state of each row in turn.

    Args:
        seed: seed of the run.
        lanes: lane of each row.
        step: step of all rows.
    """

    def __init__(self, seed: int, lanes: Sequence[int], step: int) -> None:
        self._lanes = lanes
        self._philox = np.random.Philox(key=seed, counter=[0, 0, step, 0])
        self._generator, self._state = np.random.Generator(self._philox), self._philox.state
        self._block = np.empty((len(lanes), 0))
        self._n_generated = 0

    def uniform(self, n: int) -> np.ndarray:
        """Return the next `n` numbers in [0, 1) of each row, (B, n) float64."""
        if n > self._block.shape[1]:
            self._block = self._next_block(max(n, BLOCK_SIZE))
        numbers, self._block = self._block[:, :n], self._block[:, n:]
        return numbers

    def _next_block(self, n: int) -> np.ndarray:
        block, counter = np.empty((len(self._lanes), n)), self._state["state"]["counter"]
        counter[0] = self._n_generated // 4  # Philox generates four numbers per count
        for row, lane in zip(block, self._lanes, strict=True):
            counter[1] = lane
            self._philox.state = self._state  # ten times as fast as a new generator
            self._generator.random(out=row)
        self._n_generated += n + -n % 4
        return block
