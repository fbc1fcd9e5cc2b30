"""Time to open a store, and memory to read batches from it, for stores of several sizes.

python benchmarks/data/open_store.py --tokens 1000000 1000000000

The tokens are zeros in sparse files. A sentence ends every 20 tokens, a document every 1,000. Prints one JSON line per size, measured
in a separate process: seconds to open the store (for a small store this includes its verification), and MB of anonymous memory (RssAnon,
which excludes cached pages of files) to open the store and to read batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from xlpre.data.lanes import Lanes
from xlpre.data.sparse_index import PAGE_ITEMS
from xlpre.data.store import (
    ARRAYS,
    FORMAT,
    INDEXES,
    MAX_BYTES_VERIFIED_ON_OPEN,
    META,
    SPLITS,
    TokenStore,
    compute_fingerprint,
)
from xlpre.data.window_layout import DataConfig
from xlpre.data_loader import Loader
from xlpre.objectives.objective import ObjectiveConfig
from xlpre.objectives.registry import build_objective

VOCABULARY = 32_000


def make_store(path: Path, n_tokens: int) -> None:
    """Write a store with `n_tokens` zeros in each split."""
    lengths = {"tokens": 1, "sentences": 20, "documents": 1000}
    for split in SPLITS:
        (path / split).mkdir(parents=True)
        with open(path / split / "tokens.bin", "wb") as file:
            file.truncate(2 * n_tokens)
        for name in ("sentences", "documents"):
            length = lengths[name]
            with open(path / split / f"{name}.bin", "wb") as file:
                for begin in range(length, n_tokens + 1, length << 20):
                    np.arange(begin, min(begin + (length << 20), n_tokens + 1), length).tofile(file)
            page = length * PAGE_ITEMS
            np.arange(page, n_tokens + 1, page).tofile(path / split / f"{name}_index.bin")
    np.ones(VOCABULARY, np.int64).tofile(path / "unigram.bin")
    (path / "vocabulary.model").touch()
    sizes = {name: (path / name).stat().st_size for name in (*ARRAYS, *INDEXES, "unigram.bin", "vocabulary.model")}
    is_verified = sum(sizes.values()) <= MAX_BYTES_VERIFIED_ON_OPEN
    sha256 = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() if is_verified else "" for name in sizes}
    meta = {
        "format": FORMAT,
        "dtype": "uint16",
        "source": {},
        "files": {},
        "bytes": sizes,
        "sha256": sha256,
        "vocab_size": VOCABULARY,
        "vocabulary_sha256": "",
        "preprocess": "cased",
        "sentencepiece": "0.2.1",
        **{f"{split}_n_{name}": n_tokens // length for split in SPLITS for name, length in lengths.items()},
        "fingerprint": compute_fingerprint("", "cased", sha256),
    }
    (path / META).write_text(json.dumps(meta), encoding="utf-8")


def anonymous_mb() -> float:
    """Return RssAnon of this process in MB."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3


def measure(path: Path, n_batches: int) -> dict:
    """Open a store and read batches of 32 rows of 512 tokens. Return the seconds and MB to print."""
    before = anonymous_mb()
    start = time.perf_counter()
    store = TokenStore(path)
    seconds = time.perf_counter() - start
    after_open = anonymous_mb()
    data = DataConfig()
    starts_word = np.random.default_rng(0).random(VOCABULARY) < 0.7
    lanes = Lanes(
        store.train,
        32,
        stride=data.reuse_len,
        lookahead=data.lookahead,
        windows_per_run=data.windows_per_run,
        bidirectional=True,
        seed=1,
    )
    loader = Loader(lanes, data, build_objective(ObjectiveConfig(), data, starts_word), 1)
    for step in range(20):
        loader.batch(step * 1000, range(32))
    after_warmup = anonymous_mb()
    for step in range(n_batches):
        loader.batch(step * 1000, range(32))  # far apart, so that each batch reads other parts of the text
    return {
        "tokens": len(store.train),
        "seconds_to_open": round(seconds, 4),
        "mb_to_open": round(after_open - before, 2),
        "mb_of_more_batches": round(anonymous_mb() - after_warmup, 2),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1_000_000, 1_000_000_000], help="sizes of the store")
    parser.add_argument("--batches", type=int, default=300, help="batches to read")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.batches)))
        return
    for n_tokens in args.tokens:
        with tempfile.TemporaryDirectory() as folder:
            make_store(Path(folder) / "store", n_tokens)
            command = [sys.executable, __file__, "--measure", f"{folder}/store", "--batches", str(args.batches)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
