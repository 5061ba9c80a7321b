"""Owns the content of report.json: artifacts in, one JSON-able dictionary out.

Refuses to know how it is shown: no HTML, no plot, no rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from distill.artifacts import Artifact
from distill.errors import ArtifactError
from distill.manifest import Manifest, neighbour
from distill.metrics import self_tests
from distill.metrics.sentences import ENOUGH_PROMPTS
from distill.metrics.verdict import gate_failures
from distill.report.models import drafts_of, target_of

SCHEMA_VERSION = 3

DEFINITIONS = {
    "acceptance_rate": "Draft tokens accepted / TESTED, counted while decoding (alpha). Tokens "
    "after the first rejection of a block were never tested.",
    "analytic_acceptance_rate": "The same quantity without sampling noise: the mean over "
    "positions of the target's own text of sum_v min(p, q) = 1 - TV(p, q).",
    "draft_acceptance_rate": "Draft tokens accepted / PROPOSED. Lower than the acceptance rate by "
    "construction; what other tools often print under that name.",
    "block_efficiency": "Tokens emitted per target call (tau), the correction or bonus token "
    "included: 1 for plain decoding, at most the number of draft tokens + 1.",
    "acceptance_by_position": "Probability that the i-th draft token of a block is accepted, "
    "unconditional.",
    "conditional_acceptance_by_position": "The same, given that every earlier draft token of the "
    "block was accepted.",
    "accepted_length_histogram": "Share of the blocks of which exactly n draft tokens are "
    "accepted, n = 0, 1, ...",
    "analytic_acceptance_rate_by_rule": "The analytic rate under the rules of other runtimes: "
    "p(argmax q) for a greedy draft, sum_v p q for exact matches of two samples.",
    "break_even_acceptance_rate": "The smallest alpha, equal at every position, at which some "
    "number of draft tokens is no slower than plain decoding.",
    "share_of_loss": "Share of the lost acceptance (1 - alpha, summed over positions).",
    "top_k_ceiling": "Mean probability on the target's k likeliest tokens: what a draft trained "
    "on a renormalised top-k store can reach.",
    "detectable_total_variation": "The change of the law, as total variation, that the test of "
    "sampled tokens would have found with 80% probability, if it is between the test's cells.",
    "rest_mass": "The target's probability on the cells of many tokens: a change inside them "
    "is not seen by that test.",
    "draft_cost_ratio": "Time of one draft step / time of one plain target step (c).",
    "verify_cost_ratio": "Time of the target on n tokens / on one (v).",
    "predicted_speedup": "Tokens per target call / (K c + v(K + 1)), from the measured acceptance "
    "by position and the measured costs.",
    "speedup": "Tokens per second over the same engine decoding without a draft, batch 1, "
    "interleaved runs.",
    "efficiency": "Measured / predicted speedup. The prediction leaves out the prompt's own pass, "
    "which both ways of decoding pay and the clock includes, and the decoding loop; and its "
    "acceptance is that of all prompts, not of the few that were timed.",
    "interval": "95% percentile bootstrap over prompts. Over fewer than "
    f"{ENOUGH_PROMPTS} prompts it is too narrow to rely on.",
}

_ROUND_SUMS = ("num_steps", "num_tokens", "train_s", "wall_s")
_ROUND_FACTS = ("best_step", "held_out_before", "held_out_after")


def build_report(
    name: str, artifacts: Mapping[str, Artifact], *, gate: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Gather a run's artifacts (``generate``, ``distill``, ``measure``, others welcome).

    ``gate``: the bounds of ``measure.gate``, judged here: moving a bound measures nothing again.

    Raises:
        ArtifactError: no ``measure`` artifact among them, or one filed under the wrong name.
        ArtifactMissingError: the measure artifact has no acceptance.json.
    """
    if "measure" not in artifacts:
        raise ArtifactError(
            f"A report needs a 'measure' artifact; got: {', '.join(artifacts) or 'none'}. "
            "Run the measure stage first."
        )
    for stage, artifact in artifacts.items():
        artifact.expect(stage)
    measure = artifacts["measure"]
    acceptance = json.loads(measure.file("acceptance.json").read_text(encoding="utf-8"))
    timing = measure.metrics.get("timing", {})
    manifest = measure.manifest
    copied = {key: value for key, value in acceptance.items() if key != "schema_version"}
    return copied | {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "measured": manifest.finished,
        "target": target_of(measure),
        "draft_models": drafts_of(
            measure,
            acceptance["drafts"],
            primary=acceptance["primary"],
            distilled=artifacts.get("distill"),
        ),
        "verdict": measure.metrics["verdict"],
        "gate": None if gate is None else _gate(gate, acceptance, timing),
        "summary": _summary(acceptance, timing),
        "timing": timing,
        "training": _training(artifacts.get("distill")),
        "data": dict(artifacts["generate"].metrics) if "generate" in artifacts else {},
        "artifacts": {
            stage: {"path": str(a.path), "fingerprint": a.fingerprint}
            for stage, a in artifacts.items()
        },
        "provenance": {
            "code": manifest.code,
            "packages": manifest.packages,
            "hardware": manifest.hardware,
        },
        "definitions": DEFINITIONS,
    }


