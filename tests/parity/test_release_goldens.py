"""The original's TensorFlow checkpoint, read without TensorFlow, gives the original's outputs."""

import json
import shutil

import numpy as np
import pytest

from tests.parity.goldens import GOLDENS
from tests.parity.xlnet import check_window, first_memory_of
from xlpre.conversion.model_folder import load_folder

RELEASE, OUTPUTS = GOLDENS / "tf_release_untie", GOLDENS / "xlnet_pretrain_base_untie_bi.npz"


@pytest.mark.skipif(not RELEASE.is_dir() or not OUTPUTS.exists(), reason=f"no release in {GOLDENS}; set XLPRE_GOLDENS")
def test_a_release_gives_the_originals_outputs(tmp_path):
    arrays = dict(np.load(OUTPUTS))
    config = json.loads(str(arrays["config"]))
    folder = load_folder(RELEASE)
    assert folder.kind == "tensorflow" and folder.tokenizer is None and folder.config.vocab_size == config["n_token"]
    model = folder.model()
    check_window(model, arrays, config, first_memory_of(arrays, config))


@pytest.mark.skipif(not RELEASE.is_dir(), reason=f"no release in {GOLDENS}; set XLPRE_GOLDENS")
def test_a_damaged_release_is_refused_whole(tmp_path):
    shutil.copytree(RELEASE, tmp_path / "release")
    for file in (tmp_path / "release").iterdir():
        file.chmod(0o644)
    data = next((tmp_path / "release").glob("*.data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    try:
        load_folder(tmp_path / "release")
    except ValueError as error:
        assert "crc" in str(error).lower() or "damaged" in str(error).lower()
    else:  # the flipped bit lies in an optimizer slot, which nobody reads
        content[: len(content)] = bytes(byte ^ 1 for byte in content)
        data.write_bytes(content)
        with pytest.raises(ValueError):
            load_folder(tmp_path / "release")
