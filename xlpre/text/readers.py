"""Lines of text files and rows of jsonl and parquet files, plain or packed, whole or a stretch; what cannot be read is named."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from xlpre.text.json_objects import parse_object

PACKED = (".gz", ".zst")
KINDS = (".txt", ".jsonl", ".parquet")
LONGEST_LINE = 64 << 20  # bytes; what is longer is no text with a paragraph a line
STDIN = Path("stdin")  # this object is what comes in; another Path("stdin") is a file of that name
FAULTS = (OSError, EOFError, zlib.error)


@dataclass
class ByteCounter:
    """How many bytes of its source have been read, for a progress bar."""

    n_bytes: int = 0


def kind_of(path: Path) -> str:
    """`.txt`, `.jsonl` or `.parquet`.

    Raises:
        ValueError: a folder, what is no file, or a file of another kind.
    """
    if path.is_dir():
        raise ValueError(f"text.source: {path} is a folder; name the files in it, as '{path}/*.txt'")
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"text.source: {path} is a link to {path.readlink()}, where there is no file; mend or remove it"
        )
    if path.exists() and not path.is_file():
        raise ValueError(f"text.source: {path} is a pipe or a device; write what it holds to a file")
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in PACKED), "")
    if kind not in KINDS or (kind == ".parquet" and path.suffix != kind):
        raise ValueError(
            f"text.source: {path} is of kind {''.join(path.suffixes[-2:]) or 'unknown'!r}; it must be a .txt, .jsonl or .parquet file "
            "(.gz or .zst for the first two)"
        )
    return kind


def read_lines(path: Path, meter: ByteCounter, begin: int = 0) -> Iterator[tuple[int, str]]:
    """Lines with the offset of their first byte, from the first that starts at or after byte `begin`.

    Args:
        path: a text file, packed or not, or STDIN; only a file that is not packed can begin elsewhere than at 0.
        meter: told how far the file has been read.
        begin: a byte of the file.

    Raises:
        ValueError: a file that cannot be read, a line that is not UTF-8, too long, or holds a zero byte.
    """
    number, offset, before = 0, begin, meter.n_bytes
    try:
        with (
            open(0 if path is STDIN else path, "rb", closefd=path is not STDIN) as file,
            _unpacked(file, path) as lines,
        ):
            if begin:
                offset = _next_line(lines, begin)
            while raw := lines.readline(LONGEST_LINE + 1):
                number += 1
                if offset == 0 and b"\n" not in raw and b"\r" in raw:
                    raise ValueError(
                        "lines end with \\r, as old Macs wrote them; convert it: tr '\\r' '\\n' < FILE > NEW"
                    )
                if len(raw) > LONGEST_LINE:
                    raise ValueError(f"longer than {LONGEST_LINE >> 20} MB; put a paragraph on a line")
                if offset == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise ValueError("UTF-16, as Windows writes it, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
                if b"\0" in raw:
                    raise ValueError(f"a zero byte at byte {raw.index(0)} of the line; is it a text file?")
                yield offset, raw.decode("utf-8-sig" if offset == 0 else "utf-8")  # some editors put a mark first
                offset += len(raw)
                meter.n_bytes = before + (file.tell() if lines is not file else offset - begin)
    except UnicodeDecodeError as error:
        where = _where(path, number, offset, begin)
        raise ValueError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start} of the line); convert or remove it"
        ) from None
    except ValueError as error:
        raise ValueError(f"{_where(path, number, offset, begin)}: {error}") from None
    except FAULTS as error:
        where = f"after line {number}" if not begin else f"after byte {offset}"
        way_out = "" if getattr(error, "errno", None) else "; get it anew"  # what is packed there is damaged
        raise ValueError(f"{path}, {where}: cannot be read: {error or type(error).__name__}{way_out}") from None


def json_rows(path: Path, meter: ByteCounter, begin: int, end: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of the lines that start in [begin, end), each after its place for messages.

    Raises:
        ValueError: as read_lines; a line that is not a JSON object (see parse_object).
    """
    for number, (offset, line) in enumerate(read_lines(path, meter, begin), 1):
        if end is not None and offset >= end:
            return
        if line.strip():
            place = _where(path, number, offset, begin)
            yield place, parse_object(line, place)


def row_groups(path: Path) -> list[int]:
    """Bytes of the row groups of a parquet file.

    Raises:
        ValueError: it cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        found = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None
    return [found.row_group(i).total_byte_size for i in range(found.num_row_groups)]


def parquet_rows(
    path: Path, meter: ByteCounter, column: str | None, begin: int, end: int | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the row groups [begin, end), with one column or all (None), each after its place for messages.

    Raises:
        ValueError: it cannot be read, or has no such column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column is not None and column not in file.schema_arrow.names:
            raise ValueError(
                f"{path}: has no column {column!r}; set text.column to one of {', '.join(file.schema_arrow.names)}"
            )
        number = sum(file.metadata.row_group(group).num_rows for group in range(begin))
        for group in range(begin, file.num_row_groups if end is None else end):
            for batch in file.iter_batches(row_groups=[group], columns=column and [column], batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
            meter.n_bytes += file.metadata.row_group(group).total_byte_size
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, within 1,024 rows after row {number}: not UTF-8 ({error.reason}); convert or remove it"
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _unpacked(file: IO[bytes], path: Path) -> IO[bytes]:
    if path.suffix in PACKED and not os.fstat(file.fileno()).st_size:
        raise EOFError("it has 0 bytes, and what is packed has some")
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"), 1 << 20)
    return file


def _next_line(file: IO[bytes], begin: int) -> int:
    """Move to the first line that starts at or after `begin`, and return its offset."""
    file.seek(begin - 1)
    offset = begin - 1
    while piece := file.readline(1 << 20):
        offset += len(piece)
        if piece.endswith(b"\n"):
            break
    return offset


def _where(path: Path, number: int, offset: int, begin: int) -> str:
    return f"{path}, line {number}" if not begin else f"{path}, byte {offset}"
