"""Random numbers recorded from the original, replayed as the uniform numbers that xlpre draws instead."""

import numpy as np

from xlpre.objectives.target_sampling import SpanRandomNumbers

MAX_SPAN = 5  # fixed in the original
NAN = float("nan")


class RecordedNumber(float):
    """Number in [0, 1) for an integer `value` that the original drew below `high`. It records its use.

    xlpre converts it to the integer by int(number * high). A product with another `high` fails.
    """

    def __new__(cls, value, high, at):
        number = super().__new__(cls, (value + 0.5) / high)
        number.value, number.high, number.at, number.used = value, high, at, False
        return number

    def __mul__(self, high):
        assert high == self.high and not self.used, (
            f"a number below {high} was requested, but one below {self.high} was recorded"
        )
        self.used = True
        return self.value


class Replay:
    """Replays a `rng_log` in order for one row, and checks that the requested numbers are the recorded ones.

    The original draws the length of a span with weights, xlpre looks a number up in a table. The original fills in missing targets by
    drawing positions until one is free, xlpre takes the free positions with the lowest numbers: here, those drawn first.
    """

    def __init__(self, log, max_span=MAX_SPAN):
        self._log, self._next_index, self._pending = list(log), 0, []
        weights = 1 / np.arange(1, max_span + 1)
        self._table = np.concatenate([[0], np.cumsum(weights / weights.sum())])

    @property
    def is_exhausted(self):
        self._settle()
        return self._next_index == len(self._log)

    def pair(self):
        """Coin, cut and elsewhere of a pair. A number that was not recorded must not be used."""
        self._settle()
        coin = self._log[self._next()][2] if self._is_next("random.random") else NAN
        cut = elsewhere = RecordedNumber(0, NAN, None)
        if self._is_next("random.choice"):
            _, choices, value = self._log[self._next()]
            cut = self._issue(choices.index(value), len(choices), self._next_index)
        if self._is_next("random.randint"):
            _, (low, largest), value = self._log[self._next()]
            assert low == 0
            elsewhere = self._issue(value, largest + 1, self._next_index)
        return coin, cut, elsewhere

    def spans(self, length):
        """Numbers for the targets of `length` tokens. Unused numbers belong to the next call."""
        self._settle()
        lengths, offsets, fill = [], [], np.ones(length)
        while self._is_next("np.choice_ngram"):
            index = self._next_index
            words = self._log[self._next()][2]
            kind, high, before = self._log[self._next()]
            assert kind == "np.choice"
            lengths.append(self._table[words - 1 : words + 1].mean())
            offsets.append(self._issue(before, high, index))
        lengths.append(0.0)
        offsets.append(RecordedNumber(0, NAN, None))  # an additional span, which must not be used
        n_tries = 0
        while self._is_next("np.randint"):
            _, high, position = self._log[self._next()]
            assert high == length
            fill[position] = min(fill[position], n_tries / len(self._log))
            n_tries += 1
        return SpanRandomNumbers(np.array([lengths]), np.array([offsets], dtype=object), fill[None])

    def _is_next(self, kind):
        return self._next_index < len(self._log) and self._log[self._next_index][0] == kind

    def _next(self):
        self._next_index += 1
        return self._next_index - 1

    def _issue(self, value, high, at):
        self._pending.append(RecordedNumber(value, high, at))
        return self._pending[-1]

    def _settle(self):
        """Return unused numbers to the log. No later number may have been used."""
        unused = [number.at for number in self._pending if not number.used]
        if unused:
            assert all(number.at < unused[0] for number in self._pending if number.used)
            self._next_index = unused[0]
        self._pending = []