def _gate(
    bounds: Mapping[str, Any], acceptance: Mapping[str, Any], timing: Mapping[str, Any]
) -> dict[str, Any]:
    failures = gate_failures(
        bounds,
        acceptance["cells"],
        acceptance["lossless"],
        timing,
        draft=acceptance["primary"],
        faults=self_tests.failures(acceptance["self_tests"]),
    )
    return {"bounds": dict(bounds), "failures": failures, "is_passed": not failures}


def _summary(acceptance: Mapping[str, Any], timing: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per temperature: before, after, predicted and measured."""
    rows = []
    draft, baseline = acceptance["primary"], acceptance["baseline"]
    for temperature in acceptance["temperatures"]:
        after = _pooled(acceptance["cells"], draft, temperature)
        before = baseline and _pooled(acceptance["cells"], baseline, temperature)
        difference = next(
            (
                row
                for row in acceptance["differences"]
                if row["temperature"] == temperature and row["task"] is None
            ),
            None,
        )
        runs = [r for r in timing.get("runs", []) if r["temperature"] == temperature]
        ours = next((r for r in runs if r["draft"] == draft), None)
        rivals = [r for r in runs if r["draft"] != draft]
        rows.append(
            {
                "temperature": temperature,
                **{
                    metric: {
                        "before": before and before[metric],
                        "after": after and after[metric],
                        "difference": difference and difference[metric],
                    }
                    for metric in (
                        "analytic_acceptance_rate",
                        "acceptance_rate",
                        "block_efficiency",
                    )
                },
                "timed": ours,
                "strongest_rival": max(rivals, key=lambda r: r["speedup"]["value"], default=None),
            }
        )
    return rows


def _pooled(cells: list[dict[str, Any]], draft: str, temperature: float) -> dict[str, Any] | None:
    for cell in cells:
        if (cell["draft"], cell["temperature"], cell["task"]) == (draft, temperature, None):
            return cell
    return None


def _training(distill: Artifact | None) -> dict[str, Any]:
    """What the draft's training says: of several rounds the last one's, and all of them added."""
    if distill is None:
        return {"settings": {}, "metrics": {}, "log": [], "rounds": [], "total": None}
    listed = {entry.path for entry in distill.manifest.files}
    log: list[dict[str, Any]] = []
    if "training_log.jsonl" in listed:
        text = distill.file("training_log.jsonl").read_text(encoding="utf-8")
        log = [json.loads(line) for line in text.splitlines() if line.strip()]
    rounds, num_unread = _rounds(distill)
    return {
        "settings": distill.manifest.config,
        "metrics": distill.metrics,
        "log": log,
        "rounds": rounds,
        "total": {
            "num_rounds": len(rounds) + num_unread,
            "num_rounds_unread": num_unread,
            **{name: _sum(row[name] for row in rounds) for name in _ROUND_SUMS},
        },
    }


def _rounds(distill: Artifact) -> tuple[list[dict[str, Any]], int]:
    """Each training this draft went through, the first one first; and how many are not at hand.

    A round starts from the draft of the one before, which its manifest names. One that was deleted
    hides those before it, so the count of what is not at hand is then of what is known: 1.
    """
    rounds = []
    manifest: Manifest | None = distill.manifest
    num_unread = 0
    while manifest is not None:
        rounds.append(
            {
                "fingerprint": manifest.fingerprint,
                **{name: manifest.metrics.get(name) for name in (*_ROUND_SUMS, *_ROUND_FACTS)},
            }
        )
        before = manifest.inputs.get("distill")
        manifest = None if before is None else neighbour(distill, "distill", before)
        num_unread = int(before is not None and manifest is None)
    return rounds[::-1], num_unread


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None where a part of it is not known."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
