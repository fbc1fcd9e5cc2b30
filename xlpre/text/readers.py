"""Lines of text files, and rows of jsonl and parquet files: plain or compressed, whole files or parts of them.

Errors name the file and the line, byte or row.
"""

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

from xlpre.common import os_errors
from xlpre.common.errors import InputError
from xlpre.text.json_objects import parse_object

COMPRESSED_SUFFIXES = (".gz", ".zst")
FILE_KINDS = (".txt", ".jsonl", ".parquet")
PART_BYTES = 1 << 20  # size of the parts of a verbatim text
MAX_LINE_BYTES = 64 << 20  # a longer line is not a paragraph of text
STDIN = Path("stdin")  # this object stands for standard input; another Path("stdin") is a file
READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass
class ByteCounter:
    """Bytes of the sources read so far, for a progress bar."""

    n_bytes: int = 0


def file_kind(path: Path, key: str = "text.source", any_name: bool = False) -> str:
    """Return `.txt`, `.jsonl` or `.parquet`.

    Args:
        path: the file.
        key: setting or argument that names the file, for error messages.
        any_name: the file has verbatim text and may have any name; the kind is `.txt`.

    Raises:
        InputError: `path` is a folder, a broken link, a pipe, a device, or a file of another kind.
    """
    if path.is_dir():
        raise InputError(f"{key}={path} is invalid: it is a folder. Name its files, for example '{path}/*.txt'.")
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{key}={path} is invalid: it is a link to {path.readlink()}, which does not exist. Repair or remove the link."
        )
    if path.exists() and not path.is_file():
        raise InputError(f"{key}={path} is invalid: it is a pipe or a device. Write its content to a file.")
    if any_name:
        return ".txt"
    kind = next((suffix for suffix in reversed(path.suffixes) if suffix not in COMPRESSED_SUFFIXES), "")
    if kind not in FILE_KINDS or (kind == ".parquet" and path.suffix != kind):
        raise InputError(
            f"{key}={path} is invalid: it must be a .txt, .jsonl or .parquet file; .txt and .jsonl may end in .gz or .zst. Rename or "
            "convert it. With text.line_type=verbatim, text files can have any name."
        )
    return kind


def read_lines(path: Path, counter: ByteCounter | None = None, begin: int = 0) -> Iterator[tuple[int, str]]:
    """Yield lines with the offset of their first byte, from the first line that starts at or after byte `begin`.

    Args:
        path: a text file, perhaps compressed, or STDIN.
        counter: counts the bytes read.
        begin: first byte. Must be 0 for a compressed file.

    Raises:
        InputError: the file cannot be read, or a line is not UTF-8, is too long, or contains a zero byte.
    """
    counter = counter or ByteCounter()
    number, offset, counted_before = 0, begin, counter.n_bytes
    try:
        with (
            open(0 if path is STDIN else path, "rb", closefd=path is not STDIN) as file,
            _decompressed(file, path) as lines,
        ):
            if begin:
                offset = _seek_line_start(lines, begin)
            while raw := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                _check_line(raw, is_first=offset == 0, is_jsonl=".jsonl" in path.suffixes)
                yield offset, raw.decode("utf-8-sig" if offset == 0 else "utf-8")  # drops a byte order mark
                offset += len(raw)
                counter.n_bytes = counted_before + (file.tell() if lines is not file else offset - begin)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_location(path, number, offset, begin)}: not UTF-8 ({error.reason} at byte {error.start} of the line). "
            "Convert or remove the line."
        ) from None
    except ValueError as error:
        raise InputError(f"{_location(path, number, offset, begin)}: {error}") from None
    except READ_ERRORS as error:
        location = f"after line {number}" if not begin else f"after byte {offset}"
        remedy = _remedy(error)
        raise InputError(f"{path}, {location}: cannot be read: {error or type(error).__name__}{remedy}") from None


def _remedy(error: Exception) -> str:
    if number := getattr(error, "errno", None):
        return f". {advice}" if (advice := os_errors.remedy(number)) else ""
    if "too much memory" in str(error):
        return ". It was compressed with a long window: zstd -dc --long=31 FILE | zstd -o NEW_FILE"
    if isinstance(error, gzip.BadGzipFile):
        return ". Rename the file if it is not compressed; otherwise, download it again."
    return ". The file is damaged; download it again."


def read_parts(path: Path, counter: ByteCounter | None = None, begin: int = 0, end: int | None = None) -> Iterator[str]:
    """Yield a text unchanged, in parts that end after a line if possible, else after a space.

    Args:
        path: a text file, perhaps compressed.
        counter: counts the bytes read.
        begin: first byte of the text.
        end: byte after the last one. None: the end of the file.

    Yields:
        Text in which bytes that are not UTF-8 are surrogate escapes (PEP 383).

    Raises:
        InputError: the file cannot be read, or is shorter than `end`.
    """
    counter = counter or ByteCounter()
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    counted_before, position, rest = counter.n_bytes, 0, b""
    try:
        with open(path, "rb") as file, _decompressed(file, path) as content:
            position = _skip(content, begin)
            if content is file:  # seeking beyond the end succeeds
                position = min(position, os.fstat(file.fileno()).st_size)
            while end is None or position < end:
                block = content.read(PART_BYTES if end is None else min(PART_BYTES, end - position))
                if not block:
                    break
                position += len(block)
                counter.n_bytes = counted_before + (file.tell() if content is not file else position - begin)
                block = rest + block
                cut = next((i for i in (block.rfind(b"\n"), block.rfind(b" ")) if i >= 0), len(block) - 1)
                rest = block[cut + 1 :]
                if part := decoder.decode(block[: cut + 1]):
                    yield part
            if part := decoder.decode(rest, final=True):
                yield part
    except READ_ERRORS as error:
        remedy = _remedy(error)
        raise InputError(
            f"{path}, after byte {position}: cannot be read: {error or type(error).__name__}{remedy}"
        ) from None
    if position < max(begin, end or 0):
        raise InputError(
            f"{path} ends at byte {position}, before byte {max(begin, end or 0)}. Name fewer bytes, or download it again."
        )


