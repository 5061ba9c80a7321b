"""Owns the tables: per-prompt records in, one cell per draft, task and temperature out.

Refuses to know how a record came about; every number leaves with its interval over prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from distill.metrics import intervals
from distill.metrics.acceptance import PRIMARY_RULE
from distill.metrics.intervals import Estimate, Floats, Statistic
from distill.metrics.sentences import difference_sentence

RATE_COLUMNS: Mapping[str, tuple[str, str]] = {
    "acceptance_rate": ("num_accepted", "num_tested"),
    "draft_acceptance_rate": ("num_accepted", "num_proposed"),
    "block_efficiency": ("num_emitted", "num_target_calls"),
}
"""Each decoded rate is a ratio of two counts summed over prompts."""

POSITION_COLUMNS: Mapping[str, tuple[str, str]] = {
    "acceptance_by_position": ("accepted_by_position", "proposed_by_position"),
    "conditional_acceptance_by_position": ("accepted_by_position", "tested_by_position"),
}

T = TypeVar("T")


@dataclass(frozen=True)
class PromptRecord:
    """What one draft did on one prompt at one temperature.

    ``counts`` are those of ``DecodeStats.to_dict``. ``acceptance_sums`` are sums over the
    ``num_positions`` of the target's own text, one per acceptance rule. ``num_draftable_calls``:
    target calls that had room for a draft; None: all of them.
    """

    draft: str
    temperature: float
    prompt_id: str
    task: str
    counts: Mapping[str, Any]
    num_positions: int
    acceptance_sums: Mapping[str, float]
    num_draftable_calls: int | None = None


def summarize(
    records: Sequence[PromptRecord], *, num_draft_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """One JSON-able cell per (draft, temperature, task); ``task`` None pools all tasks.

    Cells come in the order in which drafts, temperatures and tasks first occur, the pooled one
    first.
    """
    cells = []
    for draft, temperature in _distinct((r.draft, r.temperature) for r in records):
        mine = [r for r in records if (r.draft, r.temperature) == (draft, temperature)]
        for task in (None, *_distinct(r.task for r in mine)):
            rows = [r for r in mine if task is None or r.task == task]
            cell = {"draft": draft, "temperature": temperature, "task": task}
            cells.append(cell | _cell(rows, num_draft_tokens=num_draft_tokens, seed=seed))
    return cells


def compare(
    records: Sequence[PromptRecord], *, draft: str, baseline: str, seed: int
) -> list[dict[str, Any]]:
    """``draft`` minus ``baseline`` on the SAME prompts, per temperature and task.

    Pairing matters: prompts differ far more from each other than two drafts do on one prompt. A
    prompt that only one of the two answered is left out; ``num_prompts`` counts the others. Each
    row has the differences with their intervals and a plain ``sentence``.
    """
    table = []
    for temperature in _distinct(r.temperature for r in records):
        ours = _by_prompt(records, draft, temperature)
        theirs = _by_prompt(records, baseline, temperature)
        common = [i for i in ours if i in theirs]
        for task in (None, *_distinct(ours[i].task for i in common)):
            ids = [i for i in common if task is None or ours[i].task == task]
            if not ids:
                continue
            row = _difference([ours[i] for i in ids], [theirs[i] for i in ids], seed)
            names = {"temperature": temperature, "task": task, "num_prompts": len(ids)}
            sentence = difference_sentence(
                draft, baseline, row, temperature=temperature, num_prompts=len(ids)
            )
            table.append(names | row | {"sentence": sentence})
    return table


def _difference(
    a: Sequence[PromptRecord], b: Sequence[PromptRecord], seed: int
) -> dict[str, dict[str, Any]]:
    """Every rate of ``a`` minus that of ``b``, whose rows are the same prompts in order."""
    row: dict[str, dict[str, Any]] = {}
    for name, (top, bottom) in RATE_COLUMNS.items():
        columns = [_counts(a, top), _counts(a, bottom), _counts(b, top), _counts(b, bottom)]
        row[name] = _estimate(columns, intervals.ratio_difference, seed).to_dict()
    columns = [*_analytic(a, PRIMARY_RULE), *_analytic(b, PRIMARY_RULE)]
    row["analytic_acceptance_rate"] = _estimate(columns, intervals.ratio_difference, seed).to_dict()
    return row


def _cell(rows: Sequence[PromptRecord], *, num_draft_tokens: int, seed: int) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "num_prompts": len(rows),
        "num_emitted": int(_counts(rows, "num_emitted").sum()),
        "num_tested": int(_counts(rows, "num_tested").sum()),
        "num_positions": sum(r.num_positions for r in rows),
        "draft_coverage": _coverage(rows),
    }
    for name, (top, bottom) in RATE_COLUMNS.items():
        columns = [_counts(rows, top), _counts(rows, bottom)]
        cell[name] = _estimate(columns, intervals.ratio, seed).to_dict()
    for name, (top, bottom) in POSITION_COLUMNS.items():
        cell[name] = [
            _estimate(
                [_counts_at(rows, top, position), _counts_at(rows, bottom, position)],
                intervals.ratio,
                seed,
            ).to_dict()
            for position in range(num_draft_tokens)
        ]
    cell["accepted_length_histogram"] = [
        _estimate(
            [_counts_at(rows, "accepted_length_histogram", length), _counts(rows, "num_rounds")],
            intervals.ratio,
            seed,
        ).to_dict()
        for length in range(num_draft_tokens + 1)
    ]
    by_rule = {
        rule: _estimate(_analytic(rows, rule), intervals.ratio, seed).to_dict()
        for rule in _distinct(rule for r in rows for rule in r.acceptance_sums)
    }
    nothing = Estimate(None, None, None, len(rows)).to_dict()
    cell["analytic_acceptance_rate"] = by_rule.get(PRIMARY_RULE, nothing)
    cell["analytic_acceptance_rate_by_rule"] = by_rule
    return cell


def _coverage(rows: Sequence[PromptRecord]) -> float:
    """Share of the target calls that had room for a draft for which the drafter proposed one.

    On the last token of an answer's budget nobody can propose: such a call says nothing of a draft,
    and a speed model that spreads it over all rounds misjudges every one of them.
    """
    num_calls = sum(
        row.counts["num_target_calls"]
        if row.num_draftable_calls is None
        else row.num_draftable_calls
        for row in rows
    )
    num_drafted = float(_counts_at(rows, "proposed_by_position", 0).sum())
    return num_drafted / num_calls if num_calls else 0.0


def _estimate(columns: Sequence[Floats], statistic: Statistic, seed: int) -> Estimate:
    return intervals.estimate(np.stack(columns, axis=1), statistic, seed=seed)


def _counts(rows: Sequence[PromptRecord], name: str) -> Floats:
    return np.array([row.counts[name] for row in rows], dtype=np.float64)


def _counts_at(rows: Sequence[PromptRecord], name: str, position: int) -> Floats:
    """Counts at one position; a prompt whose blocks never got that deep counts nothing there."""
    values = [row.counts[name] for row in rows]
    return np.array([v[position] if position < len(v) else 0 for v in values], dtype=np.float64)


def _analytic(rows: Sequence[PromptRecord], rule: str) -> list[Floats]:
    """Sums under a rule and positions; rows without that rule are left out of both."""
    sums = [row.acceptance_sums.get(rule) for row in rows]
    known = np.array([s is not None for s in sums], dtype=np.float64)
    positions = np.array([row.num_positions for row in rows], dtype=np.float64)
    return [np.array([s or 0.0 for s in sums], dtype=np.float64), positions * known]


def _by_prompt(
    records: Iterable[PromptRecord], draft: str, temperature: float
) -> dict[str, PromptRecord]:
    return {r.prompt_id: r for r in records if r.draft == draft and r.temperature == temperature}


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
