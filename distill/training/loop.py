"""Owns the training loop: micro-batches, optimiser steps, evaluation, resume.

Refuses to know artifacts and models' files; it trains the draft it is given, in place.

B rows, T positions, N positions that carry loss, V vocabulary or its subset, D width.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError, TrainingError
from distill.losses import ChunkedLoss, Head, HiddenLoss, chunked_loss
from distill.losses.head import head_of
from distill.training.checkpoint import load_state, restore, save_state
from distill.training.config import TrainingConfig, learning_rate_at, loss_schedule
from distill.training.data import Batch, Row, TargetStates, collate, plan_steps
from distill.training.select import Best, HeldOut, HeldOutScore
from distill.training.trunk import DraftTrunk, make_optimizer, set_trainable

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class TrainingData:
    """What a draft learns from and is judged by. `token_ids_V`: its vocabulary subset, or None."""

    rows: Sequence[Row]
    held_out_rows: Sequence[Row]
    states: TargetStates
    token_ids_V: Tensor | None = None


@dataclass(frozen=True)
class TrainingResult:
    """`seconds` is the wall clock of the optimiser steps alone, over all resumed parts."""

    best: Best
    before: HeldOutScore
    log: list[dict[str, Any]]
    num_tokens: int
    num_epochs: float
    seconds: float


def train(
    model: Any,
    *,
    target_head: Head,
    data: TrainingData,
    config: TrainingConfig,
    work_dir: Path,
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Train a draft in place and leave it with the weights of the best held-out acceptance.

    `target_head` has the rows of the tokens both models know, padding left out. A state in
    `work_dir` is resumed; on a CPU with the same number of threads the result is the
    same, bit by bit, wherever the run was killed. `on_step(step, record)` is called after each
    optimiser step and evaluation with its line of the log. The model comes back in the dtypes it
    came with, in evaluation mode.

    Raises:
        ConfigError: a loss on hidden states and unequal widths, or several processes.
        TrainingError: a loss or a gradient that is not a number; names step and rows.
    """
    run = _Run(model, target_head, data, config, work_dir, on_step or (lambda step, record: None))
    try:
        return run.run()
    finally:
        run.give_back()


