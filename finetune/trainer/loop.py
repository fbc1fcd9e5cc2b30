"""The loop, the same for all tasks: micro-batches in, updates, metrics, scores, checkpoints; one run after another."""

from __future__ import annotations

from pathlib import Path

import torch

from finetune.config import FinetuneConfig
from finetune.data.examples import Outputs
from finetune.trainer.finalize import finalize, finalize_run, finished_seeds, seed_folder
from finetune.trainer.inputs import RunInputs
from finetune.trainer.logger import Log
from finetune.trainer.trainer import Trainer
from xlpre.common.files import lock_dir
from xlpre.config.loader import save_config
from xlpre.training.deepspeed_engine import build_deepspeed_config, init_process_group
from xlpre.training.distributed import (
    Comm,
    check_shared_filesystem,
    init_env,
    is_rank_zero,
    set_timeout,
    use_device,
    world_size,
)
from xlpre.training.metrics import check_wandb_installed
from xlpre.training.shutdown import ShutdownHandler


def finetune(config: FinetuneConfig) -> None:
    """Train as `config` says, with each seed; stopping at any time and calling it again goes on from the last checkpoint.

    Raises:
        ValueError: settings, examples or a folder that cannot be used, or that are not those of the run that would go on.
    """
    check_wandb_installed(config.train.wandb)
    foundation, run_dir = RunInputs(config), Path(config.run_dir)
    seeds = range(config.seed, config.seed + config.num_seeds)
    finished = finished_seeds(foundation)
    todo = [seed for seed in seeds if seed not in finished]
    init_env()
    device = use_device()
    set_timeout(config.train.timeout_minutes)
    init_process_group(device)
    settings = build_deepspeed_config(
        config.train, config.optim, device, world_size(), config.deepspeed
    )  # refused before anything is written
    comm, stopping = Comm(), ShutdownHandler()
    lock = lock_dir(run_dir, "another fine-tuning goes on in it; wait for it, or stop it") if is_rank_zero() else None
    check_shared_filesystem(run_dir, comm)
    if is_rank_zero():
        print(_opening(foundation, device, settings["zero_optimization"]["stage"], len(todo)), flush=True)
    answers: dict[int, Outputs] = {}
    for seed in todo:
        answered = _run(foundation, seed, comm, device, stopping)
        if answered is None:
            if is_rank_zero():
                print(f"stopped with seed {seed} and saved; the same command goes on from there", flush=True)
            break
        answers[seed] = answered
    else:
        finalize(foundation, list(seeds), answers, comm, device)
    if lock:
        lock.close()


def _run(
    foundation: RunInputs, seed: int, comm: Comm, device: torch.device, stopping: ShutdownHandler
) -> Outputs | None:
    """One run. Returns what it answers to the first dev split; None if it was stopped."""
    config = foundation.config
    job = Trainer(foundation, seed, seed_folder(config, seed), comm, device, stopping)
    if is_rank_zero():
        save_config(config, Path(config.run_dir) / "config.yaml")
    log, course = Log(job), job.course
    if course.step == 0:
        log.measure()
    stopped = False
    while not (job.finished or stopped):
        batches = job.begin_step()
        for micro, batch in enumerate(batches):
            job.engine.set_gradient_accumulation_boundary(micro == len(batches) - 1)
            loss = job.engine(batch.to(device))
            job.engine.backward(loss)
            job.engine.step()  # an update at the boundary
            log.micro_step(loss)
            log.count(batch)
        stopped = course.end_step()
        log.update()
        if course.step % config.eval.every == 0 or job.finished:
            log.measure()
        if course.step % config.train.log_every == 0 or job.finished or stopped:
            log.write()
        if (course.step % config.train.save_every == 0 or stopped) and not job.finished:
            with log.paused():
                job.save()
    job.close()
    log.close()
    return finalize_run(foundation, seed, course.step, course.seconds, comm, device) if job.finished else None


def _opening(foundation: RunInputs, device: torch.device, stage: int, n_runs: int) -> str:
    config, shape = foundation.config, foundation.shape
    dev = ", ".join(f"{len(split.examples):,} {split.name}" for split in foundation.dev)
    start = "new weights of the shape of" if config.from_scratch else "the weights of"
    epochs = config.train.steps * config.train.global_batch_size / len(foundation.train.features)
    return (
        f"{config.name}: {config.task}, {len(foundation.train.examples):,} train, {dev} examples\n"
        f"{start} {config.init_from} ({foundation.folder.kind}; {shape.n_layer} layers, d {shape.d_model})\n"
        f"{n_runs} run(s) to do of {config.num_seeds}: {config.train.steps:,} updates of {config.train.global_batch_size} examples "
        f"({epochs:.1f} epochs), lr {config.optim.lr:g}, {world_size()} process(es) on {device.type}, ZeRO stage {stage}; "
        f"everything goes to {config.run_dir}"
    )
