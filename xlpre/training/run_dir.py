"""What a run is called, where it goes and what it draws by: the rules that pretraining and fine-tuning share."""

from __future__ import annotations

import os
from pathlib import Path

MAX_SEED = 2**63 - 1  # what torch and numpy both take


def check_identity(name: str, run_dir: str, seed: int, seeds: int = 1) -> None:
    """Raise ValueError for a name that names no folder, for no folder, for one of `seeds` seeds, from `seed` on, that none can be."""
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(
            f"name ({name!r}) names folders, in runs/ and elsewhere, and must not be empty, . or .., or hold a slash; set run_dir for "
            "another place"
        )
    if not run_dir:
        raise ValueError("run_dir is empty; name the folder of the run, or leave it out: runs/NAME")
    if seed < 0:
        raise ValueError(f"seed ({seed}) must be at least 0")
    if seeds < 1:
        raise ValueError(f"seeds ({seeds}) must be at least 1")
    if (last := seed + seeds - 1) > MAX_SEED:
        raise ValueError(f"seed ({last}) must be at most {MAX_SEED}")


def check_place(run_dir: str, folder: str = "") -> None:
    """Raise ValueError if `run_dir`, or a `folder` in it, is no folder and none can be made there, as far as can be told without it."""
    place = Path(run_dir) / folder
    while not (place.exists() or place.is_symlink()) and place != place.parent:
        place = place.parent
    if place.is_symlink() and not place.exists():
        raise ValueError(
            f"run_dir={run_dir}: {place} is a link to {os.readlink(place)}, which is not there; put that back, or remove the link"
        )
    if not place.is_dir():
        raise ValueError(f"run_dir={run_dir}: {place} is there already and is no folder; set another run_dir, or name")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"run_dir={run_dir}: {place} is not yours to write in; set another run_dir, or name")
