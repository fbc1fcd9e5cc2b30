"""A number by which a file is known to be as it was written."""

from __future__ import annotations

from pathlib import Path

import google_crc32c


def checksum(file: Path) -> int:
    """CRC-32C of what a file holds, which finds what a disk or a network did, at the speed of reading."""
    found = 0
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            found = google_crc32c.extend(found, block)
    return found
