"""How a command ends: what its user got wrong is one sentence and exit status 2, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def run_command(main: Callable[[], None]) -> None:
    """Call `main`; a ValueError or a lack of disk or rights is printed as one line, by one process of each machine."""
    try:
        main()
    except (ValueError, OSError) as error:
        if os.environ.get("XLPRE_TRACEBACK"):
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stdout.flush()
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
