"""Error of the user, as opposed to a bug."""

from __future__ import annotations


class InputError(ValueError):
    """A mistake that the user can correct: in a setting, an option, a file, a folder or an argument of a function.

    Commands print its message without a traceback (see `xlpre.common.cli_main`): `KEY=VALUE is invalid: RULE. REMEDY.` All other
    ValueErrors are bugs.
    """
