"""TensorFlow checkpoints (V2), read and written without TensorFlow: PREFIX.index and PREFIX.data-0000N-of-0000M.

The index is a table in LevelDB's format. The empty key holds a BundleHeaderProto; the name of each tensor holds a
BundleEntryProto with its type, shape, data file, offset and checksum. The data files hold the raw values.
Source: tensorflow/core/protobuf/tensor_bundle.proto; LevelDB's doc/table_format.md.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from xlpre.common.errors import InputError
from xlpre.common.files import atomic_write
from xlpre.common.messages import counted

MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
FOOTER_BYTES = 48
MAX_DIMENSIONS, MAX_KEY_BYTES = 64, 4096  # of a tensor and its name
ENTRIES_PER_BLOCK = 64
DTYPE, SHAPE, SHARD, OFFSET, SIZE, CRC, SLICES = range(1, 8)  # fields of a BundleEntryProto
CHUNK_BYTES = 1 << 20  # small enough to be copied and checksummed in the CPU cache
# numpy types by TensorFlow's number of a data type; bfloat16, which numpy lacks, is read as 16-bit integers first
DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 14: "<u2", 17: "<u2", 19: "<f2"}
BFLOAT16 = 14
DTYPE_NUMBERS = {np.dtype(dtype): number for number, dtype in DTYPES.items() if number != BFLOAT16}


def read_checkpoint(prefix: str | Path, select: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Read the selected tensors of a TensorFlow checkpoint and verify their checksums.

    Args:
        prefix: path without `.index`, as TensorFlow expects it.
        select: returns True for the names of tensors to read. Other tensors are not read.

    Returns:
        Tensors by name, in the order of their names. bfloat16 becomes float32, which is exact.

    Raises:
        InputError: a file is missing, damaged or truncated; the checkpoint is big-endian or its index compressed; or a selected
            tensor is partitioned or has a type that is not in `DTYPES`.
    """
    index = Path(f"{prefix}.index")
    n_shards, messages = _read_index(index)
    tensors, shards = {}, dict[Path, mmap.mmap | bytes]()
    n_read = Counter[int]()  # bytes by data file
    for name in filter(select, messages):
        try:
            entry, shape = _parse_entry(messages[name], n_shards)
        except ValueError as error:
            raise InputError(f"{index}: {name} {error}") from None
        path = Path(f"{prefix}.data-{entry[SHARD]:05d}-of-{n_shards:05d}")
        if path not in shards:
            shards[path] = _mmap(
                path, f"Put the {counted(n_shards, 'data file')} of the checkpoint next to {index.name}."
            )
        n_read[entry[SHARD]] += entry[SIZE]
        try:
            if n_read[entry[SHARD]] > len(shards[path]):
                raise InputError("tensors overlap in the data file")
            tensors[name] = _read_tensor(shards[path], entry).reshape(shape)
        except (ValueError, OverflowError) as error:  # also from reshape: 65 dimensions, sizes beyond 64 bits
            raise InputError(f"{path} is damaged: {name}: {error}. Download the file again.") from None
    return tensors


