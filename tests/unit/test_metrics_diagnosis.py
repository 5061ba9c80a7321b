"""Owns the tests of the diagnosis and of the columns it is made of: shares worked out by hand.

Refuses to run a model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from distill.metrics import diagnosis, positions, self_tests
from distill.metrics.chain import expected_counts
from distill.metrics.diagnosis import ScoredText
from distill.metrics.positions import DraftLogits
from distill.metrics.sentences import difference_sentence
from distill.sampling import SamplingConfig, logits_to_probs

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]], dtype=torch.float64)
AT_ONE = SamplingConfig(temperature=1.0)


def _columns(tokens: list[int], q: torch.Tensor = Q, kept: list[bool] | None = None) -> Any:
    draft = DraftLogits(torch.arange(2), q.log(), None if kept is None else torch.tensor(kept))
    return positions.score_positions(P.log(), tokens, {"d": draft}, AT_ONE)


def test_columns_by_hand() -> None:
    found = _columns([0, 2])["drafts"]["d"]
    assert found["speculative_sampling"] == pytest.approx([0.7, 1.0])
    assert found["draft_argmax"] == pytest.approx([0.2, 0.8])
    assert found["sample_and_match"] == pytest.approx([0.1 + 0.09 + 0.1, 0.66])
    # min(1, q / p) of the text's own token: 0.2 / 0.5, and 1.
    assert found["text"] == pytest.approx([0.4, 1.0])
    assert found["draft_token"][0] == 2
    assert found["draft_excess"] == pytest.approx([0.3, 0.0], abs=1e-6)
    assert found["outside"] == [0.0, 0.0]


def test_the_texts_own_acceptance_averages_to_alpha() -> None:
    mean = sum(P[0, x].item() * _columns([x, 0])["drafts"]["d"]["text"][0] for x in range(3))
    assert mean == pytest.approx(0.7, abs=1e-6)


def test_a_text_that_rounding_would_now_continue_otherwise_asks_the_draft_for_that_token() -> None:
    greedy = SamplingConfig(temperature=0.0)
    same = DraftLogits(torch.arange(2), P.log())
    other = DraftLogits(torch.arange(2), Q.log())
    drafts = {"the target itself": same, "a draft": other}
    # Token 1 is not the most likely one of the first position in this pass.
    found = positions.score_positions(P.log(), [1, 2], drafts, greedy)["drafts"]
    assert found["the target itself"]["text"] == [1.0, 1.0]
    assert found["a draft"]["text"] == [0.0, 1.0]


def test_mass_outside_the_vocabulary_is_the_targets() -> None:
    q = torch.tensor([[0.4, 0.6, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    found = _columns([0, 2], q, [True, True, False])["drafts"]["d"]
    assert found["outside"] == pytest.approx([0.2, 0.8])


def test_entropy_is_of_the_target_at_temperature_one_whatever_is_sampled_at() -> None:
    greedy = positions.score_positions(P.log(), [0, 2], {}, SamplingConfig(temperature=0.0))
    expected = -(P * P.log()).sum(-1)
    assert greedy["target"]["entropy"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_top_k_ceiling_is_the_mass_of_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "TOP_K_SIZES", (1, 2))
    monkeypatch.setattr(diagnosis, "TOP_K_SIZES", (1, 2))
    found = positions.score_positions(P.log(), [0, 2], {}, AT_ONE)
    ceilings = diagnosis.top_k_ceilings([found["target"]["top_k_mass"]], 2)
    assert ceilings == pytest.approx({"1": (0.5 + 0.8) / 2, "2": (0.8 + 0.9) / 2})


def _text(
    prompt: str, task: str, alphas: list[float], *, tokens: list[int], outside: float = 0.0
) -> ScoredText:
    number = len(alphas)
    return ScoredText(
        prompt,
        task,
        [90, 91],
        tokens,
        [0.1] * number,
        {
            "position": list(range(number)),
            "speculative_sampling": alphas,
            "text": alphas,
            "outside": [outside] * number,
            "draft_token": [7 if a < 0.5 else 8 for a in alphas],
            "draft_excess": [1.0 - a for a in alphas],
        },
    )


def test_shares_of_the_loss_by_hand() -> None:
    # Lost: 1 + 0 in chat, 0.5 + 0.5 in math: 2 of 4 positions.
    texts = [
        _text("a", "chat", [0.0, 1.0], tokens=[5, 6], outside=0.1),
        _text("b", "math", [0.5, 0.5], tokens=[5, 2], outside=0.1),
    ]
    found = diagnosis.diagnose(texts, stop_token_ids=frozenset({2}))
    assert (found["num_positions"], found["lost"]) == (4, 0.5)
    by_task = {row["name"]: row["share_of_loss"] for row in found["by_task"]}
    assert by_task == {"chat": 0.5, "math": 0.5}
    assert found["lost_tokens"][0]["name"] == 5
    assert found["lost_tokens"][0]["share_of_loss"] == pytest.approx(1.5 / 2)
    assert found["share_lost_to_vocabulary"] == pytest.approx(0.4 / 2)
    assert found["stop_tokens"] == {"num_positions": 1, "acceptance_rate": 0.5}
    assert sum(row["share_of_loss"] for row in found["by_text_position"]) == pytest.approx(1.0)
    (worst, *_) = found["rejected_tokens"]
    assert (worst["name"], worst["context_token_ids"], worst["target_token"]) == (7, [90, 91], 5)


def test_the_shares_of_missed_tokens_sum_to_one_where_the_text_was_unlucky() -> None:
    # alpha is 0.5 at both places, the text's own tokens have r = 0.2 and 0.4: 1.4 missed, not 1.
    text = _text("a", "chat", [0.5, 0.5], tokens=[5, 6])
    unlucky = dataclasses.replace(text, columns={**text.columns, "text": [0.2, 0.4]})
    rows = diagnosis.diagnose([unlucky], stop_token_ids=frozenset())["lost_tokens"]
    shares = {row["name"]: row["share_of_loss"] for row in rows}
    assert shares == pytest.approx({5: 0.8 / 1.4, 6: 0.6 / 1.4})


def test_findings_name_what_loses_most() -> None:
    texts = [
        _text("a", "chat", [0.1, 0.9, 0.9], tokens=[5, 6, 6], outside=0.1),
        _text("b", "math", [0.1, 0.3, 0.3], tokens=[5, 6, 6], outside=0.1),
    ]
    found = diagnosis.diagnose(texts, stop_token_ids=frozenset())
    said = "\n".join(diagnosis.findings(found, draft="d", temperature=1.0))
    assert "outside the draft's vocabulary" in said
    assert "the task math is accepted" in said
    assert "the first token of an answer" in said


def test_a_perfect_draft_has_no_findings() -> None:
    found = diagnosis.diagnose([_text("a", "c", [1.0], tokens=[5])], stop_token_ids=frozenset())
    assert diagnosis.findings(found, draft="d", temperature=1.0) == []
    assert diagnosis.diagnose([], stop_token_ids=frozenset())["num_positions"] == 0


def test_a_draft_that_is_too_flat_is_told_so() -> None:
    rows = [
        {"draft_temperature": 0.5, "analytic_acceptance_rate": 0.6},
        {"draft_temperature": 1.0, "analytic_acceptance_rate": 0.5},
    ]
    sentence = diagnosis.temperature_finding(rows, 1.0)
    assert sentence is not None
    assert "too flat" in sentence
    assert diagnosis.temperature_finding([rows[1]], 1.0) is None


# ------------------------------------------------------------------------------ self-tests


def test_a_model_that_drafts_for_itself_passes_and_disjoint_ones_are_zero() -> None:
    logits_NV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 0.7, 1.0):
        sampling = SamplingConfig(temperature=temperature)
        drawn = _drawn(logits_NV, sampling)
        assert self_tests.same_model(logits_NV, drawn, sampling, **BOUNDS).is_passed is True
        assert self_tests.disjoint_support(logits_NV, sampling).is_passed is True
        neutral = self_tests.neutral_processors("d", logits_NV, drawn, sampling, {}, **BOUNDS)
        assert neutral.is_passed is True


BOUNDS: dict[str, float] = {"least": 0.999, "slack": 1e-4}


def _drawn(logits_NV: torch.Tensor, sampling: SamplingConfig) -> self_tests.Drawn:
    """What a faultless drafter with these logits says it drew from."""
    probs_NV = logits_to_probs(logits_NV, sampling)
    return self_tests.Drawn(probs_NV.argmax(-1), None if sampling.is_greedy else probs_NV)


@pytest.mark.parametrize("fault", [{"top_k": 5}, {"temperature": 0.9}, {"min_p": 0.2}])
def test_what_a_draft_alone_does_to_its_law_is_caught(fault: dict[str, Any]) -> None:
    logits_NV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    drawn = _drawn(logits_NV, SamplingConfig(**fault))
    assert self_tests.same_model(logits_NV, drawn, AT_ONE, **BOUNDS).is_passed is False
    found = self_tests.neutral_processors("draft", logits_NV, drawn, AT_ONE, {}, **BOUNDS)
    assert found.is_passed is False


def test_a_greedy_draft_that_takes_the_second_token_is_caught() -> None:
    logits_NV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    second = self_tests.Drawn(logits_NV.topk(2).indices[:, 1], None)
    greedy = SamplingConfig(temperature=0.0)
    assert self_tests.same_model(logits_NV, second, greedy, **BOUNDS).is_passed is False


def test_settings_that_are_not_applied_are_listed() -> None:
    logits_NV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    asked = self_tests.neutral_processors(
        "d", logits_NV, _drawn(logits_NV, AT_ONE), AT_ONE, {"repetition_penalty": 1.1}, **BOUNDS
    )
    assert asked.is_passed is True
    assert "repetition_penalty 1.1: not applied" in asked.detail


def _decoded(accepted: int, tested: int) -> dict[str, int]:
    return {"num_accepted": accepted, "num_tested": tested}


def _simulated(rates: list[float], depth: int, rng: Any) -> dict[str, int]:
    """Counts of one decode in which token i of the text passes its test with its own rate."""
    begin = accepted = tested = 0
    while begin < len(rates):
        stood = 0
        while stood < depth and begin + stood < len(rates):
            tested += 1
            if rng.random() >= rates[begin + stood]:
                break
            stood += 1
        accepted += stood
        begin += stood + 1
    return _decoded(accepted, tested)


def test_decoding_that_accepts_as_it_must_passes_and_one_that_does_not_fails() -> None:
    rates = [[1.0, 0.5, 0.5, 1.0, 0.0, 0.5 + 0.05 * (n % 3)] for n in range(20)]
    expected = [expected_counts(r, 2) for r in rates]
    rng = np.random.default_rng(0)
    right = [_simulated(r, 2, rng) for r in rates]
    wrong = [_decoded(5, 5) for _ in range(20)]
    common: dict[str, Any] = {"seed": 0}
    judged = self_tests.analytic_equals_decoded("d", 1.0, right, expected, **common)
    assert judged.is_passed is True, judged.found
    always = self_tests.analytic_equals_decoded("d", 1.0, wrong, expected, **common)
    assert always.is_passed is False
    few = self_tests.analytic_equals_decoded("d", 1.0, wrong[:3], expected[:3], **common)
    assert few.is_passed is None
    assert self_tests.failures([always.to_dict(), few.to_dict()])[0].startswith("self-test failed")


# ------------------------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("value", "low", "high", "words"),
    [
        (0.05, 0.02, 0.08, "new is accepted more often than old"),
        (-0.05, -0.08, -0.02, "new is accepted less often than old"),
        (0.01, -0.02, 0.04, "no difference between new and old is seen"),
        (0.0, 0.0, 0.0, "accepted equally often"),
        (0.05, None, None, "one prompt gives no interval"),
        (None, None, None, "cannot be compared"),
    ],
)
def test_a_difference_is_said_in_a_plain_sentence(
    value: float | None, low: float | None, high: float | None, words: str
) -> None:
    one = {"value": value, "low": low, "high": high}
    row = {"analytic_acceptance_rate": one, "acceptance_rate": one}
    sentence = difference_sentence("new", "old", row, temperature=0.7, num_prompts=20)
    assert words in sentence
    assert "temperature 0.7, on 20 prompts" in sentence
