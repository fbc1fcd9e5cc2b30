"""Interrupted builds of a store: a killed command or process, a full disk, a second command."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.conftest import REPOSITORY, make_documents
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig

SCRIPT = """
import sys
from xlpre.data import shards
from xlpre.data.store_builder import build_store
from xlpre.text import corpus
from xlpre.text.corpus import TextConfig
from xlpre.text.load_tokenizer import load_tokenizer
corpus.UNIT_BYTES, corpus.SMALL_UNIT_BYTES = 20_000, 0
shards.SHARD_CHARS, shards.BATCH_CHARS = 4000, 1000
source, target, vocabulary, num_processes = sys.argv[1:]
build_store(target, TextConfig(source=source, val_fraction=0.1, num_processes=int(num_processes)), load_tokenizer(vocabulary))
"""


@pytest.fixture
def start():
    """A function that starts a build. Builds that are still running at the end of the test are killed."""
    environment, builds = {**os.environ, "PYTHONPATH": str(REPOSITORY)}, []

    def start_build(*args, **popen_kwargs):
        command = [sys.executable, "-c", SCRIPT, *map(str, args)]
        builds.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **popen_kwargs))
        return builds[-1]

    yield start_build
    for build in builds:
        build.kill()
        build.communicate()


@pytest.fixture
def larger(tmp_path, tokenizer):
    path = tmp_path / "larger.txt"
    path.write_text("\n\n".join("\n".join(document) for document in make_documents(3000)))
    tokenizer.save(tmp_path / "v.model")
    return path, tmp_path / "v.model"


def shards(work):
    return list(work.glob("*/[0-9]*"))


def wait_until(condition, process):
    """Wait until `condition()` is true or the process has finished, for at most a hundred seconds."""
    deadline = time.monotonic() + 100
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    if not condition() and process.poll() != 0:
        process.kill()
        raise AssertionError(process.communicate()[1])


def test_sigkill_at_any_time_loses_no_finished_shard(start, larger, tmp_path):
    path, vocabulary = larger
    assert start(path, tmp_path / "uninterrupted", vocabulary, 1).wait(100) == 0
    work = tmp_path / ".store.unfinished"
    for n_shards in (3, 12, 25):
        process = start(path, tmp_path / "store", vocabulary, 2)
        wait_until(lambda: len(shards(work)) >= n_shards, process)  # noqa: B023 - called in this iteration
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        _, running = psutil.wait_procs(children, timeout=60)  # they notice that their parent is gone
        assert not running
    resumed = start(path, tmp_path / "store", vocabulary, 2)
    assert resumed.wait(100) == 0, resumed.stderr.read()
    for name in json.loads((tmp_path / "uninterrupted" / "meta.json").read_text())["bytes"]:
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes(), name


def test_a_killed_child_process_ends_the_command_with_an_error(start, larger, tmp_path):
    path, vocabulary = larger
    process = start(path, tmp_path / "store", vocabulary, 2)
    wait_until(lambda: shards(tmp_path / ".store.unfinished"), process)
    psutil.Process(process.pid).children()[0].kill()
    assert process.wait(60) != 0 and "an encoding process was killed" in process.stderr.read()


def test_a_second_command_for_the_same_store_is_refused(start, larger, tmp_path, tokenizer):
    path, vocabulary = larger
    process = start(path, tmp_path / "store", vocabulary, 2)
    # the first file is the lock
    wait_until(lambda: len(list((tmp_path / ".store.unfinished").glob("*"))) >= 2, process)
    with pytest.raises(ValueError, match="another command is preparing this store"):
        build_store(tmp_path / "store", TextConfig(source=str(path)), tokenizer)
    assert process.wait(100) == 0


def test_a_full_disk_is_reported_and_finished_shards_are_kept(start, larger, tmp_path):
    path, vocabulary = larger

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    process = start(path, tmp_path / "store", vocabulary, 1, preexec_fn=small_files)  # noqa: PLW1509
    message = process.communicate(timeout=100)[1]
    assert process.returncode != 0 and "File too large" in message
    assert not (tmp_path / "store").exists() and shards(tmp_path / ".store.unfinished")
    resumed = start(path, tmp_path / "store", vocabulary, 1)
    assert resumed.wait(100) == 0
