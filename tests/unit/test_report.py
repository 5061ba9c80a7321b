"""Owns the tests of the report: what it says, that it stands alone, that it escapes what it quotes.

Refuses to run a model: artifacts are built in a real store from numbers worked out here.
"""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from distill.artifacts import Artifact, ArtifactStore
from distill.config import Config
from distill.errors import ArtifactError
from distill.metrics import acceptance, diagnosis, summary
from distill.metrics.distribution import law_test
from distill.metrics.planner_tables import Rates, improvements, speedups_by_alpha
from distill.metrics.self_tests import SelfTest
from distill.metrics.summary import PromptRecord
from distill.report import build_report, plots, render, report_table, write_report

DRAFTS = ("distilled", "undistilled", "prompt_lookup")
TASKS = ("chat", "math <b>& $x_1$")


SCORE = {"acceptance": 0.5, "greedy_agreement": 0.6, "num_positions": 800}
TRAINED = {
    "held_out_before": SCORE | {"acceptance": 0.3},
    "held_out_after": SCORE,
    "best_step": 360,
    "is_stopped_early": False,
    "num_steps": 380,
    "num_tokens": 9000,
    "num_epochs": 2,
    "num_parameters": 42_500_000,
    "vocabulary_coverage": 0.99,
    "train_s": 61.5,
    "tokens_per_s": 146.3,
    "wall_s": 80.0,
    "initialization": {
        "kind": "pruned",
        "layers": [0, 29],
        "block_influence": [0.4, 0.1],
        "mean_norm_gain": 1.1,
    },
}
ANSWERED = {
    **{f"num_{status}": 1 for status in ("completed", "truncated", "rejected", "failed")},
    **{f"num_prompts_{status}": 1 for status in ("completed", "truncated", "rejected", "failed")},
    "num_rows": 100,
    "num_train_rows": 90,
    "num_held_out_rows": 10,
    "num_rows_of_task/chat": 100,
    "num_completion_tokens": 9000,
    "num_prompt_tokens": 500,
    "num_read": 4,
    "num_left_out": 0,
    "num_read_of_part/a": 4,
    "num_rejected_of_part/a": 0,
    "num_asked_of_part/a": 4,
    "num_rejected_as/no_user_turn": 1,
    "target_store_bytes": 1_000_000,
    "top_k_acceptance_cap": {"1.0": 0.98},
    "num_prompts": 4,
    "num_chunks": 1,
    "num_chunks_resumed": 0,
    "generate_s": 12.5,
    "tokens_per_s": 720.0,
    "wall_s": 13.0,
}


class Target(Config):
    """Stands in for a stage's settings."""

    model: str = "org/target <script>alert(1)</script>"
    dtype: str = "bfloat16"
    quantize: str = "none"


class Start(Config):
    """Stands in for how a draft starts."""

    kind: str = "pruned"
    layers: tuple[int, ...] = (0, 29)
    num_layers: int | None = None


class Phase(Config):
    """Stands in for a phase of the loss schedule."""

    name: str


class Settings(Config):
    """Stands in for a stage's settings."""

    target: Target = Target()
    learning_rate: float = 3e-4
    initialization: Start = Start()
    loss: tuple[Phase, ...] = (Phase(name="forward_kl"), Phase(name="acceptance"))


def _records() -> list[PromptRecord]:
    """Eight prompts a task; the distilled draft accepts one more token a block than the other."""
    records = []
    for temperature in (0.0, 1.0):
        for draft, gain in zip(DRAFTS, (2, 1, 0), strict=True):
            for task in TASKS:
                for n in range(8):
                    rounds = [(gain + n + i) % 5 if gain else 0 for i in range(6)]
                    rates = acceptance.summarize_rounds(rounds, 4)
                    counts = {
                        **rates,
                        "proposed_by_position": [6] * 4,
                        "tested_by_position": [sum(a >= i for a in rounds) for i in range(4)],
                        "accepted_by_position": [sum(a > i for a in rounds) for i in range(4)],
                        "num_rounds": len(rounds),
                        "accepted_length_histogram": [rounds.count(n) for n in range(5)],
                    }
                    sums = {rule: 20.0 * (0.2 + 0.2 * gain) + 0.3 * n for rule in acceptance.RULES}
                    prompt_id = f"{task}-{n}"
                    records.append(
                        PromptRecord(draft, temperature, prompt_id, task, counts, 30, sums)
                    )
    return records


