"""Text of any kind, with any number of workers and any number of deaths, becomes the same bytes."""

import dataclasses
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY, make_documents
from xlpre.data import building, pieces
from xlpre.data.building import build_store, write_store
from xlpre.text import corpus, document
from xlpre.text.corpus import TextConfig, documents, documents_of, units_of
from xlpre.text.files import Meter
from xlpre.text.tokenizer import Tokenizer, TokenizerConfig, train


@pytest.fixture
def small(monkeypatch):
    """Units, shards and batches so small that a little text makes many."""
    monkeypatch.setattr(corpus, "UNIT_BYTES", 3000)
    monkeypatch.setattr(corpus, "SMALL_BYTES", 0)
    monkeypatch.setattr(building, "SHARD_CHARACTERS", 2000)
    monkeypatch.setattr(building, "BATCH_CHARACTERS", 500)


@pytest.fixture
def files(tmp_path):
    """The same documents in every kind of file, and the glob that names them all."""
    folder = tmp_path / "text"
    folder.mkdir()
    found = make_documents(150)
    parts = [found[i::6] for i in range(6)]
    text = ["\n\n".join("\n".join(document) for document in part) + "\n" for part in parts]
    (folder / "a.txt").write_text(text[0])
    (folder / "b.txt.gz").write_bytes(gzip.compress(text[1].encode()))
    with pyarrow.CompressedOutputStream(str(folder / "c.txt.zst"), "zstd") as file:
        file.write(text[2].encode())
    rows = [{"text": "\n".join(document)} for document in parts[3]]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pyarrow.CompressedOutputStream(str(folder / "e.jsonl.zst"), "zstd") as file:
        file.write("".join(json.dumps({"text": "\n".join(document)}) + "\n" for document in parts[4]).encode())
    table = pyarrow.table({"text": ["\n".join(document) for document in parts[5]]})
    pyarrow.parquet.write_table(table, folder / "f.parquet", row_group_size=7)
    return f"{folder}/*", [document for part in parts for document in part]


def content(store):
    return {name: (store.path / name).read_bytes() for name in store.meta["bytes"]}


def test_any_number_of_workers_writes_the_same_bytes(small, files, tokenizer, tmp_path):
    pattern, found = files
    stores = [
        build_store(tmp_path / f"store{n}", TextConfig(source=pattern, held_out=0.1, workers=n), tokenizer)
        for n in (1, 2, 4)
    ]
    assert len(units_of(TextConfig(source=pattern))) > 10
    assert content(stores[0]) == content(stores[1]) == content(stores[2])
    assert len({store.fingerprint for store in stores}) == 1
    assert sum(store.meta[f"{part}_n_documents"] for store in stores[:1] for part in ("train", "held_out")) == len(
        found
    )
    assert not list(tmp_path.glob(".*"))


@settings(max_examples=60, deadline=None)
@given(
    paragraphs=st.lists(
        st.sampled_from(["", "", "one", "two words", "a longer line, of some words", " \t "]), max_size=60
    ),
    unit=st.integers(1, 50),
    ending=st.sampled_from(["", "\n", "\r\n"]),
)
def test_a_file_cut_into_units_holds_the_same_documents(tmp_path_factory, paragraphs, unit, ending):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(("\r\n" if ending == "\r\n" else "\n").join(paragraphs).encode() + ending.encode())
    config = TextConfig(source=str(path))
    before, corpus.UNIT_BYTES = corpus.UNIT_BYTES, 1 << 30
    try:
        (whole,) = units_of(config)
        expected = list(documents_of(whole, config, Meter()))
        corpus.UNIT_BYTES = unit
        cut = units_of(config)
    finally:
        corpus.UNIT_BYTES = before
    assert [document for units in cut for document in documents_of(units, config, Meter())] == expected


