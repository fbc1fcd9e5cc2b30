"""Errors of the user, as opposed to bugs."""

from __future__ import annotations


class InputError(ValueError):
    """A mistake that the user can correct: in a setting, an option, a file, a folder or an argument of a function.

    Commands print its message without a traceback (see `xlpre.common.cli_main`): `KEY=VALUE is invalid: RULE. REMEDY.` All other
    ValueErrors are bugs.
    """


def check_minimum(name: str, value: float | None, minimum: int, remedy: str = "") -> None:
    """Raise InputError if a number is below its minimum. None is accepted.

    Args:
        name: setting, option or argument, for the message.
        value: the number.
        minimum: smallest value that is accepted.
        remedy: sentence on what to set instead; empty if the rule says it all.
    """
    if value is not None and not value >= minimum:
        raise InputError(f"{name}={value} is invalid: it must be at least {minimum}.{f' {remedy}' if remedy else ''}")


def option_name(name: str) -> str:
    """Return the option of a command line whose value is the attribute `name` of the parsed arguments: `--mem-len` for mem_len."""
    return f"--{name.replace('_', '-')}"
