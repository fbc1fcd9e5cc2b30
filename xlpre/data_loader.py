"""From a step to a Batch, prepared ahead by background threads. Every draw is keyed by (seed, lane, step)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.data.lanes import Lanes
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import DataConfig, Windows, build_windows
from xlpre.objectives.objective import Examples, Objective


class Loader:
    """`batch(step, lanes)` is a pure function; `batches` yields them in order, prepared ahead.

    Args:
        lanes: where each row reads.
        data: the layout of a window.
        objective: what is predicted.
        seed: of every draw.

    Attributes:
        waited_seconds: how long whoever asked `batches` for the next one has waited for it, in all.
    """

    def __init__(self, lanes: Lanes, data: DataConfig, objective: Objective, seed: int) -> None:
        self.lanes, self._data, self._objective, self._seed = lanes, data, objective, seed
        self.waited_seconds = 0.0
        self._pin = torch.cuda.is_available()  # so that copies to a GPU do not wait

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """The rows of `lanes` at `step`.

        Raises:
            ValueError: no lanes, or some that there are not; what the objective made is no batch.
        """
        if not isinstance(lanes, Sequence) or not lanes or min(step, *lanes) < 0 or max(lanes) >= self.lanes.n_lanes:
            raise ValueError(
                f"lanes ({lanes}) must be some of range({self.lanes.n_lanes}), and step ({step}) at least 0; `batches` takes a list of "
                "such groups of lanes for each step, [range(n_lanes)] for all at once"
            )
        rng = RowRng(self._seed, lanes, step)
        windows = build_windows([self.lanes.location(lane, step) for lane in lanes], self._data, rng)
        batch = batch_of(windows, self._objective.examples(windows, rng))
        return batch.pin_memory() if self._pin else batch

    def batches(
        self, first_step: int, groups_of: Callable[[int], Sequence[Sequence[int]]]
    ) -> Generator[Batch, None, None]:
        """Endless batches: at each step from `first_step` on, one for each of its groups of lanes."""
        executor = ThreadPoolExecutor(self._data.num_threads, thread_name_prefix="batch")
        pending: deque[Future[Batch]] = deque()
        step = first_step
        try:
            while True:
                while len(pending) < 2 * self._data.num_threads + len(groups := groups_of(step)):
                    pending += [executor.submit(self.batch, step, lanes) for lanes in groups]
                    step += 1
                asked = time.perf_counter()
                batch = pending.popleft().result()
                self.waited_seconds += time.perf_counter() - asked
                yield batch
        finally:
            executor.shutdown(cancel_futures=True)


def batch_of(windows: Windows, examples: Examples) -> Batch:
    """The same as tensors, which share memory with it.

    Raises:
        ValueError: what is no batch: something else than arrays, or of other shapes and types; positions that do not increase in a window.
    """
    _check(examples)
    fields = {
        "input_ids": examples.input_ids,
        "segment_ids": windows.segments,
        "query_rank": examples.query_rank,
        "key_rank": examples.key_rank,
        "target_positions": examples.target_positions,
        "targets": examples.targets,
        "target_weights": np.ones(examples.targets.shape, np.float32),
        "backward": windows.backward,
        "visible_mem_len": windows.visible_mem_len,
        "pair_label": windows.pair_label,
    }
    return Batch(
        **{name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in fields.items()},
        reuse_len=windows.reuse_len,
    )


def _check(examples: Examples) -> None:
    for name, x in vars(examples).items():
        if not isinstance(x, np.ndarray) or x.ndim != 2:
            raise ValueError(f"Examples.{name} must be an array with a row for each window, not {x!r:.60}")
    places, length = examples.target_positions, examples.input_ids.shape[1]
    if places.shape != examples.targets.shape:
        raise ValueError(
            f"Examples.targets {examples.targets.shape} must have one for each of target_positions {places.shape}"
        )
    if places.size and not (places[:, 0].min() >= 0 and places[:, -1].max() < length and (np.diff(places) > 0).all()):
        raise ValueError(
            f"Examples.target_positions must be places in a window, 0 to {length - 1}, increasing in each row, not {places!r:.200}"
        )


def assign_lanes(rank: int, world_size: int, micro_batch_size: int, accumulation: int) -> list[range]:
    """Return the lanes of one process, a range for each micro-step.

    A micro-step of all processes together takes consecutive lanes. The order of the lanes therefore does not depend on the number of
    processes.

    Args:
        rank: index of the process.
        world_size: number of processes.
        micro_batch_size: rows of one process in one micro-step.
        accumulation: micro-steps of a step.
    """
    starts = [(micro_step * world_size + rank) * micro_batch_size for micro_step in range(accumulation)]
    return [range(start, start + micro_batch_size) for start in starts]