def test_what_was_finished_before_a_death_is_kept_and_the_bytes_are_the_same(
    small, files, tokenizer, tmp_path, monkeypatch
):
    config = TextConfig(source=files[0], held_out=0.1, workers=1)
    whole = build_store(tmp_path / "whole", config, tokenizer)
    encode, calls = pieces.encode, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) in (9, 20):
            raise OSError(28, "No space left on device")
        return encode(*arguments)

    monkeypatch.setattr(pieces, "encode", dying)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            build_store(tmp_path / "store", config, tokenizer)
        assert not (tmp_path / "store").exists()
    n_wasted = len(calls)
    store = build_store(tmp_path / "store", config, tokenizer)
    assert content(store) == content(whole)
    monkeypatch.setattr(pieces, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    n_needed = len(calls)
    build_store(tmp_path / "again", config, tokenizer)
    assert len(calls) - n_needed > n_needed - n_wasted + 5  # a build from the start encodes more than the last one did


def test_a_file_that_changed_is_read_again_and_the_others_are_not(small, files, tokenizer, tmp_path, monkeypatch):
    config = TextConfig(source=files[0], held_out=0.1, workers=1)
    broken = tmp_path / "text" / "g.txt"
    broken.write_bytes(b"Ba be.\n\n\xff")
    with pytest.raises(ValueError, match="g.txt, line 3: not UTF-8"):
        build_store(tmp_path / "store", config, tokenizer)
    broken.write_bytes(b"Ba be.\n\nBi bo.")
    encode, seen = pieces.encode, []
    monkeypatch.setattr(pieces, "encode", lambda batch, *rest: seen.extend(batch) or encode(batch, *rest))
    build_store(tmp_path / "store", config, tokenizer)
    assert seen == [["Ba be."], ["Bi bo."]]


def test_many_small_files_are_few_shards_and_their_documents_stay_apart(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "text").mkdir()
    words = [f"b{a} b{b} b{c}" for a in "aeiou" for b in "aeiou" for c in "aeiou"]
    for number, text in enumerate(words):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(text)
    (tmp_path / "text" / "050.txt").write_text("ba be\n\n" * 60_000)  # large
    config = TextConfig(source=f"{tmp_path}/text/*.txt", held_out=0.1, workers=1)
    assert [len(group) for group in units_of(config)] == [50, 1, 74]
    made, encode = [], building._Job.encode
    monkeypatch.setattr(building._Job, "encode", lambda *given: made.append(encode(*given)))
    store = build_store(tmp_path / "store", config, tokenizer)
    assert len(made) == 3
    assert store.meta["train_n_documents"] + store.meta["held_out_n_documents"] == len(words) - 1 + 60_000


SCRIPT = """
import sys
from xlpre.data import building
from xlpre.text import corpus
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import Tokenizer
corpus.UNIT_BYTES, corpus.SMALL_BYTES = 20_000, 0
building.SHARD_CHARACTERS, building.BATCH_CHARACTERS = 4000, 1000
source, target, vocabulary, workers = sys.argv[1:]
building.build_store(target, TextConfig(source=source, held_out=0.1, workers=int(workers)), Tokenizer.load(vocabulary))
"""


def start(*words, **settings):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", SCRIPT, *map(str, words)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **settings)


@pytest.fixture
def larger(tmp_path, tokenizer):
    path = tmp_path / "larger.txt"
    path.write_text("\n\n".join("\n".join(document) for document in make_documents(3000)))
    tokenizer.save(tmp_path / "v.model")
    return path, tmp_path / "v.model"


def shards(work):
    return list(work.glob("*/[0-9]*"))


def wait_until(condition, process):
    """Until it holds or the process has done its work, for a hundred seconds at most."""
    until = time.monotonic() + 100
    while not condition() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    if not condition() and process.poll() != 0:
        process.kill()
        raise AssertionError(process.communicate()[1])


def test_kill_9_at_any_time_loses_no_finished_shard(larger, tmp_path):
    path, vocabulary = larger
    assert start(path, tmp_path / "whole", vocabulary, 1).wait(100) == 0
    work = tmp_path / ".store.unfinished"
    for wanted in (3, 12, 25):
        process = start(path, tmp_path / "store", vocabulary, 2)
        wait_until(lambda: len(shards(work)) >= wanted, process)  # noqa: B023 - it is asked here
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.3)  # its workers notice that nobody waits for them
    done = start(path, tmp_path / "store", vocabulary, 2)
    assert done.wait(100) == 0, done.stderr.read()
    for name in json.loads((tmp_path / "whole" / "meta.json").read_text())["bytes"]:
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_killed_worker_ends_the_command_with_a_sentence(larger, tmp_path):
    path, vocabulary = larger
    process = start(path, tmp_path / "store", vocabulary, 2)
    wait_until(lambda: shards(tmp_path / ".store.unfinished"), process)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
    assert process.wait(60) != 0 and "a worker was killed" in process.stderr.read()


