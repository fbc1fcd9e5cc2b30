"""Files of torch.save, read without unpickling: nothing that the file names is imported or called.

A pickle is a program for a stack machine. `_Machine` runs it with its own implementation of the instructions that torch.save writes (pickle
protocols 2 to 4); Python's `pickle` is not used. Names of classes stay names. Instances become `Instance`, which holds attributes and has
no behavior. The functions that rebuild tensors are replaced by functions of this module, and any other call is refused.

Both formats of torch.save are read: the legacy format (magic number, protocol, system information, pickle, storage keys, storages), and the
zip format (pickle, one uncompressed entry per storage).

Memory is bounded. A pickle has at most `MAX_INSTRUCTIONS` instructions, each of which makes at most one small object, and
`MAX_PICKLE_BYTES` bytes. A tensor is read only on request, from a storage that lies in the file, and has no two elements at the same
place; `read_tensors` reads no storage more than once.

Source: Lib/pickletools.py of Python (instructions); torch/serialization.py and torch/_utils.py (formats).
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, cast

import torch
from torch import Tensor

from xlpre.common.errors import InputError

MAX_INSTRUCTIONS = 1_000_000  # a Transformer-XL of 3 layers has 7,400
MAX_PICKLE_BYTES = 64 << 20  # includes the source text of classes, which torch stores
MAX_STORAGES = 100_000
CHUNK_BYTES = 1 << 20
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 300  # of a class, or of a weight
MAX_TENSORS = 100_000
MAX_DEPTH = 32  # of modules within modules
MAGIC = b"l\xfc\x9cF\xf9 j\xa8P\x19"  # integer in the first pickle of a legacy file
MAX_MAGIC_END = 32  # in bytes
ZIP_MAGIC = b"PK\x03\x04"
PROTOCOL = 1001  # of the legacy format
DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class Name:
    """Class or function that a pickle names. It is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return _shorten(f"{self.module}.{self.name}")


@dataclass(eq=False)
class Instance:
    """Instance of a class, without behavior.

    Attributes:
        of: name of the class.
        attributes: attributes by name.
    """

    of: Name
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Storage:
    """Numbers that tensors view.

    Attributes:
        key: name of the storage in the file.
        dtype: type of its numbers.
        size: number of numbers.
        file: the file that holds it.
        offset: position of the first number in the file, in bytes. The legacy format tells it after the pickle.
    """

    key: str
    dtype: torch.dtype
    size: int
    file: Path
    offset: int = -1

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


@dataclass(eq=False)
class StoredTensor:
    """Tensor in a file. Its size and stride have been checked against its storage.

    Attributes:
        storage: the numbers.
        offset: index of the first element.
        shape: size of each dimension.
        stride: distance in the storage between neighbors along each dimension.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def place(self) -> tuple[Any, ...]:
        """Value that is equal for tensors that share all their elements, such as tied weights."""
        return self.storage.key, self.offset, self.shape, self.stride

    @property
    def reach(self) -> int:
        """Number of elements of the storage from the first to the last element."""
        return (
            0 if 0 in self.shape else 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        )

    def read(self) -> Tensor:
        """Read the tensor from the file: contiguous, with its own memory.

        Raises:
            InputError: the file has changed since it was opened.
        """
        itemsize = self.storage.dtype.itemsize
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.storage.dtype)
        content = bytearray(self.reach * itemsize)
        with open(self.storage.file, "rb") as file:
            file.seek(self.storage.offset + self.offset * itemsize)
            if file.readinto(content) != len(content):
                raise InputError(f"{self.storage.file} cannot be read: it has changed. Copy the file again.")
        flat = torch.frombuffer(content, dtype=self.storage.dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


def is_torch_file(path: Path) -> bool:
    """Return True if `path` is a file that starts like the legacy or the zip format of torch.save."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return _format_of(file) is not None


