"""Owns the answer to "acceptance is low: why?": where a draft loses, and to what.

Refuses to know models and tokenizers: columns of ``positions.py`` in, shares and findings out.

What is lost at a position is 1 - alpha there. It is attributed twice: to the target's token that
was not accepted (1 - r of the text's own token, whose mean is 1 - alpha as well), and to the token
the draft proposes too often (q - p at its largest).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.metrics.positions import TOP_K_SIZES
from distill.metrics.sentences import exact, percent

ENTROPY_BANDS = (0.0, 0.5, 1.0, 2.0, 3.0, math.inf)
POSITION_BANDS = (0, 1, 8, 32, 128, math.inf)
NUM_TOKENS = 10
NUM_REJECTED = 5
CONTEXT_TOKENS = 12


@dataclass(frozen=True)
class ScoredText:
    """One text of the target and a draft's columns along it (see ``positions.score_positions``)."""

    prompt_id: str
    task: str
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    entropy: Sequence[float]
    columns: Mapping[str, Sequence[Any]]


def diagnose(texts: Sequence[ScoredText], *, stop_token_ids: frozenset[int]) -> dict[str, Any]:
    """Where the acceptance of one draft at one temperature is lost.

    Returns JSON-able tables; ``share_of_loss`` columns sum to 1 over a table that covers every
    position, but for ``rejected_tokens``: the draft's worst token is a part of a position's loss.
    Empty texts give an empty diagnosis.
    """
    spots = [spot for text in texts for spot in _spots(text)]
    lost = math.fsum(spot.lost for spot in spots)
    if not spots:
        return {"num_positions": 0, "lost": None}
    # On a finite text the mean of 1 - r is not that of 1 - alpha: its shares are of its own sum.
    missed = math.fsum(1.0 - spot.text for spot in spots)
    by_token = _table(spots, lambda s: s.token, missed, loss=lambda s: 1.0 - s.text)
    rejected = _table(spots, lambda s: s.draft_token, lost, loss=lambda s: s.draft_excess)
    outside = math.fsum(spot.outside for spot in spots)
    stops = [spot for spot in spots if spot.token in stop_token_ids]
    return {
        "num_positions": len(spots),
        "lost": lost / len(spots),
        "lost_to_vocabulary": outside / len(spots),
        "share_lost_to_vocabulary": outside / lost if lost else 0.0,
        "by_task": _table(spots, lambda s: s.text_of.task, lost),
        "by_entropy": _bands(spots, lambda s: s.entropy, ENTROPY_BANDS, lost),
        "by_text_position": _bands(spots, lambda s: s.position, POSITION_BANDS, lost),
        "stop_tokens": {
            "num_positions": len(stops),
            "acceptance_rate": math.fsum(s.text for s in stops) / len(stops) if stops else None,
        },
        "lost_tokens": by_token[:NUM_TOKENS],
        "rejected_tokens": [_with_example(row, spots) for row in rejected[:NUM_REJECTED]],
    }


def top_k_ceilings(sums: Iterable[Mapping[str, float]], num_positions: int) -> dict[str, float]:
    """E[mass of the target's k likeliest tokens]: what a draft of a top-k store can reach at most.

    A draft that fits the renormalised top-k law perfectly has this acceptance and no more.
    """
    rows = list(sums)
    if not num_positions:
        return {}
    return {str(k): math.fsum(row[str(k)] for row in rows) / num_positions for k in TOP_K_SIZES}


def findings(diagnosis: Mapping[str, Any], *, draft: str, temperature: float) -> list[str]:
    """The few sentences a reader should have seen, the largest loss first."""
    if not diagnosis["num_positions"] or not diagnosis["lost"]:
        return []
    found = [
        f"{draft} loses {percent(diagnosis['lost'])} of what it proposes at temperature "
        f"{exact(temperature)}"
    ]
    share = diagnosis["share_lost_to_vocabulary"]
    if share >= 0.02:
        found.append(
            f"{percent(share)} of the loss is the target's probability on tokens outside the "
            "draft's vocabulary: raise distill.vocabulary_size if that is much"
        )
    found += _uneven(diagnosis["by_task"], "task")
    open_places = [row for row in diagnosis["by_entropy"] if row["from"] >= 2.0]
    share = math.fsum(row["share_of_loss"] for row in open_places)
    if share >= 0.5:
        found.append(
            f"{percent(share)} of the loss is where the target itself is open (entropy of 2 nats "
            "or more): a larger draft gains there, more training of this one little"
        )
    first = diagnosis["by_text_position"][0]
    rest = diagnosis["by_text_position"][1:]
    typical = _mean_rate(rest)
    if typical is not None and first["num_positions"] and first["acceptance_rate"] < 0.5 * typical:
        found.append(
            f"the first token of an answer is accepted {percent(first['acceptance_rate'])} of the "
            f"time, the others {percent(typical)}: look at the chat template and at how the "
            "draft's training text began"
        )
    stops = diagnosis["stop_tokens"]
    if stops["num_positions"] >= 5 and stops["acceptance_rate"] < 0.5 * (1 - diagnosis["lost"]):
        found.append(
            f"tokens that end an answer are accepted {percent(stops['acceptance_rate'])} of the "
            "time: the draft may have learnt another end of text than the target's"
        )
    return found


