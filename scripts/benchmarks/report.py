"""Owns the arithmetic and the text of the runtime benchmark: rows, ratios, goals.
Refuses to run anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks import measuring, ours
from scripts.benchmarks.contest import (
    ADAPTIVE,
    BASELINE,
    FIXED,
    HF_PLAIN,
    HF_TUNED,
    PLAIN,
    Cell,
    Entry,
)
from scripts.benchmarks.measuring import Sample, megabytes, number, table

COLUMNS = (
    "batch",
    "T",
    "system",
    "K",
    "tokens/s [min, max]",
    "tau",
    "alpha",
    "c",
    "v(K+1)",
    "predicted",
    "measured",
    "efficiency",
)
GOALS = {
    "plain": ("our plain / transformers plain", 1.4),
    "speculative": ("our speculative / transformers assisted tuned", 1.5),
    "efficiency": ("efficiency of fixed K at batch 1", 0.95),
    "python": ("python outside model forwards, share of a round", 0.05),
    "memory": ("peak memory / (weights + caches + [rows, S, V] float32)", 1.0),
}


def runtime_rows(
    cell: Cell, systems: Mapping[str, Entry], samples: Mapping[str, Sequence[Sample]]
) -> list[dict[str, Any]]:
    """One row per system of a cell; what is not known of a system is None.

    ``measured_speedup`` is over the same engine without speculation, round by round.
    ``predicted_speedup`` is what the run's own rounds should have given at the measured costs, and
    ``efficiency`` measured over predicted.
    """
    rows = []
    for name, entry in systems.items():
        stats = measuring.total_stats(samples[name])
        measured = predicted = None
        if name in BASELINE:
            measured = measuring.paired_ratio(samples[name], samples[BASELINE[name]]).median
        if stats is not None and entry.costs is not None:
            predicted = ours.predicted_speedup(
                stats,
                draft_cost_ratio=entry.costs.draft_cost_ratio,
                verify_cost_ratio=entry.costs.verify,
            )
        has_drafts = stats is not None and stats.num_proposed > 0
        rows.append(
            {
                "batch_size": cell[0],
                "temperature": cell[1],
                "system": name,
                "num_draft_tokens": entry.label,
                "tokens_per_s": measuring.throughput(samples[name]).to_dict(),
                "seconds": [sample.seconds for sample in samples[name]],
                "num_tokens": [sample.run.num_tokens for sample in samples[name]],
                "block_efficiency": stats.block_efficiency if stats and has_drafts else None,
                "acceptance_rate": stats.acceptance_rate if stats and has_drafts else None,
                "draft_cost_ratio": None if entry.costs is None else entry.costs.draft_cost_ratio,
                "verify_cost_ratio": _verify_at(entry),
                "predicted_speedup": predicted,
                "measured_speedup": measured,
                "efficiency": measured / predicted if measured and predicted else None,
                "stats": None if stats is None else stats.to_dict(),
            }
        )
    return rows


def _verify_at(entry: Entry) -> float | None:
    """v(K + 1) where K is one number."""
    if entry.costs is None or not entry.label.isdigit():
        return None
    return entry.costs.verify(int(entry.label) + 1)


def runtime_ratios(
    samples: Mapping[Cell, Mapping[str, Sequence[Sample]]],
) -> list[dict[str, Any]]:
    """The ratios that have a goal, in every cell; our speculative is the better of its two."""
    ratios = []
    for (batch, temperature), here in samples.items():
        best = max((FIXED, ADAPTIVE), key=lambda name: measuring.throughput(here[name]).median)
        for kind, mine, theirs in (("plain", PLAIN, HF_PLAIN), ("speculative", best, HF_TUNED)):
            ratios.append(
                {
                    "kind": kind,
                    "batch_size": batch,
                    "temperature": temperature,
                    "ours": mine,
                    "theirs": theirs,
                    "ratio": measuring.paired_ratio(here[mine], here[theirs]).to_dict(),
                }
            )
    return ratios


def goals(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal with the number that is to meet it; ``is_met`` is None where it is not known."""
    found: list[dict[str, Any]] = []

    def add(kind: str, where: str, value: float | None) -> None:
        name, goal = GOALS[kind]
        is_floor = kind in ("plain", "speculative", "efficiency")
        met = None if value is None else (value >= goal if is_floor else value <= goal)
        found.append({"goal": name, "where": where, "value": value, "bound": goal, "is_met": met})

    for ratio in report["ratios"]:
        which = f", {ratio['ours'].removeprefix('ours ')}" if ratio["kind"] != "plain" else ""
        add(ratio["kind"], _where(ratio) + which, ratio["ratio"]["median"])
    for row in report["rows"]:
        if row["system"] == FIXED and row["batch_size"] == 1:
            add("efficiency", _where(row), row["efficiency"])
    for temperature, shares in report["profile"].items():
        add("python", f"T = {temperature}", shares["python"])
    memory = report["memory"]
    peak, allowed = memory["peak_bytes"], memory["allowed_bytes"]
    add("memory", f"batch {memory['batch_size']}", None if peak is None else peak / allowed)
    return found


