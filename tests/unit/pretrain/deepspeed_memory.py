"""What a process keeps after updates with DeepSpeed, in bytes: `states.py OUT "PRECISION STAGE OFFLOADED..." ...`."""

import gc
import json
import os
import sys
import time

import torch
from torch import nn

from xlpre.training.deepspeed_engine import TrainConfig, build_deepspeed_config, build_engine, init_process_group
from xlpre.training.distributed import init_env
from xlpre.training.optimizer import OptimConfig


def tensors() -> dict[int, int]:
    """The bytes of all that were made here, by their place."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def kept_besides(before: dict[int, int]) -> int:
    """Bytes, a moment later."""
    time.sleep(0.05)
    gc.collect()
    return sum(n for place, n in tensors().items() if place not in before)


def main() -> None:
    """Each case in turn."""
    out, *cases = sys.argv[1:]
    init_env()
    device = torch.device("cpu")
    init_process_group(device)
    gc.freeze()  # what libraries made need not be looked at again and again
    result = {}
    for case in cases:
        precision, stage, *offloaded = case.split()
        gc.collect()
        before = tensors()
        model = nn.Sequential(nn.Linear(200, 200), *(nn.Linear(200, 200, bias=False) for _ in range(9)))
        zero = {"stage": int(stage), "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 1000}
        zero |= {f"offload_{name}": {"device": "cpu"} for name in offloaded}
        train, optim = TrainConfig(batch_size=4, accumulation=2, precision=precision), OptimConfig()
        engine = build_engine(
            model, build_deepspeed_config(train, optim, device, 2, {"zero_optimization": zero}), train, optim, device
        )
        x = torch.randn(1, 200, dtype=next(model.parameters()).dtype)
        for _ in range(3):
            loss = engine(x).float().pow(2).mean()
            engine.backward(loss)
            del loss
            engine.step()
        # threads that sent gradients let go of them a little later
        result[case] = min(kept_besides(before) for _ in range(5))
        engine.destroy()
        del engine, model
    if os.environ["RANK"] == "0":
        with open(out, "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