class _Run:
    def __init__(
        self,
        model: Any,
        target_head: Head,
        data: TrainingData,
        config: TrainingConfig,
        work_dir: Path,
        on_step: OnStep,
    ) -> None:
        self.model, self.data, self.config = model, data, config
        self.work_dir, self.on_step = work_dir, on_step
        self.schedule = loss_schedule(config)
        _require_equal_widths(self.schedule, model.config.hidden_size, data.states.width)
        self.accelerator = _accelerator(model.device)
        self.device = model.device
        self.dtype = getattr(torch, config.compute_dtype)
        self.original_dtypes = [parameter.dtype for parameter in model.parameters()]
        self.parameters = set_trainable(model, config)
        self.trunk, self.optimizer = self.accelerator.prepare(
            DraftTrunk(model), make_optimizer(list(self.parameters.values()), config)
        )
        self.log: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.step = 0
        self.num_rows = target_head.num_rows
        target_head = target_head.to(self.dtype)
        self.target_head = target_head.subset(data.token_ids_V)
        self.frozen_head = None if config.train_embeddings else self._frozen_head()
        self.held_out = HeldOut(
            data.held_out_rows,
            data.states,
            target_head=target_head,
            token_ids_V=None if data.token_ids_V is None else data.token_ids_V.to(self.device),
            max_tokens=config.eval_max_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            seed=config.seed,
        )

    def run(self) -> TrainingResult:
        config = self.config
        best = self._resume() or self._evaluate(None)
        steps = plan_steps(
            self.data.rows,
            batch_tokens=config.batch_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            seed=config.seed,
            start=self.step,
        )
        while self.step < config.max_steps:
            epoch, micro_batches = next(steps)
            started = time.perf_counter()
            record = self._train_step(epoch, micro_batches)
            self.seconds += time.perf_counter() - started
            self.step += 1
            self._report(record)
            if self.step % config.eval_every == 0 or self.step == config.max_steps:
                best = self._evaluate(best)
            if self.step % config.checkpoint_every == 0 and self.step < config.max_steps:
                self._save(best)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(best.parameters[name])
        num_tokens = sum(record.get("num_tokens", 0) for record in self.log)
        return TrainingResult(
            best=best,
            before=HeldOutScore(**self.log[0]["held_out"]),
            log=self.log,
            num_tokens=num_tokens,
            num_epochs=num_tokens / sum(row.num_positions for row in self.data.rows),
            seconds=self.seconds,
        )

    def give_back(self) -> None:
        """Restore dtypes and modes, whatever happened."""
        with torch.no_grad():
            for parameter, dtype in zip(self.model.parameters(), self.original_dtypes, strict=True):
                parameter.data = parameter.data.to(dtype)
                parameter.grad = None
        self.model.requires_grad_(False)
        self.model.eval()

    # ------------------------------------------------------------ one step

    def _train_step(self, epoch: int, micro_batches: list[list[int]]) -> dict[str, Any]:
        phase = next(phase for phase in self.schedule if self.step < phase.end_step)
        rows = self.data.rows
        learning_rate = learning_rate_at(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        num_tokens = sum(rows[index].num_positions for micro in micro_batches for index in micro)
        self.model.train()
        total = 0.0
        with torch.random.fork_rng(devices=_accelerators(self.device)):
            # dropout, where a model has it, depends on the step alone, so a resumed run repeats it
            torch.manual_seed(self.config.seed * 1_000_003 + self.step)
            for micro in micro_batches:
                batch = collate([rows[index] for index in micro], self.data.states)
                result = self._loss(phase.loss, batch, num_tokens)
                self._require_finite(phase.name, batch, result)
                self.accelerator.backward(result.value)
                total += result.value.item()
        norm = self.accelerator.clip_grad_norm_(
            self.parameters.values(), self.config.max_grad_norm
        ).item()
        if not norm < float("inf"):
            raise TrainingError(
                f"step {self.step}: the gradient of {phase.name} has norm {norm} although its loss "
                f"is {total:.4g}. {_WAY_OUT}"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "epoch": epoch,
            "loss_name": phase.name,
            "loss": total,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "num_tokens": num_tokens,
        }

    def _loss(self, loss: Any, batch: Batch, num_tokens: int) -> ChunkedLoss:
        on_subset = self.data.token_ids_V is not None
        return chunked_loss(
            loss,
            self._states(batch),
            batch.target_hidden_ND.to(self.device),
            draft_head=self._draft_head(),
            target_head=self.target_head,
            target_logsumexp_N=batch.target_logsumexp_N.to(self.device) if on_subset else None,
            normalizer=num_tokens,
        )

    def _states(self, batch: Batch) -> Tensor:
        """Return the draft's hidden_ND at the batch's positions, in the compute dtype."""
        is_low = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype) if is_low else nullcontext():
            hidden_ND: Tensor = self.trunk(
                batch.input_ids_BT.to(self.device), batch.flat_positions_N.to(self.device)
            )
        return hidden_ND.to(self.dtype)

    def _draft_head(self) -> Head:
        if self.frozen_head is not None:
            return self.frozen_head
        return self._head_as_it_is()

    def _head_as_it_is(self) -> Head:
        whole = head_of(self.model).first(self.num_rows)
        return whole.subset(self.data.token_ids_V).to(self.dtype)

    def _frozen_head(self) -> Head:
        head = self._head_as_it_is()
        # one matrix in the cache instead of two equal ones
        is_shared = head.weight_VD.shape == self.target_head.weight_VD.shape and torch.equal(
            head.weight_VD, self.target_head.weight_VD
        )
        return self.target_head if is_shared else head

    def _require_finite(self, name: str, batch: Batch, result: ChunkedLoss) -> None:
        if torch.isfinite(result.loss_N.sum()):
            return
        bad_N = ~torch.isfinite(result.loss_N.cpu())
        rows = sorted({batch.row_ids[i] for i in batch.row_index_N[bad_N].tolist()})
        raise TrainingError(
            f"step {self.step}: {name} is not a number at {int(bad_N.sum())} of {len(bad_N)} "
            f"positions, in rows {', '.join(rows[:5])}{', ...' if len(rows) > 5 else ''}. "
            f"{_WAY_OUT}"
        )

    # ------------------------------------------------------------ evaluation and state

    def _evaluate(self, best: Best | None) -> Best:
        self.model.eval()
        score = self.held_out.score(self._states, self._draft_head())
        self._report({"held_out": asdict(score)})
        if best is None or score.acceptance > best.score.acceptance:
            return Best.of(self.step, score, self.parameters)
        return best

    def _report(self, record: dict[str, Any]) -> None:
        record = {"step": self.step, **record}
        self.log.append(record)
        self.on_step(self.step, record)

    def _save(self, best: Best) -> None:
        save_state(
            self.work_dir,
            step=self.step,
            parameters=self.parameters,
            optimizer=self.optimizer.optimizer,
            best=best,
            log=self.log,
            seconds=self.seconds,
        )

    def _resume(self) -> Best | None:
        saved = load_state(self.work_dir)
        if saved is None:
            return None
        logger.info("resuming at step %d of %d", saved.step, self.config.max_steps)
        restore(saved, self.parameters, self.optimizer.optimizer)
        self.step, self.log, self.seconds = saved.step, saved.log, saved.seconds
        return saved.best


_WAY_OUT = (
    "Lower distill.learning_rate or raise distill.warmup_steps; if it stays at the same rows, "
    "look at them in the generate artifact."
)


def _require_equal_widths(schedule: Sequence[Any], draft: int, target: int) -> None:
    for phase in schedule:
        if isinstance(phase.loss, HiddenLoss) and draft != target:
            raise ConfigError(
                f"loss {phase.name} compares hidden states, but the draft's width is {draft} and "
                f"the target's {target}. Use a loss on logits, such as forward_kl, or a draft of "
                f"the target's width."
            )


def _accelerator(device: torch.device) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"distill was started in {accelerator.num_processes} processes, but training runs in "
            f"one so far. Start it without a launcher."
        )
    return accelerator


def _accelerators(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]
