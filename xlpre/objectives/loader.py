"""From a step to a Batch, prepared ahead by background threads. Every draw is keyed by (seed, lane, step)."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.data.lanes import Lanes
from xlpre.data.layout import DataConfig, Window, lay_out
from xlpre.objectives.objective import Example, Objective


class Loader:
    """`batch(step, lanes)` is a pure function; `batches` yields them in order, prepared ahead.

    Args:
        lanes: where each row reads.
        data: the layout of a window.
        objective: what is predicted.
        seed: of every draw.
    """

    def __init__(self, lanes: Lanes, data: DataConfig, objective: Objective, seed: int) -> None:
        self.lanes, self._data, self._objective, self._seed = lanes, data, objective, seed
        self._pin = torch.cuda.is_available()  # so that copies to a GPU do not wait

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """The rows of `lanes` at `step`."""
        rows = [self._row(lane, step) for lane in lanes]
        windows, examples = [window for window, _ in rows], [example for _, example in rows]
        targets = _stack([e.targets for e in examples])
        batch = Batch(
            input_ids=_stack([e.input_ids for e in examples]),
            segment_ids=_stack([w.segments for w in windows]),
            query_rank=_stack([e.query_rank for e in examples]),
            key_rank=_stack([e.key_rank for e in examples]),
            target_positions=_stack([e.target_positions for e in examples]),
            targets=targets,
            target_weights=torch.ones(targets.shape),
            backward=torch.tensor([w.backward for w in windows]),
            continues=torch.tensor([w.continues for w in windows]),
            pair_label=torch.tensor([w.pair_label for w in windows]),
            reuse_len=self._data.reuse_len,
        )
        return batch.pin_memory() if self._pin else batch

    def batches(self, first_step: int, lane_groups: Sequence[Sequence[int]]) -> Generator[Batch, None, None]:
        """Endless batches: at each step from `first_step` on, one for each group of lanes."""
        executor = ThreadPoolExecutor(self._data.workers, thread_name_prefix="batch")
        pending: deque[Future[Batch]] = deque()
        step = first_step
        try:
            while True:
                while len(pending) < 2 * self._data.workers + len(lane_groups):
                    pending += [executor.submit(self.batch, step, lanes) for lanes in lane_groups]
                    step += 1
                yield pending.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)

    def _row(self, lane: int, step: int) -> tuple[Window, Example]:
        rng = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, lane, step, 0]))
        place = self.lanes.place(lane, step)
        window = lay_out(self.lanes.text(place), place, self._data, rng)
        return window, self._objective.example(window, rng)


def lanes_of(process: int, n_processes: int, n_lanes: int, accumulation: int) -> list[range]:
    """The lanes of one process, a group for each micro-step.

    A micro-step of all processes together takes consecutive lanes, so that the order of targets does not depend on how many
    processes share them.
    """
    rows = n_lanes // (n_processes * accumulation)
    begins = [(micro * n_processes + process) * rows for micro in range(accumulation)]
    return [range(begin, begin + rows) for begin in begins]


def _stack(rows: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.stack(rows)))