def json_rows(
    path: Path, counter: ByteCounter | None = None, begin: int = 0, end: int | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for error messages, object) for each line that starts in [begin, end).

    Raises:
        InputError: see `read_lines` and `parse_object`.
    """
    for number, (offset, line) in enumerate(read_lines(path, counter, begin), 1):
        if end is not None and offset >= end:
            return
        if line.strip():
            location = _location(path, number, offset, begin)
            yield location, parse_object(line, location)


def row_group_sizes(path: Path) -> list[int]:
    """Return the bytes of each row group of a parquet file.

    Raises:
        InputError: the file cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(_parquet_error(path, error)) from None
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_rows(
    path: Path,
    column: str | None = None,
    counter: ByteCounter | None = None,
    begin: int = 0,
    end: int | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location for error messages, row) for each row of the row groups [begin, end).

    Args:
        path: a parquet file.
        column: column to read. None: all of them.
        counter: counts the bytes read.
        begin: first row group.
        end: row group after the last one. None: the end of the file.

    Raises:
        InputError: the file cannot be read, or has no such column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column is not None and column not in file.schema_arrow.names:
            raise InputError(
                f"text.column={column} is invalid: {path} has no such column. "
                f"Set text.column to one of {', '.join(file.schema_arrow.names)}."
            )
        number = sum(file.metadata.row_group(group).num_rows for group in range(begin))
        for group in range(begin, file.num_row_groups if end is None else end):
            for batch in file.iter_batches(row_groups=[group], columns=column and [column], batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
            if counter:
                counter.n_bytes += file.metadata.row_group(group).total_byte_size
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, within 1,024 rows after row {number}: not UTF-8 ({error.reason}). Convert or remove the row."
        ) from None
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(_parquet_error(path, error)) from None


def _parquet_error(path: Path, error: Exception) -> str:
    remedy = os_errors.remedy(os_errors.error_number(error)) or "Copy or download it again."
    return f"{path}: cannot be read as parquet ({str(error).splitlines()[0]}). {remedy}"


def _check_line(raw: bytes, is_first: bool, is_jsonl: bool) -> None:
    """Raise InputError if a line is too long, or is not UTF-8 text with Unix or Windows line endings."""
    if is_first and b"\n" not in raw and b"\r" in raw:
        raise InputError("lines end with \\r, as in files of old Macs. Convert the file: tr '\\r' '\\n' < FILE > NEW")
    if len(raw) > MAX_LINE_BYTES:
        if is_jsonl and raw.lstrip().startswith(b"["):
            remedy = "Convert the array to one object per line: jq -c '.[]' FILE > NEW.jsonl"
        elif is_jsonl:
            remedy = "Divide the text into several rows."
        else:
            remedy = "Write one paragraph per line."
        raise InputError(f"the line is longer than {MAX_LINE_BYTES >> 20} MB. {remedy}")
    if is_first and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError("the file is UTF-16, not UTF-8. Convert the file: iconv -f UTF-16 -t UTF-8 FILE > NEW")
    if b"\0" in raw:
        raise InputError(f"there is a zero byte at byte {raw.index(0)} of the line. Check that the file is text.")


def _decompressed(file: IO[bytes], path: Path) -> IO[bytes]:
    if path.suffix in COMPRESSED_SUFFIXES and not os.fstat(file.fileno()).st_size:
        raise EOFError("an empty file is not a compressed file")
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"), 1 << 20)
    return file


def _skip(file: IO[bytes], n_bytes: int) -> int:
    """Read over the first bytes of a file, which may be unable to seek. Return their number, less than `n_bytes` at the end of the file."""
    if file.seekable():
        return file.seek(n_bytes)
    n_read = 0
    while n_read < n_bytes and (block := file.read(min(PART_BYTES, n_bytes - n_read))):
        n_read += len(block)
    return n_read


def _seek_line_start(file: IO[bytes], begin: int) -> int:
    """Move to the first line that starts at or after byte `begin`. Return its offset."""
    file.seek(begin - 1)
    offset = begin - 1
    while piece := file.readline(1 << 20):
        offset += len(piece)
        if piece.endswith(b"\n"):
            break
    return offset


def _location(path: Path, number: int, offset: int, begin: int) -> str:
    """Return the file and the line of an error, or the file and the byte if reading began inside the file, so lines were not counted."""
    return f"{path}, line {number}" if not begin else f"{path}, byte {offset}"
