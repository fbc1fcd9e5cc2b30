"""`pretrain/inspect_store.py`: statistics of a store."""

import shutil

import numpy as np
import pytest

from pretrain.inspect_store import main
from pretrain.tools.store_statistics import span_probabilities, split_statistics
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig


def test_counts_are_those_of_the_store(store, tokenizer, capsys, tmp_path):
    main([str(store.path), "--picture", str(tmp_path / "store.png"), "--verify", "--samples", "2"])
    output = capsys.readouterr().out
    for split in ("train", "val"):
        for count in ("n_documents", "n_sentences", "n_tokens"):
            assert f"{store.meta[f'{split}_{count}']:,}" in output
    assert "all checksums are correct" in output and output.count("  document ") == 2
    assert (tmp_path / "store.png").read_bytes()[:4] == b"\x89PNG"
    statistics = split_statistics(store.train, tokenizer.starts_word)
    assert statistics.document_lengths.sum() == len(store.train)
    longest, index = statistics.longest[0]
    assert longest == statistics.document_lengths.max() == statistics.document_lengths[index]


def test_damage_that_opening_does_not_check_is_found_on_request(store, tmp_path, monkeypatch, capsys):
    copy = tmp_path / "store"
    shutil.copytree(store.path, copy)
    monkeypatch.setattr("xlpre.data.store.MAX_BYTES_VERIFIED_ON_OPEN", 0)  # as if the store were large
    (file,) = (copy / "val").glob("tokens*")
    content = bytearray(file.read_bytes())
    content[4] ^= 1  # another token of the vocabulary
    file.write_bytes(content)
    main([str(copy), "--samples", "0"])
    assert "checksum" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="does not match its checksum"):
        main([str(copy), "--samples", "0", "--verify"])


def test_unknown_tokens_are_explained(tokenizer, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("".join(f"Ba be {n}\u4e2d\u6587\u5b57.\n\n" for n in range(40)))
    build_store(
        tmp_path / "store", TextConfig(source=str(tmp_path / "a.txt"), val_fraction=0.2, num_processes=1), tokenizer
    )
    main([str(tmp_path / "store")])
    assert "one or more unknown characters" in capsys.readouterr().out


def test_span_probabilities_are_proportional_to_one_over_n():
    probabilities = span_probabilities(5)
    assert probabilities.sum() == pytest.approx(1) and probabilities[0] == 0
    np.testing.assert_allclose(probabilities[1] / probabilities[1:], np.arange(1, 6))


@pytest.mark.parametrize(
    ("args", "message"), [(["--samples", "-1"], "at least 0"), (["--picture", "a.xyz"], "end with one of .png")]
)
def test_invalid_arguments_are_refused_before_the_store_is_opened(args, message):
    with pytest.raises(ValueError, match=message):
        main(["nowhere", *args])
