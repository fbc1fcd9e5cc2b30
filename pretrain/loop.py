"""The loop: micro-batches in, updates, metrics, checkpoints, a model folder at the end."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
from tqdm import tqdm

from pretrain.config import PretrainConfig
from pretrain.job import Job, model_folder
from xlpre.training.distributed import is_main, n_processes
from xlpre.training.metrics import MetricsLog


def pretrain(config: PretrainConfig, typed: Collection[str] = ()) -> None:
    """Train as `config` says; stopping at any time and calling it again goes on from the last checkpoint. See Job."""
    job = Job(config, typed)
    log = _Log(job)
    if job.step == 0:
        log.measure()
    batches, stopped = job.batches(), False
    while not (job.finished or stopped):
        for micro in range(job.begin_update()):
            batch = next(batches).to(job.device)
            loss, memory = job.engine(batch, job.memories[micro])
            job.engine.backward(loss)
            log.losses.append(loss.detach())
            job.engine.step()  # an update after the last micro-step
            job.carry(micro, batch, memory)
        stopped = job.end_update()
        log.update()
        if job.step % config.train.log_every == 0 or job.finished or stopped:
            log.write()
        if job.step % config.eval.every == 0 or job.finished:
            log.measure()
        if job.step % config.train.save_every == 0 or job.finished or stopped:
            log.save()
    job.finish_saving()
    batches.close()
    log.close()
    if not is_main():
        return
    if job.finished:
        print(f"finished at step {job.step:,}: the model is in {model_folder(config)}", flush=True)
    else:
        print(f"stopped at step {job.step:,} and saved; the same command goes on from there", flush=True)


class _Log:
    """What a person and a plot see of the job; its clock stands still while it measures and saves."""

    def __init__(self, job: Job) -> None:
        self.job, self.losses = job, []  # type: Job, list[torch.Tensor]
        self._file = MetricsLog(job.run_dir, job.step)
        self._bar = tqdm(
            total=job.config.train.steps,
            initial=job.step,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_main() else True,  # None: shown on a terminal only
        )
        self._since, self._since_step, self._waited = time.monotonic(), job.step, job.waited_seconds

    def update(self) -> None:
        self._bar.update()

    def write(self) -> None:
        """A line of metrics over the steps since the last."""
        job, config = self.job, self.job.config
        tokens = config.train.batch_size * config.data.window
        rate = (job.step - self._since_step) * tokens / (time.monotonic() - self._since)
        (loss_sum,) = job.talk.total(torch.stack(self.losses).mean().item())
        line = {
            "loss": loss_sum / n_processes(),
            "lr": job.engine.optimizer.param_groups[0]["lr"],
            "grad_norm": float(job.engine.get_global_grad_norm()),
            "tokens_per_second": rate,
            "wait_seconds": job.waited_seconds - self._waited,
            "skipped": job.skipped,
            "tokens": job.step * tokens,
            "seconds": job.seconds,
        }
        self._file.write(job.step, **line)
        skipped = f", {job.skipped} updates skipped" if job.skipped else ""
        self._say(f"loss {line['loss']:.3f}, lr {line['lr']:.2e}, {rate:,.0f} tokens/s, {job.seconds:,.0f} s{skipped}")
        self.losses, self._since, self._since_step = [], time.monotonic(), job.step
        self._waited = job.waited_seconds

    def measure(self) -> None:
        """Held-out loss and samples."""
        paused = time.monotonic()
        got = self.job.measure()
        self._file.write(
            self.job.step,
            held_out_loss=got.loss,
            held_out_unigram=got.unigram,
            held_out_accuracy=got.accuracy,
            tokens=self.job.step * self.job.config.train.batch_size * self.job.config.data.window,
            seconds=self.job.seconds,
        )
        self._say(
            f"held-out loss {got.loss:.3f} (word frequencies alone: {got.unigram:.3f}), {got.accuracy:.1%} of {got.n_targets:,} right"
        )
        self._since += time.monotonic() - paused

    def save(self) -> None:
        """A checkpoint and the model folder."""
        paused = time.monotonic()
        self.job.save()
        self._since += time.monotonic() - paused

    def close(self) -> None:
        self._bar.close()
        self._file.close()

    def _say(self, text: str) -> None:
        if is_main():
            tqdm.write(f"step {self.job.step:,}: {text}")
