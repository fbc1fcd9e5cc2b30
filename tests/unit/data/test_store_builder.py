"""What there is of shards in a store: no document in both of its parts, and each as often as it was asked for."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import make_documents
from xlpre.data.store_builder import build_store, write_store
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig
from xlpre.text.tokenizer_training import train_tokenizer


def texts(part, tokenizer):
    return [tokenizer.decode(ids) for ids in np.split(np.asarray(part.tokens), part.document_ends[:-1])]


@settings(max_examples=15, deadline=None)
@given(copies=st.lists(st.integers(1, 4), min_size=40, max_size=40), deduplicate=st.booleans(), seed=st.integers(0, 9))
def test_no_held_out_document_is_ever_trained_on(tmp_path_factory, tokenizer, copies, deduplicate, seed):
    folder = tmp_path_factory.mktemp("held")
    found = [document for document, n in zip(make_documents(40, seed), copies, strict=True) for _ in range(n)]
    for name, part in (("a", found[::2]), ("b", found[1::2])):
        (folder / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in part))
    config = TextConfig(source=f"{folder}/*.txt", val_fraction=0.3, deduplicate=deduplicate, num_processes=1)
    store = build_store(folder / "store", config, tokenizer)
    train_texts, held_out = texts(store.train, tokenizer), texts(store.validation, tokenizer)
    assert not set(train_texts) & set(held_out)
    assert len(train_texts) + len(held_out) == (40 if deduplicate else len(found))


def test_a_mixture_takes_each_source_as_often_as_its_weight(tmp_path, tokenizer):
    found = make_documents(1200)
    for name, part in (("a", found[:300]), ("b", found[300:600]), ("c", found[600:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in part))
    mixture = {f"{tmp_path}/a.txt": 2.5, f"{tmp_path}/b.txt": 1.0, f"{tmp_path}/c.txt": 0.25}
    store = build_store(tmp_path / "store", TextConfig(mixture=mixture, val_fraction=0.1, num_processes=2), tokenizer)
    trained, held_out = texts(store.train, tokenizer), texts(store.validation, tokenizer)
    counts = {}
    for text in trained:
        counts[text] = counts.get(text, 0) + 1
    times = [
        [counts.get(" ".join(document), 0) for document in part] for part in (found[:300], found[300:600], found[600:])
    ]
    mean = [
        sum(part) / sum(1 for n in part if n or weight < 1)
        for part, weight in zip(times, mixture.values(), strict=True)
    ]
    assert set(times[0]) <= {0, 2, 3} and abs(mean[0] - 2.5) < 0.15
    assert set(times[1]) <= {0, 1} and mean[1] == 1
    assert abs(sum(times[2]) / 600 - 0.25 * 0.9) < 0.06
    assert len(held_out) == len(set(held_out)) and not set(trained) & set(held_out)


def test_a_weight_below_one_loses_no_document_that_another_source_has_too(tmp_path, tokenizer):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in make_documents(200)))

    def read_units(**weights):
        mixture = {f"{tmp_path}/{name}.txt": weight for name, weight in weights.items()}
        config = TextConfig(mixture=mixture, deduplicate=True, val_fraction=0.2, num_processes=1)
        store = build_store(tmp_path / "_".join(map(str, weights.values())), config, tokenizer)
        return sorted(texts(store.train, tokenizer)), sorted(texts(store.validation, tokenizer))

    assert read_units(a=0.5, b=1.0) == read_units(b=1.0) == read_units(a=0.25, b=1.0)


def test_unicode_of_every_plane_survives(tmp_path):
    characters = [chr(plane * 0x10000 + place) for plane in (1, 2, 3, 14, 15, 16) for place in (0x100, 0x101)]
    characters += list("aßжעبअ中한あ😀")
    words = [a + b for a in characters for b in characters[::3]]
    found = [[" ".join(words[i::7])] for i in range(7)] * 3
    tokenizer = train_tokenizer(found, TokenizerConfig(vocab_size=60, character_coverage=1.0))
    store = write_store(tmp_path / "store", found, tokenizer, 0.3, {}, {})
    assert set(texts(store.train, tokenizer)) | set(texts(store.validation, tokenizer)) == {d[0] for d in found}


def test_more_than_65536_pieces_are_32_bit_ids(tmp_path, tokenizer, documents):
    class Large(Tokenizer):  # as far as ids are concerned
        pieces = [*tokenizer.pieces, *(f"▁{i}" for i in range(70_000))]

        def __len__(self):
            return len(self.pieces)

    store = write_store(tmp_path / "store", documents[:200], Large(tokenizer.model), 0.1, {}, {})
    assert store.train.tokens.dtype == np.uint32
    assert dataclasses.is_dataclass(store.train)
