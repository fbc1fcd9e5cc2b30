import pytest
import safetensors.torch
import torch

from xlpre.common.files import compute_crc32c
from xlpre.common.safetensors_io import DTYPES, write_tensors


def every_kind_of_tensor():
    torch.manual_seed(0)
    tensors = {f"{dtype}/é": (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(2, 0),
        "also_empty": torch.empty(0),
        "transposed": torch.randn(4, 3).T,
        "expanded": torch.randn(1, 2).expand(3, 2),
        'quoted "name"\n': torch.arange(3),
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("tensors", [every_kind_of_tensor(), {}], ids=["every_kind", "none"])
def test_a_file_has_the_bytes_of_the_safetensors_library(tmp_path, tensors, metadata):
    file = tmp_path / "a.safetensors"
    size, crc = write_tensors(file, tensors, metadata)
    expected = safetensors.torch.save({name: x.contiguous() for name, x in tensors.items()}, metadata)
    assert file.read_bytes() == expected
    assert (size, crc) == (len(expected), compute_crc32c(file))


def test_the_checksum_is_that_of_the_tensors_even_if_the_file_is_damaged_on_its_way_to_the_disk(tmp_path, monkeypatch):
    class Damaging:
        """File whose medium changes a byte of large writes."""

        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def write(self, content):
            content = bytearray(content)
            content[-1] ^= 1
            self._file.write(content)

    expected = write_tensors(tmp_path / "good", {"x": torch.ones(9)})
    monkeypatch.setattr("builtins.open", lambda *args, original=open: Damaging(original(*args)))
    assert write_tensors(tmp_path / "bad", {"x": torch.ones(9)}) == expected
    monkeypatch.undo()
    assert compute_crc32c(tmp_path / "bad") != expected[1]


def test_a_full_disk_is_an_error_of_the_system_with_its_number():
    with pytest.raises(OSError, match="No space left") as refusal:
        write_tensors("/dev/full", {"x": torch.ones(9)})
    assert refusal.value.errno == 28


@pytest.mark.parametrize("other", [lambda x: x, lambda x: x[:2]])
def test_two_names_of_one_tensor_are_refused(tmp_path, other):
    x = torch.ones(4)
    with pytest.raises(ValueError, match="share one tensor"):
        write_tensors(tmp_path / "a", {"a": x, "b": other(x)})