def read_torch_file(path: str | Path) -> Any:
    """Read a file of torch.save. Nothing in it is imported or executed.

    Args:
        path: file in the legacy or the zip format.

    Returns:
        The saved object, made of None, bool, int, float, str, bytes, list, tuple, dict (also for OrderedDict), set, `Name`, `Instance` and
        `StoredTensor`.

    Raises:
        InputError: the file cannot be read, is damaged, or holds anything else.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if (read := _format_of(file)) is None:
                raise InputError("it is in neither of the two formats of torch.save")
            return read(path, file)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Give a file that torch.save wrote.") from None
    except (ValueError, struct.error, OverflowError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = _shorten(str(error), 200)
        raise InputError(
            f"{path} is refused: {reason}. Give a file that torch.save wrote and that holds only tensors, modules and plain "
            "values. Nothing was loaded or executed."
        ) from None


def _format_of(file: BinaryIO) -> Callable[[Path, BinaryIO], Any] | None:
    """Return the function that reads the format of an open file, or None for another format."""
    start = file.read(MAX_MAGIC_END)
    file.seek(0)
    if start.startswith(ZIP_MAGIC):
        return _read_zip
    return _read_legacy if MAGIC in start else None


def is_state_dict(content: Any) -> TypeGuard[dict[str, StoredTensor]]:
    """Return True if the content of a file is a dict of tensors by name."""
    if not isinstance(content, dict):
        return False
    return all(_is_name(name) and isinstance(value, StoredTensor) for name, value in content.items())


def _is_name(value: Any) -> TypeGuard[str]:
    """Return True for a short string of one line."""
    return isinstance(value, str) and len(value) <= MAX_NAME_BYTES and value.isprintable()


def named_tensors(module: Instance, origin: Path) -> dict[str, StoredTensor]:
    """Return the parameters and buffers of a module by the names that its state dict would have.

    Args:
        module: the module.
        origin: its file, for error messages.

    Raises:
        InputError: a value is not an instance of a module, or a module occurs twice in it.
    """
    tensors: dict[str, StoredTensor] = {}
    seen = set[int]()

    def visit(module: Any, prefix: str, depth: int) -> None:
        attributes = module.attributes if isinstance(module, Instance) else {}
        parts = [attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
        objects = {id(module), *map(id, parts)}
        if not all(isinstance(part, dict) for part in parts) or depth > MAX_DEPTH or len(objects) < 4 or objects & seen:
            part = _shorten(prefix) or "the saved object"
            raise InputError(
                f"{origin} is refused: {part} is not a module, or is part of a module twice. Nothing was loaded."
            )
        seen.update(objects)
        parameters, buffers, modules = (cast(dict[Any, Any], part) for part in parts)
        for name, value in (parameters | buffers | modules).items():
            if not _is_name(name) or not _is_name(prefix + name) or len(tensors) > MAX_TENSORS:
                raise InputError(
                    f"{origin} is refused: its weights have too many or too long names. Nothing was loaded."
                )
            if isinstance(value, StoredTensor):
                tensors[prefix + name] = value
            elif value is not None:
                visit(value, f"{prefix}{name}.", depth + 1)

    visit(module, "", 0)
    return tensors


def read_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read tensors from their file. Names of the same elements get the same tensor.

    Raises:
        InputError: tensors overlap or interleave, so that together they would take more memory or time than the file itself.
    """
    distinct = {tensor.place: tensor for tensor in tensors.values()}
    available = {tensor.storage.key: tensor.storage.size for tensor in distinct.values()}
    for tensor in distinct.values():
        available[tensor.storage.key] -= tensor.reach
        if available[tensor.storage.key] < 0:
            raise InputError(
                f"{tensor.storage.file} is refused: its tensors overlap or interleave. Save copies of them."
            )
    read = {place: tensor.read() for place, tensor in distinct.items()}
    return {name: read[tensor.place] for name, tensor in tensors.items()}


def _read_legacy(path: Path, file: BinaryIO) -> Any:
    storages: dict[str, Storage] = {}
    magic = _Machine(_LimitedReader(file), _no_persistent_id).run()
    protocol = _Machine(_LimitedReader(file), _no_persistent_id).run()
    if magic != int.from_bytes(MAGIC, "little") or protocol != PROTOCOL:
        raise InputError("its legacy format has an unknown protocol version")
    system = _Machine(_LimitedReader(file), _no_persistent_id).run()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise InputError("it was not saved on a little-endian machine")
    content = _Machine(_LimitedReader(file), _PersistentIds(path, storages)).run()
    keys = _Machine(_LimitedReader(file), _no_persistent_id).run()
    if not isinstance(keys, list) or len(keys) > MAX_STORAGES:
        raise InputError("its list of storages is damaged")
    end = path.stat().st_size
    for key in keys:
        if not isinstance(key, str) or key not in storages or storages[key].offset >= 0:
            raise InputError("its list of storages does not fit its tensors")
        storage = storages[key]
        header = file.read(8)
        if len(header) < 8 or int.from_bytes(header, "little", signed=True) != storage.size:
            raise InputError(f"storage {_shorten(key)} does not have the size that its tensors state")
        storage.offset = file.tell()
        if storage.n_bytes > end - storage.offset:
            raise InputError("it ends within a storage")
        file.seek(storage.offset + storage.n_bytes)
    if any(storage.offset < 0 for storage in storages.values()):
        raise InputError("a storage of its tensors is missing")
    return content


