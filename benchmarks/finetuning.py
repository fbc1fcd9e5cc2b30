r"""An update of a fine-tuning beside Hugging Face's: pairs of texts as long as MRPC's, 32 at once, in tokens of text a second.

python benchmarks/finetuning.py --config '{"n_layer": 4, "d_model": 256, "n_head": 4, "d_inner": 1024}'
python benchmarks/finetuning.py --data glue_data --vocabulary spiece.model --rounds 5

`xlpre` is what finetune/run.py does in an update: deal, pad, forward, backward, DeepSpeed's engine, clip, AdamW. `hf` is the loop of
Hugging Face's examples with XLNetForSequenceClassification, each batch padded to its longest row; `hf-max` pads to --max-len, as
run_glue.py does if nothing else is said. All read the same batches of random order and start from the same weights; none is timed
unless the loss of the first batch, without dropout, is that of the others. They take turns in one process. Ratios are medians of
pairs of processor time, which neighbours disturb least. One JSON line each. Without --data, lengths are drawn: normal, with MRPC's mean and
deviation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow each other down many times on shared cores
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
from contenders import SIZES, weights_of
from torch import Tensor

from finetune.batches import Dealer, Parts
from finetune.config import TaskDataConfig, TaskTrainConfig
from finetune.evaluation import device_pass_tokens
from finetune.examples import Item
from finetune.inputs import lay_out, pad
from finetune.model import TaskModel
from finetune.task import Task
from finetune.tasks import build_task
from xlpre.model.config import ModelConfig
from xlpre.text.tokenizer import Tokenizer
from xlpre.training.distributed import set_defaults, use_device
from xlpre.training.engine import build_engine, settings_for, start_processes
from xlpre.training.optim import OptimConfig

DEFAULT = {"vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "dropout": 0.1}
MRPC = (
    53.1,
    12.2,
)  # tokens of its training pairs, mean and deviation, in a vocabulary of 32,000 pieces (--data says it)
HEAD = {"summary.dense": "sequence_summary.summary", "logits": "logits_proj"}
AGREE = 1e-4  # nats
OPTIM = OptimConfig(lr=2e-5)


def random_items(c: dict[str, Any], count: int, max_len: int) -> list[Item]:
    """Pairs of random tokens."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        n = int(np.clip(rng.normal(*MRPC), 12, max_len)) - 3
        a, b = np.split(rng.integers(10, c["vocab_size"], n), [n // 2])
        found.append(Item(number, (lay_out(a.tolist(), b.tolist(), max_len),), {"truth": np.int64(number % 2)}))
    return found


class Xlpre:
    """This project's."""

    def __init__(self, c: dict[str, Any], task: Task, theirs: torch.nn.Module, dealer: Dealer, rows: int) -> None:
        shape = ModelConfig(**{name: c[name] for name in SIZES}, dropatt=c["dropout"])
        self._dealer, self._rows, weights = dealer, rows, weights_of(theirs)
        named = dict(theirs.named_parameters())
        for ours, of_hf in HEAD.items():
            weights |= {f"head.{ours}.{part}": named[f"{of_hf}.{part}"] for part in ("weight", "bias")}
        model = TaskModel(shape, task)
        if missing := {name for name, _ in model.named_parameters()} - weights.keys() - {"backbone.mask_embedding"}:
            raise SystemExit(f"no weight for {sorted(missing)}")
        model.put(weights)
        device, train = use_device(), TaskTrainConfig(batch_size=rows, precision="fp32")
        start_processes(device)
        self._engine = build_engine(model, settings_for(train, OPTIM, device, 1, {}), train, OPTIM, device)

    def loss(self) -> float:
        """Of the first batch, without dropout."""
        with torch.no_grad():
            self._engine.eval()
            loss = self._engine(self._read(0))
            self._engine.train()
        return float(loss)

    def update(self, step: int) -> None:
        """Train on a batch."""
        self._engine.backward(self._engine(self._read(step)))
        self._engine.step()

    def _read(self, step: int) -> Parts:
        return self._dealer.update(1, step, self._rows, 1)[0]


class HuggingFace:
    """Theirs; every batch is padded to `length`, or to its longest row."""

    def __init__(
        self,
        c: dict[str, Any],
        state: dict[str, Tensor],
        items: list[Item],
        dealer: Dealer,
        rows: int,
        length: int | None,
    ) -> None:
        self._items, self._dealer, self._rows, self._length = items, dealer, rows, length
        self._model = huggingface(c)
        self._model.load_state_dict(state)
        settings = {"lr": OPTIM.lr, "eps": OPTIM.eps, "weight_decay": OPTIM.weight_decay}
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **settings, fused=True)

    def loss(self) -> float:
        """See Xlpre."""
        with torch.no_grad():
            self._model.eval()
            loss = self._model(**self._read(0)).loss
            self._model.train()
        return float(loss)

    def update(self, step: int) -> None:
        """See Xlpre."""
        self._model(**self._read(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), OPTIM.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _read(self, step: int) -> dict[str, Any]:
        items = [self._items[number] for number in numbers_of(self._dealer, step, self._rows)]
        inputs = pad([item.rows[0] for item in items], "left", self._length)
        return {
            "input_ids": torch.from_numpy(inputs.ids),
            "token_type_ids": torch.from_numpy(inputs.segments),
            "attention_mask": torch.from_numpy(~inputs.padding).float(),
            "labels": torch.tensor([int(item.answers["truth"]) for item in items]),
            "use_mems": False,
        }


def huggingface(c: dict[str, Any]) -> torch.nn.Module:
    """XLNetForSequenceClassification, with biases and a head that count."""
    from transformers import XLNetConfig, XLNetForSequenceClassification

    torch.manual_seed(0)
    sizes = {name: c[name] for name in SIZES}
    config = XLNetConfig(**sizes, ff_activation="gelu_new", summary_last_dropout=c["dropout"], num_labels=2)
    model = XLNetForSequenceClassification(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")):
                parameter.normal_(0, 0.2)
        model.logits_proj.weight.normal_(0, 0.05)  # so that a loss is not that of an even guess
    return model


def numbers_of(dealer: Dealer, step: int, rows: int) -> np.ndarray:
    """The items of a batch."""
    return np.concatenate([part.numbers for part in dealer.update(1, step, rows, 1)[0].parts])


def race(contenders: dict[str, Any], tokens: list[int]) -> list[dict[str, Any]]:
    """A line for each, after an update that is not counted; they take turns."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for step in range(len(tokens)):
        for name, one in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            one.update(step)
            took[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    lines = []
    for name in contenders:
        wall, cpu = (np.array(times[1:]) for times in zip(*took[name], strict=True))
        ours = [seconds for _, seconds in took["xlpre"][1:]]
        lines.append(
            {
                "impl": name,
                "tokens_per_second": round(sum(tokens[1:]) / wall.sum(), 1),
                "tokens_per_cpu_second": round(sum(tokens[1:]) / cpu.sum(), 1),
                "update_cpu_s": round(statistics.median(cpu), 3),
                "times_as_slow_as_xlpre": round(statistics.median(cpu / ours), 3),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="{}", help=f"JSON; what is left out is as in {json.dumps(DEFAULT)}")
    parser.add_argument("--data", help="a folder with MRPC/train.tsv, whose pairs are read")
    parser.add_argument("--vocabulary", type=Path, help="of --data")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    words = parser.parse_args()
    if bool(words.data) != bool(words.vocabulary):
        parser.error("--data and --vocabulary go together")
    set_defaults()
    c = {**DEFAULT, **json.loads(words.config)}
    task = build_task("glue/mrpc", TaskDataConfig(dir=words.data or "", max_len=words.max_len), "last")
    if words.data:
        items = task.encode(task.read("train"), Tokenizer.load(words.vocabulary))
    else:
        items = random_items(c, max(256, (words.rounds + 1) * words.rows), words.max_len)
    dealer = Dealer(items, "left", 0, 1, device_pass_tokens(None, torch.device("cpu")))
    theirs = huggingface(c)
    of_hf = (c, theirs.state_dict(), items, dealer, words.rows)
    contenders = {
        "xlpre": Xlpre(c, task, theirs, dealer, words.rows),
        "hf": HuggingFace(*of_hf, None),
        "hf-max": HuggingFace(*of_hf, words.max_len),
    }
    torch.set_num_threads(words.threads)  # starting DeepSpeed has set them to all
    losses = {name: one.loss() for name, one in contenders.items()}
    if not max(losses.values()) - min(losses.values()) <= AGREE:
        sys.exit(f"losses do not agree: {losses}")
    lengths = np.array([item.length for item in items])
    tokens = [int(lengths[numbers_of(dealer, step, words.rows)].sum()) for step in range(words.rounds + 1)]
    of_all = {
        "rows": words.rows,
        "threads": words.threads,
        "max_len": words.max_len,
        "lengths": {"mean": round(float(lengths.mean()), 1), "deviation": round(float(lengths.std()), 1)},
        "examples": "MRPC" if words.data else "random",
        "config": c,
        "torch": torch.__version__,
    }
    for line in race(contenders, tokens):
        print(json.dumps({**line, "loss": round(losses[line["impl"]], 6), **of_all}), flush=True)


if __name__ == "__main__":
    main()
