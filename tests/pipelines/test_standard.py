"""The standard pipeline: what is built, what is reused, and what a change makes new.

Refuses to look inside the stages: each has tests of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import distill
from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ConfigError
from distill.stages.run_config import RunConfig, load_config
from pipelines import on_policy, standard


def hashes(artifact: Artifact) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in artifact.manifest.files}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def config(tiny_run_config: Path) -> RunConfig:
    return load_config(tiny_run_config)


@pytest.fixture(scope="module")
def first_run(config: RunConfig, store: ArtifactStore) -> standard.PipelineResult:
    return standard.run(config, store)


def test_a_run_builds_every_stage_and_leaves_nothing_unfinished(
    first_run: standard.PipelineResult, store: ArtifactStore
) -> None:
    assert list(first_run.artifacts) == list(standard.STAGES)
    assert first_run.hits == ()
    assert not list(store.root.rglob("*.partial"))


def test_a_measurement_that_could_only_fail_is_refused_before_anything_is_built(
    config: RunConfig, tmp_path: Path
) -> None:
    measure = config.measure.model_copy(update={"early_exit": (9,)})
    asked = config.model_copy(update={"measure": measure})
    for pipeline in (standard, on_policy):
        store = ArtifactStore(tmp_path / pipeline.__name__)
        for call in (pipeline.plan, pipeline.run):
            with pytest.raises(ConfigError, match=r"early_exit has 9 layers, the target has 4"):
                call(asked, store)
        assert not list(store.root.rglob("*")), "it was known before the first stage"
    # a run that ends before it has nothing to refuse
    assert standard.run(asked, ArtifactStore(tmp_path), until="generate").artifacts


def test_a_second_run_takes_everything_as_it_is(
    first_run: standard.PipelineResult, config: RunConfig, store: ArtifactStore
) -> None:
    again = standard.run(config, store)
    assert again.hits == standard.STAGES
    assert {n: a.manifest for n, a in again.artifacts.items()} == {
        n: a.manifest for n, a in first_run.artifacts.items()
    }


def test_single_stage_calls_give_the_artifacts_of_the_run(
    first_run: standard.PipelineResult, config: RunConfig, tmp_path: Path
) -> None:
    store = ArtifactStore(tmp_path)
    generated = distill.generate(config.generate, store)
    draft = distill.distill_draft(config.distill, store, inputs={"generate": generated})
    measured = distill.measure_acceptance(
        config.measure, store, inputs={"generate": generated, "distill": draft}
    )
    exported = distill.export_draft(
        config.export, store, inputs={"distill": draft, "measure": measured}
    )
    for artifact in (generated, draft, measured, exported):
        other = first_run.artifacts[artifact.stage]
        assert artifact.fingerprint == other.fingerprint
        assert hashes(artifact) == hashes(other), artifact.stage


def changed_stages(
    config: RunConfig, store: ArtifactStore, tiny_run_config: Path, override: str
) -> set[str]:
    before = {state.name: state.key.fingerprint for state in standard.plan(config, store)}
    changed = load_config(tiny_run_config, [override])
    after = {state.name: state.key.fingerprint for state in standard.plan(changed, store)}
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("generate.max_new_tokens=13", {"generate", "distill", "measure", "export"}),
        ("distill.learning_rate=1e-4", {"distill", "measure", "export"}),
        ("measure.max_new_tokens=9", {"measure", "export"}),
        ("export.name=other", {"export"}),
        ("distill.checkpoint_every=3", set()),
        ("serve.port=9000", set()),
    ],
)
def test_a_change_makes_new_only_what_depends_on_it(
    config: RunConfig,
    store: ArtifactStore,
    tiny_run_config: Path,
    override: str,
    expected: set[str],
) -> None:
    assert changed_stages(config, store, tiny_run_config, override) == expected


def test_changing_what_is_measured_does_not_retrain(
    first_run: standard.PipelineResult, store: ArtifactStore, tiny_run_config: Path
) -> None:
    changed = load_config(tiny_run_config, ["measure.max_new_tokens=9"])
    result = standard.run(changed, store, until="measure")
    assert result.hits == ("generate", "distill")


def test_until_stops_after_the_named_stage(config: RunConfig, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    result = standard.run(config, store, until="generate")
    assert list(result.artifacts) == ["generate"]
    assert [path.name for path in tmp_path.iterdir() if path.name in standard.STAGES] == [
        "generate"
    ]


def test_rerun_builds_the_named_stage_again_to_equal_bytes(
    first_run: standard.PipelineResult, config: RunConfig, store: ArtifactStore
) -> None:
    result = standard.run(config, store, until="distill", rerun=["distill"])
    assert result.hits == ("generate",)
    again, before = result.artifacts["distill"], first_run.artifacts["distill"]
    assert again.manifest.finished != before.manifest.finished
    assert hashes(again) == hashes(before)


@pytest.mark.parametrize("arguments", [{"until": "destill"}, {"rerun": ["destill"]}])
def test_an_unknown_stage_is_refused_before_any_work(
    config: RunConfig, tmp_path: Path, arguments: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"destill.*generate, distill, measure, export"):
        standard.run(config, ArtifactStore(tmp_path), **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_stage_to_build_again_after_the_last_one_is_refused_before_any_work(
    config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"measure.*after generate"):
        standard.run(config, ArtifactStore(tmp_path), until="generate", rerun=["measure"])
    assert not list(tmp_path.iterdir())


def test_a_plan_loads_no_weights_and_says_what_is_built(
    first_run: standard.PipelineResult,
    config: RunConfig,
    store: ArtifactStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a plan loaded a model")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    states = standard.plan(config, store)
    assert [state.name for state in states] == list(standard.STAGES)
    assert all(state.artifact is not None for state in states)


def test_an_export_waits_in_a_plan_for_the_depth_that_measure_finds(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    def export_state(*overrides: str) -> standard.StageState:
        changed = load_config(tiny_run_config, list(overrides))
        return standard.plan(changed, ArtifactStore(tmp_path))[-1]

    assert export_state("export.num_draft_tokens=null").is_provisional
    assert not export_state("export.num_draft_tokens=3").is_provisional


def test_measuring_again_to_another_depth_exports_again(
    first_run: standard.PipelineResult,
    store: ArtifactStore,
    tiny_run_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = ArtifactStore(shutil.copytree(store.root, tmp_path / "copy"))
    config = load_config(tiny_run_config, ["export.num_draft_tokens=null"])

    def run(depth: int, **options: Any) -> standard.PipelineResult:
        verdict = {"ship": False, "reasons": [], "num_draft_tokens": depth}
        monkeypatch.setattr("distill.stages.measure.decide", lambda *_, **__: verdict)
        return standard.run(config, copied, **options)

    first = run(5, rerun=["measure"])
    assert first.artifacts["export"].metrics["num_draft_tokens"] == 5
    assert run(6).hits == standard.STAGES  # what is measured is not measured again
    again = run(6, rerun=["measure"])
    assert again.hits == ("generate", "distill")
    assert again.artifacts["export"].metrics["num_draft_tokens"] == 6
    states = standard.plan(config, copied)
    assert all(state.artifact is not None for state in states)
    assert not any(state.is_provisional for state in states)
