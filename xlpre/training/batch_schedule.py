"""Division of the global batch among processes and micro-steps, and the warm-up of its size.

A micro-step is one forward and backward pass of every process. A step accumulates the gradients of its micro-steps, and then updates the
weights once. Batch sizes are counted in rows, each of which is one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from xlpre.common.errors import InputError
from xlpre.common.messages import counted


@dataclass(frozen=True)
class BatchSchedule:
    """Number of micro-steps and of rows in each step.

    Attributes:
        world_size: number of processes.
        micro_batch_size: rows of one process in one forward and backward pass.
        accumulation: number of micro-steps in a step after the warm-up.
        warmup_steps: number of steps at the start, during which the number of micro-steps rises from 1 to `accumulation`.
    """

    world_size: int
    micro_batch_size: int
    accumulation: int
    warmup_steps: int = 0

    def micro_steps(self, step: int) -> int:
        """Return the number of micro-steps of `step`, which counts from 0."""
        if step >= self.warmup_steps:
            return self.accumulation
        return 1 + step * self.accumulation // self.warmup_steps

    def rows(self, step: int) -> int:
        """Return the number of rows that all processes together read in `step`, which counts from 0."""
        return self.world_size * self.micro_batch_size * self.micro_steps(step)

    def total_rows(self, n_steps: int) -> int:
        """Return the number of rows that all processes together read in the first `n_steps` steps."""
        n_rising = min(n_steps, self.warmup_steps)
        return sum(map(self.rows, range(n_rising))) + (n_steps - n_rising) * self.rows(self.warmup_steps)

    def __str__(self) -> str:
        return (
            f"global batch size {self.rows(self.warmup_steps):,} = {counted(self.world_size, 'process')} x micro-batch size "
            f"{self.micro_batch_size:,} x accumulation {self.accumulation:,}"
        )


def split_batch(global_batch_size: int, micro_batch_size: int | None, world_size: int) -> tuple[int, int]:
    """Divide the rows of a step among processes and micro-steps.

    Args:
        global_batch_size: rows of a step, summed over all processes.
        micro_batch_size: rows of one process in one pass; None: all rows of the process.
        world_size: number of processes.

    Returns:
        The micro-batch size and the number of micro-steps (accumulation).

    Raises:
        InputError: the rows cannot be divided equally. The message names the nearest valid sizes.
    """
    if global_batch_size % world_size:
        sizes = _nearest_multiples(global_batch_size, world_size * (micro_batch_size or 1))
        raise InputError(
            f"train.global_batch_size={global_batch_size} is invalid: it must be a multiple of {world_size}, the number of processes. "
            f"Set train.global_batch_size={sizes}, or start another number of processes."
        )
    rows = global_batch_size // world_size
    micro_batch_size = rows if micro_batch_size is None else micro_batch_size
    if rows % micro_batch_size:
        divisors = [size for size in range(1, rows + 1) if rows % size == 0]
        below = max(size for size in divisors if size < micro_batch_size)
        above = [size for size in divisors if size > micro_batch_size][:1]
        sizes = _nearest_multiples(global_batch_size, world_size * micro_batch_size)
        raise InputError(
            f"train.micro_batch_size={micro_batch_size} is invalid: it must divide the {rows} rows of each process "
            f"(train.global_batch_size={global_batch_size}, {counted(world_size, 'process')}). "
            f"Set train.micro_batch_size={' or '.join(map(str, [below, *above]))}, or train.global_batch_size={sizes}."
        )
    return micro_batch_size, rows // micro_batch_size


def _nearest_multiples(value: int, factor: int) -> str:
    """Return the multiples of `factor` below and above `value`, joined by `or`."""
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)
