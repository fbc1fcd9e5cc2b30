"""Draws recorded from the original, handed to our code in the shape of a numpy generator."""

import numpy as np

MAX_SPAN = 5  # fixed in the original


class Replay:
    """Gives back a `rng_log` in order, and checks that what is asked for is what was drawn.

    The original draws a span's length from a list with weights, we look a random number up in a table; it fills a shortfall by
    drawing places until they are free, we choose among the free ones.
    """

    def __init__(self, log, max_span=MAX_SPAN):
        self._log = list(log)
        weights = 1 / np.arange(1, max_span + 1)
        self._table = np.concatenate([[0], np.cumsum(weights / weights.sum())])

    @property
    def used_up(self):
        return not self._log

    def random(self):
        kind, _, value = self._log.pop(0)
        if kind == "np.choice_ngram":
            return self._table[value - 1 : value + 1].mean()
        assert kind == "random.random"
        return value

    def integers(self, high):
        kind, given, value = self._log.pop(0)
        if kind == "random.choice":
            assert len(given) == high
            return given.index(value)
        if kind == "np.choice":
            assert given == high
        else:
            assert kind == "random.randint" and given == [0, high - 1]
        return value

    def choice(self, free, missing, replace):
        assert not replace
        taken = []
        while len(taken) < missing:
            kind, _, value = self._log.pop(0)
            assert kind == "np.randint"
            if value in free and value not in taken:
                taken.append(value)
        return taken