def _acceptance() -> dict[str, Any]:
    records = _records()
    return {
        "schema_version": 1,
        "num_draft_tokens": 4,
        "temperatures": [0.0, 1.0],
        "max_new_tokens": 64,
        "num_prompts": 16,
        "num_skipped": 2,
        "primary": "distilled",
        "baseline": "undistilled",
        "drafts": list(DRAFTS),
        "cells": summary.summarize(records, num_draft_tokens=4, seed=0),
        "differences": summary.compare(records, draft="distilled", baseline="undistilled", seed=0),
        "lossless": {
            "dtype": "bfloat16",
            "num_compared": 16,
            "num_identical": 15,
            "num_ties": 1,
            "num_broken": 0,
            "tie_ulps": 8,
            "divergences": [
                {
                    "prompt_id": "chat-3",
                    "draft": "distilled",
                    "position": 17,
                    "plain_token": 5,
                    "speculative_token": 9,
                    "margin": 0.0625,
                    "margin_ulps": 1.0,
                    "is_tie": True,
                    "cause": "tie",
                }
            ],
            "by_draft": [
                {"draft": draft, "num_compared": 16, "num_identical": 15, "num_ties": 1}
                | {"num_broken": 0}
                for draft in DRAFTS
            ],
            "laws": [
                {"draft": "distilled", "temperature": 1.0, "rest_mass": 0.25}
                | law_test([([45, 28, 17, 10], [0.4, 0.3, 0.2, 0.1])]).to_dict()
            ],
        },
        "self_tests": [
            SelfTest("draft == target", 1.0, "acceptance rate 1", "1.000000", True).to_dict(),
            SelfTest("analytic == decoded: d", 1.0, "the same", "0.5, 0.9", False).to_dict(),
            SelfTest("draft == target, decoded", 0.0, "0.99", "nothing", None).to_dict(),
        ],
        "diagnosis": [_diagnosis()],
        "examples": [
            {
                "prompt_id": "chat-3",
                "task": "chat",
                "draft": "distilled",
                "temperature": 0.0,
                "pieces": [
                    {"text": "a <b>", "status": "accepted", "acceptance": 1.0},
                    {"text": " wrong", "status": "rejected", "acceptance": 0.0},
                    {"text": " free", "status": "extra", "acceptance": None},
                ],
            }
        ],
    }


def _diagnosis() -> dict[str, Any]:
    columns = {
        "position": [0, 1],
        "speculative_sampling": [0.2, 0.9],
        "text": [0.2, 0.9],
        "outside": [0.1, 0.0],
        "draft_token": [7, 8],
        "draft_excess": [0.8, 0.1],
    }
    text = diagnosis.ScoredText("chat-3", "chat", [1, 2], [5, 6], [0.1, 3.0], columns)
    found = diagnosis.diagnose([text], stop_token_ids=frozenset({6}))
    lost = [row | {"text": "\n"} for row in found["lost_tokens"]]
    texts = {"text": " <i>", "context": "before it", "target_text": " that"}
    rejected = [row | texts for row in found["rejected_tokens"]]
    return {
        "draft": "distilled",
        "temperature": 1.0,
        "findings": ["distilled loses 45.0% of what it proposes at temperature 1"],
        **found,
        "lost_tokens": lost,
        "rejected_tokens": rejected,
        "top_k_ceiling": {"8": 0.8},
        "by_draft_temperature": [{"draft_temperature": 0.5, "analytic_acceptance_rate": 0.4}],
    }


def _spread(value: float) -> dict[str, Any]:
    return {"median": value, "minimum": value - 1, "maximum": value + 1, "num_samples": 3}


