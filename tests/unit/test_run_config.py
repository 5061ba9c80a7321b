"""RunConfig: the target is written once and reaches every section.

Refuses to know the sections' own fields.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distill.errors import ConfigError
from distill.stages.run_config import SECTIONS_WITH_TARGET, dump_run_config, load_config

MINIMAL = {
    "name": "pair",
    "target": {"model": "org/target", "dtype": "float32"},
    "generate": {"corpus": {"path": "prompts.jsonl"}},
}


@pytest.fixture
def minimal_path(tmp_path: Path) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(MINIMAL), encoding="utf-8")
    return path


def test_every_section_is_given_the_target(minimal_path: Path) -> None:
    config = load_config(minimal_path)
    for name in SECTIONS_WITH_TARGET:
        assert getattr(config, name).target == config.target


def test_an_override_of_the_target_reaches_every_section(minimal_path: Path) -> None:
    config = load_config(minimal_path, ["target.model=org/other"])
    assert {getattr(config, name).target.model for name in SECTIONS_WITH_TARGET} == {"org/other"}


def test_a_section_with_a_target_of_its_own_is_refused(minimal_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"measure\.target is taken from the top-level target"):
        load_config(minimal_path, ["measure.target.model=org/other"])


def test_the_dump_names_the_target_once_and_reloads_to_an_equal_object(
    minimal_path: Path, tmp_path: Path
) -> None:
    config = load_config(minimal_path)
    text = dump_run_config(config)
    assert text.count("org/target") == 1
    copy = tmp_path / "elsewhere" / "copy.yaml"
    copy.parent.mkdir()
    copy.write_text(text, encoding="utf-8")
    assert load_config(copy) == config


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text("name: pair\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="target: required"):
        load_config(path)


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x"])
def test_a_name_that_is_no_folder_name_is_refused(minimal_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        load_config(minimal_path, [f"name='{name}'"])


# ------------------------------------------------------------------------------ what a run ignores


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollouts.rounds=2", r"rollouts\.rounds is 2.*pipeline is standard.*pipeline: on_policy"),
        ("rollouts.sampling.temperature=0.5", r"rollouts\.sampling is .*remove rollouts\.sampling"),
        ("distill.rollout_fraction=0.9", r"distill\.rollout_fraction is 0\.9.*writes no rollouts"),
        ("distill.trl.batch_size=2", r"distill\.trl\.batch_size is 2.*set distill\.engine: trl"),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused_with_the_way_in_and_out(
    minimal_path: Path, override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(minimal_path, [override])


@pytest.mark.parametrize(
    "overrides",
    [
        ["pipeline=on_policy", "rollouts.rounds=2", "distill.rollout_fraction=0.9"],
        ["distill.engine=trl", "distill.trl.batch_size=2"],
        ["rollouts.rounds=3"],  # the default: a file may say it, as a dump does
    ],
)
def test_a_setting_that_is_read_or_changes_nothing_is_taken(
    minimal_path: Path, overrides: list[str]
) -> None:
    load_config(minimal_path, overrides)


def test_a_run_that_names_a_draft_to_measure_is_refused_when_it_is_read(
    minimal_path: Path,
) -> None:
    overrides = ["measure.draft.model=org/other", "measure.corpus.path=other.jsonl"]
    with pytest.raises(ConfigError) as caught:
        load_config(minimal_path, overrides)
    message = str(caught.value)
    assert "measure.draft names org/other" in message
    assert "Remove measure.draft and measure.corpus" in message
    assert "measure.drafts" in message


# ------------------------------------------------------------------------------ files of a pair


@pytest.mark.parametrize("section", ["measure", "served"])
def test_the_file_of_a_pair_is_said_to_be_one(tmp_path: Path, section: str) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(f"name: pair\ntarget: {{model: org/t}}\n{section}: {{}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a pair that exists already.*`distill measure .*pair"):
        load_config(path)


def test_a_pair_that_is_overridden_into_a_run_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text("name: pair\ntarget: {model: org/t}\nmeasure: {seed: 3}\n", encoding="utf-8")
    assert load_config(path, ["generate.corpus.path=prompts.jsonl"]).measure.seed == 3


def test_a_file_that_is_neither_a_run_nor_a_pair_is_told_what_each_needs(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("name: short\ntarget: {model: org/t}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "neither generate" in str(caught.value)
    assert "nor measure or served" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["distill.seed=1"])
    assert "neither generate" not in str(caught.value)
