"""Rows of fine-tuning tasks equal the original (zihangdai/xlnet classifier_utils.py)."""

import numpy as np
import pytest

from finetune.data.features import pad, pair_to_row
from tests.parity.goldens import files


@pytest.mark.parametrize("path", files("data_classifier_features.npz"))
def test_rows_are_built_truncated_and_padded_as_in_the_original(path):
    arrays = np.load(path)
    cases = sorted(name.split("/")[0] for name in arrays.files if name.endswith("/input_ids"))
    assert cases
    for case in cases:
        a, b = (arrays[f"{case}/text_{which}"].tolist() for which in "ab")
        length = int(arrays[f"{case}/max_seq_length"])
        inputs = pad([pair_to_row(a, b, length)], "left", length)
        assert (inputs.input_ids[0] == arrays[f"{case}/input_ids"]).all(), case
        assert (inputs.segment_ids[0] == arrays[f"{case}/segment_ids"]).all(), case
        assert (inputs.padding_mask[0] == (arrays[f"{case}/input_mask"] > 0)).all(), case
