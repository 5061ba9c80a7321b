"""Owns the tests of the measure stage: what it counts, on whose text, and what it concludes.

Refuses to train and to wait: tiny random models, seconds in all. Fault rows covered: 2 and 3
(ties), 115 (tokens after the end), 118 (acceptance that cannot be low), 119 (accepted more, yet
slower).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ArtifactError, CorpusError
from distill.metrics import summary
from distill.metrics.summary import PromptRecord
from distill.metrics.verdict import decide, gate_failures
from distill.models import load_target
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig
from distill.stages import measure_audit, measure_units
from distill.stages import measure_forced as forced
from distill.stages import measure_runs as runs
from distill.stages.measure import (
    GateConfig,
    MeasureConfig,
    TimingConfig,
    measure_acceptance,
    measure_key,
)
from tests import measure_helpers as given
from tests.helpers import make_llama, save_pretrained_dir


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def target_dir(tiny_pair_dirs: tuple[Path, Path]) -> Path:
    return tiny_pair_dirs[0]


@pytest.fixture(scope="module")
def generated(store: ArtifactStore, target_dir: Path) -> Artifact:
    return given.generate_artifact(store, target_dir, given.held_out_rows(target_dir))


@pytest.fixture(scope="module")
def inputs(
    store: ArtifactStore, generated: Artifact, tiny_pair_dirs: tuple[Path, Path]
) -> dict[str, Artifact]:
    return {
        "generate": generated,
        "distill": given.distill_artifact(store, *tiny_pair_dirs),
    }


@pytest.fixture(scope="module")
def self_inputs(store: ArtifactStore, generated: Artifact, target_dir: Path) -> dict[str, Artifact]:
    """The draft is the target itself."""
    return {
        "generate": generated,
        "distill": given.distill_artifact(store, target_dir, target_dir),
    }


@pytest.fixture(scope="module")
def measured(store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]) -> Artifact:
    return measure_acceptance(given.measure_config(target_dir), store, inputs=inputs)


@pytest.fixture(scope="module")
def acceptance(measured: Artifact) -> dict[str, Any]:
    return given.read_acceptance(measured)


# ------------------------------------------------------------------------------ what is counted


def test_a_draft_equal_to_the_target_is_always_accepted(
    store: ArtifactStore, target_dir: Path, self_inputs: dict[str, Artifact]
) -> None:
    config = given.measure_config(target_dir, undistilled=False, prompt_lookup=False)
    found = given.read_acceptance(measure_acceptance(config, store, inputs=self_inputs))
    for temperature in (0.0, 1.0):
        pooled = given.cell(found, "distilled", temperature)
        assert pooled["analytic_acceptance_rate"]["value"] == pytest.approx(1.0, abs=1e-5)
        assert pooled["acceptance_rate"]["value"] == 1.0


def test_a_draft_that_proposes_what_the_target_never_says_is_never_accepted(
    store: ArtifactStore, target_dir: Path, generated: Artifact
) -> None:
    rows = pq.read_table(generated.file("completions.parquet")).to_pylist()
    greedy = {i for r in rows if r["temperature"] == 0.0 for i in r["completion_token_ids"]}
    unsaid = [i for i in range(2, 300) if i not in greedy][:50]
    inputs = {
        "generate": generated,
        "distill": given.distill_artifact(store, target_dir, target_dir, token_ids=unsaid),
    }
    config = given.measure_config(
        target_dir, temperatures=(0.0,), undistilled=False, prompt_lookup=False
    )
    pooled = given.cell(
        given.read_acceptance(measure_acceptance(config, store, inputs=inputs)), "distilled", 0.0
    )
    assert pooled["acceptance_rate"]["value"] == 0.0
    assert pooled["analytic_acceptance_rate"]["value"] == 0.0
    assert pooled["block_efficiency"]["value"] == 1.0


def test_a_vocabulary_subset_caps_acceptance_at_the_mass_it_keeps(
    target_dir: Path,
) -> None:
    # q is the target renormalised on the subset, so sum min(p, q) is exactly p(subset).
    target = load_target(given.model_config(target_dir))
    kept = tuple(range(100))
    text = ([5, 6, 7], [8, 9, 10, 11])
    rows = forced.score_texts(
        target,
        [runs.Contestant("distilled", target, kept)],
        [text],
        SamplingConfig(temperature=1.0),
    )
    logits_TV = forced.completion_logits(target, [text])[0]
    mass = logits_TV.double().softmax(-1)[:, :100].sum().item()
    found = rows[0]["drafts"]["distilled"]
    assert found["num_positions"] == 4
    assert found["sums"]["speculative_sampling"] == pytest.approx(mass, abs=1e-5)
    # All of the loss is the target's mass outside, and the columns say so.
    assert sum(found["columns"]["outside"]) == pytest.approx(4 - mass, abs=1e-5)


def test_teacher_forcing_equals_a_plain_forward(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    texts = [([5, 6, 7], [8, 9]), ([10], [11, 12, 13]), ([3, 4], [])]
    found = forced.completion_logits(target, texts)
    for (prompt, completion), logits_TV in zip(texts, found, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.inference_mode():
            plain_TV = target.model(ids).logits[0, len(prompt) - 1 : -1]
        assert logits_TV.shape == (len(completion), 300)
        torch.testing.assert_close(logits_TV, plain_TV[: len(completion)], atol=1e-5, rtol=1e-5)


def test_a_draft_with_a_short_context_is_not_judged_where_it_is_never_asked(
    target_dir: Path, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    target = load_target(given.model_config(target_dir))
    short = make_llama(len(tiny_tokenizer), hidden=64, max_positions=5)
    draft = load_target(
        given.model_config(save_pretrained_dir(tmp_path / "short", short, tiny_tokenizer))
    )
    texts = [([5, 6, 7], [8, 9, 10, 11, 12]), ([1, 2, 3, 4, 5, 6], [7])]
    rows = forced.score_texts(
        target, [runs.Contestant("distilled", draft)], texts, SamplingConfig()
    )
    # Three prompt tokens in a context of five: the draft reads 3, 4 and 5 tokens, then is silent.
    assert [row["drafts"]["distilled"]["num_positions"] for row in rows] == [3, 0]


def test_lookup_is_judged_only_where_it_proposes(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    # Positions 2 and 3 have a match: behind 20 came 21, behind 20 21 came 30.
    text = ([20, 21, 30], [31, 20, 21, 40])
    rows = forced.score_texts(
        target, [runs.Contestant("prompt_lookup")], [text], SamplingConfig(temperature=1.0)
    )
    probs_TV = forced.completion_logits(target, [text])[0].double().softmax(-1)
    found = rows[0]["drafts"]["prompt_lookup"]
    assert found["num_positions"] == 2
    expected = (probs_TV[2, 21] + probs_TV[3, 30]).item()
    assert found["sums"] == pytest.approx(dict.fromkeys(found["sums"], expected), abs=2e-6)


def test_tokens_after_the_end_are_not_counted() -> None:
    # Row 115: a block [d1, d2, EOS, d4, d5, bonus] emits 3 tokens, not 6.
    stats = DecodeStats.from_rounds([(5, 5, 3)])
    record = PromptRecord("distilled", 0.0, "p", "chat", stats.to_dict(), 3, {})
    pooled = summary.summarize([record], num_draft_tokens=5, seed=0)[0]
    assert pooled["block_efficiency"]["value"] == 3.0
    assert pooled["acceptance_rate"]["value"] == 1.0
    assert pooled["draft_acceptance_rate"]["value"] == 3 / 5
    by_position = [e["value"] for e in pooled["acceptance_by_position"]]
    assert by_position == [1.0, 1.0, 1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------ the tables


def test_tables_cover_every_draft_task_and_temperature(acceptance: dict[str, Any]) -> None:
    found = {(c["draft"], c["temperature"], c["task"]) for c in acceptance["cells"]}
    assert found == {
        (draft, temperature, task)
        for draft in ("distilled", "undistilled", "prompt_lookup")
        for temperature in (0.0, 1.0)
        for task in (None, "chat", "math")
    }


def test_every_number_of_a_pooled_cell_has_an_interval(acceptance: dict[str, Any]) -> None:
    pooled = given.cell(acceptance, "distilled", 1.0)
    names = ("acceptance_rate", "draft_acceptance_rate", "block_efficiency")
    for estimate in [*(pooled[name] for name in names), pooled["analytic_acceptance_rate"]]:
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
        assert estimate["num_prompts"] == 5
    assert len(pooled["acceptance_by_position"]) == 3


def test_rules_agree_at_temperature_zero_and_rank_as_they_must_above(
    acceptance: dict[str, Any],
) -> None:
    greedy = given.cell(acceptance, "distilled", 0.0)["analytic_acceptance_rate_by_rule"]
    assert len({e["value"] for e in greedy.values()}) == 1
    sampled = given.cell(acceptance, "distilled", 1.0)["analytic_acceptance_rate_by_rule"]
    # sum min(p, q) >= sum p q, whatever p and q are.
    assert sampled["speculative_sampling"]["value"] >= sampled["sample_and_match"]["value"]


def test_a_model_draft_covers_every_call_that_had_room_for_a_draft(
    measured: Artifact, acceptance: dict[str, Any]
) -> None:
    for temperature in (0.0, 1.0):
        for draft in ("distilled", "undistilled"):
            assert given.cell(acceptance, draft, temperature)["draft_coverage"] == 1.0
    # Twelve tokens that accept none of three: a call each, and the last one can draft nothing.
    rows = pq.read_table(measured.file("records.parquet")).to_pylist()
    worst = next(r for r in rows if r["draft"] == "distilled" and r["num_target_calls"] == 12)
    assert (worst["num_accepted"], worst["num_rounds"], worst["num_draftable_calls"]) == (0, 11, 11)


def test_records_add_up_to_the_cells(measured: Artifact, acceptance: dict[str, Any]) -> None:
    rows = pq.read_table(measured.file("records.parquet")).to_pylist()
    mine = [r for r in rows if (r["draft"], r["temperature"]) == ("distilled", 1.0)]
    pooled = given.cell(acceptance, "distilled", 1.0)
    accepted, tested = (sum(r[name] for r in mine) for name in ("num_accepted", "num_tested"))
    assert pooled["acceptance_rate"]["value"] == accepted / tested
    assert all(r["num_emitted"] == len(r["token_ids"]) for r in rows)
    assert len(rows) == 3 * 2 * 5


def test_every_self_test_is_run_and_none_fails(acceptance: dict[str, Any]) -> None:
    tests = acceptance["self_tests"]
    assert {t["name"].partition(":")[0] for t in tests} == {
        "draft == target",
        "draft == target, decoded",
        "disjoint support",
        "processors neutral",
        "analytic == decoded",
    }
    assert {t["temperature"] for t in tests} == {0.0, 1.0}
    assert [t for t in tests if t["is_passed"] is False] == []


def test_sampled_tokens_are_tested_against_the_targets_law(acceptance: dict[str, Any]) -> None:
    (law,) = acceptance["lossless"]["laws"]
    assert (law["draft"], law["temperature"], law["num_samples"]) == ("distilled", 1.0, 64)
    assert law["is_same_law"]
    assert 0 < law["detectable_total_variation"] < 1
    assert 0 < law["rest_mass"] < 1


def test_a_runtime_that_emits_the_drafts_tokens_unchecked_is_caught(
    target_dir: Path, tiny_pair_dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(given.model_config(target_dir))
    draft = load_target(given.model_config(tiny_pair_dirs[1]))
    prompts = [runs.HeldOutPrompt("p", "chat", (5, 40, 41), {})]
    contestant = runs.Contestant("draft", draft)

    def drawn() -> Any:
        return measure_audit.draw_law_samples(
            target, contestant, prompts, 0.2, num_samples=256, seed=0
        )

    assert measure_audit.law_row(drawn(), draft="draft", temperature=0.2)["is_same_law"]
    monkeypatch.setattr(
        "distill.runtime.verify._leading_true", lambda is_accepted_BK, number_B: number_B.clone()
    )
    assert not measure_audit.law_row(drawn(), draft="draft", temperature=0.2)["is_same_law"]


def test_diagnosis_covers_the_primary_draft_at_every_temperature(
    acceptance: dict[str, Any],
) -> None:
    found = acceptance["diagnosis"]
    assert [(d["draft"], d["temperature"]) for d in found] == [
        ("distilled", 0.0),
        ("distilled", 1.0),
    ]
    pooled = given.cell(acceptance, "distilled", 1.0)
    assert 1 - found[1]["lost"] == pytest.approx(
        pooled["analytic_acceptance_rate"]["value"], abs=1e-5
    )
    assert sum(row["share_of_loss"] for row in found[1]["by_task"]) == pytest.approx(1.0)
    assert len(found[1]["rejected_tokens"]) == 5
    assert [row["draft_temperature"] for row in found[1]["by_draft_temperature"]][3] == 1.0


def test_an_example_is_the_targets_text_token_by_token(
    acceptance: dict[str, Any], measured: Artifact
) -> None:
    example = acceptance["examples"][0]
    assert example["temperature"] == 0.0
    rows = pq.read_table(measured.file("positions.parquet")).to_pylist()
    row = next(
        r
        for r in rows
        if (r["draft"], r["temperature"], r["prompt_id"])
        == ("distilled", 0.0, example["prompt_id"])
    )
    assert len(example["pieces"]) == len(row["token_ids"])
    assert {piece["status"] for piece in example["pieces"]} <= {"accepted", "rejected", "extra"}


def test_differences_say_in_words_what_they_mean(acceptance: dict[str, Any]) -> None:
    pooled = [row for row in acceptance["differences"] if row["task"] is None]
    assert len(pooled) == 2
    assert all("distilled" in row["sentence"] and row["num_prompts"] == 5 for row in pooled)


def test_greedy_answers_of_every_draft_are_the_plain_ones(
    measured: Artifact, acceptance: dict[str, Any]
) -> None:
    lossless = acceptance["lossless"]
    assert (lossless["num_compared"], lossless["num_identical"]) == (5, 5)
    counts = {row["draft"]: row["num_identical"] for row in lossless["by_draft"]}
    # A lookup that found nothing to propose in an answer is in no comparison of it.
    rows = pq.read_table(measured.file("records.parquet")).to_pylist()
    copied = [r for r in rows if r["draft"] == "prompt_lookup" and r["temperature"] == 0.0]
    num_copied = sum(r["num_tested"] > 0 for r in copied)
    assert counts == {"distilled": 5, "undistilled": 5, "prompt_lookup": num_copied}
    assert [row["num_broken"] for row in lossless["by_draft"]] == [0, 0, 0]
    assert lossless["divergences"] == []


def test_the_undistilled_draft_is_rebuilt_with_the_distilled_ones_settings(
    acceptance: dict[str, Any],
) -> None:
    # The target pruned to two layers is not the tiny draft, which has weights of its own.
    values = [
        given.cell(acceptance, draft, 1.0)["analytic_acceptance_rate"]["value"]
        for draft in ("distilled", "undistilled")
    ]
    assert values[0] != values[1]
    assert {row["task"] for row in acceptance["differences"]} == {None, "chat", "math"}


# ------------------------------------------------------------------------------ whose text


def test_answers_that_generate_did_not_sample_are_decoded_here(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    rows = given.held_out_rows(target_dir, temperatures=(0.7,))
    only_warm = given.generate_artifact(store, target_dir, rows, temperatures=(0.7,))
    config = given.measure_config(target_dir, temperatures=(0.0,), undistilled=False)
    own = measure_acceptance(config, store, inputs=inputs | {"generate": only_warm})
    reused = measure_acceptance(config, store, inputs=inputs)
    # Greedy text is the same whoever decoded it, so the tables are too.
    assert given.read_acceptance(own)["cells"] == given.read_acceptance(reused)["cells"]


def test_only_an_answer_sampled_exactly_as_here_is_reused(
    store: ArtifactStore, target_dir: Path
) -> None:
    rows = given.held_out_rows(target_dir, num_prompts=2)
    artifact = given.generate_artifact(store, target_dir, rows)
    artifact.manifest.config["samplings"][1]["top_k"] = 5
    prompts = runs.read_held_out(artifact, (0.0, 1.0), max_prompts_per_task=None, max_new_tokens=12)
    assert [sorted(p.answers) for p in prompts] == [[0.0], [0.0]]
    artifact.manifest.config["backend"] = "http"
    prompts = runs.read_held_out(artifact, (0.0, 1.0), max_prompts_per_task=None, max_new_tokens=12)
    assert [sorted(p.answers) for p in prompts] == [[], []]


def test_prompts_per_task_are_limited_and_training_rows_left_out(
    store: ArtifactStore, target_dir: Path
) -> None:
    rows = given.held_out_rows(target_dir, num_prompts=6)
    others = sorted({row["prompt_id"] for row in rows if row["prompt_id"].startswith("s")})
    rows = [row for row in rows if row["prompt_id"] not in others[:2]]
    for row in rows:
        if row["prompt_id"] == "p0":
            row["split"] = "train"
        if row["prompt_id"] == "p1":
            row["status"] = "rejected"
    artifact = given.generate_artifact(store, target_dir, rows)
    prompts = runs.read_held_out(artifact, (0.0,), max_prompts_per_task=1, max_new_tokens=12)
    assert sorted((p.task, p.prompt_id) for p in prompts) == [("chat", "p2"), ("math", "p3")]


def test_without_held_out_prompts_the_way_out_is_named(
    store: ArtifactStore, target_dir: Path
) -> None:
    rows = [row | {"split": "train"} for row in given.held_out_rows(target_dir, num_prompts=1)]
    artifact = given.generate_artifact(store, target_dir, rows)
    with pytest.raises(CorpusError, match="held_out_fraction"):
        runs.read_held_out(artifact, (0.0,), max_prompts_per_task=None, max_new_tokens=12)


# ------------------------------------------------------------------------------ ties


def _greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_equal_answers_do_not_diverge(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    assert runs.find_divergence(target, [5, 6], [51, 52], [51, 52], max_new_tokens=2) is None
    assert runs.find_divergence(target, [5, 6], [51], [51, 52], max_new_tokens=2) is None


def test_a_wrong_token_is_not_a_tie(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    plain = _greedy(target.model, [5, 6, 7], 4)
    wrong = [*plain[:2], (plain[2] + 1) % 300, 9]
    found = runs.find_divergence(target, [5, 6, 7], plain, wrong, max_new_tokens=9)
    assert found is not None
    assert (found["position"], found["plain_token"]) == (2, plain[2])
    assert found["margin"] > 0
    assert not found["is_tie"]


def test_equal_logits_are_a_tie(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    plain = _greedy(target.model, [5, 6, 7], 3)
    twin = next(i for i in range(50, 300) if i not in plain)
    with torch.no_grad():
        head = target.model.get_output_embeddings().weight
        head[twin] = head[plain[1]]
    found = runs.find_divergence(target, [5, 6, 7], plain, [plain[0], twin, 8], max_new_tokens=9)
    assert found is not None
    assert (found["position"], found["margin"], found["is_tie"]) == (1, 0.0, True)


def test_an_answer_that_breaks_off_for_no_reason_is_wrong_and_no_tie(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    (stop,) = target.stop_token_ids
    plain = [5, 6, 7, 8]

    def found(speculative: list[int], max_new_tokens: int = 9) -> Any:
        return runs.find_divergence(
            target, [5, 6], plain, speculative, max_new_tokens=max_new_tokens
        )

    broken = found([5, 6])
    assert (broken["position"], broken["plain_token"], broken["speculative_token"]) == (2, 7, None)
    assert not broken["is_tie"]
    assert not found([])["is_tie"]
    assert found([5, 6], max_new_tokens=2) is None
    assert runs.find_divergence(target, [5], [6, stop, 7], [6, stop], max_new_tokens=9) is None


def test_ties_and_wrong_answers_are_counted_apart(target_dir: Path) -> None:
    target = load_target(given.model_config(target_dir))
    plain = _greedy(target.model, [5, 6, 7], 3)
    wrong = [plain[0], (plain[1] + 1) % 300, plain[2]]
    prompts = [runs.HeldOutPrompt(name, "chat", (5, 6, 7), {}) for name in ("same", "wrong")]
    counted = measure_audit.compare_greedy(
        target,
        prompts,
        {(0.0, "same"): plain, (0.0, "wrong"): plain},
        [
            PromptRecord("distilled", t, name, "chat", {"num_tested": 1}, 0, {})
            for t, name in ((0.0, "same"), (0.0, "wrong"), (1.0, "wrong"))
        ],
        [plain, wrong, wrong],
        draft="distilled",
        decoded=measure_audit.Audited(num_draft_tokens=2, max_new_tokens=3, batch_size=2),
    )
    assert {k: v for k, v in counted.items() if k.startswith("num_")} == {
        "num_compared": 2,
        "num_identical": 1,
        "num_ties": 0,
        "num_broken": 1,
    }
    assert counted["divergences"][0]["prompt_id"] == "wrong"
    # Passes of the same width leave the answer as it is, so arithmetic is no excuse.
    assert counted["divergences"][0]["cause"] == "logic"


# ------------------------------------------------------------------------------ the verdict


def _timed(speeds: dict[float, float], rival: float = 0.9) -> dict[str, Any]:
    def run(draft: str, temperature: float, speed: float) -> dict[str, Any]:
        return {
            "draft": draft,
            "temperature": temperature,
            "num_draft_tokens": 2,
            "predicted_speedup": 1.5,
            "speedup": {
                "value": speed,
                "low": speed - 0.1,
                "high": speed + 0.1,
                "num_prompts": 8,
            },
        }

    curves = {0.0: [1.2, 1.5, 1.6], 1.0: [1.1, 1.3, 0.9]}
    return {
        "runs": [
            run(draft, t, speed)
            for t, ours in speeds.items()
            for draft, speed in (("distilled", ours), ("undistilled", rival))
        ],
        "plans": [
            {
                "draft": "distilled",
                "temperature": t,
                "num_draft_tokens": curve.index(max(curve)) + 1,
                "curve": [{"num_draft_tokens": k + 1, "speedup": s} for k, s in enumerate(curve)],
            }
            for t, curve in curves.items()
        ],
    }


LAW = {
    "draft": "distilled",
    "temperature": 1.0,
    "statistic": 4.0,
    "degrees_of_freedom": 5,
    "p_value": 0.5,
    "is_same_law": True,
}
LOSSLESS: dict[str, Any] = {"num_compared": 5, "num_broken": 0, "laws": [LAW]}


def test_faster_at_every_temperature_is_shipped() -> None:
    verdict = decide(LOSSLESS, _timed({0.0: 1.4, 1.0: 1.2}))
    assert verdict["ship"] is True
    assert "temperature 0: 1.40x measured (1.30 to 1.50)" in verdict["reasons"][0]


def test_slower_at_one_temperature_is_not_shipped() -> None:
    # Row 119: a better acceptance rate that does not pay in wall clock.
    verdict = decide(LOSSLESS, _timed({0.0: 1.4, 1.0: 1.0}))
    assert verdict["ship"] is False
    assert any("temperature 1" in r and "not above 1x" in r for r in verdict["reasons"])


def test_a_wrong_answer_is_not_shipped_however_fast() -> None:
    broken = LOSSLESS | {"num_broken": 1}
    verdict = decide(broken, _timed({0.0: 3.0, 1.0: 3.0}))
    assert verdict["ship"] is False
    assert "1 of 5" in verdict["reasons"][0]


def test_untimed_is_not_shipped() -> None:
    verdict = decide(LOSSLESS, {})
    assert verdict["ship"] is False
    assert verdict["num_draft_tokens"] is None


def test_without_greedy_answers_nothing_is_shipped_because_nothing_was_checked() -> None:
    unchecked = {"num_compared": 0, "num_broken": 0}
    verdict = decide(unchecked, _timed({0.0: 3.0, 1.0: 3.0}))
    assert verdict["ship"] is False
    assert verdict["reasons"][0] == (
        "losslessness was not checked: no greedy answer was compared; add temperature 0"
    )


def test_a_draft_that_is_slower_at_every_depth_gets_no_draft_tokens() -> None:
    timed = _timed({0.0: 0.8, 1.0: 0.7})
    for plan in timed["plans"]:
        plan["curve"] = [{"num_draft_tokens": k, "speedup": 1.0 - k / 10} for k in (1, 2, 3)]
    assert decide(LOSSLESS, timed)["num_draft_tokens"] == 0


def test_a_changed_law_or_a_failed_self_test_is_not_shipped() -> None:
    law = LAW | {"statistic": 50.0, "p_value": 1e-9, "is_same_law": False}
    verdict = decide(LOSSLESS | {"laws": [law]}, _timed({0.0: 3.0, 1.0: 3.0}))
    assert verdict["ship"] is False
    assert "do not follow the target's law" in verdict["reasons"][0]
    verdict = decide(LOSSLESS, _timed({0.0: 3.0, 1.0: 3.0}), faults=["self-test failed: x"])
    assert verdict["ship"] is False
    assert verdict["reasons"][0] == "self-test failed: x"


def _gate_cell(alpha: float | None, decoded: float | None = 0.5) -> dict[str, Any]:
    def one(value: float | None) -> dict[str, Any]:
        return {"value": value, "low": None, "high": None, "num_prompts": 1}

    return {
        "draft": "distilled",
        "task": None,
        "temperature": 1.0,
        "analytic_acceptance_rate": one(alpha),
        "acceptance_rate": one(decoded),
    }


@pytest.mark.parametrize(
    ("bounds", "alpha", "lossless", "words"),
    [
        ({"min_alpha": 0.6}, 0.55, LOSSLESS, ["min_alpha is 0.6", "temperature 1 is 0.550"]),
        ({"min_alpha": 0.6}, None, LOSSLESS, ["min_alpha is 0.6", "is 0.500"]),
        ({"min_alpha": 0.5}, 0.5, LOSSLESS, []),
        ({"min_speedup": 1.3}, 0.5, LOSSLESS, ["min_speedup is 1.3", "1.200 (95%: 1.100 to 1.3"]),
        ({"min_speedup": 1.2}, 0.5, LOSSLESS, []),
        ({"lossless": True}, 0.5, LOSSLESS | {"num_broken": 2}, ["lossless is true", "2 of 5"]),
        ({"lossless": False}, 0.5, LOSSLESS | {"num_broken": 2}, []),
        ({"lossless": True}, 0.5, {"num_compared": 0, "num_broken": 0}, ["was not checked"]),
    ],
)
def test_a_gate_says_which_bound_failed_with_both_values(
    bounds: dict[str, Any], alpha: float | None, lossless: dict[str, Any], words: list[str]
) -> None:
    given_bounds = {"min_speedup": None, "min_alpha": None, "lossless": False} | bounds
    timing = _timed({1.0: 1.2})
    cells = [_gate_cell(alpha)]
    failed = gate_failures(given_bounds, cells, lossless, timing, draft="distilled")
    assert len(failed) == bool(words)
    assert all(word in failed[0] for word in words)


def test_what_was_not_timed_does_not_pass_a_gate_on_speed() -> None:
    bounds = {"min_speedup": 1.0, "min_alpha": None, "lossless": False}
    (failure,) = gate_failures(bounds, [], LOSSLESS, {}, draft="distilled")
    assert "no speed was measured" in failure


def test_a_gate_changes_no_key(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    plain = given.measure_config(target_dir)
    gated = given.measure_config(target_dir, gate=GateConfig(min_speedup=2.0))
    assert measure_key(gated, store, inputs=inputs) == measure_key(plain, store, inputs=inputs)


def test_a_faster_rival_is_named() -> None:
    verdict = decide(LOSSLESS, _timed({0.0: 1.4, 1.0: 1.2}, rival=1.3))
    assert verdict["ship"] is True
    assert [r for r in verdict["reasons"] if "undistilled is faster" in r] == [
        "temperature 1: undistilled is faster, 1.30x"
    ]


def test_one_depth_serves_all_temperatures_by_its_worst_case() -> None:
    # Worst of (1.2, 1.1), (1.5, 1.3), (1.6, 0.9): the second.
    verdict = decide(LOSSLESS, _timed({0.0: 1.4, 1.0: 1.2}))
    assert verdict["num_draft_tokens"] == 2
    assert verdict["num_draft_tokens_by_temperature"] == {"0": 3, "1": 2}


# ------------------------------------------------------------------------------ timing


def test_timing_measures_cost_plans_and_times_every_draft(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    config = given.measure_config(
        target_dir,
        temperatures=(1.0,),
        timing=TimingConfig(
            num_prompts=2, max_new_tokens=6, repeats=1, cost_repeats=2, max_draft_tokens=3
        ),
    )
    artifact = measure_acceptance(config, store, inputs=inputs)
    timing = artifact.metrics["timing"]
    assert list(timing["verify_cost_ratio"]) == ["1", "2", "3", "4"]
    assert timing["verify_cost_ratio"]["1"] == 1.0
    drafts = ["distilled", "undistilled", "prompt_lookup"]
    assert [run["draft"] for run in timing["runs"]] == drafts
    assert [cost["draft"] for cost in timing["draft_costs"]] == drafts
    for run, plan in zip(timing["runs"], timing["plans"], strict=True):
        assert len(plan["curve"]) == 3
        assert run["num_draft_tokens"] == max(1, plan["num_draft_tokens"])
        assert run["efficiency"] == run["speedup"]["value"] / run["predicted_speedup"]
        assert run["speedup"]["num_prompts"] == 2
        assert run["caveat"] == "fewer than 8 prompts are too few to rely on"
    assert artifact.metrics["verdict"]["num_draft_tokens"] in (0, 1, 2, 3)
    assert timing["conditions"]["batch_size"] == 1


# ------------------------------------------------------------------------------ the stage


def test_same_inputs_give_the_same_bytes(
    store: ArtifactStore,
    target_dir: Path,
    inputs: dict[str, Artifact],
    measured: Artifact,
    tmp_path: Path,
) -> None:
    again = measure_acceptance(
        given.measure_config(target_dir), ArtifactStore(tmp_path), inputs=inputs
    )
    assert again.manifest.files == measured.manifest.files


def test_close_temperatures_do_not_share_results(tmp_path: Path) -> None:
    def units_after(temperature: float) -> set[str]:
        units = measure_units.Units(tmp_path)
        bench = measure_units.Bench(
            target=None,  # type: ignore[arg-type]
            contestants=(),
            units=units,
            num_draft_tokens=1,
            max_new_tokens=1,
            batch_size=2,
            seed=0,
        )
        prompt = runs.HeldOutPrompt("p", "chat", (5,), {})
        bench._by_chunk("plain", [prompt], temperature, lambda chunk: [0])
        return {path.name for path in tmp_path.iterdir()}

    assert len(units_after(0.1234561)) == 1
    assert len(units_after(0.1234562)) == 2


def test_no_name_of_a_draft_is_that_of_another_unit(
    store: ArtifactStore, target_dir: Path, tiny_pair_dirs: tuple[Path, Path], inputs: Any
) -> None:
    names = ("analytic", "law", "self_tests", "scan")
    draft = given.model_config(tiny_pair_dirs[1])
    config = given.measure_config(
        target_dir,
        temperatures=(1.0,),
        undistilled=False,
        prompt_lookup=False,
        drafts=dict.fromkeys(names, draft),
    )
    found = given.read_acceptance(measure_acceptance(config, store, inputs=inputs))
    rates = [given.cell(found, name, 1.0)["acceptance_rate"] for name in ("distilled", *names)]
    assert rates == [rates[0]] * 5  # the same weights under every name


def test_the_draft_is_measured_in_the_precision_it_is_served_in(
    target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    from distill.stages.measure import _contestants

    config = given.measure_config(target_dir, undistilled=False, prompt_lookup=False)
    half = config.target.model_copy(update={"dtype": "bfloat16"})
    config = config.model_copy(update={"target": half})
    (contestant,) = _contestants(config, inputs, load_target(half))
    assert contestant.model is not None
    assert contestant.model.dtype == torch.bfloat16


def test_how_many_are_decoded_together_does_not_change_the_counts(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact], acceptance: Any
) -> None:
    config = given.measure_config(target_dir, batch_size=5)
    other = given.read_acceptance(measure_acceptance(config, store, inputs=inputs))
    for cell in acceptance["cells"]:
        same = given.cell(other, cell["draft"], cell["temperature"], cell["task"])
        assert same["acceptance_rate"] == cell["acceptance_rate"]


def test_a_second_call_measures_nothing(
    store: ArtifactStore,
    target_dir: Path,
    inputs: dict[str, Artifact],
    measured: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "decode", None)
    again = measure_acceptance(given.measure_config(target_dir), store, inputs=inputs)
    assert again.fingerprint == measured.fingerprint


def test_the_key_needs_fingerprints_only(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    config = given.measure_config(target_dir)
    names = {name: artifact.fingerprint for name, artifact in inputs.items()}
    assert measure_key(config, store, inputs=names) == measure_key(config, store, inputs=inputs)


def test_what_is_measured_changes_the_key(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    keys = {
        measure_key(given.measure_config(target_dir, **change), store, inputs=inputs).fingerprint
        for change in ({}, {"temperatures": (0.0,)}, {"num_draft_tokens": 2}, {"seed": 1})
    }
    assert len(keys) == 4


def test_both_inputs_are_needed(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact]
) -> None:
    config = given.measure_config(target_dir)
    with pytest.raises(ArtifactError, match="'generate' and 'distill'"):
        measure_key(config, store, inputs={"generate": inputs["generate"]})
    swapped = {"generate": inputs["distill"], "distill": inputs["generate"]}
    with pytest.raises(ArtifactError, match="'distill'"):
        measure_acceptance(config, store, inputs=swapped)


def test_another_target_than_the_drafts_is_refused_with_both_revisions(
    store: ArtifactStore, tiny_pair_dirs: tuple[Path, Path], inputs: dict[str, Artifact]
) -> None:
    config = given.measure_config(tiny_pair_dirs[1])
    with pytest.raises(ArtifactError, match="made with a target at sha256"):
        measure_acceptance(config, store, inputs=inputs)


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (-0.5,), ()])
def test_odd_temperatures_are_refused(target_dir: Path, temperatures: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="temperatures"):
        given.measure_config(target_dir, temperatures=temperatures)


def test_config_survives_json(target_dir: Path) -> None:
    config = given.measure_config(target_dir)
    assert MeasureConfig.model_validate(json.loads(config.model_dump_json())) == config
