"""Measure the bytes of a DeepSpeed process after updates: `deepspeed_memory.py OUT "PRECISION STAGE OPTION..." ...`."""

import gc
import json
import os
import sys
import time

import torch
from torch import nn

from xlpre.training.config import OptimConfig, TrainConfig
from xlpre.training.deepspeed_engine import build_deepspeed_config, build_engine, init_process_group
from xlpre.training.distributed import init_env


def tensor_bytes() -> dict[int, int]:
    """Return the bytes of all tensor storages by address."""
    sizes = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def added_bytes(before: dict[int, int]) -> int:
    """Return the bytes of storages that are not in `before`."""
    time.sleep(0.05)
    gc.collect()
    return sum(n for address, n in tensor_bytes().items() if address not in before)


def main() -> None:
    """Run the cases one after another."""
    out, *cases = sys.argv[1:]
    init_env()
    device = torch.device("cpu")
    init_process_group(device)
    gc.freeze()  # objects of libraries need not be scanned again
    result = {}
    for case in cases:
        precision, stage, *options = case.split()
        gc.collect()
        before = tensor_bytes()
        model = nn.Sequential(nn.Linear(200, 200), *(nn.Linear(200, 200, bias=False) for _ in range(9)))
        zero = {"stage": int(stage), "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 1000}
        zero |= (
            {"overlap_comm": True} if options == ["overlap"] else {f"offload_{x}": {"device": "cpu"} for x in options}
        )
        train, optim = TrainConfig(global_batch_size=4, micro_batch_size=1, precision=precision), OptimConfig()
        engine = build_engine(
            model, build_deepspeed_config(train, optim, device, 2, {"zero_optimization": zero}), train, optim, device
        )
        x = torch.randn(1, 200, dtype=next(model.parameters()).dtype)
        for _ in range(3):
            loss = engine(x).float().pow(2).mean()
            engine.backward(loss)
            del loss
            engine.step()
        # threads that sent gradients free them slightly later
        result[case] = min(added_bytes(before) for _ in range(5))
        engine.destroy()
        del engine, model
    if os.environ["RANK"] == "0":
        with open(out, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
