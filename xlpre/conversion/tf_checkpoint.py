"""TensorFlow checkpoints (V2), read and written without TensorFlow: PREFIX.index and PREFIX.data-0000N-of-0000M.

The index is a table in LevelDB's format: under the empty key a BundleHeaderProto, under each tensor's name a
BundleEntryProto with its type, shape, data file, place and checksum. The data files hold the bare numbers.
Source: tensorflow/core/protobuf/tensor_bundle.proto; LevelDB's doc/table_format.md.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from xlpre.common.files import atomic_write

MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
FOOTER_BYTES = 48
ENTRIES_PER_BLOCK = 64
DTYPE, SHAPE, SHARD, OFFSET, SIZE, CRC, SLICES = range(1, 8)  # the fields of a BundleEntryProto
CHUNK_BYTES = 1 << 20  # copied and summed while it is in the cache
# TensorFlow's numbers of data types; numpy has no bfloat16, so that one is first read as its 16 bits
DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 14: "<u2", 17: "<u2", 19: "<f2"}
BFLOAT16 = 14
DTYPE_NUMBERS = {np.dtype(dtype): number for number, dtype in DTYPES.items() if number != BFLOAT16}


def read_checkpoint(prefix: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Read the tensors of a TensorFlow checkpoint: all that are wanted, each checked, or none.

    Args:
        prefix: the path without `.index`, as TensorFlow takes it.
        wanted: whether to read the tensor of this name; what is not wanted costs neither time nor memory.

    Returns:
        The tensors by name, in the order of their names; bfloat16 becomes float32, which holds it exactly.

    Raises:
        ValueError: a file is missing, damaged or cut short; the checkpoint is big-endian or its index compressed;
            a wanted tensor is partitioned or of a type that is not in `DTYPES`.
    """
    index = Path(f"{prefix}.index")
    n_shards, messages = _read_index(index)
    tensors, shards = {}, dict[Path, mmap.mmap | bytes]()
    for name in filter(wanted, messages):
        try:
            entry, shape = _parse_entry(messages[name], n_shards)
        except ValueError as error:
            raise ValueError(f"{index}: {name} {error}") from None
        path = Path(f"{prefix}.data-{entry[SHARD]:05d}-of-{n_shards:05d}")
        if path not in shards:
            shards[path] = _mapped(path, f"the checkpoint has {n_shards} data file(s), put each beside {index.name}")
        try:
            tensors[name] = _read_tensor(shards[path], entry).reshape(shape)
        except (ValueError, OverflowError) as error:  # reshape's own: 65 dimensions, an empty tensor beyond 64 bits
            raise ValueError(f"{path}: {name}: {error}; fetch the file anew or leave the tensor out") from None
    return tensors


