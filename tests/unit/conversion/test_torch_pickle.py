"""Files of torch.save are read as torch reads them; hostile and damaged files are refused, execute nothing and take little memory."""

import builtins
import collections
import io
import pickle
import random
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile

import pytest
import torch
from torch import nn

from xlpre.conversion import torch_pickle
from xlpre.conversion.torch_pickle import (
    Instance,
    StoredTensor,
    named_tensors,
    read_tensors,
    read_torch_file,
)

LEGACY, ZIP = False, True
FORMATS = pytest.mark.parametrize("new_format", [LEGACY, ZIP], ids=["legacy", "zip"])
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def save(content, path, new_format):
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    return path


def resolve(value):
    """Replace stored tensors by tensors."""
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, dict):
        return {key: resolve(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(resolve, value))
    return value


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def legacy_file(path, pickled: bytes, storages=(), protocol=1001, system=SYSTEM):
    """Write a legacy file around a pickle. Storages are (key, number of elements, bytes)."""
    header = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(protocol, 2) + pickle.dumps(system, 2)
    keys = pickle.dumps([key for key, _, _ in storages], 2)
    content = b"".join(struct.pack("<q", size) + data for _, size, data in storages)
    path.write_bytes(header + pickled + keys + content)
    return path


def zip_file(path, pickled: bytes, storages=(), compression=zipfile.ZIP_STORED):
    """Write a zip file around a pickle, as torch names its entries."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, _, data in storages:
            archive.writestr(f"archive/data/{key}", data)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(key="0", size=6, kind="ctorch\nFloatStorage\n", tail=b"N") -> bytes:
    """Reference to a storage."""
    number = b"\x8a\x08" + struct.pack("<q", size)
    tail = tail if tail != b"N" else b""
    return b"(" + text("storage") + kind.encode() + text(key) + text("cpu") + number + tail + b"tQ"


def tensor(source: bytes, offset: bytes = b"K\x00", shape: bytes = b"K\x06\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """Call that rebuilds a tensor."""
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + source + offset + shape + stride + b"\x89}tR"


SIX = [("0", 6, struct.pack("<6f", *range(6)))]


# what torch saves


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_tensors_and_plain_values_are_read_as_torch_reads_them(new_format, protocol, tmp_path):
    base = torch.arange(24.0).view(4, 6)
    content = {
        "views": [base, base.T, base[1:3, ::2], base[2, 3], base[:0], base.unflatten(0, (2, 2))],
        "types": [base.to(dtype) for dtype in torch_pickle.DTYPES.values()],
        "parameter": (nn.Parameter(base.clone()).data, nn.Embedding(3, 2).weight.data),
        "plain": [None, True, False, 0, 255, 65535, -1, 2**31, 2**70, -(2**70), 1.5, float("inf"), "", "é😀", ()],
        "nested": collections.OrderedDict([("a", [[], {}, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]), ("b", {1: 2, None: 3})]),
        "set": {1, "two"},
        "long": list(range(3000)) + [str(i) for i in range(3000)],
    }  # fmt: skip
    torch.save(content, tmp_path / "file", pickle_protocol=protocol, _use_new_zipfile_serialization=new_format)
    expected = {**torch.load(tmp_path / "file", weights_only=False), "nested": dict(content["nested"])}
    assert equal(resolve(read_torch_file(tmp_path / "file")), expected)


@FORMATS
def test_a_module_becomes_its_names_attributes_and_tensors(new_format, tmp_path):
    module = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), "tied": nn.Linear(3, 5)})
    module["tied"].weight = module["inner"][0].weight
    module.note = "kept"
    content = read_torch_file(save(module, tmp_path / "file", new_format))
    assert isinstance(content, Instance) and str(content.of) == "torch.nn.modules.container.ModuleDict"
    assert content.attributes["note"] == "kept"
    tensors = named_tensors(content, tmp_path)
    assert equal(read_tensors(tensors), dict(module.state_dict()))
    assert tensors["tied.weight"].place == tensors["inner.0.weight"].place != tensors["inner.0.bias"].place
    assert read_tensors(tensors)["tied.weight"] is not read_tensors(tensors)["inner.0.bias"]


class Custom(nn.Module):
    """A class that the reader does not know; torch stores its source text in the file."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


@FORMATS
def test_a_class_is_not_imported(new_format, tmp_path, monkeypatch):
    file = save(Custom(), tmp_path / "file", new_format)
    imported = []
    original = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest, **more: imported.append(name) or original(name, *rest, **more)
    )
    monkeypatch.setattr(pickle, "Unpickler", None)
    monkeypatch.setattr(torch, "load", None)
    content = read_torch_file(file)
    monkeypatch.undo()
    assert content.of.name == "Custom" and content.of.module == __name__
    assert not [name for name in imported if "test" in name or name.startswith("torch.nn")]