def _timing() -> dict[str, Any]:
    speeds = {"distilled": 1.62, "undistilled": 1.2, "prompt_lookup": 1.08}
    runs = [
        {
            "draft": draft,
            "temperature": temperature,
            "num_draft_tokens": 3,
            "plain_tokens_per_s": _spread(20.0),
            "tokens_per_s": _spread(20.0 * speed),
            "speedup": {"value": speed, "low": speed - 0.1, "high": speed + 0.1, "num_prompts": 4},
            "caveat": "fewer than 8 prompts are too few to rely on",
            "predicted_speedup": 1.8,
            "efficiency": speed / 1.8,
            "block_efficiency": 2.1,
            "acceptance_rate": 0.6,
        }
        for temperature in (0.0, 1.0)
        for draft, speed in speeds.items()
    ]
    curve = [0.9, 1.2, 1.6, 1.7, 1.6, 1.5]
    plans = [
        {
            "draft": draft,
            "temperature": temperature,
            "num_draft_tokens": 4,
            "predicted_speedup": 1.7,
            "break_even_acceptance_rate": 0.2,
            "curve": [{"num_draft_tokens": k + 1, "speedup": s} for k, s in enumerate(curve)],
            "improvements": improvements(
                Rates([0.6, 0.6], 0.6),
                draft_cost_ratio=0.12,
                verify_cost_ratio=lambda n: 1.0,
                max_draft_tokens=6,
            ),
            "by_alpha": speedups_by_alpha(draft_cost_ratio=0.12, max_draft_tokens=6),
            "by_batch_size": [{"batch_size": 16, "num_draft_tokens": 0, "predicted_speedup": 1.0}],
        }
        for temperature in (0.0, 1.0)
        for draft in DRAFTS
    ]
    return {
        "conditions": {
            "device_name": "a CPU",
            "num_cpus": 2,
            "num_threads": 2,
            "dtype": "bfloat16",
            "load_average": 0.5,
        },
        "num_prompts": 4,
        "max_new_tokens": 64,
        "repeats": 3,
        "target_step_ms": _spread(41.0),
        "draft_costs": [
            {
                "draft": draft,
                "temperature": temperature,
                "draft_cost_ratio": 0.12,
                "draft_step_ms": _spread(5.0),
            }
            for draft in DRAFTS
            for temperature in (0.0, 1.0)
        ],
        "verify_cost_ratio": {"1": 1.0, "4": 1.1, "8": 1.3},
        "batches": [
            {
                "batch_size": 16,
                "temperature": temperature,
                "target_step_ms": _spread(50.0),
                "draft_cost_ratio": 0.2,
                "verify_cost_ratio": {"1": 1.0, "7": 3.0},
            }
            for temperature in (0.0, 1.0)
        ],
        "runs": runs,
        "plans": plans,
    }


def _measure_metrics(ship: bool = True) -> dict[str, Any]:
    reason = "1.62x at temperature 0 and 1.62x at temperature 1" if ship else "slower <than> plain"
    verdict = {
        "ship": ship,
        "reasons": [reason],
        "num_draft_tokens": 3,
        "num_draft_tokens_by_temperature": {"0": 3, "1": 3},
    }
    return {"timing": _timing(), "verdict": verdict}


def _artifact(
    store: ArtifactStore,
    stage: str,
    files: dict[str, str],
    metrics: dict[str, Any],
    *,
    settings: Config | None = None,
    **inputs: str,
) -> Artifact:
    def build(partial: Path) -> dict[str, Any]:
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        return metrics

    revisions = {"target": "abc123", "draft/draft": "d1", "draft/rival": "r1"}
    key = store.key(stage, 1, settings or Settings(), inputs=inputs, revisions=revisions)
    return store.get_or_build(key, build)