def test_two_commands_do_not_prepare_one_store(larger, tmp_path, tokenizer):
    path, vocabulary = larger
    process = start(path, tmp_path / "store", vocabulary, 2)
    # the lock, which is held once there is more
    wait_until(lambda: len(list((tmp_path / ".store.unfinished").glob("*"))) >= 2, process)
    with pytest.raises(ValueError, match="another command prepares this store"):
        build_store(tmp_path / "store", TextConfig(source=str(path)), tokenizer)
    assert process.wait(100) == 0


def test_a_full_disk_is_named_and_what_is_finished_stays(larger, tmp_path):
    path, vocabulary = larger

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    process = start(path, tmp_path / "store", vocabulary, 1, preexec_fn=small_files)  # noqa: PLW1509
    message = process.communicate(timeout=100)[1]
    assert process.returncode != 0 and "File too large" in message
    assert not (tmp_path / "store").exists() and shards(tmp_path / ".store.unfinished")
    done = start(path, tmp_path / "store", vocabulary, 1)
    assert done.wait(100) == 0


def texts(part, tokenizer):
    return [tokenizer.decode(ids) for ids in np.split(np.asarray(part.tokens), part.document_ends[:-1])]


@settings(max_examples=15, deadline=None)
@given(copies=st.lists(st.integers(1, 4), min_size=40, max_size=40), deduplicate=st.booleans(), seed=st.integers(0, 9))
def test_no_held_out_document_is_ever_trained_on(tmp_path_factory, tokenizer, copies, deduplicate, seed):
    folder = tmp_path_factory.mktemp("held")
    found = [document for document, n in zip(make_documents(40, seed), copies, strict=True) for _ in range(n)]
    for name, part in (("a", found[::2]), ("b", found[1::2])):
        (folder / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in part))
    config = TextConfig(source=f"{folder}/*.txt", held_out=0.3, deduplicate=deduplicate, workers=1)
    store = build_store(folder / "store", config, tokenizer)
    train_texts, held_out = texts(store.train, tokenizer), texts(store.held_out, tokenizer)
    assert not set(train_texts) & set(held_out)
    assert len(train_texts) + len(held_out) == (40 if deduplicate else len(found))


