"""The loop: micro-batches in, updates, metrics, checkpoints, a model folder at the end."""

from __future__ import annotations

from pretrain.config import PretrainConfig
from pretrain.trainer.inputs import model_folder
from pretrain.trainer.logger import Log
from pretrain.trainer.trainer import Trainer
from xlpre.config.cli import NO_EXPLICIT_KEYS, ExplicitKeys
from xlpre.training.distributed import is_rank_zero
from xlpre.training.metrics import check_wandb_installed


def pretrain(config: PretrainConfig, given: ExplicitKeys = NO_EXPLICIT_KEYS) -> None:
    """Train as `config` says; stopping at any time and calling it again goes on from the last checkpoint. See Job."""
    check_wandb_installed(config.train.wandb)
    job = Trainer(config, given)
    log, course = Log(job), job.course
    if course.step == 0:
        log.measure()
    batches, stopped = job.batches(), False
    while not (course.finished or stopped):
        micro_steps = job.begin_step()
        for micro in range(micro_steps):
            job.engine.set_gradient_accumulation_boundary(micro == micro_steps - 1)
            batch = next(batches).to(job.device)
            loss, memory, *others = job.engine(batch, job.memories[micro])
            job.engine.backward(sum(others, start=loss))
            log.micro_step(loss, *others)
            job.engine.step()  # an update at the boundary
            job.carry(micro, batch, memory)
        stopped = job.end_step()
        log.update()
        if course.step % config.train.log_every == 0 or course.finished or stopped:
            log.write()
        if course.step % config.eval.every == 0 or course.finished:
            measured = log.measure()
            if course.finished:
                job.check_result(measured)
        if course.step % config.train.save_every == 0 or course.finished or stopped:
            with log.paused():
                job.save()
    batches.close()
    job.close()
    log.close()
    if not is_rank_zero():
        return
    if course.finished:
        print(f"finished at step {course.step:,}: the model is in {model_folder(config)}", flush=True)
    else:
        print(f"stopped at step {course.step:,} and saved; the same command goes on from there", flush=True)