def write_checkpoint(prefix: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint for TensorFlow atomically, with one data file and without compression.

    Args:
        prefix: path without `.index`; an existing checkpoint is replaced.
        tensors: tensors by name, of any shape and of the types in `DTYPES` except bfloat16.

    Raises:
        InputError: a tensor of another type, or an invalid name.
    """
    for name, tensor in tensors.items():
        # the empty key is that of the header; keys of parts of variables begin with NUL
        if not name or name[0] == "\0":
            raise InputError(
                f"{prefix}: the tensor name {name!r} is invalid: it must begin with a character other than NUL. Rename the tensor."
            )
        if tensor.dtype.newbyteorder("<") not in DTYPE_NUMBERS:
            raise InputError(
                f"{prefix}: {name} is invalid: tensors of the type {tensor.dtype} cannot be written. Convert it to float32."
            )
    entries = [(b"", _encode_field(1, 1) + _encode_field(3, _encode_field(1, 1)))]  # num_shards, version.producer
    with atomic_write(f"{prefix}.index") as new_index, atomic_write(f"{prefix}.data-00000-of-00001") as new_shard:
        with open(new_shard, "wb") as file:  # the data file is renamed before the index
            for name in sorted(tensors, key=str.encode):
                dtype = tensors[name].dtype.newbyteorder("<")
                content = np.asarray(tensors[name], dtype).tobytes()
                shape = b"".join(_encode_field(2, _encode_field(1, length)) for length in tensors[name].shape)
                entry = _encode_field(DTYPE, DTYPE_NUMBERS[dtype]) + _encode_field(SHAPE, shape)
                entry += _encode_field(OFFSET, file.tell()) + _encode_field(SIZE, len(content))
                entry += _encode_varint(CRC << 3 | 5) + _mask_crc(google_crc32c.value(content))
                entries.append((name.encode(), entry))
                file.write(content)
        new_index.write_bytes(_build_table(entries))


def _parse_entry(message: bytes, n_shards: int) -> tuple[dict[int, int], tuple[int, ...]]:
    """Return the integers of a BundleEntryProto by field, and the shape."""
    try:
        numbers, parts = _parse_fields(message)
        dims = [dim for part in parts.get(SHAPE, []) for dim in _parse_fields(part)[1].get(2, [])]
        if len(dims) > MAX_DIMENSIONS:
            raise InputError(f"it has {len(dims)} dimensions")
        shape = tuple(_parse_fields(dim)[0].get(1, 0) for dim in dims)
    except ValueError as error:
        raise InputError(f"has a damaged entry: {error}. Download the file again.") from None
    entry = {field: numbers.get(field, 0) for field in (DTYPE, SHARD, OFFSET, SIZE, CRC)}
    if SLICES in parts:
        raise InputError("is a partitioned variable, which is not supported. Save it without a partitioner.")
    if entry[DTYPE] not in DTYPES:
        raise InputError(f"has TensorFlow's data type {entry[DTYPE]}, which is not supported. Save it as float32.")
    if math.prod(shape) * np.dtype(DTYPES[entry[DTYPE]]).itemsize != entry[SIZE] or entry[SHARD] >= n_shards:
        raise InputError(
            f"of shape {shape} has a damaged entry: {entry[SIZE]} bytes in data file {entry[SHARD]} (counted from 0) of {n_shards}. "
            "Download the file again."
        )
    return entry, shape


def _read_tensor(data: mmap.mmap | bytes, entry: dict[int, int]) -> np.ndarray:
    """Return the values of a tensor from its data file, flat."""
    begin, end = entry[OFFSET], entry[OFFSET] + entry[SIZE]
    if end > len(data):
        raise InputError(f"it should end at byte {end}, but the file ends at byte {len(data)}")
    raw, crc = np.empty(entry[SIZE], np.uint8), 0
    for start in range(begin, end, CHUNK_BYTES):
        chunk = data[start : min(start + CHUNK_BYTES, end)]  # bytes: google_crc32c does not accept a memoryview
        crc = google_crc32c.extend(crc, chunk)
        raw[start - begin : start - begin + len(chunk)] = np.frombuffer(chunk, np.uint8)
    if int.from_bytes(_mask_crc(crc), "little") != entry[CRC]:
        raise InputError("it does not match its checksum")
    values = raw.view(DTYPES[entry[DTYPE]])
    return (values.astype("<u4") << 16).view("<f4") if entry[DTYPE] == BFLOAT16 else values


def _read_index(path: Path) -> tuple[int, dict[str, bytes]]:
    """Return the number of data files, and the BundleEntryProto of each tensor by name."""
    table = _mmap(path, "Give the path of a TensorFlow checkpoint (V2) without .index.")
    if len(table) < FOOTER_BYTES or table[-8:] != MAGIC:
        raise InputError(f"{path} is truncated, or not the index of a TensorFlow checkpoint. Download the file again.")
    try:
        footer = _Cursor(table[-FOOTER_BYTES:])
        _read_block(table, footer)  # the metaindex, which is empty in a checkpoint
        messages = dict[bytes, bytes]()
        handles = [*_parse_block(_read_block(table, footer)).values()]
        if len({*handles}) < len(handles):
            raise InputError("two entries refer to the same block")
        for handle in handles:
            messages |= _parse_block(_read_block(table, _Cursor(handle)))
        header, _ = _parse_fields(messages.pop(b"", b""))
        # a key that begins with NUL names a part of a variable
        names = {key.decode(): message for key, message in messages.items() if key[0]}
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}. Download the file again, or save it again with TensorFlow."
        ) from None
    if 1 not in header:
        raise InputError(f"{path} is invalid: it has no header of a TensorFlow checkpoint. Check the path.")
    if header.get(2, 0):
        raise InputError(
            f"{path} is invalid: big-endian checkpoints are not supported. Save it again on a little-endian machine."
        )
    return header[1], names


def _read_block(table: mmap.mmap | bytes, handle: _Cursor) -> bytes:
    """Return the content of the block at the offset and size in `handle`."""
    offset, size = handle.varint(), handle.varint()
    block = _Cursor(table, offset).take(size + 5)
    if _mask_crc(google_crc32c.value(block[:-4])) != block[-4:]:
        raise InputError(f"the block at byte {offset} does not match its checksum")
    if block[-5]:
        raise InputError(f"the block at byte {offset} is compressed (type {block[-5]}), which is not supported")
    return block[:-5]


def _parse_block(block: bytes) -> dict[bytes, bytes]:
    """Return the values of a block by key. A stored key omits the prefix that it shares with the previous key."""
    n_restarts = int.from_bytes(block[-4:], "little")  # restart points, for binary search
    cursor, key, entries = _Cursor(block[: max(0, len(block) - 4 * n_restarts - 4)]), b"", {}
    while cursor.offset < len(cursor.data):
        shared, rest, size = cursor.varint(), cursor.varint(), cursor.varint()
        if shared > len(key) or shared + rest > MAX_KEY_BYTES:
            raise InputError("a name is damaged")
        key = key[:shared] + cursor.take(rest)
        entries[key] = cursor.take(size)
    return entries


def _parse_fields(message: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """Return the fields of a protobuf message by number: unsigned integers, and strings or messages."""
    numbers, parts = dict[int, int](), dict[int, list[bytes]]()
    cursor = _Cursor(message)
    while cursor.offset < len(message):
        field, wire = divmod(cursor.varint(), 8)
        if wire == 0:
            numbers[field] = cursor.varint()
        elif wire == 2:
            parts.setdefault(field, []).append(cursor.take(cursor.varint()))
        elif wire in (1, 5):
            numbers[field] = int.from_bytes(cursor.take(8 if wire == 1 else 4), "little")
        else:
            raise InputError(f"field {field} has the unknown wire type {wire}")
    return numbers, parts


class _Cursor:
    """Reading position in a buffer."""

    def __init__(self, data: mmap.mmap | bytes, offset: int = 0) -> None:
        self.data, self.offset = data, offset

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        self.offset += size
        if self.offset > len(self.data):
            raise InputError(f"its parts extend to byte {self.offset}, but it has {len(self.data)} bytes")
        return self.data[self.offset - size : self.offset]

    def varint(self) -> int:
        """Return the next varint: each byte holds seven bits, lowest first; its eighth bit is set in all bytes but the last."""
        value = 0
        for i in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return value
        raise InputError("a number is longer than 64 bits")


def _build_table(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a table of `entries`, which must be sorted by key."""
    table = bytearray()
    blocks = [entries[start : start + ENTRIES_PER_BLOCK] for start in range(0, len(entries), ENTRIES_PER_BLOCK)]
    index = [(block[-1][0], _append_block(table, block)) for block in blocks]
    handles = _append_block(table, []) + _append_block(table, index)
    return bytes(table) + handles.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC


def _append_block(table: bytearray, entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Append a block without shared prefixes, in which each entry is a restart point; return its offset and size."""
    block, restarts = bytearray(), []
    for key, value in entries:
        restarts.append(len(block))
        block += _encode_varint(0) + _encode_varint(len(key)) + _encode_varint(len(value)) + key + value
    block += b"".join(number.to_bytes(4, "little") for number in [*restarts, len(restarts)])
    handle = _encode_varint(len(table)) + _encode_varint(len(block))
    table += block + b"\0" + _mask_crc(google_crc32c.value(bytes(block) + b"\0"))  # type 0: not compressed
    return handle


def _encode_field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _encode_varint(number << 3) + _encode_varint(value)
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _encode_varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + _encode_varint(number >> 7) if number >> 7 else bytes([number])


def _mask_crc(crc: int) -> bytes:
    """Return a checksum as it is stored: LevelDB masks it, because the data may contain checksums."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def _mmap(path: Path, remedy: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.read(1) else b""
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. {remedy}") from None