def test_files_of_python_2_and_of_old_torch_are_read(tmp_path):
    """Str as bytes, OrderedDict from pairs, parts of a storage, parameters without their function, backends and sizes."""
    key = b"U\x01w"
    view = text("view") + b"K\x02K\x04\x87"
    parameter = b"ctorch.nn.parameter\nParameter\n" + tensor(storage(tail=view), shape=b"K\x04\x85") + b"\x88\x86R"
    pairs = b"ccollections\nOrderedDict\n]](" + key + parameter + b"ea\x85R"
    backend = b"ctorch.nn.backends.thnn\n_get_thnn_function_backend\n)R"
    size = b"ctorch\nSize\n(K\x05t\x85R"
    file = legacy_file(tmp_path / "file", b"\x80\x02" + pairs + backend + size + b"\x87.", SIX)
    weights, nothing, shape = read_torch_file(file)
    assert nothing is None and shape == (5,) and resolve(weights)["w"].tolist() == [2, 3, 4, 5]


# hostile files

CANARY = "import pathlib; pathlib.Path({!r}).write_text('executed')"


class Calls:
    """Object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


class BuildsWithState:
    def __reduce__(self):
        return object, (), {"__class__": 1}


def hostile_objects(canary):
    code = CANARY.format(str(canary))
    import os

    return {
        "os.system": Calls(os.system, f"touch {canary}"),
        "eval": Calls(eval, f"__import__('os').system('touch {canary}')"),
        "exec": Calls(exec, code),
        "getattr chain": Calls(getattr, Calls(__import__, "os"), "system"),
        "torch.load": Calls(torch.load, str(canary)),
        "subprocess": Calls(subprocess.Popen, ["touch", str(canary)]),
        "in a list": [1, Calls(exec, code)],
        "as a key": {"a": {"b": Calls(exec, code)}},
        "slots": BuildsWithState(),
        "partial": Calls(__import__("functools").partial, exec, code),
        "bytearray": bytearray(b"x" * 100),
        "complex": 1j,
        "range": range(5),
        "class instance": Calls(collections.Counter, "aab"),
    }


@FORMATS
@pytest.mark.parametrize("name", hostile_objects("x"))
def test_a_pickle_that_calls_anything_is_refused_and_executes_nothing(name, new_format, tmp_path):
    canary = tmp_path / "canary"
    hostile = hostile_objects(canary)[name]
    (tmp_path / "plain").write_bytes(pickle.dumps(hostile, 2))
    file = save({"weight": torch.zeros(2), "x": hostile}, tmp_path / "file", new_format)
    for path in (file, tmp_path / "plain"):
        with pytest.raises(ValueError, match="Nothing was loaded or executed") as caught:
            read_torch_file(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert not canary.exists()


GLOBAL = b"cposix\nsystem\n"
N_STRIDE = b"\x8a\x08" + struct.pack("<q", -1)
HUGE = b"\x8a\x06" + (2**47 - 1).to_bytes(6, "little")
HOSTILE = {
    "INST": b"(" + text("true") + b"iposix\nsystem\n.",
    "OBJ": b"(" + GLOBAL + text("true") + b"o.",
    "NEWOBJ with arguments": GLOBAL + text("true") + b"\x85\x81.",
    "NEWOBJ_EX": GLOBAL + b")}\x92.",
    "NEWOBJ of a value": b"K\x01)\x81.",
    "REDUCE of a value": text("system") + b")R.",
    "REDUCE of an instance": GLOBAL + b")\x81)R.",
    "REDUCE with a list": b"ccollections\nOrderedDict\n]R.",
    "EXT1": b"\x82\x01.",
    "EXT2": b"\x83\x01\x00.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "STACK_GLOBAL, then a call": text("posix") + text("system") + b"\x93" + text("true") + b"\x85R.",
    "STACK_GLOBAL of numbers": b"K\x01K\x02\x93.",
    "attribute of a name": text("torch._utils") + text("_rebuild_tensor_v2.__globals__") + b"\x93)R.",
    "BUILD of a name": GLOBAL + b"}" + text("x") + b"K\x01sb.",
    "BUILD of a list": b"]}b.",
    "BUILD with slots": GLOBAL + b")\x81}}\x86b.",
    "BUILD with a number": GLOBAL + b")\x81K\x01b.",
    "SETITEM of an instance": GLOBAL + b")\x81K\x01K\x02s.",
    "APPEND to an instance": GLOBAL + b")\x81K\x01a.",
    "a name as a key": b"}" + GLOBAL + b"K\x01s.",
    "a tuple as a key": b"}K\x01\x85K\x01s.",
    "a large number as a key": b"}\x8a\x05\x00\x00\x00\x00\x01Ns.",
    "a float as a key": b"}G" + bytes(8) + b"Ns.",
    "no elements, but a huge shape": tensor(storage(), shape=b"K\x00" + HUGE * 2 + b"\x87", stride=HUGE * 3 + b"\x87") + b".",
    "a list in a set": b"\x8f(]\x90.",
    "persistent id in text": b"P0\n.",
    "persistent id: number": b"K\x01Q.",
    "persistent id: empty": b")Q.",
    "persistent id: other kind": b"(" + text("file") + text("/etc/passwd") + b"K\x01K\x01K\x01tQ.",
    "persistent id: no class": b"(" + text("storage") + text("FloatStorage") + text("0") + text("cpu") + b"K\x06tQ.",
    "persistent id: other class": storage(kind="cposix\nsystem\n") + b".",
    "persistent id: class of another module": storage(kind="cos\nFloatStorage\n") + b".",
    "persistent id: text as size": b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + text("6") + b"tQ.",
    "persistent id: key is a number": b"(" + text("storage") + b"ctorch\nFloatStorage\nK\x00" + text("cpu") + b"K\x06tQ.",
    "persistent id: negative size": storage(size=-1) + b".",
    "persistent id: other size": storage() + storage(size=7) + b"\x86.",
    "persistent id: other type": storage() + storage(kind="ctorch\nLongStorage\n") + b"\x86.",
    "persistent id: module without a class": b"(" + text("module") + text("x") + b"NNtQ.",
    "persistent id: part outside": storage(tail=text("v") + b"K\x05K\x04\x87") + b".",
    "storage larger than the file": tensor(storage(size=2**40)) + b".",
    "unknown storage": tensor(storage(key="1")) + b".",
    "tensor larger than its storage": tensor(storage(), shape=b"K\x07\x85") + b".",
    "tensor beyond its storage": tensor(storage(), offset=b"K\x01") + b".",
    "number beyond its storage": tensor(storage(), offset=b"K\x06", shape=b")", stride=b")") + b".",
    "stride beyond its storage": tensor(storage(), shape=b"K\x02\x85", stride=b"K\x06\x85") + b".",
    "expanded tensor": tensor(storage(), shape=HUGE + b"\x85", stride=b"K\x00\x85") + b".",
    "overlapping tensor": tensor(storage(), shape=b"K\x03K\x03\x86", stride=b"K\x01K\x01\x86") + b".",
    "negative stride": tensor(storage(), offset=b"K\x05", stride=N_STRIDE + b"\x85") + b".",
    "negative offset": tensor(storage(), offset=N_STRIDE) + b".",
    "negative size": tensor(storage(), shape=N_STRIDE + b"\x85") + b".",
    "overflowing size": tensor(storage(), shape=HUGE * 3 + b"\x87", stride=HUGE * 3 + b"\x87") + b".",
    "shape of another length": tensor(storage(), shape=b"K\x02K\x03\x86") + b".",
    "shape as a list": tensor(storage(), shape=b"]") + b".",
    "bool in a shape": tensor(storage(), shape=b"\x88\x85") + b".",
    "ninety dimensions": tensor(storage(), shape=b"(" + b"K\x01" * 90 + b"t", stride=b"(" + b"K\x01" * 90 + b"t") + b".",
    "tensor without a storage": tensor(text("storage")) + b".",
    "tensor of an own tuple": tensor(b"K\x01K\x01K\x06\x87") + b".",
    "parameter without a tensor": b"ctorch._utils\n_rebuild_parameter\nK\x01\x89}\x87R.",
    "too many arguments": b"ctorch._utils\n_rebuild_parameter\n(" + b"N" * 9 + b"tR.",
    "huge string": b"X\xff\xff\xff\xff.",
    "huge bytes": b"B\xff\xff\xff\xff.",
    "huge 8-byte string": b"\x8d" + b"\xff" * 7 + b"\x7f.",
    "huge bytearray": b"\x96" + b"\xff" * 7 + b"\x7f.",
    "huge number": b"\x8b\xff\xff\xff\x7f.",
    "long name": b"c" + b"a" * 10_000 + b"\nb\n.",
    "number as text": b"I" + b"9" * 10_000 + b"\n.",
    "old string": b"S'x'\n.",
    "missing value": b"\x85.",
    "missing mark": b"t.",
    "values below a mark": b"K\x01(a.",
    "unfinished mark": b"K\x01(.",
    "several values": b"K\x01K\x02.",
    "no value": b".",
    "missing memo": b"h\x05.",
    "memo of nothing": b"q\x00.",
    "odd items": b"}(K\x01u.",
    "invalid UTF-8": b"X\x01\x00\x00\x00\xff.",
    "protocol 5": b"\x80\x05N.",
    "unknown instruction": b"\xfe.",
    "endless": b"N" * 60_000 + b".",
    "copies of a long list": b"ccollections\nOrderedDict\nq\x00]q\x01(" + b"h\x01" * 1000 + b"K\x01K\x02\x86" * 1000 + b"e"
    + b"h\x00h\x01\x85R" * 2_000 + b".",
    "sets of a long list": b"cbuiltins\nset\nq\x00](" + b"M\x01\x02" * 1_000 + b"eq\x01" + b"h\x00h\x01\x85R" * 2_000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("write", [legacy_file, zip_file])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_with_little_memory(name, write, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_pickle, "MAX_INSTRUCTIONS", 50_000)
    file = write(tmp_path / "file", HOSTILE[name], SIX)
    tracemalloc.start()
    with pytest.raises(ValueError, match="Nothing was loaded or executed") as caught:
        read_tensors({"x": value} if isinstance(value := read_torch_file(file), StoredTensor) else value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert peak < 12e6, f"{peak / 1e6:.0f} MB"


DEEP = {
    "tuples": b")" + b"\x85" * 100_000 + b".",
    "lists": b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list in itself": b"]q\x00h\x00a.",
}


@pytest.mark.parametrize("name", DEEP)
def test_depth_and_cycles_do_not_recurse(name, tmp_path):
    value = read_torch_file(zip_file(tmp_path / "file", DEEP[name]))
    assert not torch_pickle.is_state_dict(value)


def test_a_large_memo_index_takes_no_memory(tmp_path):
    tracemalloc.start()
    assert read_torch_file(zip_file(tmp_path / "file", b"Nr\xff\xff\xff\xff.")) is None
    assert tracemalloc.get_traced_memory()[1] < 12e6
    tracemalloc.stop()


def module(*parts: bytes) -> bytes:
    """Pickle of a module whose submodules are named by letters."""
    attributes = text("_parameters") + b"}" + text("_buffers") + b"}" + text("_modules") + b"}("
    attributes += b"".join(text(chr(97 + i)) + part for i, part in enumerate(parts)) + b"u"
    return b"cm\nM\n)\x81}(" + attributes + b"ub"


def test_a_module_that_contains_itself_or_another_twice_is_refused(tmp_path):
    inside_itself = (
        b"cm\nM\n)\x81q\x00}(" + text("_parameters") + b"}" + text("_buffers") + b"}" + text("_modules") + b"}"
    )
    inside_itself += text("a") + b"h\x00sub."
    nested = module() + b"q\x01"
    for _ in range(40):  # 2^40 paths
        nested = module(nested, b"h\x01") + b"q\x01"
    shared = (
        b"cm\nM\n)\x81}(" + text("_parameters") + b"}q\x02" + text("_buffers") + b"h\x02" + text("_modules") + b"}ub."
    )
    for pickled in (inside_itself, nested + b".", module(module(text("not a module"))) + b".", shared):
        content = read_torch_file(zip_file(tmp_path / "file", pickled))
        with pytest.raises(ValueError, match="is not a module, or is part of a module twice"):
            named_tensors(content, tmp_path)


def test_names_that_would_break_a_message_are_refused(tmp_path):
    for name in ("a\nb", "a" * 2000, 7):
        save({"w": torch.zeros(1), name: torch.zeros(1)}, tmp_path / "file", ZIP)
        assert not torch_pickle.is_state_dict(read_torch_file(tmp_path / "file"))


def test_tensors_that_share_a_storage_cannot_take_more_memory_than_it(tmp_path):
    views = [tensor(storage(size=6), offset=bytes([75, i]), shape=b"K\x05\x85") for i in (0, 1)]
    file = legacy_file(tmp_path / "file", b"}(" + text("a") + views[0] + text("b") + views[1] + b"u.", SIX)
    content = read_torch_file(file)
    assert content["b"].read().tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="tensors overlap or interleave"):
        read_tensors(content)


def test_entries_of_an_archive_that_overlap_or_are_compressed_are_refused(tmp_path):
    storages = [(str(i), 1000, bytes(4000)) for i in range(50)]
    pickled = b"(" + b"".join(tensor(storage(key=key, size=1000)) for key, _, _ in storages) + b"t."
    file = zip_file(tmp_path / "compressed", pickled, storages, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 50_000
    with pytest.raises(ValueError, match="compressed"):
        read_torch_file(file)
    with zipfile.ZipFile(tmp_path / "overlapping", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(4000))
        first = archive.getinfo("archive/data/0")
        for key, _, _ in storages[1:]:
            info = zipfile.ZipInfo(f"archive/data/{key}")
            for name in ("CRC", "file_size", "compress_size", "header_offset", "create_system", "external_attr"):
                setattr(info, name, getattr(first, name))
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info
    with pytest.raises(ValueError, match="overlap"):
        read_torch_file(tmp_path / "overlapping")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"protocol": 1002}, "protocol"),
        ({"system": {**SYSTEM, "little_endian": False}}, "little-endian"),
        ({"system": [1]}, "little-endian"),
        ({"storages": []}, "missing"),
        ({"storages": SIX * 2}, "list of storages"),
        ({"storages": [("0", 5, bytes(20))]}, "size"),
        ({"storages": [("0", 6, bytes(20))]}, "ends within a storage"),
        ({"storages": [("1", 6, bytes(24))]}, "list of storages"),
    ],
)
def test_a_damaged_legacy_file_is_refused(change, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        read_torch_file(legacy_file(tmp_path / "file", tensor(storage()) + b".", **{"storages": SIX, **change}))


@FORMATS
def test_truncated_and_changed_files_are_refused_or_read(new_format, tmp_path):
    """No other error than ValueError, whichever byte is changed; and a truncated file is never read."""
    buffer = io.BytesIO()
    torch.save(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), buffer, _use_new_zipfile_serialization=new_format)
    content, generator = buffer.getvalue(), random.Random(1)
    file = tmp_path / "file"
    for length in sorted(generator.sample(range(len(content)), 50)):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=str(file)):
            read_torch_file(file)
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(generator.choice([1, 1, 3])):
            changed[generator.randrange(len(content))] = generator.randrange(256)
        file.write_bytes(changed)
        try:
            value = read_torch_file(file)
            read_tensors(named_tensors(value, file) if isinstance(value, Instance) else {})
        except ValueError as error:
            assert "\n" not in str(error)


AUDIT = textwrap.dedent("""
    import sys, pathlib
    from xlpre.conversion.torch_pickle import read_torch_file
    b"x".decode("cp437")  # zipfile imports this codec
    files = sorted(pathlib.Path(sys.argv[1]).iterdir())
    forbidden = ("import", "exec", "compile", "os.", "subprocess.", "pickle.", "socket.", "ctypes.", "shutil.")
    events = []
    sys.addaudithook(lambda event, arguments: events.append((event, arguments)) if event.startswith(forbidden) else None)
    for file in files:
        try:
            read_torch_file(file)
        except ValueError:
            pass
    sys.exit(f"{events[:3]}" if events else 0)
""")


def test_python_reports_no_import_call_or_unpickling_while_hostile_files_are_read(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for i, pickled in enumerate([p for p in HOSTILE.values() if len(p) < 10_000]):
        legacy_file(folder / f"legacy_{i}", pickled, SIX)
        zip_file(folder / f"zip_{i}", pickled, SIX)
    for i, hostile in enumerate(hostile_objects(tmp_path / "canary").values()):
        save({"x": hostile}, folder / f"object_{i}", LEGACY)
        save({"x": hostile}, folder / f"object_zip_{i}", ZIP)
    save(Custom(), folder / "module", LEGACY)
    result = subprocess.run([sys.executable, "-c", AUDIT, str(folder)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("new_format", [False, True])
def test_a_tensor_with_a_bit_for_negation_is_refused(new_format, tmp_path):
    path = save({"a": torch.imag(torch.randn(3, dtype=torch.complex64).conj())}, tmp_path / "a.pt", new_format)
    with pytest.raises(ValueError, match="resolve_neg"):
        read_torch_file(path)
