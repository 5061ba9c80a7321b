"""Owns the distill stage: what its key depends on, its payload, its refusals.

Refuses to know how a step is taken: that is test_training.py. Kills are in tests/faults.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.artifacts import Artifact, ArtifactStore
from distill.config import dump_config, parse_config
from distill.errors import ArtifactError, ConfigError
from distill.losses.head import head_of
from distill.models import load_draft, load_target
from distill.stages import distill_run
from distill.stages.distill_draft import (
    DistillConfig,
    build_undistilled,
    distill_draft,
    distill_key,
)
from distill.stages.measure_runs import read_held_out
from distill.training.data import TargetFiles
from distill.training.held_out_rows import read_selection_rows
from distill.training.run import TrainingResult
from distill.training.select import HeldOut
from tests.distill_helpers import make_generated
from tests.helpers import make_llama, save_pretrained_dir

MakeConfig = Callable[..., DistillConfig]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def generated(store: ArtifactStore, tiny_pair_dirs: tuple[Path, Path]) -> Artifact:
    return make_generated(store, tiny_pair_dirs[0])


@pytest.fixture
def make_config(tiny_pair_dirs: tuple[Path, Path]) -> MakeConfig:
    def make(target_dir: Path = tiny_pair_dirs[0], **changes: Any) -> DistillConfig:
        settings: dict[str, Any] = {
            "target": {"model": str(target_dir), "device": "cpu"},
            "initialization": {"kind": "pruned", "layers": [0, 3]},
            "max_steps": 4,
            "batch_tokens": 60,
            "micro_batch_tokens": 64,
            "warmup_steps": 1,
            "eval_every": 2,
            "learning_rate": 1e-2,
        }
        return parse_config(settings | changes, DistillConfig)

    return make


def test_a_target_is_all_a_config_needs(tiny_pair_dirs: tuple[Path, Path]) -> None:
    config = parse_config({"target": {"model": str(tiny_pair_dirs[0])}}, DistillConfig)
    assert config.phases[0].name == "forward_kl"
    again = parse_config(json.loads(config.model_dump_json()), DistillConfig)
    assert again == config
    assert "initialization:" in dump_config(config)


def test_a_schedule_in_yaml_reads_as_phases(make_config: MakeConfig) -> None:
    phases = [
        {"name": "hidden_regression", "fraction": 0.25},
        {"name": "forward_kl", "fraction": 0.75, "temperature": 2.0},
    ]
    assert [phase.temperature for phase in make_config(loss=phases).phases] == [1.0, 2.0]
    with pytest.raises(ConfigError, match="Did you mean 'forward_kl'"):
        make_config(loss=[{"name": "forwardkl", "fraction": 1.0}])


@pytest.mark.parametrize("name", ["acceptance", "acceptance_hybrid", "total_variation"])
def test_a_loss_of_the_whole_mass_at_another_temperature_is_refused_on_a_subset_when_it_is_read(
    make_config: MakeConfig, name: str
) -> None:
    phases = [
        {"name": "forward_kl", "fraction": 0.5, "temperature": 2.0},
        {"name": name, "fraction": 0.5, "temperature": 2.0},
    ]
    assert make_config(loss=phases).vocabulary_size is None
    with pytest.raises(ConfigError, match=rf"loss {name} .*has 2\.0\..*vocabulary_size: null"):
        make_config(loss=phases, vocabulary_size=100)
    assert make_config(loss=[phases[0], phases[1] | {"temperature": 1.0}], vocabulary_size=100)


def test_a_loss_on_hidden_states_at_a_temperature_is_refused_when_it_is_read(
    make_config: MakeConfig,
) -> None:
    with pytest.raises(ConfigError, match="hidden states has no temperature"):
        make_config(loss=[{"name": "hidden_regression", "temperature": 2.0}])


# ---------------------------------------------------------------- the key


def test_the_key_follows_from_fingerprints_alone(
    store: ArtifactStore, generated: Artifact, make_config: MakeConfig
) -> None:
    config = make_config()
    key = distill_key(config, store, inputs={"generate": generated})
    assert key == distill_key(config, store, inputs={"generate": generated.fingerprint})
    assert key != distill_key(config, store, inputs={"generate": "0" * 64})


@pytest.mark.parametrize(
    ("changes", "changes_bytes"),
    [
        ({"learning_rate": 1e-3}, True),
        ({"loss": "acceptance"}, True),
        ({"initialization": {"kind": "scratch"}}, True),
        ({"vocabulary_size": 100}, True),
        ({"eval_every": 4}, True),
        ({"checkpoint_every": 1}, False),
    ],
)
def test_what_can_change_the_weights_changes_the_key(
    store: ArtifactStore, make_config: MakeConfig, changes: dict[str, Any], changes_bytes: bool
) -> None:
    inputs = {"generate": "0" * 64}
    before = distill_key(make_config(), store, inputs=inputs)
    after = distill_key(make_config(**changes), store, inputs=inputs)
    assert (before != after) == changes_bytes


def test_the_revision_of_an_existing_draft_is_in_the_key(
    store: ArtifactStore, make_config: MakeConfig, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    existing = {"kind": "existing", "model": {"model": str(tiny_pair_dirs[1])}}
    config = make_config(initialization=existing)
    key = distill_key(config, store, inputs={"generate": "0" * 64})
    revisions = key.parts["revisions"]
    assert set(revisions) == {"target", "initialization"}
    assert revisions["target"] != revisions["initialization"]


@pytest.mark.parametrize("inputs", [{}, {"generate": "0", "measure": "1"}, {"corpus": "0"}])
def test_other_inputs_than_generates_are_refused(
    store: ArtifactStore, make_config: MakeConfig, inputs: dict[str, str]
) -> None:
    with pytest.raises(ArtifactError, match="distill reads 'generate'"):
        distill_key(make_config(), store, inputs=inputs)


def test_an_artifact_of_another_stage_is_refused(
    store: ArtifactStore, make_config: MakeConfig, generated: Artifact
) -> None:
    draft = distill_draft(make_config(), store, inputs={"generate": generated})
    with pytest.raises(ArtifactError, match=r"'distill'.*'generate'"):
        distill_draft(make_config(), store, inputs={"generate": draft})


# ---------------------------------------------------------------- the payload


def test_the_payload_is_a_draft_that_loads_and_a_log_without_a_clock(
    store: ArtifactStore,
    make_config: MakeConfig,
    generated: Artifact,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        artifact = distill_draft(make_config(), store, inputs={"generate": generated})
    assert "held-out acceptance" in caplog.text
    names = {entry.path for entry in artifact.manifest.files}
    assert {"draft/config.json", "draft/model.safetensors", "draft/tokenizer.json"} <= names
    assert "draft_vocabulary.json" not in names
    draft = load_draft(artifact, device="cpu")
    assert draft.vocabulary is None
    assert draft.shape.num_hidden_layers == 2
    assert draft.tokenizer.chat_template
    log = [
        json.loads(line)
        for line in artifact.file("training_log.jsonl").read_text().split("\n")[:-1]
    ]
    assert [record["step"] for record in log] == [0, 1, 2, 2, 3, 4, 4]
    assert {key for record in log for key in record} == {
        "step",
        "held_out",
        "decoded",
        "epoch",
        "loss_name",
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
    }
    metrics = artifact.metrics
    assert metrics["held_out_before"] == log[0]["held_out"]
    assert metrics["num_steps"] == 4
    assert metrics["tokens_per_s"] > 0
    assert metrics["num_parameters"] == sum(p.numel() for p in draft.model.parameters())


def test_the_saved_draft_is_the_one_that_was_scored(
    store: ArtifactStore, make_config: MakeConfig, generated: Artifact
) -> None:
    config = make_config(compute_dtype="float32")
    artifact = distill_draft(config, store, inputs={"generate": generated})
    target, draft = load_target(config.target), load_draft(artifact, device="cpu")
    held_out = HeldOut(
        read_selection_rows(generated, max_length=512),
        TargetFiles(generated),
        target_head=head_of(target.model),
        token_ids_V=None,
        max_tokens=1000,
        micro_batch_tokens=64,
        seed=0,
    )

    def states(batch: Any) -> torch.Tensor:
        hidden_BTD = draft.model.base_model(input_ids=batch.input_ids_BT).last_hidden_state
        selected: torch.Tensor = hidden_BTD.flatten(0, 1)[batch.flat_positions_N]
        return selected

    score = held_out.score(states, head_of(draft.model))
    expected = artifact.metrics["held_out_after"]
    assert score.acceptance == pytest.approx(expected["acceptance"], abs=1e-5)
    assert score.num_positions == expected["num_positions"]


def test_weights_are_chosen_on_no_prompt_that_measure_reports_on(
    store: ArtifactStore,
    make_config: MakeConfig,
    tiny_pair_dirs: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two answers each of two prompts; a later turn and an answer that failed are in no half."""
    held_out = {1: "a", 5: "a", 9: "b", 13: "b", 17: "c", 21: "d"}
    changes: dict[int, dict[str, Any]] = {i: {"prompt_id": p} for i, p in held_out.items()}
    changes[17]["turn_index"] = 1
    changes[21] |= {"status": "failed"}
    generated = make_generated(store, tiny_pair_dirs[0], changes=changes, salt="halves")
    given: list[Any] = []

    def look(*args: Any, data: Any, **kwargs: Any) -> TrainingResult:
        given.extend(data.held_out_rows)
        raise ArtifactError("seen enough")

    monkeypatch.setattr(distill_run, "train", look)
    with pytest.raises(ArtifactError, match="seen enough"):
        distill_draft(make_config(), store, inputs={"generate": generated})
    for name, value in {"samplings": [], "backend": "local"}.items():
        monkeypatch.setitem(generated.manifest.config, name, value)  # the stand-in has none
    reported = read_held_out(generated, (0.0,), max_prompts_per_task=None, max_new_tokens=1)
    (one,) = [prompt.prompt_id for prompt in reported]
    other = {"a": "b", "b": "a"}[one]
    assert {row.row_id for row in given} == {f"row-{i}" for i, p in held_out.items() if p == other}


