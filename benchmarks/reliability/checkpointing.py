"""What saving costs a training: how long it waits, how long is written beside it, and what the updates meanwhile cost more.

python benchmarks/reliability/checkpointing.py --out reports/reliability/saving.jsonl

One process on a CPU. For each model a line of JSON: seconds that training stands still for a checkpoint (`waits`), seconds until
the checkpoint is there (`lasts`), medians of an update alone and of one while a checkpoint is written. `share` is what saving takes
of a training that saves every `--minutes`: standing still, and slower updates.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from pretrain.config import PretrainConfig
from pretrain.tools.preparation import make_store, make_tokenizer
from pretrain.trainer.trainer import Trainer
from xlpre.common.tables import to_jsonl
from xlpre.config.loader import load_config

WINDOW = ["data.seq_len=128", "data.reuse_len=64", "model.mem_len=96", "train.global_batch_size=2", "eval.batch_size=1"]
MODELS = {
    "13 M": ["model.n_layer=6", "model.d_model=256", "model.n_head=4", "model.d_inner=1024"],
    "117 M (Base)": ["model.n_layer=12", "model.d_model=768", "model.n_head=12", "model.d_inner=3072"],
}
TINY = ["model.n_layer=2", "model.d_model=16", "model.n_head=2", "model.d_inner=32"]


def update(job, batches):
    """Seconds of one."""
    begun = time.perf_counter()
    job.begin_step()
    batch = next(batches)
    loss, memory = job.engine(batch, job.memories[0])
    job.engine.backward(loss)
    job.engine.step()
    job.carry(0, batch, memory)
    job.end_step()
    return time.perf_counter() - begun


def measure(words, saves, between):
    """Save `saves` times, with so many updates `between`."""
    job = Trainer(load_config(PretrainConfig, None, words))
    batches = job.batches()
    for _ in range(3):
        update(job, batches)
    alone, beside, waits, lasts = [], [], [], []
    for _ in range(saves):
        alone += [update(job, batches) for _ in range(between)]
        begun = time.perf_counter()
        job.save()
        waits.append(time.perf_counter() - begun)
        while job.writer.in_progress:
            beside.append(update(job, batches))
        lasts.append(time.perf_counter() - begun)
    n_bytes = sum(f.stat().st_size for f in next((job.run_dir / "checkpoints").iterdir()).rglob("*") if f.is_file())
    n_parameters = sum(p.numel() for p in job.engine.module.parameters())
    batches.close()
    job.close()
    return n_parameters, n_bytes, alone, beside, waits, lasts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="between two checkpoints")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="only to see that it works")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = [f"tokenizer.path={folder}/t.model", f"data.store_dir={folder}/store"]
        size = 300 if words.tiny else 32000
        common += [f"tokenizer.vocab_size={size}", "tokenizer.train_chars=20000000"]
        source = load_config(PretrainConfig, None, [*common, f"text.max_chars={300_000 if words.tiny else 20_000_000}"])
        make_tokenizer(source)
        make_store(source)
        lines = []
        for name, shape in ({"tiny": TINY} if words.tiny else MODELS).items():
            run = [*common, *WINDOW, *shape, f"run_dir={folder}/{name.split()[0]}", "train.keep_last_checkpoints=1"]
            n, n_bytes, alone, beside, waits, lasts = measure(run, words.saves, between=10)
            update_alone = statistics.median(alone)
            slower = sum(beside) - len(beside) * update_alone
            lines.append(
                {
                    "model": name,
                    "parameters": n,
                    "checkpoint_mb": round(n_bytes / 1e6, 1),
                    "waits_s": round(statistics.median(waits), 4),
                    "lasts_s": round(statistics.median(lasts), 3),
                    "update_s": round(update_alone, 4),
                    "update_beside_s": round(statistics.median(beside), 4),
                    "share": round((statistics.mean(waits) + slower / len(waits)) / (words.minutes * 60), 5),
                    "every_minutes": words.minutes,
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    if words.out:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(to_jsonl(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
