"""The command line and the files of pairs: measured again, shown, and told apart from a run's.

Refuses to test what is measured; the stage's own tests do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from distill import cli
from distill.stages.measure_pair import load_pair_config

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def pair_file(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> Path:
    target, draft = tiny_pair_dirs
    content = {
        "name": "pair",
        "target": {"model": str(target), "dtype": "float32"},
        "measure": {
            "draft": {"model": str(draft)},
            "corpus": {"path": str(tiny_corpus)},
            "temperatures": [0.0],
            "max_new_tokens": 6,
            "max_prompts_per_task": 2,
            "law_samples": 0,
            "prompt_lookup": False,
            "timing": {"enabled": False},
        },
    }
    path = tmp_path_factory.mktemp("pair") / "pair.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def command(pair_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`distill measure` of the pair, which has been measured once."""
    artifacts = tmp_path_factory.mktemp("artifacts")
    command = ["measure", str(pair_file), "--artifacts", str(artifacts)]
    result = RUNNER.invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    return command


def finished(path: Path) -> str:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    return str(manifest["finished"])


def test_a_pair_is_measured_again_when_asked_also_where_its_artifact_is_damaged(
    command: list[str],
) -> None:
    command = [*command, "--json"]
    first = RUNNER.invoke(cli.app, command)
    assert first.exit_code == 0, first.output
    artifact = Path(json.loads(first.stdout)["artifacts"]["measure"]["path"])
    before = finished(artifact)
    assert RUNNER.invoke(cli.app, command).exit_code == 0
    assert finished(artifact) == before
    (artifact / "acceptance.json").write_text("{}", encoding="utf-8")
    damaged = RUNNER.invoke(cli.app, command)
    assert damaged.exit_code == 2
    assert "distill measure CONFIG --rerun" in damaged.stderr
    again = RUNNER.invoke(cli.app, [*command, "--rerun"])
    assert again.exit_code == 0, again.output
    assert finished(artifact) > before
    assert RUNNER.invoke(cli.app, command).exit_code == 0


def test_config_show_prints_a_pair_with_its_defaults_that_reloads_to_an_equal_object(
    pair_file: Path, tmp_path: Path
) -> None:
    shown = RUNNER.invoke(cli.app, ["config", "show", str(pair_file), "--set", "measure.seed=5"])
    assert shown.exit_code == 0, shown.output
    assert "law_samples: 0" in shown.stdout
    assert "early_exit: []" in shown.stdout
    path = tmp_path / "shown.yaml"
    path.write_text(shown.stdout, encoding="utf-8")
    assert load_pair_config(path) == load_pair_config(pair_file, ["measure.seed=5"])


def test_config_show_prints_a_served_pair(tmp_path: Path, tiny_corpus: Path) -> None:
    path = tmp_path / "served.yaml"
    content = {
        "name": "served",
        "target": {"model": "org/target"},
        "served": {"server": {"base_urls": ["http://h:1"]}, "corpus": {"path": str(tiny_corpus)}},
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    shown = RUNNER.invoke(cli.app, ["config", "show", str(path)])
    assert shown.exit_code == 0, shown.output
    (tmp_path / "shown.yaml").write_text(shown.stdout, encoding="utf-8")
    assert load_pair_config(tmp_path / "shown.yaml") == load_pair_config(path)


def test_config_show_prints_the_schema_of_a_pair(pair_file: Path) -> None:
    result = RUNNER.invoke(cli.app, ["config", "show", str(pair_file), "--schema"])
    assert set(json.loads(result.stdout)["properties"]) == {"name", "target", "measure", "served"}


@pytest.mark.parametrize("name", ["plan", "run", "serve", "export"])
def test_a_command_for_runs_says_that_a_pairs_file_is_for_distill_measure(
    pair_file: Path, tmp_path: Path, name: str
) -> None:
    output = ["-o", str(tmp_path / "out")] if name == "export" else []
    result = RUNNER.invoke(cli.app, [name, str(pair_file), *output])
    assert result.exit_code == 2
    assert f"distill measure {pair_file}" in result.stderr
    assert "generate.corpus: required" not in result.stderr


def test_a_file_without_measure_says_so(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("name: short\ntarget: {model: org/t}\n", encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["measure", str(path)])
    assert result.exit_code == 2
    assert "nor measure or served" in result.stderr


def test_a_comparison_that_cannot_be_written_there_is_a_users_mistake(
    command: list[str], tmp_path: Path
) -> None:
    # a link that leads nowhere: its folder cannot be made, and its name is taken
    (tmp_path / "broken").symlink_to(tmp_path / "gone" / "away")
    for output in ("/proc/nowhere/x.json", str(tmp_path / "broken" / "x.json")):
        compare = ["compare", "pair", "pair", *command[2:], "-o", output]
        result = RUNNER.invoke(cli.app, compare)
        assert result.exit_code == 2, result.output
        assert "hoose another path" in result.stderr
        assert result.stderr.count("distill: error:") == 1


def test_one_process_of_a_run_prints(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = ["--set", "measure.gate.min_alpha=1.0", "--set", "measure.gate.lossless=false"]
    first = RUNNER.invoke(cli.app, [*command, *gate])
    assert first.exit_code == 3, first.output
    assert "report:" in first.stdout
    assert "the gate failed" in first.stderr
    monkeypatch.setenv("RANK", "1")
    for extra in ([], ["--json"]):
        other = RUNNER.invoke(cli.app, [*command, *gate, *extra])
        assert other.exit_code == 3
        assert other.stdout == ""
        assert "the gate failed" not in other.stderr
    # a mistake is told by whoever finds it
    wrong = RUNNER.invoke(cli.app, [*command, "--set", "measure.sed=1"])
    assert "Did you mean 'measure.seed'?" in wrong.stderr
