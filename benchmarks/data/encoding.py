"""Encoding speed against raw SentencePiece, and memory against the size of the text.

python benchmarks/data/encoding.py --vocabulary stores/wiki/vocabulary.model --text wiki_en.txt.gz books_en.txt.gz --times 1 10

One JSON line for the speed on one core (CPU time, the same lines, taking turns), then one for each size: the text `times` over is prepared
by a process of its own, whose largest worker and whose own peak of resident memory are watched.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.text.corpus import TextConfig, read_documents
from xlpre.text.tokenizer import Tokenizer

PREPARE = """
import sys
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig
from xlpre.text.tokenizer import Tokenizer
source, target, vocabulary, workers = sys.argv[1:]
build_store(target, TextConfig(source=source, num_processes=int(workers)), Tokenizer.load(vocabulary))
"""


def speed(tokenizer: Tokenizer, source: str, megabytes: float, repeats: int) -> dict:
    """MB of text a CPU second, of SentencePiece alone and of what goes into a store (ids, ends of sentences and documents)."""
    found = list(read_documents(TextConfig(source=source, max_chars=round(megabytes * 1e6))))
    lines = [line for document in found for line in document]
    size = sum(len(line.encode()) for line in lines) / 1e6
    raw, ours = [], []
    for _ in range(repeats):
        since = time.process_time()
        for begin in range(0, len(lines), 1000):
            tokenizer._processor.encode(lines[begin : begin + 1000], num_threads=1)
        raw.append(size / (time.process_time() - since))
        since = time.process_time()
        stream = iter(found)
        while batch := list(islice(stream, 100)):
            tokenizer.encode_documents(batch)
        ours.append(size / (time.process_time() - since))
    return {
        "what": "encoding on one core",
        "mb": round(size, 1),
        "sentencepiece_mb_per_cpu_second": round(statistics.median(raw), 2),
        "ours_mb_per_cpu_second": round(statistics.median(ours), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(raw, ours, strict=True)), 3),
    }


def memory(vocabulary: str, sources: list[Path], times: int, workers: int) -> dict:
    """Peak resident memory of the command and of its largest worker, and MB/s, for the text `times` over."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(times):
            for source in sources:
                (Path(folder) / f"{number:03d}_{source.name}").symlink_to(source.resolve())
        size = sum(source.stat().st_size for source in sources) * times
        words = [f"{folder}/*.txt", f"{folder}/store", vocabulary, str(workers)]
        since = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", PREPARE, *words])
        own, largest, watched = 0, 0, psutil.Process(process.pid)
        while process.poll() is None:
            try:
                own = max(own, watched.memory_info().rss)
                largest = max([largest, *(child.memory_info().rss for child in watched.children())])
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.05)
        seconds = time.monotonic() - since
        assert process.returncode == 0
        meta = json.loads((Path(folder) / "store" / "meta.json").read_text("utf-8"))
    return {
        "what": "preparing",
        "text_mb": round(size / 1e6, 1),
        "workers": workers,
        "seconds": round(seconds, 1),
        "mb_per_second": round(size / 1e6 / seconds, 2),
        "tokens": meta["train_n_tokens"] + meta["val_n_tokens"],
        "peak_mb": round(own / 1e6, 1),
        "peak_mb_of_a_worker": round(largest / 1e6, 1),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", required=True, help="a SentencePiece model with XLNet's symbols")
    parser.add_argument("--text", nargs="+", required=True, type=Path, help=".txt or .txt.gz files")
    parser.add_argument("--times", nargs="+", type=int, default=[1, 10], help="how often over, for the memory curve")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mb", type=float, default=10, help="of text for the speed on one core")
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = []
        for path in words.text:
            plain.append(Path(folder) / path.name.removesuffix(".gz"))
            content = path.read_bytes()
            plain[-1].write_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)
        print(json.dumps(speed(Tokenizer.load(words.vocabulary), str(plain[0]), words.mb, words.repeats)), flush=True)
        for times in words.times:
            print(json.dumps(memory(words.vocabulary, plain, times, words.workers)), flush=True)


if __name__ == "__main__":
    main()
