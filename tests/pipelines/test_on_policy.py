"""The on-policy pipeline: rounds, their lineage, what is reused, a run that was killed.

Refuses to look inside the stages, except at what a round writes and what it starts from.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from distill.artifacts import Artifact, ArtifactStore
from distill.cli import app
from distill.errors import ArtifactError, ConfigError
from distill.losses.head import head_of
from distill.models import load_draft, load_target
from distill.stages import rollouts as stage
from distill.stages.distill_draft import distill_draft
from distill.stages.rollouts import rollouts_key, write_rollouts
from distill.stages.run_config import RunConfig, load_config
from distill.training.data import TargetFiles, read_rows
from distill.training.trl_engine import settings_for_trl
from pipelines import chosen, on_policy, standard

OVERRIDES = [
    "pipeline=on_policy",
    "rollouts.rounds=2",
    "rollouts.steps_per_round=4",
    "rollouts.num_prompts=6",
    "rollouts.max_new_tokens=6",
    "rollouts.batch_size=3",
    "rollouts.chunk_size=4",
    "distill.learning_rate=1e-2",
    "distill.decode_every=null",
]


@pytest.fixture(scope="module")
def config(tiny_run_config: Path) -> RunConfig:
    return load_config(tiny_run_config, OVERRIDES)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def first_run(config: RunConfig, store: ArtifactStore) -> standard.PipelineResult:
    return on_policy.run(config, store)


def _built(store: ArtifactStore, name: str) -> list[Artifact]:
    found = [store.load(path.parent) for path in (store.root / name).glob("*/manifest.json")]
    return sorted(found, key=lambda artifact: artifact.manifest.started)


def test_each_round_is_text_of_the_last_draft_and_a_training_that_starts_from_it(
    first_run: standard.PipelineResult, store: ArtifactStore
) -> None:
    drafts, texts = _built(store, "distill"), _built(store, "rollouts")
    (generated,) = _built(store, "generate")
    assert (len(drafts), len(texts)) == (3, 2)
    assert drafts[0].manifest.inputs == {"generate": generated.fingerprint}
    for number, text in enumerate(texts):
        before, after = drafts[number], drafts[number + 1]
        assert text.manifest.inputs == {
            "generate": generated.fingerprint,
            "distill": before.fingerprint,
        }
        assert after.manifest.inputs == {
            "generate": generated.fingerprint,
            "rollouts": text.fingerprint,
            "distill": before.fingerprint,
        }
        assert after.metrics["num_steps"] == 4
        # what it is before its first step is what the last round left
        assert after.metrics["held_out_before"]["acceptance"] == pytest.approx(
            before.metrics["held_out_after"]["acceptance"], abs=1e-3
        )
    assert first_run.artifacts["distill"].fingerprint == drafts[-1].fingerprint
    assert first_run.artifacts["measure"].manifest.inputs["distill"] == drafts[-1].fingerprint
    assert [text.manifest.config["seed"] for text in texts] == [0, 1]


def test_rollouts_are_the_drafts_own_text_within_its_vocabulary_on_prompts_of_the_train_split(
    first_run: standard.PipelineResult, store: ArtifactStore
) -> None:
    text, draft = _built(store, "rollouts")[0], _built(store, "distill")[0]
    rows = pq.read_table(text.file("completions.parquet")).to_pylist()
    assert len(rows) == 6
    asked = {
        tuple(row["prompt_token_ids"])
        for row in pq.read_table(
            _built(store, "generate")[0].file("completions.parquet")
        ).to_pylist()
        if row["split"] == "train"
    }
    allowed = load_draft(draft, device="cpu").vocabulary_token_ids
    assert allowed is not None
    for row in rows:
        assert row["split"] == "train"
        assert tuple(row["prompt_token_ids"]) in asked
        assert 1 <= len(row["completion_token_ids"]) <= 6
        assert set(row["completion_token_ids"]) <= set(allowed)


def test_the_states_beside_a_rollout_are_the_targets_on_that_text(
    first_run: standard.PipelineResult, store: ArtifactStore, config: RunConfig
) -> None:
    text, target = _built(store, "rollouts")[0], load_target(config.target)
    rows = read_rows(text, "train", max_length=512)
    assert len(rows) == 6
    for row in rows:
        known = TargetFiles(text).of([row])
        with torch.no_grad():
            ids_1T = torch.from_numpy(row.input_ids_T)[None]
            hidden_TD = target.model.base_model(input_ids=ids_1T).last_hidden_state[0]
        want_ND = hidden_TD[torch.from_numpy(row.positions_N)]
        torch.testing.assert_close(known.hidden_ND.float(), want_ND, rtol=0.02, atol=0.02)  # type: ignore[attr-defined]
        logits_NV = head_of(target.model).first(len(target.tokenizer)).logits(want_ND)
        torch.testing.assert_close(known.logsumexp_N, logits_NV.logsumexp(-1))  # type: ignore[attr-defined]


def test_a_second_run_takes_everything_as_it_is_and_one_more_round_builds_one_more(
    first_run: standard.PipelineResult,
    store: ArtifactStore,
    tiny_run_config: Path,
    config: RunConfig,
) -> None:
    again = on_policy.run(config, store)
    assert list(again.hits) == [step.name for step in on_policy.plan(config, store)]
    longer = load_config(tiny_run_config, [*OVERRIDES, "rollouts.rounds=3"])
    to_build = [state.name for state in on_policy.plan(longer, store) if state.artifact is None]
    assert to_build == ["rollouts round 3", "distill round 3", "measure", "export"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollouts.max_new_tokens=5", {"rollouts", "distill"}),
        ("rollouts.steps_per_round=5", {"distill", "rollouts"}),
        ("distill.rollout_fraction=0.25", {"distill", "rollouts"}),
        ("measure.max_new_tokens=7", set()),
    ],
)
def test_a_change_is_built_again_from_the_step_it_concerns(
    first_run: standard.PipelineResult,
    store: ArtifactStore,
    tiny_run_config: Path,
    override: str,
    expected: set[str],
) -> None:
    changed = load_config(tiny_run_config, [*OVERRIDES, override])
    states = on_policy.plan(changed, store)
    stages = {state.key.stage for state in states if state.artifact is None}
    assert stages - {"measure", "export"} == expected
    assert states[0].artifact is not None


def test_a_run_killed_in_a_round_goes_on_to_the_same_draft(
    first_run: standard.PipelineResult,
    store: ArtifactStore,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed between two chunks of the second round's text; the first chunk is not written anew."""
    killed = ArtifactStore(tmp_path / "killed")
    shutil.copytree(store.root / "generate", killed.root / "generate")
    written: list[tuple[int, int]] = []
    write = stage._Writer.write

    def dying(self: Any, chunk: Any, index: int, directory: Path, settings: Any) -> None:
        if written == [(0, 0), (0, 1), (1, 0)]:
            raise KeyboardInterrupt
        written.append((self._config.seed, index))
        write(self, chunk, index, directory, settings)

    monkeypatch.setattr(stage._Writer, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        on_policy.run(config, killed, until="distill")
    monkeypatch.setattr(stage._Writer, "write", write)
    result = on_policy.run(config, killed, until="distill")
    assert written == [(0, 0), (0, 1), (1, 0)]
    assert "rollouts round 1" in result.hits
    assert "rollouts round 2" not in result.hits
    want = first_run.artifacts["distill"]
    assert result.artifacts["distill"].manifest.files == want.manifest.files


def test_a_rounds_draft_is_another_one_than_the_first(
    first_run: standard.PipelineResult, store: ArtifactStore
) -> None:
    first, *_, last = _built(store, "distill")
    before = load_file(first.file("draft/model.safetensors"))
    after = load_file(last.file("draft/model.safetensors"))
    assert before.keys() == after.keys()
    if last.metrics["best_step"] > 0:
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert load_draft(last, device="cpu").shape == load_draft(first, device="cpu").shape


def test_the_config_chooses_the_pipeline_and_the_command_line_runs_it(
    first_run: standard.PipelineResult,
    store: ArtifactStore,
    config: RunConfig,
    tiny_run_config: Path,
) -> None:
    assert [s.name for s in chosen.plan(load_config(tiny_run_config), store)] == [*standard.STAGES]
    assert [s.name for s in chosen.plan(config, store)][1:3] == [
        "distill round 0",
        "rollouts round 1",
    ]
    options = [str(tiny_run_config), "--artifacts", str(store.root)]
    for override in OVERRIDES:
        options += ["--set", override]
    done = CliRunner().invoke(app, ["run", *options, "--until", "distill", "--json"])
    assert done.exit_code == 0, done.output
    built = json.loads(done.stdout)["artifacts"]
    assert built["distill"]["fingerprint"] == first_run.artifacts["distill"].fingerprint
    planned = CliRunner().invoke(app, ["plan", *options, "--json"])
    assert planned.exit_code == 0, planned.output
    stages = {row["stage"]: row for row in json.loads(planned.stdout)["stages"]}
    assert stages["rollouts round 2"]["num_tokens"] == 6 * 6
    assert stages["distill round 1"]["num_tokens"] == 4 * 64
    assert {row["state"] for row in stages.values()} == {"cached"}


def test_stages_that_are_not_there_or_not_reached_are_refused(
    config: RunConfig, store: ArtifactStore
) -> None:
    with pytest.raises(ConfigError, match="unknown stage 'mesure'"):
        on_policy.run(config, store, until="mesure")
    with pytest.raises(ConfigError, match=r"measure is to be built again.*after distill"):
        on_policy.run(config, store, until="distill", rerun=["measure"])


def test_a_training_by_trl_refuses_rollouts_that_it_would_throw_away(
    config: RunConfig, store: ArtifactStore, first_run: standard.PipelineResult
) -> None:
    changes = settings_for_trl() | {"engine": "trl", "vocabulary_size": None}
    inputs = {name: first_run.artifacts[name] for name in ("generate", "rollouts", "distill")}
    with pytest.raises(ConfigError, match="rollouts it is given would be thrown away"):
        distill_draft(config.distill.model_copy(update=changes), store, inputs=inputs)


def test_text_that_the_target_scored_in_bytes_does_not_train_a_draft_of_the_whole_target(
    first_run: standard.PipelineResult, config: RunConfig, tmp_path: Path
) -> None:
    inputs = {name: first_run.artifacts[name] for name in ("generate", "distill")}
    in_bytes = config.target.model_copy(update={"quantize": "int8"})
    asked = config.rollouts.model_copy(update={"target": in_bytes})
    text = write_rollouts(asked, ArtifactStore(tmp_path), inputs=inputs)
    with pytest.raises(ArtifactError, match=r"none, but .* \(rollouts\).*quantize: int8"):
        distill_draft(config.distill, ArtifactStore(tmp_path), inputs=inputs | {"rollouts": text})


def test_inputs_of_a_round_are_checked(
    first_run: standard.PipelineResult, store: ArtifactStore, config: RunConfig
) -> None:
    generated = first_run.artifacts["generate"]
    with pytest.raises(ArtifactError, match="rollouts reads 'generate' and 'distill'"):
        rollouts_key(config.rollouts, store, inputs={"generate": generated})
    with pytest.raises(ArtifactError):
        write_rollouts(config.rollouts, store, inputs={"generate": generated, "distill": generated})
    with pytest.raises(ArtifactError):
        distill_draft(config.distill, store, inputs={"generate": generated, "rollouts": generated})


def test_the_rounds_that_the_page_on_training_shows_give_the_pipelines_artifacts(
    first_run: standard.PipelineResult,
    store: ArtifactStore,
    tiny_run_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    shown = '"configs/quickstart.yaml", ["pipeline=on_policy"]'
    assert shown in code
    code = code.replace(shown, f"{str(tiny_run_config)!r}, {OVERRIDES!r}")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "training.md", "exec"), names)
    for name, own in (("generated", "generate"), ("text", "rollouts"), ("draft", "distill")):
        artifact, theirs = names[name], first_run.artifacts[own]
        assert artifact.fingerprint == theirs.fingerprint, own
        assert artifact.manifest.files == theirs.manifest.files, own
    ours, all_theirs = (_built(where, "distill") for where in (names["store"], store))
    assert {a.fingerprint for a in ours} <= {a.fingerprint for a in all_theirs}
    assert len(ours) == 3
