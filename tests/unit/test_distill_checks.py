"""Owns what of a training is refused before anything is built for it, by every pipeline.

Refuses to know the refusals of a stage that has weights: those are in test_distill_stage.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from distill import load_config
from distill.artifacts import ArtifactStore
from distill.errors import ConfigError, ModelNotFoundError
from distill.models import ModelConfig, read_shape
from distill.stages.distill_draft import check_before_building
from pipelines import chosen, standard
from tests.helpers import make_llama, save_pretrained_dir

WIDE = "{kind: scratch, num_layers: 1, hidden_size: 32, num_attention_heads: 4"
NARROW = "{kind: pruned, layers: [0], hidden_size: 32, num_attention_heads: 2}"


def _refused(path: Path, overrides: list[str], root: Path, complaint: str, kind: Any) -> None:
    """By a run and by a plan, and neither leaves a byte."""
    config, store = load_config(path, overrides), ArtifactStore(root)
    for call in (chosen.run, chosen.plan):
        with pytest.raises(kind, match=complaint):
            call(config, store)
    assert not root.exists() or not any(root.iterdir())


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["distill.initialization={kind: scratch, num_attention_heads: 5}"],
            "hidden_size 64 is not a multiple of num_attention_heads 5",
        ),
        ([f"distill.initialization={WIDE}, embeddings: copied}}"], "copied, .*width is 32"),
        ([f"distill.initialization={WIDE}}}"], r"train_embeddings is false.*would be random"),
        (["distill.initialization={kind: pruned, layers: [9]}"], "layer 9, .*has 4 layers"),
        (
            [f"distill.initialization={NARROW}", "distill.loss=hidden_regression"],
            "hidden_regression compares hidden states, but the draft's width is 32",
        ),
        (["distill.vocabulary_size=5000"], "vocabulary_size is 5000, .* share at most 300"),
        (
            [
                "pipeline=on_policy",
                "rollouts.steps_per_round=4",
                "distill.loss=[{name: forward_kl, fraction: 0.9}, {name: jsd, fraction: 0.1}]",
            ],
            r"steps_per_round is 4: the loss phase jsd has 0\.1 of 4 steps",
        ),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused_before_it_generates(
    tiny_run_config: Path, tmp_path: Path, overrides: list[str], complaint: str
) -> None:
    _refused(tiny_run_config, overrides, tmp_path / "artifacts", complaint, ConfigError)


@pytest.mark.parametrize("pipeline", ["standard", "on_policy"])
def test_a_width_of_an_existing_draft_that_a_loss_cannot_compare_is_refused_before(
    tiny_run_config: Path, tmp_path: Path, tiny_tokenizer: Any, pipeline: str
) -> None:
    model = make_llama(len(tiny_tokenizer), hidden=32)
    directory = save_pretrained_dir(tmp_path / "narrow", model, tiny_tokenizer)
    overrides = [
        f"pipeline={pipeline}",
        f"distill.initialization={{kind: existing, model: {{model: {directory}}}}}",
        "distill.loss=hidden_regression",
    ]
    _refused(tiny_run_config, overrides, tmp_path / "a", "the draft's width is 32", ConfigError)


@pytest.mark.parametrize("pipeline", ["standard", "on_policy"])
@pytest.mark.parametrize(
    "override",
    [
        "distill.initialization={kind: existing, model: {model: /nowhere/at/all}}",
        "distill.reference={model: /nowhere/at/all}",
    ],
)
def test_a_draft_that_is_nowhere_is_missed_before_the_target_generates(
    tiny_run_config: Path, tmp_path: Path, override: str, pipeline: str
) -> None:
    overrides = [
        f"pipeline={pipeline}",
        override,
        "distill.loss={name: forward_kl, keep_fraction: 0.5}",
    ]
    complaint = "/nowhere/at/all"
    _refused(tiny_run_config, overrides, tmp_path / "artifacts", complaint, ModelNotFoundError)


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else find(name, *rest),
    )


def test_a_trackers_missing_package_is_told_before_the_target_generates(
    tiny_run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "tensorboard")
    overrides = ["distill.trackers=[jsonl, tensorboard]"]
    complaint = "`pip install tensorboard`"
    _refused(tiny_run_config, overrides, tmp_path / "artifacts", complaint, ConfigError)


def test_a_run_that_ends_before_the_training_needs_nothing_of_it(
    tiny_run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(monkeypatch, "tensorboard")
    config = load_config(tiny_run_config, ["distill.trackers=[tensorboard]"])
    built = standard.run(config, ArtifactStore(tmp_path), until="generate").artifacts
    assert list(built) == ["generate"]


def test_launches_that_cannot_train_are_refused_before_the_target_generates(
    tiny_run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    _refused(tiny_run_config, [], tmp_path / "artifacts", "FSDP", ConfigError)


TRL_ALONE = [
    *("distill.engine=trl", "distill.vocabulary_size=null", "distill.batch_tokens=2048"),
    *("distill.micro_batch_tokens=2048", "distill.eval_every=50", "distill.checkpoint_every=50"),
]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("distill.loss=acceptance", "loss is acceptance"),
        ("distill.vocabulary_size=200", r"nothing of vocabulary_size \(200, not null\)"),
        ("distill.batch_tokens=64", r"nothing of batch_tokens \(64, not 2048\)"),
        ("distill.trackers=[jsonl, wandb]", r"nothing of trackers \(jsonl, wandb"),
        ("distill.warm_start={name: jsd, fraction: 0.5}", "make 2 phases"),
    ],
)
def test_what_trl_cannot_do_is_refused_when_the_config_is_read(
    tiny_run_config: Path, override: str, complaint: str
) -> None:
    assert load_config(tiny_run_config, TRL_ALONE).distill.engine == "trl"
    with pytest.raises(ConfigError, match=complaint):
        load_config(tiny_run_config, [*TRL_ALONE, override])


def test_a_draft_padded_differently_is_refused_for_trl_before_the_target_generates(
    tiny_run_config: Path, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    model = make_llama(len(tiny_tokenizer) + 8, hidden=64)
    directory = save_pretrained_dir(tmp_path / "padded", model, tiny_tokenizer)
    start = f"distill.initialization={{kind: existing, model: {{model: {directory}}}}}"
    complaint = "the draft has 308, the target 300"
    _refused(tiny_run_config, [*TRL_ALONE, start], tmp_path / "a", complaint, ConfigError)


def test_what_follows_from_a_shape_that_is_not_known_is_left_to_the_stage(
    tiny_run_config: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    config = load_config(tiny_run_config, ["distill.vocabulary_size=5000"]).distill
    check_before_building(config, None)
    with pytest.raises(ConfigError, match="at most 300"):
        check_before_building(config, read_shape(ModelConfig(model=str(tiny_pair_dirs[0]))))
