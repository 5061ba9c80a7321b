"""Owns the tests of judging one round: which random numbers a row uses, which rows are asked about.
Refuses to prove the law: tests/exactness/test_enumeration.py does, for ``judge`` too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.errors import SamplingError
from distill.runtime import rounds
from distill.runtime.commit import CommitRules
from distill.runtime.draft_length import FixedDraftLength
from distill.runtime.requests import DecodeRequest, Row
from distill.sampling import ACCEPT_LANE, RESIDUAL_LANE, SamplingConfig


def row(output: list[int], **request: Any) -> Row:
    settings: dict[str, Any] = {
        "sampling": SamplingConfig(),
        "seed": 3,
        "stop_token_ids": frozenset(),
    } | request
    return Row(
        handle=0,
        request=DecodeRequest([1, 2], 99, **settings),
        rules=CommitRules(99, 99),
        draft_length=FixedDraftLength(4),
        token_ids=[1, 2, *output],
        num_prompt_tokens=2,
        rounds=[(4, 1, 2)],  # fewer rounds than tokens
    )


def peaked(*tokens: int) -> torch.Tensor:
    """Logits [N, V] of a target that is sure of these tokens."""
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(tokens), 6).float()


def test_random_numbers_are_those_of_the_positions_in_the_answer(monkeypatch):
    """By round or call, a number would decide about two tokens, and the law be another one."""
    asked: list[tuple[list[list[int]], list[list[int]], int]] = []
    original = rounds.uniforms

    def uniforms(seeds: Any, positions: Any, lane: int) -> torch.Tensor:
        asked.append((seeds, positions, lane))
        return original(seeds, positions, lane)

    monkeypatch.setattr(rounds, "uniforms", uniforms)
    rows = [row([4, 4, 4, 4, 4]), row([], seed=8)]
    found = rounds.judge(rows, [[3, 5], [2]], peaked(3, 5, 4, 2, 1), None)
    assert found.num_accepted_B.tolist() == [2, 1]
    assert found.next_token_B.tolist() == [4, 1]
    assert asked == [
        ([[3], [8]], [[5, 6, 7], [0, 1, 2]], ACCEPT_LANE),
        ([[3], [8]], [[5], [0]], RESIDUAL_LANE),
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nobody_is_asked_about_what_stands_behind_an_excluded_draft(temperature):
    asked: list[list[int]] = []

    def no_fives(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(input_ids[0].tolist())
        return scores.index_fill(1, torch.tensor([5]), -torch.inf)

    judged = row(
        [4], sampling=SamplingConfig(temperature=temperature), logits_processors=(no_fives,)
    )
    found = rounds.judge([judged], [[3, 5, 0]], peaked(3, 2, 1, 1), None)
    assert (found.num_accepted_B.tolist(), found.next_token_B.tolist()) == ([1], [2])
    assert asked == [[1, 2, 4], [1, 2, 4, 3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_control_row_is_decided_by_its_first_position_whatever_was_drafted(temperature):
    sampling = SamplingConfig(temperature=temperature)
    rows = [row([], sampling=sampling, is_control=True), row([], sampling=sampling)]
    found = rounds.judge(rows, [[3, 5]] * 2, peaked(3, 5, 4, 3, 5, 4), None)
    assert found.num_accepted_B.tolist() == [0, 2]
    assert found.next_token_B.tolist() == [3, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nobody_is_asked_about_what_stands_behind_a_stop_token(temperature):
    asked: list[list[int]] = []

    def recording(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(input_ids[0].tolist())
        return scores

    judged = row(
        [4],
        sampling=SamplingConfig(temperature=temperature),
        logits_processors=(recording,),
        stop_token_ids=frozenset({5}),
    )
    found = rounds.judge([judged], [[3, 5, 0]], peaked(3, 5, 0, 1), None)
    assert found.num_accepted_B.tolist()[0] >= 2  # the commit ends the block at the stop
    assert asked == [[1, 2, 4], [1, 2, 4, 3]]


def test_the_drafts_of_a_control_row_are_no_text_to_ask_about():
    asked: list[list[int]] = []

    def recording(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(input_ids[0].tolist())
        return scores

    judged = row([], logits_processors=(recording,), is_control=True)
    rounds.judge([judged], [[3, 5]], peaked(3, 5, 4), None)
    assert asked == [[1, 2]]


def raising(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if 3 in input_ids[0].tolist():
        raise KeyError(3)
    return scores


def emptying(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - torch.inf if 3 in input_ids[0].tolist() else scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("failing", [raising, emptying])
def test_what_fails_behind_a_draft_matters_only_if_the_draft_stands(temperature, failing):
    sampling = SamplingConfig(temperature=temperature)
    asked = {"sampling": sampling, "logits_processors": (failing,)}
    rows = [row([], **asked), row([], sampling=sampling), row([], **asked)]
    drafts = [[2, 3, 4], [3, 4], [2, 3, 4]]
    logits_NV = peaked(2, 5, 4, 1, 3, 4, 1, 2, 3, 4, 1)
    found = rounds.judge(rows, drafts, logits_NV, None)
    # In the first row the 3 is refused; in the last one it stands, and who knows what follows it.
    assert found.num_accepted_B.tolist() == [1, 2, 2]
    assert found.next_token_B.tolist() == [5, 1, rounds.NOT_JUDGED]
    with pytest.raises((KeyError, SamplingError)):
        rounds.judge([row([3], **asked)], [[2]], peaked(2, 1), None)