def _artifacts(root: Path, **metrics: Any) -> dict[str, Artifact]:
    store = ArtifactStore(root)
    step = {"epoch": 0, "loss": 1.0, "grad_norm": 0.5, "learning_rate": 1e-4, "num_tokens": 9}
    decode = {"temperature": 1.0, "acceptance_rate": 0.5, "block_efficiency": 2.0, "num_tokens": 9}
    log = "".join(
        json.dumps({"step": s, **step})
        + "\n"
        + json.dumps(
            {
                "step": s,
                "held_out": SCORE | {"acceptance": a, "greedy_agreement": a + 0.05},
                "decoded": [decode],
            }
        )
        + "\n"
        for s in range(0, 400, 20)
        for a in [0.3 + 0.2 * s / (s + 50)]
    )
    return {
        "generate": _artifact(store, "generate", {"a.txt": "x"}, ANSWERED),
        "distill": _artifact(store, "distill", {"training_log.jsonl": log}, TRAINED),
        "measure": _artifact(
            store,
            "measure",
            {"acceptance.json": json.dumps(_acceptance())},
            metrics or _measure_metrics(),
        ),
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_report("demo", _artifacts(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def page(report: dict[str, Any]) -> str:
    return render.render_html(report)


def test_summary_puts_before_and_after_side_by_side(report: dict[str, Any]) -> None:
    row = report["summary"][0]
    rate = row["analytic_acceptance_rate"]
    # 20 * .4 and 20 * .6, plus a mean of .3 * 3.5, over 30 positions.
    assert rate["before"]["value"] == pytest.approx((20 * 0.4 + 1.05) / 30)
    assert rate["after"]["value"] == pytest.approx((20 * 0.6 + 1.05) / 30)
    assert rate["difference"]["value"] == pytest.approx(4 / 30)
    assert row["timed"]["speedup"]["value"] == 1.62


def test_the_strongest_rival_stands_beside_the_draft(report: dict[str, Any]) -> None:
    assert [row["strongest_rival"]["draft"] for row in report["summary"]] == ["undistilled"] * 2


def test_report_names_every_artifact_and_its_fingerprint(report: dict[str, Any]) -> None:
    assert set(report["artifacts"]) == {"generate", "distill", "measure"}
    assert all(len(a["fingerprint"]) == 64 for a in report["artifacts"].values())
    assert report["target"]["revision"] == "abc123"


def test_written_report_is_json_and_html(report: dict[str, Any], tmp_path: Path) -> None:
    paths = write_report(tmp_path / "out", report)
    assert [path.name for path in paths] == ["report.json", "report.html"]
    assert json.loads(paths[0].read_text(encoding="utf-8")) == report
    assert paths[1].read_text(encoding="utf-8").startswith("<!doctype html>")


def _schema() -> Any:
    path = Path(render.__file__).with_name("report.schema.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_report_fits_its_schema(report: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(_schema())
    assert [(list(e.path), e.message) for e in validator.iter_errors(report)] == []


def test_schema_refuses_what_is_no_report(report: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(_schema())
    for change in ({"unheard_of": 1}, {"cells": [{}]}, {"verdict": {"ship": "yes"}}):
        assert not validator.is_valid(report | change)


STRUCTURE = frozenset(("schema_version", "from", "to", "name", "position"))
# Settings are no numbers that were found, versions no numbers at all.
NOT_OURS = ("settings", "definitions", "code", "packages")


def _number_names(tree: Any, name: str = "") -> set[str]:
    """The key over every number; one that is no identifier ("8", "1.0") stands for its parent."""
    if isinstance(tree, dict):
        if set(tree) == {"value", "low", "high", "num_prompts"}:
            return {name}
        found: set[str] = set()
        for key, value in tree.items():
            if key not in NOT_OURS:
                name_of = key.partition("/")[0]  # num_rows_of_task/chat: the rest is a label
                is_label = not name_of.isidentifier()
                found |= _number_names(value, name if is_label else name_of)
        return found
    if isinstance(tree, list):
        return set().union(*(_number_names(item, name) for item in tree))
    return {name} if isinstance(tree, (int, float)) and not isinstance(tree, bool) else set()


def test_every_numbers_name_is_a_heading_of_the_definitions(report: dict[str, Any]) -> None:
    path = Path(__file__).resolve().parents[2] / "docs" / "definitions.md"
    headings = [x for x in path.read_text(encoding="utf-8").splitlines() if x.startswith("### ")]
    defined = set(re.findall(r"`([^`]+)`", "\n".join(headings)))
    token_ids = {"plain_token", "speculative_token", "target_token", "context_token_ids"}
    names = _number_names(report) - STRUCTURE - token_ids
    assert "analytic_acceptance_rate" in names
    assert "detectable_effect" in names
    assert {"best_step", "grad_norm", "greedy_agreement", "load_average"} <= names
    assert {"num_rows_of_task", "target_store_bytes", "memory_bytes", "num_rounds"} <= names
    assert names - defined == set()
    assert set(report["definitions"]) - {"interval"} - defined == set()


def test_a_gate_is_judged_when_the_report_is_written(tmp_path: Path) -> None:
    bounds = {"min_speedup": 1.7, "min_alpha": 0.4, "lossless": True}
    report = build_report("demo", _artifacts(tmp_path), gate=bounds)
    failures = report["gate"]["failures"]
    assert len(failures) == 3  # a failed self-test, and 1.62x at both temperatures
    assert "cannot be judged: self-test failed at temperature 1: analytic == decoded" in failures[0]
    assert "min_speedup is 1.7, the speedup at temperature 0 is 1.620 (95%: 1.520" in failures[1]
    assert "Gate failed" in render.render_html(report)
    assert "gate failed" in _printed(report)
    reached = build_report("demo", _artifacts(tmp_path), gate=bounds | {"min_speedup": 1.6})
    assert reached["gate"]["failures"] == failures[:1]
    assert reached["gate"]["is_passed"] is False


def test_a_gate_passes_where_every_bound_is_reached_and_every_self_test(tmp_path: Path) -> None:
    content = _acceptance()
    content["self_tests"] = [t for t in content["self_tests"] if t["is_passed"] is not False]
    store = ArtifactStore(tmp_path)
    files = {"acceptance.json": json.dumps(content)}
    measure = _artifact(store, "measure", files, _measure_metrics())
    bounds = {"min_speedup": 1.6, "min_alpha": 0.4, "lossless": True}
    assert build_report("demo", {"measure": measure}, gate=bounds)["gate"]["is_passed"] is True


def test_what_was_left_out_is_said_beside_what_was_measured(
    report: dict[str, Any], page: str
) -> None:
    assert report["num_skipped"] == 2
    assert "Left out: 2 of 18 prompts" in page
    assert "skipped: 2 of 18 prompts" in _printed(report)


def test_few_timed_prompts_and_untested_cells_are_said_beside_their_numbers(page: str) -> None:
    assert "1.62x <small>1.52 to 1.72*</small>" in page
    assert '<span class="range">1.52 to 1.72*</span>' in page
    assert "a change inside those is not seen" in page
    assert "<td>25.0%</td>" in page


def _intervals(page: str) -> list[str]:
    """The small print that is an interval, and the range under a speedup."""
    small = re.findall(r"<(?:small|span class=.range.)>(.*?)</", page)
    return [text for text in small if re.match(r"[-+0-9.]+ to [-+0-9.]+", text)]


def test_every_interval_over_few_prompts_says_so_and_no_other(tmp_path: Path) -> None:
    content = _acceptance()
    few = [r for r in _records() if int(r.prompt_id[-1]) < 3]  # three prompts a task, six in all
    names = {"draft": "distilled", "baseline": "undistilled"}
    content["cells"] = summary.summarize(few, num_draft_tokens=4, seed=0)
    content["differences"] = summary.compare(few, seed=0, **names)
    files = {"acceptance.json": json.dumps(content)}
    measure = _artifact(ArtifactStore(tmp_path), "measure", files, _measure_metrics())
    report = build_report("few", {"measure": measure})
    page = render.render_html(report)
    spreads = 2 * len(report["timing"]["runs"])  # of repeated passes, not over prompts
    intervals = _intervals(page)
    assert len(intervals) > 60
    assert sum("*" not in text for text in intervals) == spreads
    assert "* is over fewer than 8 prompts, too few to rely on" in page
    assert page.count("Some are over fewer than 8 prompts") == 3
    said = [row["sentence"] for row in report["differences"]]
    assert all("fewer than 8 prompts are too few to rely on" in text for text in said)
    text = _printed(report)
    assert "* fewer than 8 prompts are too few to rely on" in text
    rates = [line for line in text.splitlines() if "rate" in line and "]" in line]
    assert len(rates) == 4
    assert all(line.count("]*") == line.count("]") for line in rates)


def test_intervals_over_enough_prompts_are_not_marked(report: dict[str, Any], page: str) -> None:
    pooled = page[page.index("Before and after") : page.index("<h2>Speed")]
    assert len(_intervals(pooled)) == 18
    assert "fewer than" not in pooled
    assert not any("]*" in line for line in _printed(report).splitlines() if "acceptance" in line)


def test_a_law_that_was_not_judged_is_no_yes(report: dict[str, Any]) -> None:
    law = report["lossless"]["laws"][0] | {"p_value": None, "is_same_law": None}
    unjudged = report | {"lossless": report["lossless"] | {"laws": [law]}}
    assert "<td>not judged</td>" in render.render_html(unjudged)
    validator = jsonschema.Draft202012Validator(_schema())
    assert validator.is_valid(unjudged)


def test_the_training_curve_starts_at_the_draft_that_was_trained_on(page: str) -> None:
    # After rounds of on-policy training, step 0 of the last one is no undistilled draft.
    assert "Step 0 is the draft this training (of several rounds: the last one) started" in page
    assert "as the last round found it" in page


def test_efficiency_names_the_prompts_own_pass(report: dict[str, Any]) -> None:
    assert "the prompt's own pass" in report["definitions"]["efficiency"]


def test_page_colours_tokens_and_names_what_failed(page: str) -> None:
    assert '<span class="accepted" title="acceptance 100.0%">a &lt;b&gt;</span>' in page
    assert '<span class="rejected" title="acceptance 0.0%"> wrong</span>' in page
    assert "1 of 3 self-tests of this measurement passed, 1 failed, 1 was not judged" in page
    assert "distilled loses 45.0%" in page
    assert "before it" in page


def test_equal_reports_render_to_equal_bytes(report: dict[str, Any], page: str) -> None:
    assert render.render_html(report) == page


def test_page_needs_nothing_from_outside(page: str) -> None:
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert [link for link in links if not link.startswith("#")] == []
    assert "@import" not in page


def test_page_says_the_verdict_first(page: str) -> None:
    body = page[page.index("<body>") :]
    assert body.index("<strong>Ship</strong>") < body.index("<table")


def test_page_escapes_what_it_quotes(page: str) -> None:
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "math <b>" not in page
    assert "math &lt;b&gt;&amp; $x_1$" in page


def test_page_has_a_dark_theme_and_a_print_form(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_plots_follow_the_theme_and_have_ids_of_their_own(page: str) -> None:
    assert page.count("<svg ") == 4
    assert "var(--series-0)" in page
    assert not re.search(r"#0[1-9]0[1-9]0[1-9]", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("num_drafts", [1, 30])
def test_long_names_and_many_drafts_leave_a_plot_room_for_its_axes(
    num_drafts: int, recwarn: pytest.WarningsRecorder
) -> None:
    rate = {"value": 0.5, "low": 0.4, "high": 0.6, "num_prompts": 9}
    drafts = [f"draft-{n}-{'d' * 90}" for n in range(num_drafts)]
    tasks = [None, "t" * 100, "math"]
    content = {
        "drafts": drafts,
        "temperatures": [0.0, 0.7, 1.0],
        "num_draft_tokens": 2,
        "cells": [
            {
                "draft": draft,
                "temperature": temperature,
                "task": task,
                "analytic_acceptance_rate": rate,
                "acceptance_by_position": [rate, rate],
            }
            for draft in drafts
            for temperature in (0.0, 0.7, 1.0)
            for task in tasks
        ],
    }
    for svg in (plots.acceptance_by_task(content), plots.acceptance_by_position(content)):
        assert svg is not None
    assert [str(w.message) for w in recwarn] == []


def test_a_long_name_keeps_its_beginning_and_its_end_in_a_plot() -> None:
    assert plots.shortened("math") == "math"
    assert plots.shortened("a" * 32) == "a" * 32
    assert plots.shortened("begin" + "x" * 100 + "end") == f"begin{'x' * 10}…{'x' * 12}end"


class Balance(HTMLParser):
    """Checks that tags close in order."""

    VOID = frozenset({"meta", "br", "img", "hr", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []


def _printed(report: dict[str, Any], width: int = 110) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(report_table(report))
    return console.export_text()


def test_terminal_table_says_verdict_numbers_and_places(report: dict[str, Any]) -> None:
    text = _printed(report)
    assert "demo: ship" in text
    assert "1.62x [1.52, 1.72]*" in text  # over four prompts
    assert "undistilled 1.20x" in text
    assert str(report["artifacts"]["measure"]["path"])[:60] in text


def test_what_was_trained_is_said_in_a_line(report: dict[str, Any], page: str) -> None:
    line = (
        "pruned (layers [0, 29]); 42.5M parameters; trained with forward_kl then acceptance; "
        "380 steps, 9000 tokens, 62 s"
    )
    assert render.trained(report) == line
    assert line in page
    assert "42.5M parameters" in _printed(report)


def _rounds(root: Path, numbers: tuple[int, ...]) -> list[Artifact]:
    """Trainings that follow each other, of so many steps."""
    store, built = ArtifactStore(root), list[Artifact]()
    for steps in numbers:
        before = {"distill": built[-1].fingerprint} if built else {}
        told = {"num_steps": steps, "num_tokens": 100 * steps, "train_s": 1.5, "wall_s": 2.0}
        log = {"training_log.jsonl": json.dumps({"step": 0, "held_out": SCORE}) + "\n"}
        built.append(_artifact(store, "distill", log, TRAINED | told, **before))
    return built


def _report_of_rounds(root: Path, distilled: Artifact) -> dict[str, Any]:
    files = {"acceptance.json": json.dumps(_acceptance())}
    measure = _artifact(ArtifactStore(root), "measure", files, _measure_metrics())
    return build_report("demo", {"distill": distilled, "measure": measure})


def test_every_round_of_training_is_listed_and_their_sums_are_what_is_said(
    tmp_path: Path,
) -> None:
    rounds = _rounds(tmp_path, (6, 4, 5))
    report = _report_of_rounds(tmp_path, rounds[-1])
    training = report["training"]
    assert [row["fingerprint"] for row in training["rounds"]] == [r.fingerprint for r in rounds]
    assert [row["num_steps"] for row in training["rounds"]] == [6, 4, 5]
    assert training["total"] == {
        "num_rounds": 3,
        "num_rounds_unread": 0,
        "num_steps": 15,
        "num_tokens": 1500,
        "train_s": 4.5,
        "wall_s": 6.0,
    }
    assert training["metrics"]["num_steps"] == 5
    line = "3 rounds of 6 + 4 + 5 = 15 steps, 1500 tokens, 4 s"
    assert line in render.trained(report)
    page = render.render_html(report)
    assert line in page
    assert '<th scope="row">sum</th><td>15</td><td>1500</td>' in page
    assert "Settings and counts of the last round" in page
    assert "".join(line.split()) in "".join(_printed(report).split())
    assert jsonschema.Draft202012Validator(_schema()).is_valid(report)


def test_rounds_that_were_deleted_are_said_to_be_missing_from_the_sums(tmp_path: Path) -> None:
    rounds = _rounds(tmp_path, (6, 4, 5))
    shutil.rmtree(rounds[0].path)
    report = _report_of_rounds(tmp_path, rounds[-1])
    assert report["training"]["total"]["num_rounds_unread"] == 1
    line = "4 + 5 = 9 steps, 900 tokens, 3 s in the last 2 of its rounds; those before are deleted"
    assert line in render.trained(report)
    assert "those before the first row are deleted" in render.render_html(report)
    assert jsonschema.Draft202012Validator(_schema()).is_valid(report)


class Pair(Config):
    """Stands in for the settings of a pair that was not trained here."""

    target: Target = Target(quantize="int8")
    draft: Target = Target(model="org/<draft>", dtype="auto", quantize="int8")
    drafts: dict[str, Target]


def test_the_report_of_a_pair_names_its_drafts_and_how_every_model_was_held(
    tmp_path: Path,
) -> None:
    content = json.loads(json.dumps(_acceptance()).replace('"distilled"', '"draft"'))
    content["drafts"] = ["draft", "rival", "early_exit_2", "prompt_lookup"]
    content |= {"baseline": None, "differences": []}
    files = {"acceptance.json": json.dumps(content)}
    metrics = _measure_metrics() | {"timing": {}}
    store = ArtifactStore(tmp_path)
    drafts = {"rival": Target(model="org/rival", dtype="float32")}
    measure = _artifact(store, "measure", files, metrics, settings=Pair(drafts=drafts))
    report = build_report("pair", {"measure": measure})
    assert report["target"]["quantize"] == "int8"
    assert report["draft_models"] == [
        {
            "draft": "draft",
            "model": "org/<draft>",
            "dtype": "bfloat16",  # left open: the target's
            "quantize": "int8",
            "revision": "d1",
        },
        {
            "draft": "rival",
            "model": "org/rival",
            "dtype": "float32",
            "quantize": "none",
            "revision": "r1",
        },
    ]
    page = render.render_html(report)
    assert "Draft <code>org/&lt;draft&gt;</code> (bfloat16, int8 weights)" in page
    assert "</code> (bfloat16, int8 weights), measured" in page
    assert "<code>org/rival</code> (float32), revision <code>r1</code>" in page
    text = "".join(_printed(report).split())  # lines are folded anywhere
    assert "draft:org/<draft>(bfloat16,int8weights,d1)" in text
    assert "rival:org/rival(float32,r1)" in text
    assert "</script>(bfloat16,int8weights,abc123)" in text
    assert jsonschema.Draft202012Validator(_schema()).is_valid(report)


def test_a_trained_draft_is_named_by_the_artifact_that_trained_it(tmp_path: Path) -> None:
    (distilled,) = _rounds(tmp_path, (6,))
    files = {"acceptance.json": json.dumps(_acceptance())}
    store, inputs = ArtifactStore(tmp_path), {"distill": distilled.fingerprint}
    measure = _artifact(store, "measure", files, _measure_metrics(), **inputs)
    for artifacts, model in (
        ({"distill": distilled}, str(distilled.path)),
        ({}, f"distill/{distilled.fingerprint[:12]}"),
    ):
        (draft,) = build_report("demo", {"measure": measure, **artifacts})["draft_models"]
        assert draft["model"] == model
        assert draft["revision"] == distilled.fingerprint


def test_a_draft_not_worth_shipping_is_said_to_be_so(tmp_path: Path) -> None:
    report = build_report("demo", _artifacts(tmp_path, **_measure_metrics(ship=False)))
    assert "demo: do not ship" in _printed(report)
    page = render.render_html(report)
    assert "<strong>Do not ship</strong>" in page
    assert "slower &lt;than&gt; plain" in page


def test_report_without_timing_still_renders(tmp_path: Path) -> None:
    metrics = _measure_metrics(ship=False) | {"timing": {}}
    report = build_report("demo", _artifacts(tmp_path, **metrics))
    assert "Timing was switched off" in render.render_html(report)
    assert "–" in _printed(report)


def test_a_report_needs_a_measurement(tmp_path: Path) -> None:
    artifacts = _artifacts(tmp_path)
    del artifacts["measure"]
    with pytest.raises(ArtifactError, match="measure"):
        build_report("demo", artifacts)


def test_an_artifact_under_the_wrong_name_is_refused(tmp_path: Path) -> None:
    artifacts = _artifacts(tmp_path)
    with pytest.raises(ArtifactError, match="'generate'"):
        build_report("demo", artifacts | {"distill": artifacts["generate"]})


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        ({"value": 0.7312, "low": 0.7, "high": 0.76}, "percent", "73.1% [70.0, 76.0]"),
        ({"value": 1.5, "low": None, "high": None}, "times", "1.50x"),
        ({"value": 0.031, "low": -0.01, "high": 0.07}, "points", "+3.1 [-1.0, +7.0]"),
        ({"value": 1.5, "low": 1.4, "high": 1.6, "num_prompts": 7}, "times", "1.50x [1.40, 1.60]*"),
        ({"value": None, "low": None, "high": None}, "percent", "–"),
        (None, "percent", "–"),
    ],
)
def test_estimates_read_well(value: dict[str, Any] | None, unit: str, text: str) -> None:
    assert render.estimate(value and {"num_prompts": 8, **value}, unit) == text
