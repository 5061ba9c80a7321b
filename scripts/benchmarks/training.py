"""Owns the systems of scripts/bench_distill: our loop by loss and store, TRL, a plain loop.
Refuses to know tables and rounds. Every system trains on the same rows, once a step, all at once.

B rows, T positions, N positions that carry loss, V vocabulary.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.losses import FullKnowledge, Head, SampledKnowledge, TargetKnowledge
from distill.losses.chunked import default_chunk_tokens
from distill.losses.head import head_of
from distill.models import LoadedModel
from distill.target_store.sampled import SampledRows, concatenate, sampled_of_law
from distill.target_store.top_k import top_k_of_law, unpack_top_k
from distill.training.config import TrainingConfig
from distill.training.data import Row, TargetSource, pad
from distill.training.live_target import LiveTarget
from distill.training.loop import train
from distill.training.run import TrainingData
from distill.training.trl_engine import settings_for_trl, train_with_trl
from distill.training.trunk import make_optimizer, set_trainable
from scripts.benchmarks.measuring import Run, Sample, synchronize

LIVE = "live"
STORES = ("final_hidden", "top_k", "sampled", LIVE)
TOP_K, NUM_DRAWS = 64, 50
_IGNORED = -100


@dataclass(frozen=True)
class Contest:
    """What every system is given: both models, the rows of each turn, and how a step is taken.

    `token_ids_V` is the subset of tokens that the draft of the pair's own config proposes.
    """

    target: LoadedModel
    draft: LoadedModel
    turns: Sequence[Sequence[Row]]
    config: TrainingConfig
    token_ids_V: Tensor | None = None

    @property
    def target_head(self) -> Head:
        """The rows of the tokens both models know."""
        num_tokens = min(
            len(self.target.tokenizer), self.target.shape.vocab_size, self.draft.shape.vocab_size
        )
        return head_of(self.target.model).first(num_tokens)

    def rows(self, turn: int) -> Sequence[Row]:
        """The rows of a turn."""
        return self.turns[turn % len(self.turns)]

    def num_tokens(self, turn: int) -> int:
        """Completion tokens that a turn trains on."""
        return self.config.max_steps * sum(row.num_positions for row in self.rows(turn))


TimedSystem = Callable[[int], Sample]
"""Takes a turn, and says how many completion tokens it trained in which time."""


# ------------------------------------------------------------------------------ ours


class InMemory:
    """What is known of the target at each row, computed before the clock starts."""

    def __init__(self, known: dict[str, TargetKnowledge]) -> None:
        self._known = known

    def of(self, rows: Sequence[Row]) -> TargetKnowledge:
        """In the rows' order."""
        return joined([self._known[row.row_id] for row in rows])


def joined(parts: Sequence[Any]) -> TargetKnowledge:
    """Knowledge of one kind, one after the other."""
    if isinstance(parts[0], SampledKnowledge):
        return concatenate(list(parts))
    columns = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        columns[field.name] = None if values[0] is None else torch.cat(values)
    known: TargetKnowledge = type(parts[0])(**columns)
    return known


def known_of(
    contest: Contest, rows: Sequence[Row], store: str, *, needs_logsumexp: bool = False
) -> dict[str, TargetKnowledge]:
    """Run the target over rows and keep what a store keeps: this is what scoring costs."""
    head = contest.target_head
    live = LiveTarget(contest.target.model, target_head=head, needs_logsumexp=needs_logsumexp)
    known: dict[str, TargetKnowledge] = {}
    whole = live.of(rows)
    start = 0
    for row in rows:
        of_row = slice(start, start + row.num_positions)
        if store == "final_hidden":
            mass_N = None if whole.logsumexp_N is None else whole.logsumexp_N[of_row].cpu()
            states_ND = whole.hidden_ND[of_row].to(torch.bfloat16).cpu()
            known[row.row_id] = FullKnowledge(states_ND, mass_N)
        else:
            known[row.row_id] = _kept(whole.hidden_ND[of_row], head, store)
        start = of_row.stop
    return known


