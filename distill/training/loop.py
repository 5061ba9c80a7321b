"""Owns the training loop: micro-batches, optimiser steps, evaluation, resume.

Refuses to know artifacts and models' files, and how processes meet (`processes.py`); it trains the
draft it is given, in place.

B rows, T positions, N positions that carry loss, V vocabulary or its subset, D width.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.losses import ChunkedLoss, DraftColumns, Head, HiddenLoss, LogitLoss, chunked_loss
from distill.losses.head import head_of
from distill.training.checkpoint import STATE_FILE, load_state, restore, save_state
from distill.training.config import (
    ScheduledLoss,
    TrainingConfig,
    learning_rate_at,
    loss_schedule,
    require_equal_widths,
)
from distill.training.data import Batch, collate, plan_steps
from distill.training.guards import Guard
from distill.training.probe import is_decode_due
from distill.training.processes import Processes, dropout_seed
from distill.training.run import Followers, TrainingData, TrainingResult
from distill.training.select import Best, HeldOut, HeldOutScore, evaluations_since
from distill.training.selection import Reference, kept_tokens
from distill.training.trunk import (
    DraftTrunk,
    make_optimizer,
    recompute_activations,
    set_trainable,
)

__all__ = ["Followers", "TrainingData", "TrainingResult", "evaluate", "train"]

logger = logging.getLogger(__name__)


def train(
    model: Any,
    *,
    target_head: Head,
    data: TrainingData,
    config: TrainingConfig,
    work_dir: Path,
    followers: Followers | None = None,
    processes: Processes | None = None,
    reference: Any = None,
) -> TrainingResult:
    """Train a draft in place and leave it with the weights of the best held-out acceptance.

    `target_head` has the rows of the tokens both models know, padding left out. A state in
    `work_dir` is resumed; on a CPU with the same number of threads the result is the
    same, bit by bit, wherever the run was killed. `processes` share each step's micro-batches;
    the weights are then those of one process to rounding, and equal in all of them. The model
    comes back in the dtypes it came with, in evaluation mode. Phases with a `keep_fraction` compare
    with the model `reference`; None: with a frozen copy of the draft as it starts.

    Raises:
        ConfigError: a loss on hidden states and unequal widths, or activations that cannot be
            computed again.
        TrainingError: a loss or a gradient that is not a number, or a loss that leaps; names step,
            rows and the last good state.
    """
    processes = processes or Processes(model.device)
    followers = followers or Followers()
    if config.is_selecting and reference is None:
        reference = copy.deepcopy(model)
    run = _Run(model, target_head, data, config, work_dir, followers, processes, reference)
    try:
        return run.run()
    finally:
        run.give_back()
        for tracker in followers.trackers:
            tracker.finish()


def evaluate(
    model: Any, *, target_head: Head, data: TrainingData, config: TrainingConfig
) -> HeldOutScore:
    """Score a draft as the loop does, without a step; it comes back as it came."""
    nobody = Processes(model.device)
    run = _Run(model, target_head, data, config, Path(), Followers(), nobody, None)
    try:
        return run._evaluate(None).score
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
        followers: Followers,
        processes: Processes,
        reference: Any,
    ) -> None:
        self.model, self.data, self.config = model, data, config
        self.work_dir, self.followers, self.processes = work_dir, followers, processes
        self.guard = Guard(config.max_loss_ratio, work_dir)
        self.schedule = loss_schedule(config)
        require_equal_widths(
            self.schedule, model.config.hidden_size, target_head.weight_VD.shape[1]
        )
        self.device = model.device
        self.dtype = getattr(torch, config.compute_dtype)
        self.original_dtypes = [parameter.dtype for parameter in model.parameters()]
        self.parameters = set_trainable(model, config)
        if config.gradient_checkpointing:
            recompute_activations(model)
        self.trunk = DraftTrunk(model)
        self.optimizer = make_optimizer(list(self.parameters.values()), config)
        self.log: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.step = 0
        self.num_rows = target_head.num_rows
        target_head = target_head.to(self.dtype)
        ids_V = None if data.token_ids_V is None else data.token_ids_V.to(self.device)
        self.columns = DraftColumns(target_head.subset(ids_V), ids_V)
        self.frozen_head = None if config.trains_head else self._frozen_head()
        self.held_out = HeldOut(
            data.held_out_rows,
            data.held_out_source or data.source,
            target_head=target_head,
            token_ids_V=ids_V,
            max_tokens=config.eval_max_tokens,
            micro_batch_tokens=config.micro_batch_tokens,
            seed=config.seed,
        )
        self.reference = None
        if config.is_selecting:
            self.reference = Reference(
                reference, num_rows=self.num_rows, token_ids_V=ids_V, dtype=self.dtype
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
        while self.step < config.max_steps and not self._is_patience_over(best):
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
        is_stopped_early = self.step < config.max_steps
        if is_stopped_early:
            logger.info(
                "stopped at step %d of %d: no better acceptance than that of step %d",
                self.step,
                config.max_steps,
                best.step,
            )
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
            is_stopped_early=is_stopped_early,
            is_main=self.processes.is_main,
        )

    def give_back(self) -> None:
        """Restore dtypes and modes, whatever happened."""
        if self.config.gradient_checkpointing:
            self.model.activation_checkpointing_disable()
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
        row_ids = [rows[index].row_id for micro in micro_batches for index in micro]
        total = self._accumulate(phase, micro_batches, num_tokens)
        # summed over the processes, so that all of them go on, or none does
        self.guard.check_step(self.step, phase.name, total, row_ids=row_ids, log=self.log)
        norm = torch.nn.utils.clip_grad_norm_(
            self.parameters.values(), self.config.max_grad_norm
        ).item()
        self.guard.check_norm(self.step, phase.name, norm, loss=total, row_ids=row_ids)
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

    def _accumulate(
        self, phase: ScheduledLoss, micro_batches: list[list[int]], num_tokens: int
    ) -> float:
        """Return a step's loss and leave its gradient, both summed over all its micro-batches."""
        total = 0.0
        batches: Iterable[tuple[int, Batch]] = (
            (index, collate([self.data.rows[row] for row in micro], self.data.source))
            for index, micro in self.processes.share(micro_batches)
        )
        weights: dict[int, Tensor] = {}
        if phase.keep_fraction < 1:
            kept = list(batches)
            weights, num_tokens = self._select(phase, kept, micro_batches)
            batches = kept
        self.model.train()
        with torch.random.fork_rng(devices=_accelerators(self.device)):
            for index, batch in batches:
                # dropout, where a model has it, depends on the place of the micro-batch alone:
                # not on what ran before a kill, nor on the number of processes
                torch.manual_seed(dropout_seed(self.config.seed, self.step, index))
                result = self._loss(
                    phase.loss,
                    self._states(batch),
                    self._draft_head(),
                    batch,
                    num_tokens,
                    weight_N=weights.get(index),
                )
                self.guard.check_batch(self.step, phase.name, batch, result.loss_N)
                result.value.backward()
                total += result.value.item()
        self.processes.add_gradients(self.parameters.values())
        return self.processes.add(total)

    def _select(
        self, phase: ScheduledLoss, mine: list[tuple[int, Batch]], micro_batches: list[list[int]]
    ) -> tuple[dict[int, Tensor], int]:
        """Return the weights of this process's micro-batches, and the number of tokens kept."""
        assert self.reference is not None

        def losses(hidden_ND: Tensor, head: Head, batch: Batch) -> Tensor:
            return self._loss(phase.loss, hidden_ND, head, batch, 1).loss_N

        self.model.eval()
        return kept_tokens(
            mine,
            [sum(self.data.rows[row].num_positions for row in micro) for micro in micro_batches],
            draft_losses=lambda batch: losses(self._states(batch), self._draft_head(), batch),
            reference=self.reference,
            losses=losses,
            keep_fraction=phase.keep_fraction,
            processes=self.processes,
        )

    def _loss(
        self,
        loss: LogitLoss | HiddenLoss,
        hidden_ND: Tensor,
        head: Head,
        batch: Batch,
        num_tokens: int,
        *,
        weight_N: Tensor | None = None,
    ) -> ChunkedLoss:
        return chunked_loss(
            loss,
            hidden_ND,
            batch.target.to(self.device),
            draft_head=head,
            columns=self.columns,
            normalizer=num_tokens,
            weight_N=weight_N,
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
        theirs = self.columns.target_head
        is_shared = head.weight_VD.shape == theirs.weight_VD.shape and torch.equal(
            head.weight_VD, theirs.weight_VD
        )
        return theirs if is_shared else head

    # ------------------------------------------------------------ evaluation and state

    def _evaluate(self, best: Best | None) -> Best:
        record: dict[str, Any] | None = None
        if self.processes.is_main:
            self.model.eval()
            score = self.held_out.score(self._states, self._draft_head())
            record = {"held_out": asdict(score)}
            is_due = is_decode_due(self.config, self.step, is_last=self._is_last(best, score))
            if self.followers.probe is not None and is_due:
                record["decoded"] = self.followers.probe.score(self.model, self.original_dtypes)
        record = self.processes.from_main(record)
        assert record is not None
        self._report(record)
        score = HeldOutScore(**record["held_out"])
        if best is None or score.acceptance > best.score.acceptance:
            return Best.of(self.step, score, self.parameters)
        return best

    def _is_last(self, best: Best | None, score: HeldOutScore) -> bool:
        """Whether the run ends with this evaluation, which is not in the log yet."""
        if best is None or score.acceptance > best.score.acceptance:
            return self.step == self.config.max_steps
        return self.step == self.config.max_steps or self._is_patience_over(best, now=1)

    def _is_patience_over(self, best: Best, *, now: int = 0) -> bool:
        patience = self.config.patience
        return patience is not None and evaluations_since(best, self.log) + now >= patience

    def _report(self, record: dict[str, Any]) -> None:
        record = {"step": self.step, **record}
        self.log.append(record)
        if self.processes.is_main:
            self.followers.on_step(self.step, record)
            for tracker in self.followers.trackers:
                tracker.log(record)

    def _save(self, best: Best) -> None:
        if not self.processes.is_main:
            return
        save_state(
            self.work_dir,
            step=self.step,
            parameters=self.parameters,
            optimizer=self.optimizer,
            best=best,
            log=self.log,
            seconds=self.seconds,
        )

    def _resume(self) -> Best | None:
        # the main process may have just thrown an old build away: it says whether there is one
        if not self.processes.from_main((self.work_dir / STATE_FILE).is_file()):
            return None
        saved = load_state(self.work_dir)
        assert saved is not None, "processes on several machines need one shared artifact store"
        logger.info("resuming at step %d of %d", saved.step, self.config.max_steps)
        restore(saved, self.parameters, self.optimizer)
        self.step, self.log, self.seconds = saved.step, saved.log, saved.seconds
        return saved.best


def _accelerators(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]
