"""Errors of the rows of a file, collected so that one message reports all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from xlpre.common.errors import InputError

MAX_LISTED = 10  # rows in a message

RowError = tuple[str, str]  # location (file and line), and what is wrong


class MissingColumnError(InputError):
    """A row has no column of this name."""


class InvalidRowsError(InputError):
    """One or more rows are invalid. The message lists the first MAX_LISTED of them.

    Attributes:
        errors: location and problem of each row.
    """

    def __init__(self, errors: Sequence[RowError]) -> None:
        self.errors = list(dict.fromkeys(errors))  # no duplicates: training and held-out examples are in the same file
        super().__init__(_format(self.errors))


class RowErrors:
    """Collector of errors, so that one message reports all of them.

    Usage:

    errors = RowErrors()
    for location, fields in rows:
        with errors.collect(location):
            examples.append(parse(fields))
    errors.raise_if_any()
    """

    def __init__(self) -> None:
        self._errors: list[RowError] = []

    def add(self, location: str, problem: str) -> None:
        """Add the error of one row."""
        self._errors.append((location, problem))

    @contextmanager
    def collect(self, location: str, is_first: bool = False) -> Iterator[None]:
        """Catch a ValueError of the `with` block and add it.

        A MissingColumnError of the first row is not caught, because then the settings contain a wrong column name and all rows would fail.

        Args:
            location: file and line of the row.
            is_first: True for the first row of a file.
        """
        try:
            yield
        except InvalidRowsError as error:
            self._errors += error.errors
        except ValueError as error:
            if is_first and isinstance(error, MissingColumnError):
                raise
            self.add(location, str(error).removeprefix(f"{location}: "))

    def raise_if_any(self) -> None:
        """Raise InvalidRowsError if there are errors."""
        if self._errors:
            raise InvalidRowsError(self._errors)


def _format(errors: Sequence[RowError]) -> str:
    if len(errors) == 1:
        return _join(*errors[0])
    lines = []
    for (file, problem), group in groupby(errors[:MAX_LISTED], lambda error: (_file(error[0]), error[1])):
        lines.append(_join(_merge_locations(file, [location for location, _ in group]), problem))
    n_more = len(errors) - MAX_LISTED
    lines.append(f"{len(errors):,} rows are invalid" + (f", {n_more:,} more than listed here." if n_more > 0 else "."))
    return "\n  ".join(lines)


def _join(location: str, problem: str) -> str:
    return problem if location in problem else f"{location}: {problem}"


def _file(location: str) -> str:
    return location.rpartition(", ")[0]


def _merge_locations(file: str, locations: Sequence[str]) -> str:
    """Return `FILE, line 3, 5, 8` for locations in the same file."""
    first, *others = (location.removeprefix(f"{file}, ") for location in locations)
    return ", ".join([f"{file}, {first}" if file else first, *(other.rpartition(" ")[2] for other in others)])
