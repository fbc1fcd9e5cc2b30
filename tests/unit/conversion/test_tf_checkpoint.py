import math
import tempfile
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.conftest import examples
from tests.parity.goldens import GOLDENS
from xlpre.conversion import tf_checkpoint
from xlpre.conversion.tf_checkpoint import (
    DTYPE_NUMBERS,
    _build_table,
    _encode_field,
    _encode_varint,
    _mask_crc,
    read_checkpoint,
    write_checkpoint,
)

# written by TensorFlow 2.21: a checkpoint of layer/kernel, and one of layer/bias (bfloat16) and step, merged into one
WRITTEN_BY_TENSORFLOW = {
    "index": "00000608021a020801000a116c617965722f62696173080e1204120208031801280635bf437a640606136b65726e656c08011208"
    "1202080212020803281835c0db3d1700040f737465700809120018012006280835bbd79f11000000000100000000a6d5b61600000000010000"
    "0000c0f2a1b0000102740061000000000100000000c96371476608730e" + "00" * 36 + "57fb808b247547db",
    "data-00000-of-00002": "000000000000803f0000004000004040000080400000a040",
    "data-00001-of-00002": "803f003f00c00700000000000000",
}
HEADER = (b"", _encode_field(1, 1))
KERNEL = (
    _encode_field(1, 1) + _encode_field(2, _encode_field(2, _encode_field(1, 2))) + _encode_field(5, 8)
)  # two float32, without their checksum

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(lambda name: name[0] != "\0")
arrays = hnp.arrays(st.sampled_from(list(DTYPE_NUMBERS)), hnp.array_shapes(min_dims=0, min_side=0, max_dims=4))


def assert_same(tensors, expected):
    assert list(tensors) == sorted(expected, key=str.encode)
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert tensor.tobytes() == expected[name].tobytes()


def put(folder: Path, index: bytes, data: bytes = b"") -> Path:
    (folder / "model.ckpt.index").write_bytes(index)
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(data)
    return folder / "model.ckpt"


@pytest.fixture
def prefix(tmp_path) -> Path:
    write_checkpoint(tmp_path / "model.ckpt", {"bias": np.arange(3, dtype="i4"), "kernel": np.ones((2, 3), "f4")})
    return tmp_path / "model.ckpt"


@settings(max_examples=examples(60))
@given(st.dictionaries(names, arrays, max_size=8))
def test_tensors_survive_a_round_trip_bit_for_bit(tensors):
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "a"), tensors)
        assert_same(read_checkpoint(Path(folder, "a")), tensors)


def test_a_thousand_tensors_in_many_blocks_and_chunks_are_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(tf_checkpoint, "CHUNK_BYTES", 16)
    tensors = {f"model/layer_{i}/kernel": np.full((i % 4, 3), i, "f4") for i in range(1000)}
    write_checkpoint(tmp_path / "a", tensors)
    assert_same(read_checkpoint(tmp_path / "a"), tensors)


def test_a_transposed_and_a_big_endian_array_keep_their_values(tmp_path):
    array = np.arange(6, dtype="f4").reshape(2, 3)
    write_checkpoint(tmp_path / "a", {"big": array.astype(">f4"), "transposed": array.T})
    assert_same(read_checkpoint(tmp_path / "a"), {"big": array, "transposed": array.T})


def test_two_data_files_and_bfloat16_of_tensorflow_are_read(tmp_path):
    for ending, content in WRITTEN_BY_TENSORFLOW.items():
        (tmp_path / f"a.{ending}").write_bytes(bytes.fromhex(content))
    bias, kernel = np.array([1, 0.5, -2], "f4"), np.arange(6, dtype="f4").reshape(2, 3)
    assert_same(read_checkpoint(tmp_path / "a"), {"layer/bias": bias, "layer/kernel": kernel, "step": np.array(7)})
    (tmp_path / "a.data-00001-of-00002").unlink()
    with pytest.raises(ValueError, match=r"a\.data-00001-of-00002 .*No such file.* 2 data file"):
        read_checkpoint(tmp_path / "a")


def test_parameters_of_the_original_release_equal_the_recorded_ones():
    prefix, arrays = GOLDENS / "tf_release_untie" / "xlnet_model.ckpt", GOLDENS / "xlnet_pretrain_base_untie_bi.npz"
    if not prefix.with_name("xlnet_model.ckpt.index").exists() or not arrays.exists():
        pytest.skip(f"no {prefix} or no {arrays.name} in {GOLDENS}; set XLPRE_GOLDENS")
    with np.load(arrays) as run:
        expected = {name[len("param/") :]: run[name] for name in run.files if name.startswith("param/")}
    assert len(expected) > 40
    assert_same(read_checkpoint(prefix, lambda name: name in expected), expected)
    assert "model/lm_loss/bias/Adam" in read_checkpoint(prefix)


