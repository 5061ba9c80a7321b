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