def test_a_mixture_takes_each_source_as_often_as_its_weight(tmp_path, tokenizer):
    found = make_documents(1200)
    for name, part in (("a", found[:300]), ("b", found[300:600]), ("c", found[600:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(document) for document in part))
    mixture = {f"{tmp_path}/a.txt": 2.5, f"{tmp_path}/b.txt": 1.0, f"{tmp_path}/c.txt": 0.25}
    store = build_store(tmp_path / "store", TextConfig(mixture=mixture, held_out=0.1, workers=2), tokenizer)
    trained, held_out = texts(store.train, tokenizer), texts(store.held_out, tokenizer)
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

    def documents_of(**weights):
        mixture = {f"{tmp_path}/{name}.txt": weight for name, weight in weights.items()}
        config = TextConfig(mixture=mixture, deduplicate=True, held_out=0.2, workers=1)
        store = build_store(tmp_path / "_".join(map(str, weights.values())), config, tokenizer)
        return sorted(texts(store.train, tokenizer)), sorted(texts(store.held_out, tokenizer))

    assert documents_of(a=0.5, b=1.0) == documents_of(b=1.0) == documents_of(a=0.25, b=1.0)


def test_a_dataset_on_disk_that_changed_is_read_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"text": f"Ba {'di ' * length}be."}) for length in range(100)]
    (tmp_path / "set" / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "set" / "b.jsonl").write_text('{"text": null}')
    config = TextConfig(source=f"hf:{tmp_path}/set", held_out=0.2, workers=1)
    monkeypatch.setattr(building, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(building, "SHARD_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="row .* is null"):
        build_store(tmp_path / "store", config, tokenizer)
    (tmp_path / "set" / "a.jsonl").write_text("\n".join(row.replace("be.", "do.") for row in rows))
    (tmp_path / "set" / "b.jsonl").write_text('{"text": "Ba do."}')
    store = build_store(tmp_path / "store", config, tokenizer)
    assert {text.split()[-1] for part in (store.train, store.held_out) for text in texts(part, tokenizer)} == {"do."}
    assert sum(store.meta["files"].values()) == sum(path.stat().st_size for path in (tmp_path / "set").iterdir())


def test_unicode_of_every_plane_survives(tmp_path):
    characters = [chr(plane * 0x10000 + place) for plane in (1, 2, 3, 14, 15, 16) for place in (0x100, 0x101)]
    characters += list("aßжעبअ中한あ😀")
    words = [a + b for a in characters for b in characters[::3]]
    found = [[" ".join(words[i::7])] for i in range(7)] * 3
    tokenizer = train(found, TokenizerConfig(vocab_size=60, character_coverage=1.0))
    store = write_store(tmp_path / "store", found, tokenizer, 0.3, {}, {})
    assert set(texts(store.train, tokenizer)) | set(texts(store.held_out, tokenizer)) == {d[0] for d in found}


def test_a_line_without_end_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("xlpre.text.files.LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.txt"
    with open(path, "wb") as file:
        file.write(b"Ba be.\n\n" + b"bi " * 500_000)
    with pytest.raises(ValueError, match="a.txt, line 3: longer than 1 MB; put a paragraph on a line"):
        list(documents(TextConfig(source=str(path))))
    path.write_bytes(b"Ba\n\x00\x01\x02")
    with pytest.raises(ValueError, match="a.txt, line 2: a zero byte at byte 0 of the line; is it a text file"):
        list(documents(TextConfig(source=str(path))))


def test_a_document_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "LONGEST_DOCUMENT", 20)
    (tmp_path / "a.txt").write_text("ten letter\n" * 5)
    assert [len(document) for document in documents(TextConfig(source=f"{tmp_path}/a.txt"))] == [2, 2, 1]


def test_more_than_65536_pieces_are_32_bit_ids(tmp_path, tokenizer, documents):
    class Large(Tokenizer):  # as far as ids are concerned
        pieces = [*tokenizer.pieces, *(f"▁{i}" for i in range(70_000))]

        def __len__(self):
            return len(self.pieces)

    store = write_store(tmp_path / "store", documents[:200], Large(tokenizer.model), 0.1, {}, {})
    assert store.train.tokens.dtype == np.uint32
    assert dataclasses.is_dataclass(store.train)


class Hub:
    """A streamed dataset in shares, one of which dies at a row, once."""

    num_shards = 3

    def __init__(self, rows, dies_at=None):
        self.rows, self.dies_at = rows, dies_at

    def shard(self, num_shards, index):
        return self._rows(index)

    def _rows(self, index):
        for number, row in enumerate(self.rows[index::3]):
            if index == 1 and number == self.dies_at:
                raise ConnectionError("the network is gone")
            yield {"text": row}


def test_a_dataset_that_dies_in_the_middle_loses_nothing_finished(small, tokenizer, tmp_path, monkeypatch):
    rows = ["\n".join(document) for document in make_documents(200)]
    config = TextConfig(source="hf:owner/data", held_out=0.1, workers=1)
    monkeypatch.setattr(corpus, "streamed", lambda source, split: Hub(rows))
    whole = build_store(tmp_path / "whole", config, tokenizer)
    monkeypatch.setattr(corpus, "streamed", lambda source, split: Hub(rows, dies_at=50))
    with pytest.raises(
        ValueError, match="'hf:owner/data', after row 50: cannot be read: the network is gone; run again"
    ):
        build_store(tmp_path / "store", config, tokenizer)
    kept = len(shards(tmp_path / ".store.unfinished"))
    assert kept > 5 and not (tmp_path / "store").exists()
    monkeypatch.setattr(corpus, "streamed", lambda source, split: Hub(rows))
    assert content(build_store(tmp_path / "store", config, tokenizer)) == content(whole)