def test_only_selected_tensors_are_read(prefix):
    data = prefix.with_name("model.ckpt.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:12])
    assert list(read_checkpoint(prefix, lambda name: name == "bias")) == ["bias"]


def test_a_missing_index_or_data_file_is_named(tmp_path, prefix):
    with pytest.raises(ValueError, match=r"model\.ckpt\.index\.index .*No such file.*without \.index"):
        read_checkpoint(f"{prefix}.index")
    prefix.with_name("model.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(ValueError, match=r"model\.ckpt\.data-00000-of-00001 .*No such file.* 1 data file"):
        read_checkpoint(prefix)


@pytest.mark.parametrize("content", [b"", b"text", b"0" * 100])
def test_a_file_that_is_not_a_table_is_refused(tmp_path, content):
    with pytest.raises(ValueError, match=r"model\.ckpt\.index is truncated, or not the index"):
        read_checkpoint(put(tmp_path, content))


@pytest.mark.parametrize(
    ("ending", "length", "tail", "message"),
    [
        ("index", -1, b"", r"model\.ckpt\.index is truncated"),
        ("index", 20, b"!", r"model\.ckpt\.index .*block at byte 0 .*checksum"),
        ("data-00000-of-00001", 35, b"", r"data-00000-of-00001 .*kernel: .*byte 36.*byte 35"),
        ("data-00000-of-00001", 35, b"!", r"data-00000-of-00001 .*kernel: .*checksum"),
    ],
)
def test_damage_is_refused_with_file_and_tensor(prefix, ending, length, tail, message):
    path = prefix.with_name(f"model.ckpt.{ending}")
    content = path.read_bytes()
    path.write_bytes(content[:length] + tail + (content[length + 1 :] if tail else b""))
    with pytest.raises(ValueError, match=message):
        read_checkpoint(prefix, lambda name: name == "kernel")


def test_a_compressed_block_is_refused(tmp_path):
    table = _build_table([HEADER])
    snappy = (
        table[:13] + b"\1" + _mask_crc(google_crc32c.value(table[:13] + b"\1"))
    )  # the block ends before its type byte
    with pytest.raises(ValueError, match=r"block at byte 0 is compressed \(type 1\)"):
        read_checkpoint(put(tmp_path, snappy + table[len(snappy) :]))


def test_a_table_without_the_header_and_big_endian_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.ckpt\.index .*no header"):
        read_checkpoint(put(tmp_path, _build_table([(b"kernel", KERNEL)])))
    with pytest.raises(ValueError, match=r"model\.ckpt\.index .*big-endian"):
        read_checkpoint(put(tmp_path, _build_table([(b"", HEADER[1] + _encode_field(2, 1))])))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (KERNEL + _encode_field(7, b""), "kernel is a partitioned variable"),
        (_encode_field(1, 7), "kernel has TensorFlow's data type 7"),
        (b"\x12\x7f", "kernel has a damaged entry"),
        (b"\x0b", "kernel has a damaged entry: field 1 .*wire type 3"),
        (b"\xff" * 11, "kernel has a damaged entry: .*64 bits"),
        (KERNEL + _encode_field(5, 9), r"kernel of shape \(2,\) .* 9 bytes"),
        (KERNEL + _encode_field(3, 1), r"kernel of shape \(2,\) .* 8 bytes in data file 1"),
    ],
)
def test_an_unreadable_entry_is_refused_only_if_selected(tmp_path, entry, message):
    prefix = put(tmp_path, _build_table([HEADER, (b"kernel", entry)]))
    assert read_checkpoint(prefix, lambda name: False) == {}
    with pytest.raises(ValueError, match=rf"model\.ckpt\.index: {message}"):
        read_checkpoint(prefix)


def test_entries_cannot_take_more_memory_than_the_files(tmp_path):
    """Names that share a long prefix, tensors that share their bytes, and index entries that share a block."""
    content = np.ones(2, "f4").tobytes()
    entry = KERNEL + b"\x35" + _mask_crc(google_crc32c.value(content))
    with pytest.raises(ValueError, match="kernel2: tensors overlap in the data file"):
        read_checkpoint(put(tmp_path, _build_table([HEADER, (b"kernel1", entry), (b"kernel2", entry)]), content))
    with pytest.raises(ValueError, match="a name is damaged"):
        read_checkpoint(put(tmp_path, _build_table([HEADER, (b"k" * 5000, entry)]), content))


