"""The loop: micro-batches in, updates, metrics, checkpoints, a model folder at the end."""

from __future__ import annotations

from collections.abc import Collection

from pretrain.config import PretrainConfig
from pretrain.foundation import model_folder
from pretrain.job import Job
from pretrain.log import Log
from xlpre.training.distributed import is_main
from xlpre.training.metrics import check_wandb


def pretrain(config: PretrainConfig, typed: Collection[str] = ()) -> None:
    """Train as `config` says; stopping at any time and calling it again goes on from the last checkpoint. See Job."""
    check_wandb(config.train.wandb)
    job = Job(config, typed)
    log = Log(job)
    if job.step == 0:
        log.measure()
    batches, stopped = job.batches(), False
    while not (job.finished or stopped):
        micro_steps = job.begin_update()
        for micro in range(micro_steps):
            job.engine.set_gradient_accumulation_boundary(micro == micro_steps - 1)
            batch = next(batches).to(job.device)
            loss, memory = job.engine(batch, job.memories[micro])
            job.engine.backward(loss)
            log.losses.append(loss.detach())
            job.engine.step()  # an update at the boundary
            job.carry(micro, batch, memory)
        stopped = job.end_update()
        log.update()
        if job.step % config.train.log_every == 0 or job.finished or stopped:
            log.write()
        if job.step % config.eval.every == 0 or job.finished:
            log.measure()
        if job.step % config.train.save_every == 0 or job.finished or stopped:
            log.save()
    batches.close()
    job.close()
    log.close()
    if not is_main():
        return
    if job.finished:
        print(f"finished at step {job.step:,}: the model is in {model_folder(config)}", flush=True)
    else:
        print(f"stopped at step {job.step:,} and saved; the same command goes on from there", flush=True)