@torch.no_grad()
def _kept(states_ND: Tensor, head: Head, store: str) -> TargetKnowledge:
    parts: list[TargetKnowledge] = []
    for part_ND in states_ND.split(default_chunk_tokens(head.num_rows)):
        law_NV = head.logits(part_ND).float().log_softmax(-1).cpu()
        if store == "top_k":
            parts.append(unpack_top_k(top_k_of_law(law_NV, TOP_K)))
        else:
            packed = sampled_of_law(law_NV, seed=0, num_draws=NUM_DRAWS, vocab_size=head.num_rows)
            parts.append(SampledRows(packed).of(torch.arange(len(law_NV))))
    return joined(parts)


class OursTraining:
    """Our loop with one loss, on what one store knows, over all tokens or the config's subset."""

    def __init__(self, contest: Contest, loss: str, store: str, *, is_subset: bool = False) -> None:
        self._contest, self._loss = contest, loss
        self._token_ids_V = contest.token_ids_V if is_subset else None
        head = contest.target_head
        self._head = Head(head.weight_VD.clone(), head.bias_V, head.scale, head.softcap)
        self._live = None
        self._sources: list[TargetSource] = []
        if store == LIVE:
            self._live = LiveTarget(contest.target.model, target_head=head, needs_logsumexp=False)
        else:
            self._sources = [self._known(rows, store) for rows in contest.turns]
        self._held_out = contest.turns[0][:1]
        self._judge = self._known(self._held_out, "final_hidden")

    def _known(self, rows: Sequence[Row], store: str) -> InMemory:
        needs_logsumexp = self._token_ids_V is not None
        return InMemory(known_of(self._contest, rows, store, needs_logsumexp=needs_logsumexp))

    def __call__(self, turn: int) -> Sample:
        """Train a copy of the draft; the clock runs during the steps alone."""
        contest = self._contest
        data = TrainingData(
            rows=contest.rows(turn),
            held_out_rows=self._held_out,
            source=self._live or self._sources[turn % len(self._sources)],
            held_out_source=self._judge,
            token_ids_V=self._token_ids_V,
        )
        with tempfile.TemporaryDirectory() as work:
            result = train(
                copy.deepcopy(contest.draft.model),
                target_head=self._head,
                data=data,
                config=contest.config.model_copy(update={"loss": self._loss}),
                work_dir=Path(work),
            )
        assert result.num_tokens == contest.num_tokens(turn), "one step has to take every row"
        return Sample(result.seconds, Run(result.num_tokens))


class Scoring:
    """The target's part of a store, alone; over a subset the mass of all tokens belongs to it."""

    def __init__(self, contest: Contest, store: str, *, is_subset: bool = False) -> None:
        self._contest, self._store, self._is_subset = contest, store, is_subset

    def __call__(self, turn: int) -> Sample:
        """Score a turn's rows once."""
        rows = self._contest.rows(turn)
        started = time.perf_counter()
        known_of(self._contest, rows, self._store, needs_logsumexp=self._is_subset)
        synchronize(self._contest.target.device)
        return Sample(time.perf_counter() - started, Run(sum(row.num_positions for row in rows)))


# ------------------------------------------------------------------------------ theirs