def _where(entry: Mapping[str, Any]) -> str:
    return f"batch {entry['batch_size']}, T = {entry['temperature']:g}"


def runtime_text(report: Mapping[str, Any]) -> str:
    """The whole report for a terminal."""
    return "\n\n".join(
        [
            _head(report),
            table(COLUMNS, [_table_row(row) for row in report["rows"]]),
            _costs(report),
            _goals(report),
            _profile(report),
            _memory(report["memory"]),
            _notes(report),
        ]
    )


def _head(report: Mapping[str, Any]) -> str:
    conditions, settings = report["conditions"], report["settings"]
    subset = report["draft_vocabulary_size"]
    lengths = report["prompt_tokens"]
    return "\n".join(
        [
            f"target  {report['target']}",
            f"draft   {report['draft']}"
            + (f"; it proposes from {subset} tokens" if subset else ""),
            f"on      {conditions['device_name']}, {conditions['num_threads']} threads, torch "
            f"{conditions['torch']}, load {number(conditions['load_average'])}",
            f"run     {settings['rounds']} interleaved rounds in rotated order, "
            f"{settings['new_tokens']} new tokens, {report['num_prompts']} prompts of "
            f"{min(lengths)} to {max(lengths)} tokens; no token ends a text, in any system",
        ]
    )


def _table_row(row: Mapping[str, Any]) -> list[str]:
    rate = row["tokens_per_s"]
    return [
        str(row["batch_size"]),
        f"{row['temperature']:g}",
        row["system"],
        row["num_draft_tokens"],
        f"{rate['median']:.1f} [{rate['minimum']:.1f}, {rate['maximum']:.1f}]",
        *(
            number(row[key])
            for key in (
                "block_efficiency",
                "acceptance_rate",
                "draft_cost_ratio",
                "verify_cost_ratio",
                "predicted_speedup",
                "measured_speedup",
                "efficiency",
            )
        ),
    ]


def _costs(report: Mapping[str, Any]) -> str:
    lines = ["step costs, in target steps of the same batch (c: one draft step; v(n): n tokens)"]
    for costs in report["costs"]:
        widths = ", ".join(f"v({n}) {v:.2f}" for n, v in costs["verify_cost_ratio"].items())
        name = "" if costs["pair"] == "own" else f" {costs['pair']}"
        lines.append(
            f"  {_where(costs)}{name}: target step {costs['target_step_ms']['median']:.1f} ms, "
            f"draft step {costs['draft_step_ms']['median']:.1f} ms, "
            f"c {costs['draft_cost_ratio']:.2f}, {widths}"
        )
    return "\n".join(lines)


def _goals(report: Mapping[str, Any]) -> str:
    words = {True: "met", False: "NOT met", None: "not measured"}
    rows = [
        [
            entry["goal"],
            entry["where"],
            number(entry["value"]),
            number(entry["bound"]),
            words[entry["is_met"]],
        ]
        for entry in goals(report)
    ]
    return table(("goal", "where", "value", "bound", "result"), rows)


def _profile(report: Mapping[str, Any]) -> str:
    rows = [
        [
            temperature,
            number(shares["round_ms"], 1),
            *(
                f"{100 * shares[key]:.1f}%"
                for key in ("target_forward", "draft_forward", "probabilities", "python")
            ),
        ]
        for temperature, shares in report["profile"].items()
    ]
    batch = report["settings"]["batch_sizes"][0]
    title = f"one speculative round at batch {batch}, without prefill"
    columns = ("T", "ms", "target forward", "draft forward", "probabilities", "python")
    return f"{title}\n{table(columns, rows)}"


def _memory(memory: Mapping[str, Any]) -> str:
    return (
        f"memory of a speculative run (batch {memory['batch_size']}, K "
        f"{memory['num_draft_tokens']}) above the empty process: peak "
        f"{megabytes(memory['peak_bytes'])}; weights + caches + one float32 block are "
        f"{megabytes(memory['allowed_bytes'])}, "
        f"of which weights {megabytes(memory['weight_bytes'])}"
    )


def _notes(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    tuned = ", ".join(f"{k} at T = {t}" for t, k in report["assistant_tokens"].items())
    typical = statistics.median(report["prompt_tokens"])
    return "\n".join(
        [
            "measured: over the same engine without speculation, round by round. predicted: tokens "
            "over calls at the measured c and v. efficiency: measured / predicted",
            f"transformers: torch {report['conditions']['torch']}, sdpa, inference mode, the same "
            "dtype and threads; plain batches are left-padded",
            "transformers assisted takes one prompt at a time: at every batch size it answers one "
            "prompt a round, and its tokens/s are those of answering them one after the other",
            f"transformers assisted tuned: constant schedule, confidence threshold 0, K from a "
            f"sweep over {', '.join(map(str, settings['assistant_tokens']))}: {tuned}; it computes "
            "the draft's own vocabulary only, as ours does",
            f"a typical prompt has {typical:g} tokens; tokens/s include its prefill",
            f"llama_cpp: {report['llama_cpp']}",
        ]
    )
