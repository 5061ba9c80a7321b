"""Owns the faults that measurements of speculation have shipped, one test a row of the list.

Refuses to load more than tiny random models. Rows: 115 (tokens after the end are counted), 117
(drafts that were never proposed are in the denominator), 118 (acceptance that cannot be low), 119
(accepted more often, yet slower).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.drafters.base import Proposal
from distill.metrics import planner, summary
from distill.metrics.acceptance import summarize_rounds
from distill.metrics.summary import PromptRecord
from distill.metrics.verdict import decide
from distill.models import LoadedModel, load_target
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.lossless import FillerDrafter
from distill.runtime.speculative import decode_batch
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig
from tests import measure_helpers as given

GREEDY = SamplingConfig(temperature=0.0)
PROMPT = [5, 40, 41]


class ScriptedDrafter(FillerDrafter):
    """Proposes what comes next in a fixed text, shifted by so many ids, at most so many tokens."""

    def __init__(self, text: Sequence[int], *, shift: int = 0, at_most: int = 99) -> None:
        self.text, self.shift, self.at_most = text, shift, at_most

    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        drafts = []
        for tokens, number in zip(token_ids, num_draft_tokens_B, strict=True):
            begin = len(tokens) - len(PROMPT)
            ahead = self.text[begin : begin + min(number, self.at_most)]
            drafts.append([(token + self.shift) % 300 for token in ahead])
        width = max(map(len, drafts), default=0)
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        return Proposal(
            torch.tensor(padded, dtype=torch.long).reshape(len(drafts), width),
            [len(draft) for draft in drafts],
            None,
        )


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(given.model_config(tiny_pair_dirs[0]))


def _decode(
    target: LoadedModel, drafter: Any, *, stop: Sequence[int] = (), length: int = 24, depth: int = 5
) -> DecodeResult:
    engine = DecodeEngine(
        target.model,
        drafter,
        num_draft_tokens=depth if drafter is not None else 0,
        max_batch_size=1,
        max_length=len(PROMPT) + length,
        tokenizer=target.tokenizer,
    )
    request = DecodeRequest(PROMPT, length, GREEDY, 0, frozenset(stop))
    return decode_batch(engine, [request])[0]


@pytest.fixture(scope="module")
def text(target: LoadedModel) -> list[int]:
    """The target's own greedy continuation."""
    return _decode(target, None).token_ids


def _cell(stats: DecodeStats, depth: int) -> dict[str, Any]:
    record = PromptRecord("d", 0.0, "p", "chat", stats.to_dict(), 0, {})
    return summary.summarize([record], num_draft_tokens=depth, seed=0)[0]


# ------------------------------------------------------------------------------ row 115


def test_a_block_that_holds_the_end_counts_what_it_emits() -> None:
    # [d1, d2, EOS, d4, d5, bonus]: three tokens come out, not six.
    cell = _cell(DecodeStats.from_rounds([(5, 5, 3)]), 5)
    assert cell["block_efficiency"]["value"] == 3.0
    assert cell["acceptance_rate"]["value"] == 1.0
    assert [e["value"] for e in cell["accepted_length_histogram"]] == [0, 0, 0, 1.0, 0, 0]


def test_an_end_inside_an_accepted_block_ends_the_counting_in_real_decoding(
    target: LoadedModel, text: list[int]
) -> None:
    end = next(i for i in range(1, 5) if text[i] not in text[:i])
    stats = _decode(target, ScriptedDrafter(text), stop=[text[end]]).stats
    assert (stats.num_target_calls, stats.num_emitted) == (1, end + 1)
    assert (stats.num_tested, stats.num_accepted) == (end + 1, end + 1)
    assert _cell(stats, 5)["block_efficiency"]["value"] == end + 1


# ------------------------------------------------------------------------------ row 117


def test_drafts_that_were_never_proposed_are_in_no_denominator(
    target: LoadedModel, text: list[int]
) -> None:
    # Five are asked for and two come: an always accepted draft reads 1 under both names.
    stats = _decode(target, ScriptedDrafter(text, at_most=2)).stats
    assert stats.num_proposed == stats.num_tested == stats.num_accepted
    cell = _cell(stats, 5)
    assert cell["draft_acceptance_rate"]["value"] == 1.0
    assert cell["acceptance_rate"]["value"] == 1.0
    assert [e["value"] for e in cell["acceptance_by_position"]] == [1.0, 1.0, None, None, None]


def test_rounds_without_a_draft_are_plain_steps() -> None:
    rates = summarize_rounds([2, 0, 0], [2, 0, 0])
    assert rates["acceptance_rate"] == rates["draft_acceptance_rate"] == 1.0
    assert rates["block_efficiency"] == 5 / 3


# ------------------------------------------------------------------------------ row 118


def test_an_adversarial_draft_reads_zero_and_changes_no_token(
    target: LoadedModel, text: list[int]
) -> None:
    result = _decode(target, ScriptedDrafter(text, shift=1))
    assert result.token_ids == text
    cell = _cell(result.stats, 5)
    assert cell["acceptance_rate"]["value"] == 0.0
    assert cell["draft_acceptance_rate"]["value"] == 0.0
    assert cell["block_efficiency"]["value"] == 1.0


def test_a_draft_that_is_always_right_reads_one(target: LoadedModel, text: list[int]) -> None:
    cell = _cell(_decode(target, ScriptedDrafter(text)).stats, 5)
    assert cell["acceptance_rate"]["value"] == 1.0
    assert cell["block_efficiency"]["value"] == 24 / 4


# ------------------------------------------------------------------------------ row 119


def test_a_better_draft_that_costs_more_is_predicted_to_be_slower() -> None:
    cheap = planner.speedup(0.6, 4, draft_cost_ratio=0.05)
    better = planner.speedup(0.7, 4, draft_cost_ratio=0.4)
    assert planner.expected_tokens(0.7, 4) > planner.expected_tokens(0.6, 4)
    assert better < 1.1 < cheap


def test_more_accepted_and_slower_is_not_shipped_and_the_clock_is_the_reason() -> None:
    run = {
        "draft": "distilled",
        "temperature": 0.0,
        "num_draft_tokens": 4,
        "predicted_speedup": 1.4,
        "acceptance_rate": 0.9,
        "speedup": {"value": 0.8, "low": 0.7, "high": 0.9},
    }
    verdict = decide({"num_compared": 5, "num_broken": 0}, {"runs": [run], "plans": []})
    assert verdict["ship"] is False
    assert "0.80x measured (0.70 to 0.90)" in verdict["reasons"][0]
