"""Owns the tests of measuring what was never trained here: two references, a table of many, a run.

Refuses to train: tiny random models, seconds in all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from distill.artifacts import ArtifactStore
from distill.cli import app
from distill.errors import ArtifactError, ConfigError, PairMismatchError
from distill.held_out import reporting_half, selection_half
from distill.models import ModelConfig, load_target
from distill.models.quantization import is_quantized
from distill.report import compare_runs
from distill.stages.measure import measure_acceptance
from distill.stages.measure_pair import (
    PairConfig,
    is_pair_config,
    load_contestant,
    load_pair_config,
)
from tests import helpers
from tests import measure_helpers as given

runner = CliRunner()


def _settings(pair: tuple[Path, Path], prompts: Path, **changes: Any) -> dict[str, Any]:
    target, draft = pair
    measure = {
        "draft": {"model": str(draft)},
        "corpus": {"path": str(prompts)},
        "drafts": {"itself": {"model": str(target)}},
        "early_exit": [2, 4],
        "temperatures": [0.0, 1.0],
        "num_draft_tokens": 3,
        "max_new_tokens": 10,
        "batch_size": 8,
        "law_samples": 64,
        "timing": {"enabled": False},
    }
    return {
        "name": "pair",
        "target": {"model": str(target), "dtype": "float32"},
        "measure": measure | changes,
    }


@pytest.fixture(scope="module")
def pair_file(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> Path:
    path = tmp_path_factory.mktemp("pair") / "pair.yaml"
    path.write_text(yaml.safe_dump(_settings(tiny_pair_dirs, tiny_corpus)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def measured(pair_file: Path, artifacts: Path) -> dict[str, Any]:
    result = runner.invoke(
        app, ["measure", str(pair_file), "--artifacts", str(artifacts), "--json"]
    )
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_a_bad_draft_the_target_itself_and_early_exits_come_out_as_theory_says(
    measured: dict[str, Any],
) -> None:
    names = ["draft", "itself", "early_exit_2", "early_exit_4", "prompt_lookup"]
    assert measured["drafts"] == names
    for temperature in (0.0, 1.0):
        cells = {n: given.cell(measured, n, temperature) for n in names}
        # The target drafting for itself, and all of its layers: always, K + 1 tokens a call but
        # for the last round of an answer.
        for name in ("itself", "early_exit_4"):
            rate = cells[name]["analytic_acceptance_rate"]["value"]
            assert rate == pytest.approx(1.0, abs=1e-4)
            assert cells[name]["acceptance_rate"]["value"] == pytest.approx(1.0, abs=0.02)
            assert cells[name]["block_efficiency"]["value"] > 3.0
        assert cells["draft"]["acceptance_rate"]["value"] < 0.5
        rates = [cells[n]["analytic_acceptance_rate"]["value"] for n in ("draft", "itself")]
        assert rates[0] < cells["early_exit_2"]["analytic_acceptance_rate"]["value"] < rates[1]


def test_every_prompt_is_measured_for_nothing_was_trained_on_any(
    measured: dict[str, Any],
) -> None:
    assert measured["num_prompts"] == 24
    assert measured["baseline"] is None
    assert measured["differences"] == []
    assert [t for t in measured["self_tests"] if t["is_passed"] is False] == []


def test_measuring_twice_gives_the_same_acceptance(
    pair_file: Path, measured: dict[str, Any], tmp_path: Path
) -> None:
    config = load_pair_config(pair_file)
    assert config.measure is not None
    again = measure_acceptance(config.measure, ArtifactStore(tmp_path), inputs={})
    found = given.read_acceptance(again)
    assert found["cells"] == measured["cells"]
    assert found["lossless"] == measured["lossless"]


def test_a_gate_that_fails_exits_with_3_after_everything_is_written(
    pair_file: Path, measured: dict[str, Any], artifacts: Path
) -> None:
    report = artifacts / "reports" / "pair" / "report.json"
    report.unlink()
    command = ["measure", str(pair_file), "--artifacts", str(artifacts)]
    failed = runner.invoke(app, [*command, "--set", "measure.gate.min_alpha=0.9"])
    assert failed.exit_code == 3
    assert "measure.gate.min_alpha is 0.9, the acceptance rate at temperature 0 is" in failed.stderr
    assert json.loads(report.read_text())["gate"]["is_passed"] is False
    passed = runner.invoke(app, [*command, "--set", "measure.gate.min_alpha=0.0"])
    assert passed.exit_code == 0, passed.output


def test_runs_are_compared_by_name_prompt_by_prompt(
    pair_file: Path, measured: dict[str, Any], artifacts: Path
) -> None:
    command = ["measure", str(pair_file), "--artifacts", str(artifacts)]
    second = runner.invoke(
        app, [*command, "--set", "name=other", "--set", "measure.max_new_tokens=11"]
    )
    assert second.exit_code == 0, second.output
    output = artifacts / "comparison.json"
    compared = runner.invoke(
        app, ["compare", "pair", "other", "--artifacts", str(artifacts), "-o", str(output)]
    )
    assert compared.exit_code == 0, compared.output
    assert "acceptance rate, analytic, temperature 1" in compared.stdout
    content = json.loads(output.read_text())
    assert [run["name"] for run in content["runs"]] == ["pair", "other"]
    pooled = [row for row in content["differences"] if row["task"] is None]
    assert [(r["draft"], r["baseline"], r["num_prompts"]) for r in pooled] == [
        ("other", "pair", 24)
    ] * 2
    difference = pooled[1]["analytic_acceptance_rate"]
    values = [
        next(c for c in run["cells"] if c["temperature"] == 1.0)["analytic_acceptance_rate"]
        for run in content["runs"]
    ]
    assert difference["value"] == pytest.approx(values[1]["value"] - values[0]["value"])


def test_a_run_compared_with_itself_differs_by_nothing(
    measured: dict[str, Any], artifacts: Path
) -> None:
    found = compare_runs(ArtifactStore(artifacts), ["pair", "pair"])
    assert [run["name"] for run in found["runs"]] == ["pair (1)", "pair (2)"]
    assert all(row["acceptance_rate"]["value"] == 0.0 for row in found["differences"])
    assert "accepted equally often" in found["differences"][0]["sentence"]


def test_comparing_what_is_no_run_names_the_way_out(artifacts: Path) -> None:
    store = ArtifactStore(artifacts)
    with pytest.raises(ArtifactError, match="at least two"):
        compare_runs(store, ["pair"])
    with pytest.raises(ArtifactError, match="neither a run with a report under"):
        compare_runs(store, ["pair", "nowhere"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"acceptance: 0.5", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2]", "names no measure artifact"),
        (b"{}", "names no measure artifact"),
        (b'{"records": []}', "names no measure artifact"),
        (b'{"artifacts": {"distill": {"path": "x"}}, "name": "n"}', "names no measure artifact"),
        (b'{"artifacts": {"measure": {}}, "name": "n"}', "names no measure artifact"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_name_with_exit_code_2(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=words) as caught:
        compare_runs(ArtifactStore(tmp_path), [str(path), str(path)])
    assert str(path) in str(caught.value)
    command = ["compare", str(path), str(path), "--artifacts", str(tmp_path)]
    assert runner.invoke(app, command).exit_code == 2


def test_prompts_the_target_has_no_room_for_are_counted(
    pair_file: Path, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    limit = load_target(given.model_config(tiny_pair_dirs[0])).shape.max_position_embeddings
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text} for text in ("one two", "three", "word " * limit)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = _settings(tiny_pair_dirs, prompts, drafts={}, early_exit=[], temperatures=[0.0])
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = load_pair_config(path).measure
    assert config is not None
    found = given.read_acceptance(measure_acceptance(config, ArtifactStore(tmp_path), inputs={}))
    assert (found["num_prompts"], found["num_skipped"]) == (2, 1)


def test_a_draft_of_another_vocabulary_is_named(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> None:
    tokenizer = helpers.make_tokenizer()
    tokenizer.add_tokens(["<|extra|>"])
    model = helpers.make_llama(len(tokenizer), layers=1, hidden=64, seed=3)
    other = helpers.save_pretrained_dir(tmp_path / "other", model, tokenizer)
    settings = _settings(tiny_pair_dirs, tiny_corpus, drafts={"other": {"model": str(other)}})
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = load_pair_config(path)
    assert config.measure is not None
    with pytest.raises(PairMismatchError, match="other"):
        measure_acceptance(config.measure, ArtifactStore(tmp_path), inputs={})


@pytest.mark.parametrize(
    ("asked", "held", "is_target"),
    [
        ({}, {}, True),
        ({}, {"dtype": "float32"}, True),
        ({"device": "auto", "dtype": "float32"}, {"dtype": "float32"}, True),
        ({"quantize": "int8"}, {"quantize": "int8"}, True),
        ({"quantize": "int8"}, {}, False),
        ({}, {"quantize": "int8"}, False),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, False),
        ({"trust_remote_code": True}, {}, False),
    ],
)
def test_a_draft_is_the_target_itself_only_where_it_is_held_the_same_way(
    asked: dict[str, Any],
    held: dict[str, Any],
    is_target: bool,
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    path = str(tiny_pair_dirs[0])
    target_config = ModelConfig.model_validate({"model": path, "device": "cpu", **held})
    target = load_target(target_config)
    config = ModelConfig.model_validate({"model": path, **asked})
    found = load_contestant("draft", config, target_config, target).model
    assert found is not None
    assert (found is target) == is_target
    assert is_quantized(found.model) == (config.quantize == "int8")
    if config.dtype != "auto":
        assert found.dtype == getattr(torch, config.dtype)


def test_sizes_that_are_not_the_models_are_refused_though_the_draft_is_the_target(
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    target_config = given.model_config(tiny_pair_dirs[0])
    target = load_target(target_config)
    other = target.shape.model_copy(update={"num_hidden_layers": 9})
    right, wrong = (target_config.model_copy(update={"shape": s}) for s in (target.shape, other))
    assert load_contestant("draft", right, target_config, target).model is target
    with pytest.raises(ConfigError, match="config says 9, the model has 4"):
        load_contestant("draft", wrong, target_config, target)


def test_the_target_in_bytes_as_its_own_draft_is_measured_and_not_the_target(
    tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path
) -> None:
    in_bytes = {"model": str(tiny_pair_dirs[0]), "quantize": "int8"}
    settings = _settings(
        tiny_pair_dirs,
        tiny_corpus,
        draft=in_bytes,
        drafts={"itself": {"model": str(tiny_pair_dirs[0])}},
        early_exit=[],
        prompt_lookup=False,
        temperatures=[1.0],
        law_samples=0,
    )
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config = load_pair_config(path).measure
    assert config is not None
    found = given.read_acceptance(measure_acceptance(config, ArtifactStore(tmp_path), inputs={}))
    alpha = {
        name: given.cell(found, name, 1.0)["analytic_acceptance_rate"]["value"]
        for name in ("draft", "itself")
    }
    assert 1.0 - alpha["itself"] < 1e-5  # rounding alone
    assert 1e-4 < 1.0 - alpha["draft"] < 0.1  # what a byte a weight rounds away


@pytest.mark.parametrize("same", [True, False])
def test_a_target_of_its_own_in_measure_is_refused(
    same: bool, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path
) -> None:
    settings = _settings(tiny_pair_dirs, tiny_corpus)
    target = settings["target"] if same else {"model": str(tiny_pair_dirs[1])}
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match="taken from the top-level target; remove it"):
        load_pair_config(path, [f"measure.target={json.dumps(target)}"])
    settings["measure"]["target"] = target
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match="taken from the top-level target; remove it"):
        load_pair_config(path)


def test_a_pair_put_together_of_two_targets_is_refused_with_both(
    pair_file: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    config = load_pair_config(pair_file)
    other = given.model_config(tiny_pair_dirs[1])
    with pytest.raises(ValidationError, match="a pair has one target") as caught:
        PairConfig(name="pair", target=other, measure=config.measure)
    assert all(str(path) in str(caught.value) for path in tiny_pair_dirs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"corpus": None}, "needs both"),
        ({"draft": None, "corpus": None}, "measure.draft is not set"),
        ({"drafts": {"plain": {"model": "x"}}}, "cannot be a draft's name"),
        ({"early_exit": [2, 2]}, "each once"),
        ({"timing": {"batch_sizes": [1]}}, "sizes of 2 and more"),
        ({"law_samples": 1}, "law_samples 1: so few draws test nothing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    tiny_pair_dirs: tuple[Path, Path],
    tiny_corpus: Path,
) -> None:
    path = tmp_path / "pair.yaml"
    settings = _settings(tiny_pair_dirs, tiny_corpus, **changes)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load_pair_config(path)


def test_a_runs_file_is_not_taken_for_a_pairs(tiny_run_config: Path, pair_file: Path) -> None:
    assert is_pair_config(pair_file)
    assert not is_pair_config(tiny_run_config)
    assert not is_pair_config(pair_file.with_name("nowhere.yaml"))


def test_a_pair_takes_no_artifacts(pair_file: Path, tmp_path: Path) -> None:
    config = load_pair_config(pair_file).measure
    assert config is not None
    with pytest.raises(ArtifactError, match="no artifact, because"):
        measure_acceptance(config, ArtifactStore(tmp_path), inputs={"generate": None})  # type: ignore[dict-item]


# ------------------------------------------------------------------------------ the three splits


def test_weights_are_chosen_on_other_prompts_than_are_reported() -> None:
    names = [f"p{n}" for n in range(101)]
    reported, selected = reporting_half(names), selection_half(names)
    assert reported | selected == set(names)
    assert not reported & selected
    assert len(reported) == 51
    assert reporting_half(reversed(names)) == reported


def test_a_single_prompt_has_to_serve_for_both() -> None:
    assert reporting_half(["p"]) == selection_half(["p"]) == {"p"}
