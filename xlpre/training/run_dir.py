"""Name, folder and seed of a run: the checks that pretraining and fine-tuning share."""

from __future__ import annotations

import os
from pathlib import Path

from xlpre.common.errors import InputError, check_minimum

MAX_SEED = 2**63 - 1  # the largest seed that both torch and numpy accept


def check_run_identity(name: str, run_dir: str, seed: int, num_seeds: int = 1) -> None:
    """Check the name, the folder and the `num_seeds` seeds of a run, of which `seed` is the first.

    Raises:
        InputError: one of them is invalid.
    """
    if name in ("", ".", "..") or "/" in name:
        raise InputError(
            f"name={name!r} is invalid: it is used as the name of folders, so it must not be empty, be `.` or `..`, or contain a slash. "
            "Set run_dir to choose another folder."
        )
    if not run_dir:
        raise InputError("run_dir='' is invalid: it must name a folder. Leave it out for runs/NAME.")
    check_minimum("seed", seed, 0, "Set seed=1.")
    check_minimum("num_seeds", num_seeds, 1, "Set num_seeds=1.")
    if (last := seed + num_seeds - 1) > MAX_SEED:
        raise InputError(
            f"seed={last} is invalid: it must be at most {MAX_SEED}, also for the last of num_seeds={num_seeds} seeds. Set seed=1."
        )


def check_run_dir_writable(run_dir: str, subfolder: str = "") -> None:
    """Check that `run_dir`, or `subfolder` in it, is a writable folder or can be created. Nothing is written.

    Raises:
        InputError: the path is a file, a broken link, or not writable.
    """
    path = Path(run_dir) / subfolder
    while not (path.exists() or path.is_symlink()) and path != path.parent:
        path = path.parent
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"run_dir={run_dir} is invalid: {path} is a link to {os.readlink(path)}, which does not exist. Restore that folder, or "
            "remove the link."
        )
    if not path.is_dir():
        raise InputError(f"run_dir={run_dir} is invalid: {path} is not a folder. Set another run_dir, or another name.")
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(
            f"run_dir={run_dir} is invalid: you may not write to {path}. Set another run_dir, or another name."
        )
