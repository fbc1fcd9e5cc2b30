"""A store has the same bytes with any number of processes and after any number of interruptions."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import make_documents
from tests.unit.data.test_store_builder import texts
from xlpre.data import encoded_documents, shards
from xlpre.data.shards import list_tasks
from xlpre.data.store_builder import build_store
from xlpre.text import corpus
from xlpre.text.corpus import TextConfig, list_units


@pytest.fixture
def small(monkeypatch):
    """Make units, shards and batches so small that a short text has many of them."""
    monkeypatch.setattr(corpus, "UNIT_BYTES", 3000)
    monkeypatch.setattr(corpus, "SMALL_UNIT_BYTES", 0)
    monkeypatch.setattr(shards, "SHARD_CHARS", 2000)
    monkeypatch.setattr(shards, "BATCH_CHARS", 500)


@pytest.fixture
def files(tmp_path):
    """Return a glob of files of every kind, and their documents in order."""
    folder = tmp_path / "text"
    folder.mkdir()
    documents = make_documents(150)
    parts = [documents[i::6] for i in range(6)]
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


def test_any_number_of_processes_writes_the_same_bytes(small, files, tokenizer, tmp_path):
    pattern, documents = files
    stores = [
        build_store(tmp_path / f"store{n}", TextConfig(source=pattern, val_fraction=0.1, num_processes=n), tokenizer)
        for n in (1, 2, 4)
    ]
    assert len(list_units(TextConfig(source=pattern))) > 10
    assert content(stores[0]) == content(stores[1]) == content(stores[2])
    assert len({store.fingerprint for store in stores}) == 1
    assert sum(stores[0].meta[f"{split}_n_documents"] for split in ("train", "val")) == len(documents)
    assert not list(tmp_path.glob(".*"))


def test_a_failed_build_resumes_after_its_shards_with_the_same_bytes(small, files, tokenizer, tmp_path, monkeypatch):
    config = TextConfig(source=files[0], val_fraction=0.1, num_processes=1)
    uninterrupted = build_store(tmp_path / "uninterrupted", config, tokenizer)
    encode, calls = encoded_documents.encode, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) in (9, 20):
            raise OSError(28, "No space left on device")
        return encode(*arguments)

    monkeypatch.setattr(encoded_documents, "encode", failing)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            build_store(tmp_path / "store", config, tokenizer)
        assert not (tmp_path / "store").exists()
    n_until_last_failure = len(calls)
    store = build_store(tmp_path / "store", config, tokenizer)
    assert content(store) == content(uninterrupted)
    monkeypatch.setattr(encoded_documents, "encode", lambda *arguments: calls.append(1) or encode(*arguments))
    n_until_finished = len(calls)
    build_store(tmp_path / "again", config, tokenizer)
    # a build from scratch encodes more than the resumed one
    assert len(calls) - n_until_finished > n_until_finished - n_until_last_failure + 5


def test_a_build_is_not_resumed_by_another_version_of_sentencepiece(small, files, tokenizer, tmp_path, monkeypatch):
    config = TextConfig(source=files[0], val_fraction=0.1, num_processes=1)
    encode, calls = encoded_documents.encode, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        return encode(*arguments)

    monkeypatch.setattr(encoded_documents, "encode", failing)
    with pytest.raises(OSError, match="No space left"):
        build_store(tmp_path / "store", config, tokenizer)
    work = tmp_path / ".store.unfinished"
    finished = sorted(work.glob("*/[0-9]*"))
    with monkeypatch.context() as other_version:
        other_version.setattr(type(tokenizer), "library_version", "9.9")
        with pytest.raises(
            ValueError, match=r"store is invalid: .*unfinished .* the installed 9\.9 .* delete that folder"
        ):
            build_store(tmp_path / "store", config, tokenizer)
        key = list_tasks(work, config, tokenizer)[0].folder
    assert finished and sorted(work.glob("*/[0-9]*")) == finished
    assert list_tasks(work, config, tokenizer)[0].folder != key
    build_store(tmp_path / "store", config, tokenizer)
    assert not work.exists()


def test_only_a_changed_file_is_encoded_again(small, files, tokenizer, tmp_path, monkeypatch):
    config = TextConfig(source=files[0], val_fraction=0.1, num_processes=1)
    broken = tmp_path / "text" / "g.txt"
    broken.write_bytes(b"Ba be.\n\n\xff")
    with pytest.raises(ValueError, match="g.txt, line 3: not UTF-8"):
        build_store(tmp_path / "store", config, tokenizer)
    broken.write_bytes(b"Ba be.\n\nBi bo.")
    encode, encoded = encoded_documents.encode, []
    monkeypatch.setattr(encoded_documents, "encode", lambda batch, *rest: encoded.extend(batch) or encode(batch, *rest))
    build_store(tmp_path / "store", config, tokenizer)
    assert encoded == [["Ba be."], ["Bi bo."]]


def test_many_small_files_share_shards_but_not_documents(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "text").mkdir()
    texts = [f"b{a} b{b} b{c}" for a in "aeiou" for b in "aeiou" for c in "aeiou"]
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(text)
    (tmp_path / "text" / "050.txt").write_text("ba be\n\n" * 60_000)  # large
    config = TextConfig(source=f"{tmp_path}/text/*.txt", val_fraction=0.1, num_processes=1)
    assert [len(group) for group in list_units(config)] == [50, 1, 74]
    tasks, encode = [], shards.EncodeJob.encode
    monkeypatch.setattr(shards.EncodeJob, "encode", lambda *args: tasks.append(encode(*args)))
    store = build_store(tmp_path / "store", config, tokenizer)
    assert len(tasks) == 3
    assert store.meta["train_n_documents"] + store.meta["val_n_documents"] == len(texts) - 1 + 60_000


def test_a_changed_dataset_on_disk_is_encoded_again(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"text": f"Ba {'di ' * length}be."}) for length in range(100)]
    (tmp_path / "set" / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "set" / "b.jsonl").write_text('{"text": null}')
    config = TextConfig(source=f"hf:{tmp_path}/set", val_fraction=0.2, num_processes=1)
    monkeypatch.setattr(shards, "BATCH_CHARS", 100)
    monkeypatch.setattr(shards, "SHARD_CHARS", 1000)
    with pytest.raises(ValueError, match="row .* must be text, not null"):
        build_store(tmp_path / "store", config, tokenizer)
    (tmp_path / "set" / "a.jsonl").write_text("\n".join(row.replace("be.", "do.") for row in rows))
    (tmp_path / "set" / "b.jsonl").write_text('{"text": "Ba do."}')
    store = build_store(tmp_path / "store", config, tokenizer)
    assert {text.split()[-1] for split in (store.train, store.validation) for text in texts(split, tokenizer)} == {
        "do."
    }
    assert sum(store.meta["files"].values()) == sum(path.stat().st_size for path in (tmp_path / "set").iterdir())


class StreamedDataset:
    """A streamed dataset with three shards, one of which fails at a row."""

    num_shards = 3

    def __init__(self, rows, fails_at=None):
        self.rows, self.fails_at = rows, fails_at

    def shard(self, num_shards, index):
        return self._rows(index)

    def _rows(self, index):
        for number, row in enumerate(self.rows[index::3]):
            if index == 1 and number == self.fails_at:
                raise ConnectionError("the network is gone")
            yield {"text": row}


def test_a_failed_download_resumes_after_its_shards(small, tokenizer, tmp_path, monkeypatch):
    rows = ["\n".join(document) for document in make_documents(200)]
    config = TextConfig(source="hf:owner/data", val_fraction=0.1, num_processes=1)
    monkeypatch.setattr(corpus, "open_stream", lambda source, split, prefix="": StreamedDataset(rows))
    uninterrupted = build_store(tmp_path / "uninterrupted", config, tokenizer)
    monkeypatch.setattr(corpus, "open_stream", lambda source, split, prefix="": StreamedDataset(rows, fails_at=50))
    with pytest.raises(
        ValueError, match="'hf:owner/data', after row 50: cannot be read: the network is gone. Run the same command"
    ):
        build_store(tmp_path / "store", config, tokenizer)
    n_shards = len(list(tmp_path.glob(".store.unfinished/*/[0-9]*")))
    assert n_shards > 5 and not (tmp_path / "store").exists()
    monkeypatch.setattr(corpus, "open_stream", lambda source, split, prefix="": StreamedDataset(rows))
    assert content(build_store(tmp_path / "store", config, tokenizer)) == content(uninterrupted)
