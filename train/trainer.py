"""Training: from state stores and a drafter to checkpoints, a log, and the drafter that held-out text accepts most.

    eyas train -c CONFIG                                               one process
    accelerate launch --multi_gpu --num_processes 8 -m train -c CONFIG    one process a GPU, DDP (on CPUs as well, then by gloo)

Writes ``output/train``: log.jsonl, checkpoints/step-NNNNNN (resumable), best (a drafter folder) and manifest.json. The same command
resumes a run that was stopped: without a time budget and on the CPU in fp32, bit for bit as if it had never stopped.

A step: every process sums the loss of its micro-batches, gradients are added over processes, then divided by N_0, the pairs counted at
step 0 of the training-time test in all of them. Until then nothing is a mean, so neither packing nor the number of processes is in it.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from rich.console import Console
from torch import Tensor, nn

from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import JsonlAppender, read_jsonl, write_text
from eyas.folder import drafter_config
from eyas.manifest import begin, finish, is_current
from eyas.progress import Task
from eyas.target import pick_device
from train.batches import Batch, PlannedStep, Position, Prefetch, plan_epoch
from train.best import Best, keep_best, read_best
from train.checkpoint import (
    Counters,
    latest,
    optimizer_tensors,
    random_tensors,
    restore_optimizer,
    restore_random,
    save,
)
from train.inputs import Inputs, open_inputs
from train.interrupt import StopRequest
from train.schedule import Schedule
from train.sums import Sums
from train.tracking import check_trackers, scalars, start_trackers
from train.ttt import TrainingTimeTest
from train.validation import Measurement, measure

# How a run is watched and stored, not what it computes: these may change between a run and its resumption.
OPERATIONAL = {"trackers", "keep_checkpoints", "checkpoint_every", "log_every"}


def train(config: Config) -> Path:
    """Train as ``config`` says, or resume; return ``output/train``. A finished, current run is left as it is.

    Raises EyasError for inputs that do not fit each other or diverging numbers, KeyboardInterrupt after Ctrl-C or SIGTERM, when the
    checkpoint to resume from is written.
    """
    started = time.monotonic()
    check_trackers(config.train.trackers)
    accelerator = Accelerator(
        cpu=pick_device(config.target.device).type == "cpu",
        mixed_precision="no",  # the drafter's own affair: it casts its matrices, softmaxes stay float32
        log_with=list(config.train.trackers) or None,
        project_dir=str(config.folder("train")),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    console = Console(stderr=True, quiet=not accelerator.is_main_process)
    inputs = open_inputs(config)
    folder, part = config.folder("train"), config_part(config)
    current = is_current(folder, "checkpoint", part, inputs.digests)
    accelerator.wait_for_everyone()
    if current:
        console.print(f"train: {folder} is complete and current", highlight=False)
        accelerator.end_training()
        return folder
    for note in inputs.notes:
        console.print(f"train: {note}", highlight=False, soft_wrap=True)
    if accelerator.is_main_process:
        begin(folder, "checkpoint", part, inputs.digests)
    Run(config, accelerator, inputs, console, started).go()
    accelerator.end_training()
    return folder


def config_part(config: Config) -> dict[str, Any]:
    """The part of a config that decides what training computes."""
    return {
        "train": config.train.model_dump(mode="json", exclude=OPERATIONAL),
        "drafter": config.drafter.model_dump(mode="json"),
        "draft_steps": config.engine.draft_steps,
        "seed": config.seed,
    }


class Run:
    """One run of the training loop. ``go`` does it all; the rest are its parts, in the order in which a step needs them."""

    def __init__(self, config: Config, accelerator: Accelerator, inputs: Inputs, console: Console, started: float) -> None:
        self.config, self.accelerator, self.inputs, self.console = config, accelerator, inputs, console
        self.settings = config.train
        self.device: torch.device = accelerator.device
        self.main: bool = accelerator.is_main_process
        self.folder = config.folder("train")
        self.started = started
        self.dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self.drafter = inputs.drafter
        self.model, self.probe = self._modules()
        self.optimizer = self._optimizer()
        self.at = Counters(window=Sums.zero(self.settings.ttt_steps).numbers())
        self.best: Best | None = None
        self.last_length: float | None = None
        self.log: JsonlAppender | None = None

    def go(self) -> None:
        """Resume if there is something to resume, train to the end, keep the best drafter."""
        self._resume()
        steps = self._count_steps()
        self.accelerator.wait_for_everyone()
        with ExitStack() as stack:
            if self.main:
                self.log = stack.enter_context(JsonlAppender(self.folder / "log.jsonl"))
            start_trackers(self.accelerator, self.settings.trackers, self.config)
            if self.at.validated < 0:
                self._validate()
            self.schedule = self._make_schedule(steps)
            task = stack.enter_context(Task("train", steps, "steps", done=self.at.step, console=self.console))
            self._loop(task, stack.enter_context(StopRequest()))
            if self.at.validated < self.at.step:
                self._validate()
            self._checkpoint()
        if self.main:
            assert self.best is not None
            finish(self.folder, self._holds(self.best))
            self.console.print(f"train: best drafter of step {self.best.step}, acceptance length {self.best.length:.3f}", highlight=False)
        self.accelerator.wait_for_everyone()

    def _modules(self) -> tuple[nn.Module, TrainingTimeTest]:
        """The module that trains the drafter, wrapped for DDP, and the one that measures it: as many drafts as will be served."""
        drafter, target = self.drafter, self.inputs.target
        drafter.set_embedding(target.embedding(self.dtype))
        # Top log-probabilities are made already: then the target's lm_head is neither read nor held.
        whole = self.inputs.train.spec.top_logprobs is None
        head_DH = target.lm_head(self.dtype)[drafter.draft_ids_D] if whole else torch.empty(0, target.shape.hidden_size, dtype=self.dtype)
        head_DH = head_DH.to(self.device)
        drafter.to(self.device)
        test = TrainingTimeTest(drafter, head_DH, self.settings.ttt_steps, self.settings.step_weight_decay)
        return self.accelerator.prepare_model(test), TrainingTimeTest(drafter, head_DH, self.config.engine.draft_steps, 1.0)

    def _optimizer(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self.drafter.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.drafter.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=self.settings.betas, fused=True)

    def _plan(self, start: Position) -> list[PlannedStep]:
        settings, world = self.settings, self.accelerator.num_processes
        return plan_epoch(self.inputs.train.lengths, self.config.seed, start, settings.batch_tokens, world, settings.accumulation)

    def _count_steps(self) -> int:
        """Optimiser steps of the whole run, those done included."""
        left, start = 0, self.at.position
        while start.epoch < self.settings.epochs:
            left += len(self._plan(start))
            start = Position(start.epoch + 1)
        total = self.at.step + left
        return min(total, self.settings.max_steps or total)

    def _make_schedule(self, steps: int) -> Schedule:
        """The time budget leaves room for the measurement that follows the last step, if that is not most of it."""
        budget = self.settings.max_minutes and self.settings.max_minutes * 60
        seconds = max(budget - self.at.validation_seconds, budget / 2) if budget else None
        return Schedule(steps, seconds, self.settings.warmup_share, self.settings.final_rate_share)

    def _planned_steps(self, start: Position, left: int) -> Iterator[PlannedStep]:
        """The next ``left`` steps from ``start`` on, epoch by epoch."""
        while start.epoch < self.settings.epochs and left > 0:
            for planned in self._plan(start)[:left]:
                yield planned
                left -= 1
            start = Position(start.epoch + 1)

    def _loop(self, task: Task, stop: StopRequest) -> None:
        if self.schedule.share(self.at.step, self.at.seconds) >= 1.0:
            return
        rank, start, left = self.accelerator.process_index, self.at.position, self.schedule.steps - self.at.step
        rows = (rows for planned in self._planned_steps(start, left) for rows in planned.of_rank(rank))
        with Prefetch(self.inputs.train, rows, pin=self.device.type == "cuda") as batches:
            feed = iter(batches)
            for planned in self._planned_steps(start, left):
                if self._step(feed, planned, stop, task):
                    return

    def _step(self, feed: Iterator[Batch], planned: PlannedStep, stop: StopRequest, task: Task) -> bool:
        """One optimiser step and what is due after it; True when the run is over."""
        began = time.monotonic()
        sums = self._gradients(feed, planned)
        sums, stopped, elapsed = self._total(sums, stop.wanted)
        share = self.schedule.share(self.at.step + 1, elapsed)
        rate = self.settings.learning_rate * self.schedule.rate(share)
        norm = self._update(sums.counted_J[0], rate)
        sums.seconds = time.monotonic() - began
        self._count(sums, planned)
        over = share >= 1.0
        if self.at.step % self.settings.log_every == 0 or over:
            self._log(rate, norm)
        if self.at.step % self.settings.evaluate_every == 0:
            self._validate()
        if not over and (self.at.step % self.settings.checkpoint_every == 0 or stopped):
            self._checkpoint()
        task.advance(1, note=self._note(sums))
        if stopped and not over:
            raise KeyboardInterrupt(f"checkpoint of step {self.at.step} is written")
        return over

    def _gradients(self, feed: Iterator[Batch], planned: PlannedStep) -> Sums:
        """Add the gradients of this process's micro-batches (and with the last one those of the other processes)."""
        steps = self.settings.ttt_steps
        loss_J = torch.zeros(steps, dtype=torch.float64, device=self.device)
        counted_J = torch.zeros(steps, dtype=torch.float64)
        total = Sums.zero(steps)
        micro_batches = planned.of_rank(self.accelerator.process_index)
        for number, rows in enumerate(micro_batches, 1):
            batch = next(feed).to(self.device, self.dtype)
            last = number == len(micro_batches)
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                sums = self.model(batch)
                sums.loss_sum.backward()  # accelerator.backward divides by a number of micro-batches from the environment
            loss_J += sums.loss_J
            counted_J += sums.counted_J
            total.tokens += batch.tokens if rows else 0
            total.supervised += sum(self.inputs.train.supervised[row] for row in rows)
        total.loss_J, total.counted_J = loss_J.tolist(), counted_J.tolist()
        return total

    def _total(self, sums: Sums, stop: bool) -> tuple[Sums, bool, float]:
        """The sums over all processes, whether any of them was asked to stop, and the main process's clock: one exchange."""
        own = [*sums.numbers(), float(stop), self._elapsed() if self.main else 0.0]
        vector = torch.tensor(own, dtype=torch.float64, device=self.device)
        *numbers, stopped, elapsed = self._reduce(vector).tolist()
        return Sums.from_numbers(numbers), stopped > 0, elapsed

    def _reduce(self, vector: Tensor) -> Tensor:
        return self.accelerator.reduce(vector, reduction="sum")

    def _elapsed(self) -> float:
        """Seconds spent on this run, earlier processes included."""
        return self.at.seconds + time.monotonic() - self.started

    def _update(self, counted: float, rate: float) -> float:
        """Normalise, clip and apply the gradients; return their norm before clipping. Without a counted pair nothing moves."""
        if not counted:
            self.optimizer.zero_grad()
            return 0.0
        gradients = [parameter.grad for parameter in self.drafter.parameters() if parameter.grad is not None]
        scale = self.accelerator.num_processes / counted  # DDP has divided by the number of processes
        norm = torch.nn.utils.get_total_norm(gradients) * scale
        if not torch.isfinite(norm):
            raise EyasError(
                f"train: the gradient of step {self.at.step + 1} is not finite; lower train.learning_rate, or check the states with "
                f"`eyas inspect {self.inputs.train.folder}`"
            )
        torch._foreach_mul_(gradients, scale * torch.clamp(self.settings.clip_norm / (norm + 1e-6), max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _count(self, sums: Sums, planned: PlannedStep) -> None:
        self.at.step += 1
        self.at.position = planned.after
        self.at.tokens += int(sums.tokens)
        self.at.supervised += int(sums.supervised)
        self.at.window = (Sums.from_numbers(self.at.window) + sums).numbers()

    def _log(self, rate: float, norm: float) -> None:
        window = Sums.from_numbers(self.at.window)
        self._record(
            {
                "kind": "train",
                "step": self.at.step,
                "epoch": self.at.position.epoch,
                "loss": window.loss(self.settings.step_weight_decay),
                "loss_J": window.means(),
                "learning_rate": rate,
                "gradient_norm": norm,
                "tokens_per_second": window.tokens / max(window.seconds, 1e-9),
                "tokens": self.at.tokens,
                "supervised_tokens": self.at.supervised,
                "seconds": round(self._elapsed(), 3),
            }
        )
        self.at.window = Sums.zero(self.settings.ttt_steps).numbers()

    def _record(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.append(record)
        self.accelerator.log({f"{record['kind']}/{key}": value for key, value in scalars(record).items()}, step=self.at.step)

    def _validate(self) -> None:
        """Measure the drafter on the held-out sets, keep it if it is the best so far."""
        began = time.monotonic()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        sets = {
            name: measure(self.probe, store, self.settings.batch_tokens, self.device, rank, world, self._reduce)
            for name, store in self.inputs.held_out.items()
        }
        measurement = Measurement(sets)
        self.last_length = measurement.length
        # a resumed run meets the step again from which 'best' may already be
        is_best = self.best is None or measurement.length > self.best.length or self.at.step == self.best.step
        if is_best:
            self.best = Best(self.at.step, measurement.length)
            if self.main:
                config = drafter_config(self.drafter.shape, self.inputs.layers, self.inputs.target)
                keep_best(self.folder / "best", self.drafter, config, self.best, self.dtype)
        self.at.validated = self.at.step
        self.at.validation_seconds = self._of_main(time.monotonic() - began)
        place = {"kind": "validation", "step": self.at.step, "supervised_tokens": self.at.supervised, "best": is_best}
        self._record({**place, "seconds": round(self._elapsed(), 3), **measurement.as_json()})

    def _of_main(self, number: float) -> float:
        """The main process's number, everywhere: what decides how long to go on must be the same in all of them."""
        return float(self._reduce(torch.tensor([number if self.main else 0.0], dtype=torch.float64, device=self.device)))

    def _checkpoint(self) -> None:
        random = {name: self.accelerator.gather(state[None].to(self.device)).cpu() for name, state in random_tensors(self.device).items()}
        if not self.main:
            return
        parts = {
            "model": self.drafter.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer, self.drafter),
            "random": random,
        }
        save(self.folder / "checkpoints", replace(self.at, seconds=self._elapsed()), parts, self.settings.keep_checkpoints)

    def _resume(self) -> None:
        """Take up the newest checkpoint; without one, clear what a run left that was killed before its first."""
        found = latest(self.folder / "checkpoints")
        self.accelerator.wait_for_everyone()
        if self.main:
            _cut_log(self.folder / "log.jsonl", -1 if found is None else found.counters.step)
            if found is None:
                shutil.rmtree(self.folder / "best", ignore_errors=True)
        if found is None:
            return
        self.drafter.load_state_dict(found.tensors("model"))
        restore_optimizer(self.optimizer, self.drafter, found.tensors("optimizer"))
        restore_random(found.tensors("random"), self.accelerator.process_index, self.device)
        self.at = found.counters
        self.best = read_best(self.folder / "best")
        self.console.print(f"train: resumes at step {self.at.step}", highlight=False)

    def _note(self, sums: Sums) -> str:
        loss = sums.loss(self.settings.step_weight_decay)
        parts = [] if loss is None else [f"loss {loss:.3f}"]
        if self.last_length is not None:
            parts.append(f"acceptance length {self.last_length:.3f}")
        if self.settings.max_minutes:
            parts.append(f"{self._elapsed() / 60:.1f} of {self.settings.max_minutes:g} min")
        return ", ".join(parts)

    def _holds(self, best: Best) -> dict[str, Any]:
        return {
            "steps": self.at.step,
            "tokens": self.at.tokens,
            "supervised_tokens": self.at.supervised,
            "seconds": round(self._elapsed(), 3),
            "layers": list(self.inputs.layers),
            "warm_start": self.inputs.measured,
            "best": asdict(best),
            "processes": self.accelerator.num_processes,
        }


def _cut_log(path: Path, step: int) -> None:
    """Drop the log records after ``step``: the resumed run writes them again."""
    if not path.exists():
        return
    JsonlAppender(path).close()  # cuts a torn last line
    kept = [record for _, record in read_jsonl(path) if record["step"] <= step]
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