def _read_zip(path: Path, file: BinaryIO) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if len(entries) > MAX_STORAGES:
            raise InputError("it has too many entries")
        names = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise InputError("its archive does not hold one data.pkl")
        root = names[0].removesuffix("data.pkl")
        if f"{root}constants.pkl" in entries:
            raise InputError("it is a TorchScript archive, which holds code")
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise InputError("an entry of its archive is compressed, which torch.save does not do")
        if f"{root}byteorder" in entries:
            with archive.open(f"{root}byteorder") as entry:
                if entry.read(16) != b"little":
                    raise InputError("it was not saved on a little-endian machine")
        storages: dict[str, Storage] = {}
        with archive.open(names[0]) as entry:
            content = _Machine(_LimitedReader(entry), _PersistentIds(path, storages)).run()  # type: ignore[arg-type]
        if sum(storage.n_bytes for storage in storages.values()) > path.stat().st_size:
            raise InputError("its storages overlap")
        for key, storage in storages.items():
            info = entries.get(f"{root}data/{key}")
            if info is None or info.file_size != storage.n_bytes:
                raise InputError(f"storage {_shorten(key)} does not have the size that its tensors state")
            with archive.open(info) as entry:
                n_read = sum(
                    len(chunk) for chunk in iter(partial(entry.read, CHUNK_BYTES), b"")
                )  # verifies the checksum
            if n_read != storage.n_bytes:
                raise InputError("it ends within a storage")
            storage.offset = _start_of_entry(file, info)
    return content


