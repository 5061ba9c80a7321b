"""Owns the promise that every file in configs/ is a valid, complete, documented configuration.
Refuses to run any of them.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from distill.config import dump_config, fingerprint_view, json_schema, parse_config
from distill.stages.run_config import RunConfig, dump_run_config, load_config

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
SECTIONS = ("generate", "distill", "measure", "serve", "export")

every_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


def test_the_quickstart_is_among_them() -> None:
    assert "quickstart.yaml" in [path.name for path in CONFIGS]


@every_config
def test_config_loads_and_reloads_from_its_own_dump(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    dumped = tmp_path / path.name
    dumped.write_text(dump_run_config(config), encoding="utf-8")
    assert load_config(dumped) == config


@every_config
@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_is_complete_by_itself(path: Path, section: str, tmp_path: Path) -> None:
    """A notebook may hand one section to one stage, so a section must not need its neighbours."""
    config = getattr(load_config(path), section)
    text = dump_config(config)
    assert parse_config(config.model_dump(mode="json"), type(config)) == config
    assert text


@every_config
def test_fingerprints_hold_no_path_of_this_machine(path: Path) -> None:
    """Otherwise a second checkout, or a colleague's, would build everything again."""
    config = load_config(path)
    views = {name: json.dumps(fingerprint_view(getattr(config, name))) for name in SECTIONS}
    assert [name for name, view in views.items() if str(REPOSITORY) in view] == []


@every_config
def test_header_says_what_it_needs_takes_and_gives(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    header = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines)).lower()
    needed = ("prerequisites", "hardware", "wall time", "expected", f"configs/{path.name}")
    assert [word for word in needed if word not in header] == []


@every_config
def test_prompts_named_by_a_config_are_in_the_repository(path: Path) -> None:
    corpus = load_config(path).generate.corpus
    if corpus.path is not None and corpus.path.is_relative_to(REPOSITORY):
        assert corpus.path.is_file()


def test_schema_can_be_given_to_an_editor() -> None:
    assert json.loads(json.dumps(json_schema(RunConfig)))["title"] == "RunConfig"
