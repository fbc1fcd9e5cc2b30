import shutil

import numpy as np
import pytest

from pretrain.inspect_store import facts_of, main, theory
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig


def test_counts_and_rates_are_those_of_the_store(store, tokenizer, capsys, tmp_path):
    main([str(store.path), "--picture", str(tmp_path / "store.png"), "--verify", "--samples", "2"])
    shown = capsys.readouterr().out
    for part in ("train", "val"):
        for what in ("n_documents", "n_sentences", "n_tokens"):
            assert f"{store.meta[f'{part}_{what}']:,}" in shown
    assert "every file is as it was written" in shown and shown.count("  document ") == 2
    assert (tmp_path / "store.png").read_bytes()[:4] == b"\x89PNG"
    facts = facts_of(store.train, tokenizer.starts_word)
    assert facts.document_lengths.sum() == len(store.train)
    longest, number = facts.longest[0]
    assert longest == facts.document_lengths.max() == facts.document_lengths[number]


def test_unknown_tokens_are_said_to_be_one_for_many_characters(tokenizer, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("".join(f"Ba be {n}\u4e2d\u6587\u5b57.\n\n" for n in range(40)))
    build_store(
        tmp_path / "store", TextConfig(source=str(tmp_path / "a.txt"), val_fraction=0.2, num_processes=1), tokenizer
    )
    main([str(tmp_path / "store")])
    assert "an unknown token is one unknown character or many in a row" in capsys.readouterr().out


def test_the_theory_of_span_lengths_is_one_over_n():
    shares = theory(5)
    assert shares.sum() == pytest.approx(1) and shares[0] == 0
    np.testing.assert_allclose(shares[1] / shares[1:], np.arange(1, 6))


def test_a_damaged_store_is_named(store, tmp_path):
    broken = shutil.copytree(store.path, tmp_path / "broken")
    (broken / "train" / "sentences.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train/sentences.bin: 0 bytes where"):
        main([str(broken)])


@pytest.mark.parametrize(
    ("args", "message"), [(["--samples", "-1"], "at least 0"), (["--picture", "a.xyz"], "end in .png")]
)
def test_words_that_are_wrong_are_told_before_anything_is_read(args, message):
    with pytest.raises(ValueError, match=message):
        main(["nowhere", *args])
