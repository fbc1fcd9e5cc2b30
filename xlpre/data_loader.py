"""Data loading: background threads prepare the batches of each step in advance.

A lane is the text that one batch row reads, window after window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from xlpre.batch import Batch
from xlpre.common.errors import InputError
from xlpre.data.lanes import Lanes
from xlpre.data.rng import RowRng
from xlpre.data.window_layout import DataConfig, Windows, build_windows
from xlpre.objectives.objective import ModelInputs, Objective
from xlpre.training.distributed import device_type


class Loader:
    """Data loader: builds the batches of each step.

    A batch is a pure function of seed, step and lanes, because all random numbers are keyed by (seed, lane, step). Resuming a
    run therefore needs no saved data state.

    Args:
        lanes: give the text position of each lane at each step.
        data: layout of a window.
        objective: selects the targets and the tokens that each of them sees.
        seed: seed of all random numbers.

    Attributes:
        wait_seconds: total time for which the consumer of `batches` waited for a batch.
    """

    def __init__(self, lanes: Lanes, data: DataConfig, objective: Objective, seed: int) -> None:
        self.lanes, self._data, self._objective, self._seed = lanes, data, objective, seed
        self.wait_seconds = 0.0
        self._pin = device_type() == "cuda"

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Return the batch of `lanes`, one row each, at `step`.

        Raises:
            InputError: there are no lanes, a lane does not exist, or the objective returned invalid inputs.
        """
        if not isinstance(lanes, Sequence) or not lanes or min(step, *lanes) < 0 or max(lanes) >= self.lanes.n_lanes:
            raise InputError(
                f"lanes={lanes} with step={step} is invalid: lanes must be a non-empty sequence of numbers from 0 to "
                f"{self.lanes.n_lanes - 1}, and step must be at least 0. "
                "For `batches`, `lane_groups_at(step)` must return a list of such sequences, for example [range(n_lanes)]."
            )
        rng = RowRng(self._seed, lanes, step)
        windows = build_windows([self.lanes.location(lane, step) for lane in lanes], self._data, rng)
        batch = batch_from_inputs(windows, self._objective.build_inputs(windows, rng))
        return batch.pin_memory() if self._pin else batch

    def batches(
        self, first_step: int, lane_groups_at: Callable[[int], Sequence[Sequence[int]]]
    ) -> Generator[Batch, None, None]:
        """Yield batches indefinitely, starting at `first_step`.

        Args:
            first_step: step of the first batches.
            lane_groups_at: returns the groups of lanes of a step, one batch each. See `assign_lanes`.
        """
        # the current GPU is a property of each thread; pinning memory would use GPU 0 otherwise
        set_device = partial(torch.cuda.set_device, torch.cuda.current_device()) if self._pin else None
        executor = ThreadPoolExecutor(self._data.num_threads, thread_name_prefix="batch", initializer=set_device)
        pending: deque[Future[Batch]] = deque()
        step = first_step
        try:
            while True:
                while len(pending) < 2 * self._data.num_threads + len(groups := lane_groups_at(step)):
                    pending += [executor.submit(self.batch, step, lanes) for lanes in groups]
                    step += 1
                started = time.perf_counter()
                batch = pending.popleft().result()
                self.wait_seconds += time.perf_counter() - started
                yield batch
        finally:
            executor.shutdown(cancel_futures=True)


def batch_from_inputs(windows: Windows, inputs: ModelInputs) -> Batch:
    """Build a Batch from windows and their inputs. Its tensors share memory with these arrays, where they are contiguous.

    Raises:
        InputError: a field has the wrong shape or dtype, or the target positions of a row do not increase strictly.
    """
    _check_inputs(inputs)
    fields = {
        "input_ids": inputs.input_ids,
        "segment_ids": windows.segments,
        "query_rank": inputs.query_rank,
        "key_rank": inputs.key_rank,
        "target_positions": inputs.target_positions,
        "targets": inputs.targets,
        "target_weights": np.ones(inputs.targets.shape, np.float32),
        "backward": windows.backward,
        "visible_mem_len": windows.visible_mem_len,
        "pair_label": windows.pair_label,
    }
    return Batch(
        **{name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in fields.items()},
        reuse_len=windows.reuse_len,
    )


def assign_lanes(rank: int, world_size: int, micro_batch_size: int, accumulation: int) -> list[range]:
    """Return the lanes of one process, one group per micro-step.

    The lanes of a micro-step are consecutive over all processes. The order of the targets therefore does not depend on the number
    of processes.

    Args:
        rank: rank of the process.
        world_size: number of processes.
        micro_batch_size: rows of one process in one micro-step.
        accumulation: micro-steps of a step.
    """
    starts = [(micro_step * world_size + rank) * micro_batch_size for micro_step in range(accumulation)]
    return [range(start, start + micro_batch_size) for start in starts]


def _check_inputs(inputs: ModelInputs) -> None:
    for name, x in vars(inputs).items():
        if not isinstance(x, np.ndarray) or x.ndim != 2:
            raise InputError(
                f"ModelInputs.{name}={x!r:.60} is invalid: it must be a 2-dimensional array, one row per window."
            )
    positions, length = inputs.target_positions, inputs.input_ids.shape[1]
    if positions.shape != inputs.targets.shape:
        raise InputError(
            f"ModelInputs.targets of shape {inputs.targets.shape} is invalid: it needs that of target_positions, {positions.shape}."
        )
    is_valid = (
        not positions.size
        or positions[:, 0].min() >= 0
        and positions[:, -1].max() < length
        and (np.diff(positions) > 0).all()
    )
    if not is_valid:
        raise InputError(
            f"ModelInputs.target_positions={positions!r:.200} is invalid: positions must be between 0 and {length - 1}, and "
            "must increase strictly in each row."
        )