def test_a_setting_that_a_training_never_reads_is_not_in_its_key(
    store: ArtifactStore, make_config: MakeConfig
) -> None:
    first, later = {"generate": "0" * 64}, {"generate": "0" * 64, "rollouts": "1" * 64}

    def is_another(inputs: dict[str, str], same: dict[str, Any], changes: dict[str, Any]) -> bool:
        keys = (
            distill_key(make_config(**given), store, inputs=inputs)
            for given in (same, same | changes)
        )
        return next(keys) != next(keys)

    assert not is_another(first, {}, {"rollout_fraction": 0.25})
    assert is_another(later, {}, {"rollout_fraction": 0.25})
    assert not is_another(first, {}, {"trl": {"batch_size": 2}})
    of_trl = {"engine": "trl", "batch_tokens": 2048, "micro_batch_tokens": 2048, "eval_every": 50}
    assert is_another(first, of_trl, {"trl": {"batch_size": 2}})


def test_a_second_call_trains_nothing(
    store: ArtifactStore,
    make_config: MakeConfig,
    generated: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = distill_draft(make_config(), store, inputs={"generate": generated})

    def fail(*args: Any, **kwargs: Any) -> TrainingResult:
        raise AssertionError("trained again")

    monkeypatch.setattr(distill_run, "train", fail)
    again = distill_draft(make_config(checkpoint_every=1), store, inputs={"generate": generated})
    assert again.path == first.path


def test_two_builds_give_the_same_bytes(
    store: ArtifactStore, make_config: MakeConfig, generated: Artifact
) -> None:
    config = make_config(vocabulary_size=100, loss="acceptance_hybrid")
    first = distill_draft(config, store, inputs={"generate": generated}).manifest.files
    again = distill_draft(config, store, inputs={"generate": generated}, rebuild=True)
    assert again.manifest.files == first


def test_a_vocabulary_subset_is_written_and_holds_the_stop_ids(
    store: ArtifactStore, make_config: MakeConfig, generated: Artifact
) -> None:
    artifact = distill_draft(
        make_config(vocabulary_size=100), store, inputs={"generate": generated}
    )
    draft = load_draft(artifact, device="cpu")
    vocabulary = draft.vocabulary
    assert vocabulary is not None
    assert len(vocabulary.token_ids) == 100
    assert 1 in vocabulary.token_ids
    assert artifact.metrics["vocabulary_coverage"] == vocabulary.coverage
    # the head itself stays whole: runtimes that know no subset load it as it is
    assert draft.shape.vocab_size == 300


@pytest.mark.parametrize("vocabulary_size", [None, 290])
def test_rows_of_a_padded_head_are_no_tokens(
    store: ArtifactStore,
    make_config: MakeConfig,
    tmp_path: Path,
    tiny_tokenizer: Any,
    vocabulary_size: int | None,
) -> None:
    """A draft that IS the target: accepted always, or as often as the subset has the mass."""
    model = make_llama(len(tiny_tokenizer) + 20, layers=2, hidden=64, seed=3)
    target_dir = save_pretrained_dir(tmp_path / "padded", model, tiny_tokenizer)
    generated = make_generated(store, target_dir, salt="padded")
    config = make_config(
        target_dir,
        initialization={"kind": "pruned", "layers": [0, 1]},
        vocabulary_size=vocabulary_size,
        compute_dtype="float32",
    )
    artifact = distill_draft(config, store, inputs={"generate": generated})
    before = artifact.metrics["held_out_before"]
    if vocabulary_size is None:
        assert before["acceptance"] > 0.99
        assert before["greedy_agreement"] > 0.97
    else:
        assert 0.9 < before["acceptance"] < 0.99 + 1e-9


def test_an_existing_draft_is_distilled(
    store: ArtifactStore,
    make_config: MakeConfig,
    generated: Artifact,
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    existing = {"kind": "existing", "model": {"model": str(tiny_pair_dirs[1]), "device": "cpu"}}
    artifact = distill_draft(
        make_config(initialization=existing), store, inputs={"generate": generated}
    )
    after, before = artifact.metrics["held_out_after"], artifact.metrics["held_out_before"]
    assert after["acceptance"] >= before["acceptance"]


def test_the_undistilled_draft_is_rebuilt_from_the_config(make_config: MakeConfig) -> None:
    config = make_config(initialization={"kind": "scratch", "num_layers": 1}, seed=4)
    first, second = build_undistilled(config), build_undistilled(config, {})
    states = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_narrow_draft_cannot_freeze_an_embedding_it_does_not_have(
    store: ArtifactStore, make_config: MakeConfig, generated: Artifact
) -> None:
    narrow = {
        "kind": "scratch",
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    with pytest.raises(ConfigError, match="train_embeddings: true"):
        distill_draft(make_config(initialization=narrow), store, inputs={"generate": generated})
    config = make_config(initialization=narrow, train_embeddings=True)
    artifact = distill_draft(config, store, inputs={"generate": generated})
    assert load_draft(artifact, device="cpu").shape.hidden_size == 32