class PlainLoop:
    """What one writes first: both models' whole logits, forward KL, AdamW."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def __call__(self, turn: int) -> Sample:
        """Train a copy of the draft."""
        contest, config = self._contest, self._contest.config
        model = copy.deepcopy(contest.draft.model)
        optimizer = make_optimizer(list(set_trainable(model, config).values()), config)
        model.train()
        input_ids_BT, flat_N = pad(contest.rows(turn))
        device, num_rows = model.device, contest.target_head.num_rows
        input_ids_BT, flat_N = input_ids_BT.to(device), flat_N.to(device)
        is_low = config.compute_dtype == "bfloat16"
        started = time.perf_counter()
        for _ in range(config.max_steps):
            with torch.autocast(device.type, dtype=torch.bfloat16) if is_low else nullcontext():
                with torch.no_grad():
                    target_BTV = contest.target.model(input_ids_BT).logits
                draft_BTV = model(input_ids_BT).logits
            target_NV = target_BTV.flatten(0, 1)[flat_N, :num_rows].float().log_softmax(-1)
            draft_NV = draft_BTV.flatten(0, 1)[flat_N, :num_rows].float().log_softmax(-1)
            loss = torch.nn.functional.kl_div(
                draft_NV, target_NV, reduction="batchmean", log_target=True
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return Sample(time.perf_counter() - started, Run(contest.num_tokens(turn)))


class TrlDistillation:
    """TRL's DistillationTrainer: the draft writes as many tokens as our rows have, on average."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def __call__(self, turn: int) -> Sample:
        """Train a copy of the draft on prompts of the turn's rows."""
        contest, rows = self._contest, self._contest.rows(turn)
        mean_length = round(np.mean([row.num_positions for row in rows]).item())
        settings = contest.config.trl.model_copy(
            update={"batch_size": len(rows), "max_new_tokens": max(1, mean_length)}
        )
        draft = copy.copy(contest.draft)
        draft.model = copy.deepcopy(contest.draft.model)
        with tempfile.TemporaryDirectory() as work:
            result = train_with_trl(
                draft,
                contest.target,
                [row.input_ids_T[: int(row.positions_N[0]) + 1].tolist() for row in rows],
                config=contest.config.model_copy(
                    update=settings_for_trl()
                    | {"loss": "forward_kl", "engine": "trl", "trl": settings}
                ),
                work_dir=Path(work),
            )
        return Sample(result.seconds, Run(result.num_tokens))


class TrlGkd:
    """TRL's GKDTrainer on the target's text alone (lmbda 0), forward KL (beta 0)."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def __call__(self, turn: int) -> Sample:
        """Train a copy of the draft on the turn's rows."""
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        contest, config = self._contest, self._contest.config
        model = copy.deepcopy(contest.draft.model)
        set_trainable(model, config.model_copy(update={"compute_dtype": "float32"}))
        rows, is_cpu = contest.rows(turn), model.device.type == "cpu"
        with tempfile.TemporaryDirectory() as work:
            trainer = GKDTrainer(
                model=model,
                teacher_model=contest.target.model,
                args=GKDConfig(
                    output_dir=work,
                    max_steps=config.max_steps,
                    per_device_train_batch_size=len(rows),
                    gradient_accumulation_steps=1,
                    learning_rate=config.learning_rate,
                    max_grad_norm=config.max_grad_norm,
                    bf16=config.compute_dtype == "bfloat16",
                    gradient_checkpointing=config.gradient_checkpointing,
                    lmbda=0.0,
                    beta=0.0,
                    temperature=1.0,
                    use_cpu=is_cpu,
                    dataloader_pin_memory=not is_cpu,
                    logging_strategy="no",
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    # ids come from our rows; it would look for messages to render
                    dataset_kwargs={"skip_prepare_dataset": True},
                ),
                data_collator=lambda entries: gkd_batch([rows[e["index"]] for e in entries]),
                train_dataset=Dataset.from_dict({"index": list(range(len(rows)))}),
                processing_class=contest.target.tokenizer,
            )
            started = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - started
        return Sample(seconds, Run(contest.num_tokens(turn)))


def gkd_batch(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Rows as TRL's collator would give them; ``labels`` mark the positions that carry loss.

    Its loss shifts labels by one, and our positions say where a token is predicted, so each label
    stands one place further on; a column more makes room for the last one.
    """
    input_ids_BT, flat_N = pad(rows)
    num_rows, width = input_ids_BT.shape
    lengths_B = torch.tensor([row.length for row in rows])
    is_text_BT = torch.arange(width) < lengths_B.unsqueeze(1)
    labels_BT = torch.full((num_rows, width), _IGNORED)
    labels_BT.view(-1)[flat_N] = 0
    column_B1 = torch.zeros(num_rows, 1, dtype=torch.long)
    return {
        "input_ids": torch.cat([input_ids_BT, column_B1], dim=1),
        "attention_mask": torch.cat([is_text_BT.long(), column_B1], dim=1),
        "labels": torch.cat([column_B1 + _IGNORED, labels_BT], dim=1),
        "prompts": input_ids_BT[:, :1],
        "prompt_attention_mask": is_text_BT[:, :1].long(),
    }
