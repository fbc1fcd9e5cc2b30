"""Speed of encoding compared with SentencePiece alone, and the memory that preparing a store needs for texts of several sizes.

python benchmarks/data/encoding.py --vocabulary stores/wiki/vocabulary.model --text wiki_en.txt.gz books_en.txt.gz --times 1 10

Prints one JSON line with the speed on one core: megabytes of text per CPU second, where xlpre and SentencePiece take turns with the same
lines. Then prints one JSON line for each number N of `--times`: a separate process prepares a store of N copies of the text, and the line
contains the peak resident memory of that process and of its largest worker.
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
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.text.tokenizer import Tokenizer

PREPARE = """
import sys
from xlpre.data.store_builder import build_store
from xlpre.text.corpus import TextConfig
from xlpre.text.load_tokenizer import load_tokenizer
source, target, vocabulary, workers = sys.argv[1:]
build_store(target, TextConfig(source=source, num_processes=int(workers)), load_tokenizer(vocabulary))
"""


def measure_speed(tokenizer: Tokenizer, source: str, megabytes: float, repeats: int) -> dict:
    """Return MB of text per CPU second for SentencePiece alone, and for xlpre, which also computes sentence ends and document ends."""
    documents = list(read_documents(TextConfig(source=source, max_chars=round(megabytes * 1e6))))
    lines = [line for document in documents for line in document]
    size = sum(len(line.encode()) for line in lines) / 1e6
    sentencepiece, xlpre = [], []
    for _ in range(repeats):
        start = time.process_time()
        for begin in range(0, len(lines), 1000):
            tokenizer._processor.encode(lines[begin : begin + 1000], num_threads=1)
        sentencepiece.append(size / (time.process_time() - start))
        start = time.process_time()
        remaining = iter(documents)
        while batch := list(islice(remaining, 100)):
            tokenizer.encode_documents(batch)
        xlpre.append(size / (time.process_time() - start))
    return {
        "benchmark": "encoding on one core",
        "mb": round(size, 1),
        "sentencepiece_mb_per_cpu_second": round(statistics.median(sentencepiece), 2),
        "xlpre_mb_per_cpu_second": round(statistics.median(xlpre), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(sentencepiece, xlpre, strict=True)), 3),
    }


def measure_memory(vocabulary: str, sources: list[Path], times: int, workers: int) -> dict:
    """Prepare a store of `times` copies of the text. Return the peak resident memory and the MB of text per second."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(times):
            for source in sources:
                (Path(folder) / f"{number:03d}_{source.name}").symlink_to(source.resolve())
        size = sum(source.stat().st_size for source in sources) * times
        command = [sys.executable, "-c", PREPARE, f"{folder}/*.txt", f"{folder}/store", vocabulary, str(workers)]
        start = time.monotonic()
        process = subprocess.Popen(command)
        peak, worker_peak, watched = 0, 0, psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, watched.memory_info().rss)
                worker_peak = max([worker_peak, *(child.memory_info().rss for child in watched.children())])
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.05)
        seconds = time.monotonic() - start
        assert process.returncode == 0
        meta = json.loads((Path(folder) / "store" / "meta.json").read_text("utf-8"))
    return {
        "benchmark": "store preparation",
        "text_mb": round(size / 1e6, 1),
        "workers": workers,
        "seconds": round(seconds, 1),
        "mb_per_second": round(size / 1e6 / seconds, 2),
        "tokens": meta["train_n_tokens"] + meta["val_n_tokens"],
        "peak_mb": round(peak / 1e6, 1),
        "worker_peak_mb": round(worker_peak / 1e6, 1),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", required=True, help="SentencePiece model with XLNet's special tokens")
    parser.add_argument("--text", nargs="+", required=True, type=Path, help=".txt or .txt.gz files")
    parser.add_argument(
        "--times",
        nargs="+",
        type=int,
        default=[1, 10],
        help="numbers of copies of the text for which memory is measured",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mb", type=float, default=10, help="MB of text for the speed on one core")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = []
        for path in args.text:
            plain.append(Path(folder) / path.name.removesuffix(".gz"))
            content = path.read_bytes()
            plain[-1].write_bytes(gzip.decompress(content) if path.suffix == ".gz" else content)
        tokenizer = load_tokenizer(args.vocabulary)
        print(json.dumps(measure_speed(tokenizer, str(plain[0]), args.mb, args.repeats)), flush=True)
        for times in args.times:
            print(json.dumps(measure_memory(args.vocabulary, plain, times, args.workers)), flush=True)


if __name__ == "__main__":
    main()
