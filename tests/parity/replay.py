"""Draws recorded from the original, handed to our code as the uniform numbers that it would have drawn instead."""

import numpy as np

from xlpre.objectives.target_sampling import SpanRandomNumbers

MAX_SPAN = 5  # fixed in the original
NAN = float("nan")


class Recorded(float):
    """A number from 0 to 1 that the original drew as `value` below `high`, and knows whether it was asked for that.

    Our code makes an integer of it by a product, int(number * high): a product with another `high` is a failure.
    """

    def __new__(cls, value, high, at):
        number = super().__new__(cls, (value + 0.5) / high)
        number.value, number.high, number.at, number.used = value, high, at, False
        return number

    def __mul__(self, high):
        assert high == self.high and not self.used, f"asked for one below {high}, recorded is one below {self.high}"
        self.used = True
        return self.value


class Replay:
    """Gives back a `rng_log` in order, as draws for one row, and checks that what is asked for is what was drawn.

    The original draws a span's length from a list with weights, we look a number up in a table; it fills a shortfall by drawing
    places until they are free, we take the free ones with the lowest numbers: those that were drawn, by when they were.
    """

    def __init__(self, log, max_span=MAX_SPAN):
        self._log, self._at, self._lent = list(log), 0, []
        weights = 1 / np.arange(1, max_span + 1)
        self._table = np.concatenate([[0], np.cumsum(weights / weights.sum())])

    @property
    def used_up(self):
        self._settle()
        return self._at == len(self._log)

    def pair(self):
        """coin, cut and elsewhere of a pair; what was not drawn must not be asked for."""
        self._settle()
        coin = self._log[self._next()][2] if self._is_next("random.random") else NAN
        cut = elsewhere = Recorded(0, NAN, None)
        if self._is_next("random.choice"):
            _, given, value = self._log[self._next()]
            cut = self._lend(given.index(value), len(given), self._at)
        if self._is_next("random.randint"):
            _, (low, largest), value = self._log[self._next()]
            assert low == 0
            elsewhere = self._lend(value, largest + 1, self._at)
        return coin, cut, elsewhere

    def spans(self, length):
        """Draws of the targets of one stretch of `length` tokens; those not asked for are the next stretch's."""
        self._settle()
        lengths, offsets, fill = [], [], np.ones(length)
        while self._is_next("np.choice_ngram"):
            at = self._at
            words = self._log[self._next()][2]
            kind, high, before = self._log[self._next()]
            assert kind == "np.choice"
            lengths.append(self._table[words - 1 : words + 1].mean())
            offsets.append(self._lend(before, high, at))
        lengths, offsets = [*lengths, 0.0], [*offsets, Recorded(0, NAN, None)]  # one more would be one too many
        n_tries = 0
        while self._is_next("np.randint"):
            _, high, place = self._log[self._next()]
            assert high == length
            fill[place] = min(fill[place], n_tries / len(self._log))
            n_tries += 1
        return SpanRandomNumbers(np.array([lengths]), np.array([offsets], dtype=object), fill[None])

    def _is_next(self, kind):
        return self._at < len(self._log) and self._log[self._at][0] == kind

    def _next(self):
        self._at += 1
        return self._at - 1

    def _lend(self, value, high, at):
        self._lent.append(Recorded(value, high, at))
        return self._lent[-1]

    def _settle(self):
        """Take back what was lent and not asked for: nothing after it may have been."""
        unused = [number.at for number in self._lent if not number.used]
        if unused:
            assert all(number.at < unused[0] for number in self._lent if number.used)
            self._at = unused[0]
        self._lent = []
