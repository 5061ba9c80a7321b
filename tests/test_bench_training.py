"""Owns the tests of scripts/bench_distill and scripts/bench_acceptance on a tiny pair.
Refuses to assert a time: what is fast here says nothing, and differs from run to run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from distill import generate, load_config
from distill.artifacts import ArtifactStore
from distill.errors import ConfigError
from distill.held_out import answered_held_out, selection_half
from distill.losses import LOSSES
from distill.training.data import Row, pad
from distill.training.trl_engine import check_for_trl
from scripts.benchmarks import acceptance as bench_acceptance
from scripts.benchmarks import acceptance_report as printed_report
from scripts.benchmarks import distill as bench_distill
from scripts.benchmarks import distill_report as distill_report_module
from scripts.benchmarks import training

REPOSITORY = Path(__file__).resolve().parents[1]
THREADS = ["--threads", str(torch.get_num_threads())]


@pytest.mark.parametrize("name", ["distill", "acceptance"])
def test_a_script_runs_its_module(name: str) -> None:
    script = REPOSITORY / "scripts" / f"bench_{name}"
    assert os.access(script, os.X_OK)
    assert f'bin/python" -m scripts.benchmarks.{name} "$@"' in script.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------ bench_distill


@pytest.fixture(scope="module")
def distill_report(
    tmp_path_factory: pytest.TempPathFactory, tiny_run_config: Path
) -> dict[str, Any]:
    """What one short bench_distill wrote, with what it printed under ``text``."""
    root = tmp_path_factory.mktemp("bench")
    options = ["--config", str(tiny_run_config), "--artifacts", str(root / "artifacts")]
    options += ["--set", "distill.vocabulary_size=100", "--json", str(root / "out.json")]
    options += ["--batch-rows", "2", "--steps", "2", "--rounds", "2", "--no-memory", *THREADS]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: printed.append(str(a[0])))
        assert bench_distill.main(options) == 0
    found: dict[str, Any] = json.loads((root / "out.json").read_text(encoding="utf-8"))
    return found | {"text": "\n".join(printed)}


def test_every_loss_every_store_and_every_rival_is_timed_on_equal_tokens(
    distill_report: dict[str, Any],
) -> None:
    rows = {row["system"]: row for row in distill_report["rows"]}
    assert list(rows) == bench_distill.system_names(has_subset=True)
    assert "ours acceptance, subset" in {name.partition(" @")[0] for name in rows}
    assert {row["loss"] for row in rows.values()} >= set(LOSSES.names())
    assert {"final_hidden", "top_k", "sampled", "live"} <= {row["store"] for row in rows.values()}
    per_turn = [2 * tokens for tokens in distill_report["tokens_a_step"]]
    for name, row in rows.items():
        assert len(row["seconds"]) == 2
        if name == bench_distill.ON_POLICY:  # the draft's own text ends where the draft ends it
            assert all(1 <= n <= 2 * 2 * 12 for n in row["num_tokens"])
        else:
            assert row["num_tokens"] == per_turn, name


def test_the_score_of_a_store_is_in_its_rate_and_in_no_other(
    distill_report: dict[str, Any],
) -> None:
    epochs = distill_report["settings"]["epochs"]
    assert epochs > 1
    for row in distill_report["rows"]:
        alone = row["tokens_per_s"]["median"]
        one, every = row["one_epoch_tokens_per_s"], row["all_epochs_tokens_per_s"]
        if row["store"] in ("final_hidden", "top_k", "sampled"):
            # one scoring is shared by all epochs, so each has its part of the seconds it takes
            assert 1 / one - 1 / alone == pytest.approx(epochs * (1 / every - 1 / alone))
            assert one < every < alone
        else:
            assert one == every == pytest.approx(alone)
    for key in ("one_epoch", "all_epochs"):
        best = max(
            row[f"{key}_tokens_per_s"]
            for row in distill_report["rows"]
            if row["system"] in bench_distill.RIVALS
        )
        for row in distill_report["rows"]:
            assert row[f"{key}_ratio"] == pytest.approx(row[f"{key}_tokens_per_s"] / best)
    assert [goal["bound"] for goal in distill_report["goals"]] == [4.0, 4.0]
    assert not any("hidden_regression" in goal["goal"] for goal in distill_report["goals"])
    header = next(line for line in distill_report["text"].splitlines() if line.startswith("system"))
    assert " ".join(distill_report_module.COLUMNS).split() == header.split()


def test_peak_memory_is_of_a_process_that_runs_one_system(
    tmp_path: Path, tiny_run_config: Path
) -> None:
    options = ["--config", str(tiny_run_config), "--artifacts", str(tmp_path / "artifacts")]
    options += ["--systems", "forward_kl @final", "--batch-rows", "2", "--steps", "1"]
    options += ["--rounds", "1", "--json", str(tmp_path / "out.json"), *THREADS]
    assert bench_distill.main(options) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert row["peak_bytes"] is None or row["peak_bytes"] > 2**26
    assert row["one_epoch_ratio"] is row["all_epochs_ratio"] is None


def test_a_name_that_no_system_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has nonsense in its name.*trl GKDTrainer"):
        bench_distill.system_names(["nonsense"])
    assert bench_distill.system_names(["trl"]) == [bench_distill.GKD, bench_distill.ON_POLICY]


def test_labels_for_trl_mark_the_tokens_that_our_positions_predict() -> None:
    """Row one: positions 1 and 2 of ids 5 6 7 predict what stands at 2 and 3; row two: 0."""
    rows = [
        Row("a", torch.tensor([5, 6, 7]).numpy(), torch.tensor([1, 2]).numpy(), "", None),  # type: ignore[arg-type]
        Row("b", torch.tensor([8]).numpy(), torch.tensor([0]).numpy(), "", None),  # type: ignore[arg-type]
    ]
    batch = training.gkd_batch(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert (batch["labels"][:, 1:] != -100).tolist() == [[False, True, True], [True, False, False]]
    assert pad(rows)[1].tolist() == [1, 2, 3]


# ------------------------------------------------------------------------------ bench_acceptance


@pytest.fixture(scope="module")
def acceptance_report(
    tmp_path_factory: pytest.TempPathFactory, tiny_run_config: Path
) -> dict[str, Any]:
    """What one short bench_acceptance wrote, with what it printed under ``text``."""
    root = tmp_path_factory.mktemp("bench")
    options = ["--config", str(tiny_run_config), "--artifacts", str(root / "artifacts")]
    options += ["--trl-new-tokens", "3", "--trl-batch-size", "2"]
    options += ["--systems", "undistilled", "forward_kl", "acceptance", "trl"]
    # so little time that every training has the fewest steps that a warm start leaves a part of
    options += ["--minutes", "1e-9", "--seeds", "2", "--pilot-steps", "2", "--num-prompts", "2"]
    options += ["--new-tokens", "5", "--num-draft-tokens", "2", *THREADS]
    options += ["--ours", "acceptance", "--json", str(root / "out.json")]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: printed.append(str(a[0])))
        # pilots this short differ by chance
        patch.setattr(bench_acceptance, "step_seconds", lambda short, long: 1.0)
        assert bench_acceptance.main(options) == 0
    found: dict[str, Any] = json.loads((root / "out.json").read_text(encoding="utf-8"))
    return found | {"text": "\n".join(printed)}


def test_every_system_is_trained_for_its_time_and_decoded_at_both_temperatures(
    acceptance_report: dict[str, Any],
) -> None:
    rows = {(row["system"], row["temperature"]): row for row in acceptance_report["rows"]}
    names = bench_acceptance.chosen_systems(["undistilled", "forward_kl", "acceptance", "trl"])
    assert list(rows) == [(name, t) for t in (0.0, 1.0) for name in names]
    assert acceptance_report["num_prompts"] == 2
    for (name, _), row in rows.items():
        is_trained = name != bench_acceptance.UNDISTILLED
        assert row["num_steps"] == ([2, 2] if is_trained else [None, None])
        assert all(seconds > 0 for seconds in row["train_s"] if seconds is not None)
        assert 0 <= row["acceptance_rate"]["value"] <= 1
        assert len(row["acceptance_rate_by_seed"]) == 2
        others = {printed_report.FORWARD_KL, printed_report.TRL} - {name}
        assert set(row["differences"]) == others
    header = next(
        line for line in acceptance_report["text"].splitlines() if line.startswith("system")
    )
    assert " ".join(printed_report.COLUMNS).split() == header.split()


def test_a_difference_is_that_of_the_two_rates_and_goals_are_those_of_the_system_named_before(
    acceptance_report: dict[str, Any],
) -> None:
    rows = {(row["system"], row["temperature"]): row for row in acceptance_report["rows"]}
    for (_, temperature), row in rows.items():
        for other, found in row["differences"].items():
            theirs = rows[other, temperature]["acceptance_rate"]["value"]
            mine = row["acceptance_rate"]["value"]
            assert found["value"] == pytest.approx(mine - theirs)
    assert [goal["bound"] for goal in acceptance_report["goals"]] == [0.05, 0.1, 0.05, 0.1]
    for goal, (temperature, other) in zip(
        acceptance_report["goals"],
        [(t, other) for t in (0.0, 1.0) for other in printed_report.GOALS],
        strict=True,
    ):
        assert goal["goal"] == f"T = {temperature:g}: acceptance - {other}"
        paired = rows["acceptance", temperature]["differences"][other]
        assert {name: goal[name] for name in ("value", "low", "high")} == {
            name: paired[name] for name in ("value", "low", "high")
        }


def test_goals_are_not_those_of_whatever_came_out_best() -> None:
    """The system named is the worse of two by 0.3; the better one's goal would be met."""

    def row(name: str, alpha: float) -> dict[str, Any]:
        found = {"value": alpha - 0.5, "low": alpha - 0.6, "high": alpha - 0.4}
        differences = {printed_report.FORWARD_KL: found}
        rate = {"value": alpha}
        return dict(system=name, temperature=1.0, acceptance_rate=rate, differences=differences)

    rows = [row("jsd", 0.9), row("acceptance", 0.52)]
    (goal,) = printed_report.goals({"settings": {"ours": "acceptance"}, "rows": rows})
    assert goal["value"] == pytest.approx(0.02)
    assert goal["low"] == pytest.approx(-0.08)
    assert not goal["is_met"]