@pytest.mark.parametrize("lengths", [[0] * 65, [0, 2**63], [0, 2**64 - 1, 5], [2**62, 2**62], [2**60]])
def test_shapes_larger_than_any_memory_are_refused(tmp_path, lengths):
    shape = b"".join(_encode_field(2, _encode_field(1, length)) for length in lengths)
    entry = (
        _encode_field(1, 1)
        + _encode_field(2, shape)
        + _encode_field(5, 4 * math.prod(lengths))
        + b"\x35"
        + _mask_crc(0)
    )
    with pytest.raises(ValueError, match=r"model\.ckpt.*kernel"):
        read_checkpoint(put(tmp_path, _build_table([HEADER, (b"kernel", entry)])))


def test_unknown_fields_are_skipped(tmp_path):
    unknown = _encode_field(100, 5) + _encode_field(101, b"text") + b"\xb1\x06" + b"8 bytes." + b"\xb5\x06" + b"four"
    entry = unknown + KERNEL + b"\x35" + _mask_crc(google_crc32c.value(bytes(8)))
    prefix = put(tmp_path, _build_table([(b"", HEADER[1] + unknown), (b"kernel", entry)]), bytes(8))
    assert_same(read_checkpoint(prefix), {"kernel": np.zeros(2, "f4")})


@settings(max_examples=examples(300))
@given(st.data())
def test_flipped_and_missing_bytes_are_refused_or_change_nothing(data):
    tensors = {"bias": np.arange(3, dtype="i4"), "empty": np.ones((0, 2)), "kernel": np.ones((2, 3), "f4")}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "a"), tensors)
        path = data.draw(st.sampled_from(sorted(Path(folder).iterdir())))
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, len(content) - 1))
            del content[start : start + data.draw(st.integers(1, len(content)))]
        for start in data.draw(st.lists(st.integers(0, max(0, len(content) - 1)), max_size=3)):
            content[start : start + 1] = data.draw(st.binary(min_size=1, max_size=2))
        path.write_bytes(content)
        try:
            assert_same(read_checkpoint(Path(folder, "a")), tensors)
        except ValueError as error:
            assert folder in str(error)


numbers = st.sampled_from([0, 1, 2, 9, 14, 127, 128, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
messages = st.recursive(
    st.one_of(numbers.map(lambda number: _encode_field(1, number)), st.binary(max_size=6)),
    lambda inner: st.lists(st.tuples(st.integers(0, 8), numbers | inner), max_size=5).map(
        lambda fields: b"".join(_encode_field(number, value) for number, value in fields)
    ),
    max_leaves=12,
)
entries = st.dictionaries(st.binary(min_size=1, max_size=4), messages, max_size=5)


@settings(max_examples=examples(300))
@given(st.just(HEADER[1]) | messages, entries, st.binary(max_size=20))
def test_invalid_entries_with_valid_checksums_give_tensors_or_a_refusal(header, entries, data):
    with tempfile.TemporaryDirectory() as folder:
        prefix = put(Path(folder), _build_table([(b"", header), *sorted(entries.items())]), data)
        try:
            read_checkpoint(prefix)
        except ValueError as error:
            assert folder in str(error)


@settings(max_examples=examples(200))
@given(st.binary(max_size=40), st.one_of(st.none(), st.tuples(numbers, numbers)))
def test_invalid_blocks_with_valid_checksums_are_refused(block, handle):
    handles = [0, len(block), *(handle or (0, len(block)))]  # metaindex and index
    table = block + b"\0" + _mask_crc(google_crc32c.value(block + b"\0"))
    table += b"".join(_encode_varint(number) for number in handles).ljust(40, b"\0") + tf_checkpoint.MAGIC
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ValueError, match=r"model\.ckpt\.index"):
        read_checkpoint(put(Path(folder), table))


def test_an_existing_checkpoint_survives_a_failed_write(prefix, monkeypatch):
    before = read_checkpoint(prefix)
    monkeypatch.setattr(tf_checkpoint, "_build_table", lambda entries: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(prefix, {"kernel": np.zeros(2)})
    assert_same(read_checkpoint(prefix), before)
    assert len(list(prefix.parent.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("", np.ones(2), "the tensor name ''"),
        ("\0kernel", np.ones(2), "the tensor name"),
        ("kernel", np.array(["text"]), "kernel is invalid: .*<U4.*Convert it"),
    ],
)
def test_invalid_names_and_types_are_refused(tmp_path, name, tensor, message):
    with pytest.raises(ValueError, match=rf"a: .*{message}"):
        write_checkpoint(tmp_path / "a", {name: tensor})
    assert list(tmp_path.iterdir()) == []