def write_checkpoint(prefix: str | Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint that TensorFlow opens, one data file, not compressed: whole or not at all.

    Args:
        prefix: the path without `.index`; a checkpoint that is there is replaced.
        tensors: by name, of any shape and of the types in `DTYPES` but bfloat16.

    Raises:
        ValueError: a tensor of another type, or a name that cannot be one.
    """
    for name, tensor in tensors.items():
        if not name or name[0] == "\0":  # the header's key; how keys of parts of variables begin
            raise ValueError(f"{prefix}: {name!r} cannot name a tensor, which begins with a character other than NUL")
        if tensor.dtype.newbyteorder("<") not in DTYPE_NUMBERS:
            raise ValueError(f"{prefix}: {name} is {tensor.dtype}, which is not written; convert it, say to float32")
    entries = [(b"", _field(1, 1) + _field(3, _field(1, 1)))]  # num_shards, version.producer
    with atomic_write(f"{prefix}.index") as new_index, atomic_write(f"{prefix}.data-00000-of-00001") as new_shard:
        with open(new_shard, "wb") as file:  # which takes its name before the index does
            for name in sorted(tensors, key=str.encode):
                dtype = tensors[name].dtype.newbyteorder("<")
                content = np.asarray(tensors[name], dtype).tobytes()
                shape = b"".join(_field(2, _field(1, length)) for length in tensors[name].shape)
                entry = _field(DTYPE, DTYPE_NUMBERS[dtype]) + _field(SHAPE, shape)
                entry += _field(OFFSET, file.tell()) + _field(SIZE, len(content))
                entry += _varint(CRC << 3 | 5) + _masked(google_crc32c.value(content))
                entries.append((name.encode(), entry))
                file.write(content)
        new_index.write_bytes(_table(entries))


def _parse_entry(message: bytes, n_shards: int) -> tuple[dict[int, int], tuple[int, ...]]:
    """The numbers of a BundleEntryProto by their fields, and the shape."""
    try:
        numbers, parts = _fields(message)
        shape = tuple(_fields(dim)[0].get(1, 0) for part in parts.get(SHAPE, []) for dim in _fields(part)[1].get(2, []))
    except ValueError as error:
        raise ValueError(f"has a damaged entry, {error}; fetch the file anew") from None
    entry = {field: numbers.get(field, 0) for field in (DTYPE, SHARD, OFFSET, SIZE, CRC)}
    if SLICES in parts:
        raise ValueError("is a partitioned variable, which is not read; save it in one piece or leave it out")
    if entry[DTYPE] not in DTYPES:
        raise ValueError(f"has TensorFlow's data type {entry[DTYPE]}, which is not read; leave it out")
    if math.prod(shape) * np.dtype(DTYPES[entry[DTYPE]]).itemsize != entry[SIZE] or entry[SHARD] >= n_shards:
        raise ValueError(f"of shape {shape} cannot be {entry[SIZE]} bytes of data file {entry[SHARD]}; fetch it anew")
    return entry, shape


def _read_tensor(data: mmap.mmap | bytes, entry: dict[int, int]) -> np.ndarray:
    """The values of a tensor, flat, out of its data file."""
    begin, end = entry[OFFSET], entry[OFFSET] + entry[SIZE]
    if end > len(data):
        raise ValueError(f"it ends at byte {end}, but the file is cut short at {len(data)}")
    raw, crc = np.empty(entry[SIZE], np.uint8), 0
    for start in range(begin, end, CHUNK_BYTES):
        chunk = data[start : min(start + CHUNK_BYTES, end)]  # bytes: google_crc32c takes no memoryview
        crc = google_crc32c.extend(crc, chunk)
        raw[start - begin : start - begin + len(chunk)] = np.frombuffer(chunk, np.uint8)
    if int.from_bytes(_masked(crc), "little") != entry[CRC]:
        raise ValueError("it does not match its checksum")
    values = raw.view(DTYPES[entry[DTYPE]])
    return (values.astype("<u4") << 16).view("<f4") if entry[DTYPE] == BFLOAT16 else values


def _read_index(path: Path) -> tuple[int, dict[str, bytes]]:
    """The number of data files, and each tensor's BundleEntryProto by its name."""
    table = _mapped(path, "give the path of a TensorFlow checkpoint (V2) without .index")
    if len(table) < FOOTER_BYTES or table[-8:] != MAGIC:
        raise ValueError(f"{path}: not the index of a TensorFlow checkpoint, or cut short; fetch the file anew")
    try:
        footer = _Cursor(table[-FOOTER_BYTES:])
        _block(table, footer)  # the metaindex, empty in a checkpoint
        messages = dict[bytes, bytes]()
        for handle in _block_entries(_block(table, footer)).values():
            messages |= _block_entries(_block(table, _Cursor(handle)))
        header, _ = _fields(messages.pop(b"", b""))
        names = {key.decode(): message for key, message in messages.items() if key[0]}  # 0: a part of a variable
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fetch the file anew or save it anew with TensorFlow") from None
    if 1 not in header:
        raise ValueError(f"{path}: a table without the header of a TensorFlow checkpoint; see that the path is right")
    if header.get(2, 0):
        raise ValueError(f"{path}: big-endian numbers are not read; save the checkpoint on a little-endian machine")
    return header[1], names


def _block(table: mmap.mmap | bytes, handle: _Cursor) -> bytes:
    """The content of the block that `handle` gives the offset and size of."""
    offset, size = handle.varint(), handle.varint()
    block = _Cursor(table, offset).take(size + 5)
    if _masked(google_crc32c.value(block[:-4])) != block[-4:]:
        raise ValueError(f"the block at byte {offset} does not match its checksum")
    if block[-5]:
        raise ValueError(f"the block at byte {offset} is compressed (type {block[-5]}), which is not supported")
    return block[:-5]


def _block_entries(block: bytes) -> dict[bytes, bytes]:
    """What a block holds; a key names how much of the last one it begins with."""
    n_restarts = int.from_bytes(block[-4:], "little")  # they serve who searches a key
    cursor, key, entries = _Cursor(block[: max(0, len(block) - 4 * n_restarts - 4)]), b"", {}
    while cursor.at < len(cursor.data):
        shared, rest, size = cursor.varint(), cursor.varint(), cursor.varint()
        key = key[:shared] + cursor.take(rest)
        entries[key] = cursor.take(size)
    return entries


def _fields(message: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """The fields of a protobuf message by number: unsigned integers, and strings or messages."""
    numbers, parts = dict[int, int](), dict[int, list[bytes]]()
    cursor = _Cursor(message)
    while cursor.at < len(message):
        field, wire = divmod(cursor.varint(), 8)
        if wire == 0:
            numbers[field] = cursor.varint()
        elif wire == 2:
            parts.setdefault(field, []).append(cursor.take(cursor.varint()))
        elif wire in (1, 5):
            numbers[field] = int.from_bytes(cursor.take(8 if wire == 1 else 4), "little")
        else:
            raise ValueError(f"field {field} has the unknown wire type {wire}")
    return numbers, parts


class _Cursor:
    def __init__(self, data: mmap.mmap | bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"its parts reach to byte {self.at} of {len(self.data)}")
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        """Seven bits a byte, lowest first, the eighth set in all but the last."""
        value = 0
        for place in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value
        raise ValueError("a number is longer than 64 bits")


def _table(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A table of `entries`, which are in the order of their keys."""
    table = bytearray()
    blocks = [entries[start : start + ENTRIES_PER_BLOCK] for start in range(0, len(entries), ENTRIES_PER_BLOCK)]
    index = [(block[-1][0], _append_block(table, block)) for block in blocks]
    handles = _append_block(table, []) + _append_block(table, index)
    return bytes(table) + handles.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC


def _append_block(table: bytearray, entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Append a block of whole keys, so that each entry is a restart point; return its offset and size."""
    block, restarts = bytearray(), []
    for key, value in entries:
        restarts.append(len(block))
        block += _varint(0) + _varint(len(key)) + _varint(len(value)) + key + value
    block += b"".join(number.to_bytes(4, "little") for number in [*restarts, len(restarts)])
    handle = _varint(len(table)) + _varint(len(block))
    table += block + b"\0" + _masked(google_crc32c.value(bytes(block) + b"\0"))  # type 0: not compressed
    return handle


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + _varint(number >> 7) if number >> 7 else bytes([number])


def _masked(crc: int) -> bytes:
    """A checksum as it is stored, turned and shifted so that data with checksums in it can be summed."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def _mapped(path: Path, hint: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:  # an empty one cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.read(1) else b""
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {hint}") from None