def _start_of_entry(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return the position of the data of a zip entry, which follows its local header."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != ZIP_MAGIC:
        raise InputError("the archive is damaged")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    return int(info.header_offset) + 30 + name_bytes + extra_bytes


class _LimitedReader:
    """Reader of one pickle, which refuses to read more than `MAX_PICKLE_BYTES`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, MAX_PICKLE_BYTES

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        self._left -= size
        if self._left < 0:
            raise InputError(f"its pickle is longer than {MAX_PICKLE_BYTES} bytes")
        content = self._file.read(size)
        if len(content) < size:
            raise InputError("it ends within its pickle")
        return content

    def integer(self, size: int, signed: bool = False) -> int:
        """Return a little-endian integer of `size` bytes."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        """Return the text before the next line break."""
        content = bytearray()
        while (byte := self.take(1)) != b"\n":
            content += byte
            if len(content) > MAX_NAME_BYTES:
                raise InputError("its pickle has a name that is too long")
        return content.decode()


def _no_persistent_id(value: Any) -> Any:
    raise InputError("a part of it that has no tensors refers to a storage")


class _PersistentIds:
    """Resolves the references of a pickle to storages and modules.

    Args:
        file: the file that is read.
        storages: storages by key; storages that the pickle refers to are added.
    """

    def __init__(self, file: Path, storages: dict[str, Storage]) -> None:
        self._file, self._storages = file, storages

    def __call__(self, value: Any) -> Any:
        kind = value[0] if isinstance(value, tuple) and value else None
        if kind == "module" and len(value) == 4 and isinstance(value[1], Name):
            return value[1]  # followed by the name of a source file and its text, which are ignored
        if kind == "storage" and len(value) in (5, 6):
            return self._storage(*value[1:5], *value[5:])
        raise InputError("it refers to an object outside of the pickle that is neither a storage nor a module")

    def _storage(self, kind: Any, key: Any, location: Any, size: Any, view: Any = None) -> tuple[Storage, int, int]:
        """Return the storage, and the first index and number of the elements that this reference may use."""
        if not isinstance(kind, Name) or kind.module not in ("torch", "torch.cuda") or kind.name not in DTYPES:
            raise InputError("a storage has an unknown type")
        if not isinstance(key, str) or not _is_count(size):
            raise InputError("a storage has an invalid key or size")
        storage = self._storages.setdefault(key, Storage(key, DTYPES[kind.name], size, self._file))
        if storage.dtype != DTYPES[kind.name] or storage.size != size or len(self._storages) > MAX_STORAGES:
            raise InputError("references to a storage differ in type or size")
        if view is None:
            return storage, 0, size
        if not (isinstance(view, tuple) and len(view) == 3 and all(map(_is_count, view[1:]))):
            raise InputError("a part of a storage has an invalid position")
        _, offset, n_elements = view
        if offset + n_elements > size:
            raise InputError("a part of a storage lies outside of it")
        return storage, offset, n_elements


def _rebuild_tensor(
    source: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any = False,
    backward_hooks: Any = None,
    metadata: Any = None,
) -> StoredTensor:
    """Replace torch._utils._rebuild_tensor and _rebuild_tensor_v2."""
    if metadata:
        raise InputError(
            "a tensor has a bit for negation or conjugation; call resolve_neg() or resolve_conj() before saving it"
        )
    if not (isinstance(source, tuple) and len(source) == 3 and isinstance(source[0], Storage)):
        raise InputError("a tensor has no storage")
    storage, begin, available = source
    for sizes in (shape, stride):
        if not isinstance(sizes, tuple) or len(sizes) > MAX_DIMENSIONS or not all(map(_is_count, sizes)):
            raise InputError("a tensor has an invalid shape or stride")
    if not _is_count(offset) or len(shape) != len(stride):
        raise InputError("a tensor has an invalid shape or stride")
    if not _is_count(math.prod(size or 1 for size in shape)):
        raise InputError("a tensor is too large")
    if 0 in shape:
        return StoredTensor(storage, 0, shape, stride)
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step < reach:
            raise InputError("a tensor uses an element of its storage twice")
        reach += (size - 1) * step
    if offset + reach > available:
        raise InputError("a tensor is larger than its storage")
    return StoredTensor(storage, begin + offset, shape, stride)


def _rebuild_parameter(data: Any, *ignored: Any) -> StoredTensor:
    """Replace torch._utils._rebuild_parameter and torch.nn.Parameter."""
    if not isinstance(data, StoredTensor):
        raise InputError("a parameter has no tensor")
    return data


def _build_dict(items: Any = ()) -> dict[Any, Any]:
    """Replace OrderedDict, with or without a list of pairs."""
    if not isinstance(items, (list, tuple)) or not all(isinstance(x, (list, tuple)) and len(x) == 2 for x in items):
        raise InputError("an OrderedDict is not made of pairs")
    return {_check_key(key): value for key, value in items}


def _build_set(items: Any = ()) -> set[Any]:
    """Replace set."""
    if not isinstance(items, (list, tuple)):
        raise InputError("a set is not made of a list")
    return {_check_key(item) for item in items}


def _build_size(items: Any = ()) -> tuple[Any, ...]:
    """Replace torch.Size, which old versions of torch store in a LayerNorm."""
    if not isinstance(items, (list, tuple)):
        raise InputError("a size is not made of a tuple")
    return tuple(items)


def _ignore_backend() -> None:
    """Replace the function that old versions of torch store in each module to get its backend."""


CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.nn.parameter", "Parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): _build_dict,
    ("__builtin__", "set"): _build_set,
    ("builtins", "set"): _build_set,
    ("torch", "Size"): _build_size,
    ("torch.nn.backends.thnn", "_get_thnn_function_backend"): _ignore_backend,
}
N_ARGUMENTS = {
    _rebuild_tensor: range(4, 8),
    _rebuild_parameter: range(1, 4),
    _build_dict: range(2),
    _build_set: range(2),
    _build_size: range(2),
    _ignore_backend: range(1),
}


def _check_key(key: Any) -> Any:
    """Return a key of a dict or an element of a set.

    Only strings and small integers are hashed. Hashing nested tuples recurses without a limit, and a file could choose large numbers with
    equal hashes, with which a dict takes quadratic time.
    """
    is_small = type(key) is int and abs(key) < 1 << 31
    if key is not None and not is_small and type(key) not in (str, bool, bytes):
        raise InputError("a key is neither a string nor a small integer")
    return key


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _shorten(text: str, length: int = 80) -> str:
    """Return text from a file as printable characters, cut to `length`."""
    text = "".join(character if character.isprintable() else "?" for character in text[: length + 1])
    return text if len(text) <= length else f"{text[:length]}..."


class _Machine:
    """Stack machine that runs one pickle.

    Args:
        reader: the pickle.
        persistent_id: function that resolves a reference to an object outside of the pickle.
    """

    def __init__(self, reader: _LimitedReader, persistent_id: Callable[[Any], Any]) -> None:
        self._reader, self._persistent_id = reader, persistent_id
        self._stack: list[Any] = []
        self._outer_stacks: list[list[Any]] = []  # stacks below each mark
        self._memo: dict[int, Any] = {}
        self._left = MAX_INSTRUCTIONS

    def run(self) -> Any:
        """Run the pickle and return its object."""
        while True:
            self.spend(1)
            code = self._reader.take(1)
            if code == b".":
                if self._outer_stacks or len(self._stack) != 1:
                    raise InputError("its pickle is damaged")
                return self._stack[0]
            if code not in INSTRUCTIONS:
                raise InputError(f"its pickle has the instruction {code!r}, which torch.save does not write")
            INSTRUCTIONS[code](self)

    def spend(self, n_instructions: int) -> None:
        """Count instructions. One that copies a list counts as many times as the list has items, because it may run again and again."""
        self._left -= n_instructions
        if self._left < 0:
            raise InputError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")

    def push(self, value: Any) -> None:
        """Push a value."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Pop a value above the last mark."""
        if not self._stack:
            raise InputError("its pickle takes a value that is not there")
        return self._stack.pop()

    def pop_tuple(self, size: int) -> tuple[Any, ...]:
        """Pop `size` values."""
        return tuple([self.pop() for _ in range(size)][::-1])

    def mark(self) -> None:
        """Start a new stack."""
        self._outer_stacks.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        """Return the values above the last mark, and continue below it."""
        if not self._outer_stacks:
            raise InputError("its pickle takes a mark that is not there")
        items, self._stack = self._stack, self._outer_stacks.pop()
        return items

    def top(self, kind: type) -> Any:
        """Return the value on top, which must be a `kind`."""
        if not self._stack or type(self._stack[-1]) is not kind:
            raise InputError(f"its pickle changes a {kind.__name__} that is not there")
        return self._stack[-1]

    def string(self, n_bytes: int, encoding: str = "utf-8") -> None:
        """Push a string whose size is an integer of `n_bytes`."""
        errors = "surrogatepass" if encoding == "utf-8" else "strict"
        self.push(self._reader.take(self._reader.integer(n_bytes)).decode(encoding, errors))

    def byte_string(self, n_bytes: int) -> None:
        """Push bytes whose number is an integer of `n_bytes`."""
        self.push(self._reader.take(self._reader.integer(n_bytes)))

    def integer(self, n_bytes: int, signed: bool = False) -> None:
        """Push an integer of `n_bytes`."""
        self.push(self._reader.integer(n_bytes, signed))

    def long(self) -> None:
        """Push an integer of up to 255 bytes."""
        self.push(self._reader.integer(self._reader.integer(1), signed=True))

    def real(self) -> None:
        """Push a floating-point number."""
        self.push(struct.unpack(">d", self._reader.take(8))[0])

    def put(self, n_bytes: int) -> None:
        """Store the value on top in the memo, at an index of `n_bytes`."""
        self._memoize(self._reader.integer(n_bytes))

    def put_next(self) -> None:
        """Store the value on top in the memo, at the next index."""
        self._memoize(len(self._memo))

    def _memoize(self, index: int) -> None:
        self._memo[index] = self.pop()
        self.push(self._memo[index])

    def get(self, n_bytes: int) -> None:
        """Push the value of the memo at an index of `n_bytes`."""
        index = self._reader.integer(n_bytes)
        if index not in self._memo:
            raise InputError("its pickle refers to a value that is not there")
        self.push(self._memo[index])

    def append(self, items: Sequence[Any]) -> None:
        """Append values to the list on top."""
        self.top(list).extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        """Add keys and values to the dict on top."""
        target = self.top(dict)
        if len(items) % 2:
            raise InputError("its pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_check_key(key)] = value

    def add_items(self, items: Sequence[Any]) -> None:
        """Add elements to the set on top."""
        self.top(set).update([_check_key(item) for item in items])

    def name(self, module: Any, name: Any) -> None:
        """Push the name of a class or function."""
        if type(module) is not str or type(name) is not str:
            raise InputError("its pickle names a class by something other than a string")
        self.push(Name(module, name))

    def instantiate(self) -> None:
        """Replace a class and its arguments by an instance without attributes."""
        kind, arguments = self.pop_tuple(2)
        if type(kind) is not Name or type(arguments) is not tuple or arguments:
            raise InputError("its pickle builds an object with arguments")
        self.push(Instance(kind))

    def call(self) -> None:
        """Replace a function and its arguments by the result of the function of this module that stands for it."""
        function, arguments = self.pop_tuple(2)
        known = CALLS.get((function.module, function.name)) if type(function) is Name else None
        if known is None:
            called = function if type(function) is Name else "an object that is not a function"
            raise InputError(f"its pickle calls {called}, which is not needed to rebuild tensors")
        if type(arguments) is not tuple or len(arguments) not in N_ARGUMENTS[known]:
            raise InputError(f"its pickle calls {function} with invalid arguments")
        self.spend(sum(len(argument) for argument in arguments if isinstance(argument, (list, tuple))))
        self.push(known(*arguments))

    def set_state(self) -> None:
        """Set the attributes of the instance on top. Attributes of other values, as torch sets for a state dict, are ignored."""
        state = self.pop()
        self.spend(len(state) if type(state) is dict else 0)
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise InputError("its pickle sets attributes by something other than a dict")
        if self._stack and type(self._stack[-1]) is dict:
            return
        self.top(Instance).attributes = state

    def resolve(self) -> None:
        """Replace a reference by what it refers to."""
        self.push(self._persistent_id(self.pop()))

    def start(self) -> None:
        """Read the protocol."""
        if self._reader.integer(1) not in (2, 3, 4):
            raise InputError("its pickle has another protocol than 2, 3 or 4")

    def skip_frame(self) -> None:
        """Skip the size of a frame, which only helps to read ahead."""
        self._reader.take(8)

    def global_name(self) -> None:
        """Push the name on the next two lines."""
        self.name(self._reader.line(), self._reader.line())


INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.start,  # PROTO
    b"\x95": _Machine.skip_frame,  # FRAME
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),  # NEWTRUE
    b"\x89": lambda m: m.push(False),  # NEWFALSE
    b"K": lambda m: m.integer(1),  # BININT1
    b"M": lambda m: m.integer(2),  # BININT2
    b"J": lambda m: m.integer(4, signed=True),  # BININT
    b"\x8a": _Machine.long,  # LONG1
    b"G": _Machine.real,  # BINFLOAT
    b"X": lambda m: m.string(4),  # BINUNICODE
    b"\x8c": lambda m: m.string(1),  # SHORT_BINUNICODE
    b"T": lambda m: m.string(4, "latin-1"),  # BINSTRING: str of Python 2
    b"U": lambda m: m.string(1, "latin-1"),  # SHORT_BINSTRING
    b"B": lambda m: m.byte_string(4),  # BINBYTES
    b"C": lambda m: m.byte_string(1),  # SHORT_BINBYTES
    b"(": _Machine.mark,
    b")": lambda m: m.push(()),  # EMPTY_TUPLE
    b"\x85": lambda m: m.push(m.pop_tuple(1)),  # TUPLE1
    b"\x86": lambda m: m.push(m.pop_tuple(2)),
    b"\x87": lambda m: m.push(m.pop_tuple(3)),
    b"t": lambda m: m.push(tuple(m.pop_mark())),  # TUPLE
    b"]": lambda m: m.push([]),  # EMPTY_LIST
    b"a": lambda m: m.append(m.pop_tuple(1)),  # APPEND
    b"e": lambda m: m.append(m.pop_mark()),  # APPENDS
    b"}": lambda m: m.push({}),  # EMPTY_DICT
    b"s": lambda m: m.set_items(m.pop_tuple(2)),  # SETITEM
    b"u": lambda m: m.set_items(m.pop_mark()),  # SETITEMS
    b"\x8f": lambda m: m.push(set()),  # EMPTY_SET
    b"\x90": lambda m: m.add_items(m.pop_mark()),  # ADDITEMS
    b"q": lambda m: m.put(1),  # BINPUT
    b"r": lambda m: m.put(4),  # LONG_BINPUT
    b"\x94": _Machine.put_next,  # MEMOIZE
    b"h": lambda m: m.get(1),  # BINGET
    b"j": lambda m: m.get(4),  # LONG_BINGET
    b"c": _Machine.global_name,  # GLOBAL
    b"\x93": lambda m: m.name(*m.pop_tuple(2)),  # STACK_GLOBAL
    b"\x81": _Machine.instantiate,  # NEWOBJ
    b"R": _Machine.call,  # REDUCE
    b"b": _Machine.set_state,  # BUILD
    b"Q": _Machine.resolve,  # BINPERSID
}