def temperature_finding(rows: Sequence[Mapping[str, float]], temperature: float) -> str | None:
    """A sentence when the draft would be accepted clearly more often at another temperature."""
    here = next(r for r in rows if r["draft_temperature"] == temperature)
    best = max(rows, key=lambda r: r["analytic_acceptance_rate"])
    gain = best["analytic_acceptance_rate"] - here["analytic_acceptance_rate"]
    if gain < 0.01:
        return None
    is_cooler = best["draft_temperature"] < temperature
    return (
        f"drafted at temperature {exact(best['draft_temperature'])} beside a target at "
        f"{exact(temperature)} the draft would gain {100 * gain:.1f} points: it is too "
        f"{'flat' if is_cooler else 'sharp'}, which more training on sampled text mends"
    )


@dataclass(frozen=True)
class _Spot:
    """One position of one text."""

    text_of: ScoredText
    position: int
    token: int
    entropy: float
    lost: float
    text: float
    outside: float
    draft_token: int
    draft_excess: float


def _spots(text: ScoredText) -> list[_Spot]:
    columns = text.columns
    if not columns:
        return []
    names = ("position", "speculative_sampling", "text", "outside", "draft_token", "draft_excess")
    rows = zip(*(columns[name] for name in names), strict=True)
    return [
        _Spot(
            text, i, text.token_ids[i], text.entropy[i], 1.0 - alpha, r, outside, token, max(0.0, e)
        )
        for i, alpha, r, outside, token, e in rows
    ]


def _table(
    spots: Sequence[_Spot],
    key: Callable[[_Spot], Hashable],
    lost: float,
    *,
    loss: Callable[[_Spot], float] = lambda s: s.lost,
) -> list[dict[str, Any]]:
    """One row per value of ``key``, the largest loss first; equal losses in the order they came."""
    groups: dict[Hashable, list[float]] = {}
    for spot in spots:
        groups.setdefault(key(spot), []).append(loss(spot))
    rows = [
        {
            "name": name,
            "num_positions": len(losses),
            "acceptance_rate": 1.0 - math.fsum(losses) / len(losses),
            "share_of_loss": math.fsum(losses) / lost if lost else 0.0,
        }
        for name, losses in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["share_of_loss"])


def _bands(
    spots: Sequence[_Spot],
    value: Callable[[_Spot], float],
    edges: Sequence[float],
    lost: float,
) -> list[dict[str, Any]]:
    rows = []
    for low, high in itertools.pairwise(edges):
        inside = [spot for spot in spots if low <= value(spot) < high]
        loss = math.fsum(spot.lost for spot in inside)
        rows.append(
            {
                "from": low,
                "to": None if math.isinf(high) else high,
                "num_positions": len(inside),
                "acceptance_rate": 1.0 - loss / len(inside) if inside else None,
                "share_of_loss": loss / lost if lost else 0.0,
            }
        )
    return rows


def _with_example(row: dict[str, Any], spots: Sequence[_Spot]) -> dict[str, Any]:
    """The place where this token is most wrong: what stands before it and what the target said."""
    worst = max(
        (s for s in spots if s.draft_token == row["name"]), key=lambda s: (s.draft_excess, s.lost)
    )
    before = [*worst.text_of.prompt_token_ids, *worst.text_of.token_ids[: worst.position]]
    return row | {
        "prompt_id": worst.text_of.prompt_id,
        "context_token_ids": before[-CONTEXT_TOKENS:],
        "target_token": worst.token,
        "draft_excess": worst.draft_excess,
    }


def _uneven(rows: Sequence[Mapping[str, Any]], what: str) -> list[str]:
    if len(rows) < 2:
        return []
    worst = min(rows, key=lambda row: row["acceptance_rate"])
    best = max(rows, key=lambda row: row["acceptance_rate"])
    if best["acceptance_rate"] - worst["acceptance_rate"] < 0.1:
        return []
    return [
        f"the {what} {worst['name']} is accepted {percent(worst['acceptance_rate'])} of the time, "
        f"{best['name']} {percent(best['acceptance_rate'])}: more training prompts like the first"
    ]


def _mean_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    number = int(sum(row["num_positions"] for row in rows))
    if not number:
        return None
    accepted: float = math.fsum(
        row["acceptance_rate"] * row["num_positions"] for row in rows if row["num_positions"]
    )
    return accepted / float(number)
