"""Owns the tests of what measure checks itself by: self-tests on real drafters, the audit.

Refuses to train: tiny random models. Faults are put into the drafter alone, or into its answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.artifacts import ArtifactStore
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import ContextLengthError
from distill.metrics.summary import PromptRecord
from distill.metrics.verdict import decide, gate_failures
from distill.models import LoadedModel, load_target
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig, probs_by_row
from distill.stages import measure_audit, measure_checks, measure_timing
from distill.stages import measure_runs as runs
from distill.stages.measure import TimingConfig
from distill.stages.measure_runs import Contestant, HeldOutPrompt
from tests import measure_helpers as given

PROMPTS = [HeldOutPrompt(f"p{n}", "chat", (5 + n, 40, 41, 42), {}) for n in range(3)]


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(given.model_config(tiny_pair_dirs[0]))


@pytest.fixture(scope="module")
def draft(tiny_pair_dirs: tuple[Path, Path]) -> Contestant:
    return Contestant("draft", load_target(given.model_config(tiny_pair_dirs[1])))


Checks = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def checks(target: LoadedModel, draft: Contestant) -> Checks:
    """The outcome of every self-test, by name."""
    answers = {(t, p.prompt_id): list(range(60, 70)) for t in (0.0, 1.0) for p in PROMPTS}

    def run(temperature: float, contestant: Contestant = draft) -> dict[str, Any]:
        found = measure_checks.check_models(
            target, contestant, PROMPTS, answers, temperature, seed=0
        )
        return {test["name"]: test["is_passed"] for test in found}

    return run


# ------------------------------------------------------------------------------ the draft's side


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_faultless_drafters_of_every_kind_pass(checks: Checks, temperature: float) -> None:
    for contestant in (
        None,
        Contestant("early", num_layers=2),
        Contestant("whole", num_layers=4),
        Contestant("prompt_lookup"),
    ):
        outcomes = checks(temperature, contestant) if contestant else checks(temperature)
        assert set(outcomes.values()) == {True}, outcomes


def test_a_vocabulary_subset_is_no_processor(
    checks: Checks, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    model = load_target(given.model_config(tiny_pair_dirs[1]))
    outcomes = checks(1.0, Contestant("subset", model, tuple(range(50, 200))))
    assert outcomes["processors neutral: subset"] is True


def test_a_temperature_that_only_drafts_meet_is_caught(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sharper(logits: torch.Tensor, samplings: Any) -> torch.Tensor:
        return probs_by_row(logits * 1.5, samplings)

    monkeypatch.setattr("distill.drafters.autoregressive.probs_by_row", sharper)
    outcomes = checks(1.0)
    assert outcomes["draft == target"] is False
    assert outcomes["processors neutral: draft"] is False


def test_a_penalty_that_only_drafts_meet_is_caught_at_temperature_0(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def penalised(logits: torch.Tensor) -> torch.Tensor:
        return logits.topk(2, dim=-1).indices[..., 1]

    monkeypatch.setattr("distill.drafters.autoregressive.argmax_last", penalised)
    outcomes = checks(0.0)
    assert outcomes["draft == target"] is False
    assert outcomes["processors neutral: draft"] is False
    assert outcomes["draft == target, decoded"] is False


# ------------------------------------------------------------------------------ the stated bound


@pytest.mark.parametrize(
    ("rounds", "outcome"),
    [
        ([(4, 4, 5)] * 4, None),  # 16 tested: too few
        ([(4, 4, 5)] * 6, True),
        ([(4, 4, 5)] * 6 + [(4, 0, 1)], False),  # 24 of 25, below 0.99
    ],
)
def test_the_decoded_self_test_keeps_to_the_bound_it_states(
    target: LoadedModel,
    rounds: list[tuple[int, int, int]],
    outcome: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (decoded,) = runs.decode(
        target,
        None,
        PROMPTS[:1],
        SamplingConfig(),
        num_draft_tokens=0,
        max_new_tokens=1,
        seed=0,
    )
    said = dataclasses.replace(decoded, stats=DecodeStats.from_rounds(rounds))
    monkeypatch.setattr(measure_checks.runs, "decode", lambda *_, **__: [said])
    found = measure_checks._self_draft(target, PROMPTS[:1], SamplingConfig(), seed=0)
    assert found.is_passed is outcome


# ------------------------------------------------------------------------------ the audit


def _audit(
    target: LoadedModel,
    wrong: dict[str, str],
    draft: str,
    batch_size: int = 2,
    **num_tested: int,
) -> dict[str, Any]:
    """Greedy answers of two drafts to three prompts; ``wrong``: draft -> the prompt it breaks.

    ``num_tested``: draft tokens tested in each answer of a draft, 1 if not said.
    """
    plain = {
        p.prompt_id: result.token_ids
        for p, result in zip(
            PROMPTS,
            runs.decode(
                target,
                None,
                PROMPTS,
                SamplingConfig(temperature=0.0),
                num_draft_tokens=0,
                max_new_tokens=6,
                seed=0,
            ),
            strict=True,
        )
    }
    records, emitted = [], []
    for name in ("ours", "rival"):
        for prompt_id, tokens in plain.items():
            counts = {"num_tested": num_tested.get(name, 1)}
            records.append(PromptRecord(name, 0.0, prompt_id, "chat", counts, 0, {}))
            is_wrong = wrong.get(name) == prompt_id
            emitted.append([*tokens[:2], (tokens[2] + 1) % 300] if is_wrong else list(tokens))
    return measure_audit.compare_greedy(
        target,
        PROMPTS,
        {(0.0, prompt_id): tokens for prompt_id, tokens in plain.items()},
        records,
        emitted,
        draft=draft,
        decoded=measure_audit.Audited(2, 6, batch_size),
    )


def test_answers_without_a_draft_token_in_them_are_compared_with_nothing(
    target: LoadedModel,
) -> None:
    # Plain decoding beside plain decoding: identical, and no evidence of anything.
    found = _audit(target, {}, "ours", ours=0)
    assert (found["num_compared"], found["num_identical"], found["num_broken"]) == (0, 0, 0)
    assert [(row["draft"], row["num_compared"]) for row in found["by_draft"]] == [
        ("ours", 0),
        ("rival", 3),
    ]
    bounds = {"min_speedup": None, "min_alpha": None, "lossless": True}
    cells = [{"draft": "ours", "task": None, "temperature": 0.0}]
    (failure,) = gate_failures(bounds, cells, found, {}, draft="ours")
    assert "was not checked: not one draft token was tested in the greedy answers" in failure
    verdict = decide(found, {}, draft="ours")
    assert "add temperature 0" not in verdict["reasons"][0]


def test_a_wrong_answer_counts_although_nothing_was_drafted_in_it(target: LoadedModel) -> None:
    found = _audit(target, {"ours": "p1"}, "ours", ours=0)
    assert (found["num_compared"], found["num_identical"], found["num_broken"]) == (1, 0, 1)


def test_draws_that_tested_no_draft_token_test_no_law(
    target: LoadedModel, draft: Contestant
) -> None:
    model = draft.model
    assert model is not None
    silent = CausalLMDrafter(model.model)
    silent.max_length = 1  # as a draft whose context every prompt fills

    class Silent(Contestant):
        def make_drafter(self) -> Any:
            return silent

    samples = measure_audit.draw_law_samples(
        target, Silent("draft", model), PROMPTS, 1.0, num_samples=64, seed=0
    )
    row = measure_audit.law_row(samples, draft="draft", temperature=1.0)
    assert (row["num_samples"], row["is_same_law"]) == (0, None)


def test_broken_answers_are_counted_by_the_draft_that_gave_them(target: LoadedModel) -> None:
    found = _audit(target, {"rival": "p1"}, "ours")
    assert (found["num_compared"], found["num_identical"], found["num_broken"]) == (3, 3, 0)
    assert [(row["draft"], row["num_broken"]) for row in found["by_draft"]] == [
        ("ours", 0),
        ("rival", 1),
    ]
    assert _audit(target, {"rival": "p1"}, "rival")["num_broken"] == 1


@pytest.mark.parametrize(("broken", "together"), [("p1", ["p0", "p1"]), ("p2", ["p2"])])
def test_the_control_is_decoded_in_the_batch_of_the_answer_it_is_for(
    target: LoadedModel, broken: str, together: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[tuple[int, ...]]] = []
    decode_batch = measure_audit.decode_batch

    def watched(engine: Any, requests: Any) -> Any:
        batches.append([tuple(request.prompt_token_ids) for request in requests])
        return decode_batch(engine, requests)

    monkeypatch.setattr(measure_audit, "decode_batch", watched)
    found = _audit(target, {"ours": broken, "rival": broken}, "ours")
    # Once for both drafts, and with the prompts that were beside it.
    prompts = {p.prompt_id: p.token_ids for p in PROMPTS}
    assert batches == [[prompts[name] for name in together]]
    assert [row["cause"] for row in found["divergences"]] == ["logic", "logic"]


def test_what_the_law_test_cannot_see_is_told(target: LoadedModel, draft: Contestant) -> None:
    (counts, probabilities, rest), *_ = measure_audit.draw_law_samples(
        target, draft, PROMPTS, 1.0, num_samples=32, seed=0
    )
    # Four first tokens with four second ones each: 16 cells of one pair, 4 + 1 of all others.
    assert len(counts) == len(probabilities) == 21
    singles = sum(p for n, p in enumerate(probabilities[:20]) if n % 5 < 4)
    assert rest == pytest.approx(1.0 - singles)
    row = measure_audit.law_row(
        [([5, 5], [0.5, 0.5], 0.2), ([5, 5], [0.5, 0.5], 0.4)], draft="d", temperature=1.0
    )
    assert row["rest_mass"] == pytest.approx(0.3)


# ------------------------------------------------------------------------------ whose text


def test_an_answer_that_generate_cut_off_earlier_is_decoded_again(
    target: LoadedModel, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = given.held_out_rows(tiny_pair_dirs[0], num_prompts=2, max_new_tokens=4)
    for row in rows:
        if row["prompt_id"] == "p0":
            row["status"] = "completed"
    artifact = given.generate_artifact(ArtifactStore(tmp_path), tiny_pair_dirs[0], rows)

    def reused(max_new_tokens: int) -> dict[str, list[float]]:
        found = runs.read_held_out(
            artifact, (0.0, 1.0), max_prompts_per_task=None, max_new_tokens=max_new_tokens
        )
        return {p.prompt_id: sorted(p.answers) for p in found}

    assert reused(4) == {"p0": [0.0, 1.0], "p1": [0.0, 1.0]}
    assert reused(5) == {"p0": [0.0, 1.0], "p1": []}


# ------------------------------------------------------------------------------ what is timed


def test_the_judged_draft_is_timed_at_the_depth_it_is_served_with() -> None:
    def plan(draft: str, temperature: float, best: int, curve: list[float]) -> dict[str, Any]:
        points = [{"num_draft_tokens": k + 1, "speedup": s} for k, s in enumerate(curve)]
        return {
            "draft": draft,
            "temperature": temperature,
            "num_draft_tokens": best,
            "curve": points,
        }

    plans = [
        plan("ours", 0.0, 3, [1.2, 1.5, 1.6]),
        plan("rival", 0.0, 3, [1.2, 1.5, 1.6]),
        plan("ours", 1.0, 2, [1.1, 1.3, 0.9]),
        plan("rival", 1.0, 0, [0.9, 0.8, 0.7]),
    ]
    assert measure_timing._depths(plans, 0.0, judged="ours") == {"ours": 2, "rival": 3}
    assert measure_timing._depths(plans, 1.0, judged="ours") == {"ours": 2, "rival": 1}


def test_a_batch_is_planned_with_the_costs_of_its_own_temperature(
    target: LoadedModel, draft: Contestant, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {0.0: 0.1, 1.0: 0.9}

    def measured(target_pass: Any, calls: Any, **settings: Any) -> Any:
        spread = measure_timing.timing.spread([1.0])
        widths = dict.fromkeys([1, *settings["widths"]], 1.0)
        steps = dict.fromkeys(calls, spread)
        names = {key: costs[key if isinstance(key, float) else key[1]] for key in calls}
        return measure_timing.timing.StepCosts(spread, widths, steps, names)

    monkeypatch.setattr(measure_timing.timing, "measure_step_costs", measured)
    monkeypatch.setattr(measure_timing, "_time_drafts", lambda *_: [])
    rate = {"value": 0.8}
    cells = [
        {
            "draft": "draft",
            "temperature": t,
            "task": None,
            "acceptance_rate": rate,
            "draft_coverage": 1.0,
            "conditional_acceptance_by_position": [rate, rate],
        }
        for t in costs
    ]
    found = measure_timing.time_pair(
        target,
        [draft],
        PROMPTS,
        cells,
        temperatures=tuple(costs),
        config=TimingConfig(max_draft_tokens=2, batch_sizes=(4,), max_new_tokens=4),
        seed=0,
    )
    rows = [(b["batch_size"], b["temperature"], b["draft_cost_ratio"]) for b in found["batches"]]
    assert rows == [(4, 0.0, 0.1), (4, 1.0, 0.9)]
    # 1 + .8 + .64 tokens over 1 + 2 c: worth it at the cheap temperature alone.
    assert [p["by_batch_size"][0]["num_draft_tokens"] for p in found["plans"]] == [2, 0]


def test_only_prompts_with_room_for_a_whole_timed_answer_are_timed(
    target: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    limit = target.shape.max_position_embeddings
    prompts = [HeldOutPrompt(f"p{n}", "chat", (5,) * n, {}) for n in (3, 10)]

    def timed(max_new_tokens: int, **more: Any) -> list[str]:
        config = TimingConfig(max_new_tokens=max_new_tokens, **more)
        return [p.prompt_id for p in measure_timing.check_timed(prompts, target, config)]

    assert timed(limit - 10) == ["p3", "p10"]
    assert caplog.text == ""
    assert timed(limit - 9) == ["p3"]
    assert "1 of 2 prompts are not timed" in caplog.text
    with pytest.raises(ContextLengthError, match=r"timing.max_new_tokens is \d+; the target's con"):
        timed(limit - 2)
    assert timed(limit - 2, enabled=False) == []


def test_a_timing_has_enough_prompts_unless_it_is_asked_for_fewer() -> None:
    assert TimingConfig().num_prompts == 8