def test_what_two_pilots_need_to_begin_is_in_neither_step() -> None:
    """30 s to begin and 2 s a step; by the short one alone it would be 5.75 s."""
    short, long = {"train_s": 46.0, "num_steps": 8}, {"train_s": 78.0, "num_steps": 24}
    assert bench_acceptance.step_seconds(short, long) == 2.0
    with pytest.raises(ConfigError, match="Raise --pilot-steps"):
        bench_acceptance.step_seconds(long | {"num_steps": 8}, short | {"num_steps": 24})


def test_no_prompt_that_weights_are_chosen_on_is_decoded(
    tmp_path: Path, tiny_run_config: Path
) -> None:
    config, store = load_config(tiny_run_config), ArtifactStore(tmp_path)
    generated = generate(config.generate, store)
    settings = bench_acceptance.Settings(num_prompts=1000)
    bench = bench_acceptance.Bench(config.distill, generated, store, settings)
    decoded = {tuple(prompt) for prompt in bench.prompts}
    table = pq.read_table(generated.file("completions.parquet")).to_pylist()
    held_out = answered_held_out(table)
    chosen_on = selection_half(record["prompt_id"] for record in held_out)
    prompts = [(r["prompt_id"] in chosen_on, tuple(r["prompt_token_ids"])) for r in held_out]
    assert decoded == {ids for is_chosen_on, ids in prompts if not is_chosen_on}
    assert decoded.isdisjoint(ids for is_chosen_on, ids in prompts if is_chosen_on)
    assert any(is_chosen_on for is_chosen_on, _ in prompts)


def test_paired_differences_are_narrower_than_the_prompts_differ() -> None:
    """Prompts of very unequal alpha; one system accepts one draft more on each: no doubt at all."""
    theirs = np.array([[i, 20] for i in range(19)], dtype=float)
    found = bench_acceptance.difference(theirs + np.array([1, 0]), theirs, seed=0)
    assert found.value == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05)
    assert found.high == pytest.approx(0.05)


def test_every_system_of_the_benchmark_is_a_config_the_stage_takes(tiny_run_config: Path) -> None:
    config = load_config(tiny_run_config).distill
    bench = bench_acceptance.Bench.__new__(bench_acceptance.Bench)
    bench.config, bench.settings = config, bench_acceptance.Settings()
    for changes in bench_acceptance.SYSTEMS.values():
        if changes is not None:
            taken = bench._of_length(bench._config(changes), 100)
            assert taken.max_steps == 100
            if taken.engine == "trl":
                check_for_trl(taken, vocabulary_size=taken.vocabulary_size)
    with pytest.raises(ConfigError, match=r"has nonsense in its name.*trl on-policy"):
        bench_acceptance.chosen_systems(["nonsense"])
