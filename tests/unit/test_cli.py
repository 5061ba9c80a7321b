"""The command line: exit codes, messages, and that it only calls and prints.

Refuses to test stages again; the pipeline's own tests do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distill import cli
from distill.errors import ExportError
from distill.stages.run_config import load_config

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="module")
def finished_run(tiny_run_config: Path, artifacts: Path) -> str:
    result = RUNNER.invoke(cli.app, ["run", str(tiny_run_config), "--artifacts", str(artifacts)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_prints_one_table_and_where_the_report_is(finished_run: str, artifacts: Path) -> None:
    assert "ship" in finished_run.splitlines()[0]
    for name in ("report.json", "report.html"):
        path = artifacts / "reports" / "tiny" / name
        assert path.is_file()
        assert str(path) in finished_run


def test_a_run_as_json_prints_the_report_and_nothing_else_on_stdout(
    finished_run: str, tiny_run_config: Path, artifacts: Path
) -> None:
    result = RUNNER.invoke(
        cli.app, ["run", str(tiny_run_config), "--artifacts", str(artifacts), "--json"]
    )
    report = json.loads(result.stdout)
    assert report["name"] == "tiny"
    assert set(report["artifacts"]) == {"generate", "distill", "measure", "export"}


def test_a_run_until_a_stage_prints_where_its_artifacts_are(
    finished_run: str, tiny_run_config: Path, artifacts: Path
) -> None:
    arguments = ["run", str(tiny_run_config), "--artifacts", str(artifacts), "--until", "distill"]
    result = RUNNER.invoke(cli.app, arguments)
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["generate", "distill"]


def test_a_run_until_a_stage_as_json_prints_its_artifacts_and_nothing_else_on_stdout(
    finished_run: str, tiny_run_config: Path, artifacts: Path
) -> None:
    arguments = ["run", str(tiny_run_config), "--artifacts", str(artifacts), "--json"]
    result = RUNNER.invoke(cli.app, [*arguments, "--until", "generate"])
    ((name, row),) = json.loads(result.stdout)["artifacts"].items()
    assert name == "generate"
    assert set(row) == {"path", "fingerprint"}
    manifest = json.loads((Path(row["path"]) / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["fingerprint"] == row["fingerprint"]


def test_what_was_measured_is_reported_though_the_export_fails(
    finished_run: str, tiny_run_config: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ExportError("it cannot be shipped")

    monkeypatch.setattr("distill.export.export_draft", fail)
    arguments = ["run", str(tiny_run_config), "--artifacts", str(artifacts), "--set", "name=other"]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "it cannot be shipped" in result.stderr
    report = artifacts / "reports" / "other" / "report.json"
    assert set(json.loads(report.read_text(encoding="utf-8"))["artifacts"]) == {
        "generate",
        "distill",
        "measure",
    }


def test_a_plan_says_what_is_cached_and_what_is_not(
    finished_run: str, tiny_run_config: Path, artifacts: Path
) -> None:
    arguments = ["plan", str(tiny_run_config), "--artifacts", str(artifacts), "--json"]
    arguments += ["--set", "measure.max_new_tokens=9"]
    plan = json.loads(RUNNER.invoke(cli.app, arguments).stdout)
    assert [(row["stage"], row["state"]) for row in plan["stages"]] == [
        ("generate", "cached"),
        ("distill", "cached"),
        ("measure", "to build"),
        ("export", "to build"),
    ]
    assert "max_new_tokens" in plan["stages"][2]["miss"]


def test_a_plan_prints_a_table(finished_run: str, tiny_run_config: Path, artifacts: Path) -> None:
    arguments = ["plan", str(tiny_run_config), "--artifacts", str(artifacts)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert "upper estimates" in result.stdout


def test_an_export_is_a_folder_transformers_loads(
    finished_run: str, tiny_run_config: Path, artifacts: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "bundle"
    arguments = ["export", str(tiny_run_config), "--artifacts", str(artifacts), "-o", str(output)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(output)
    assert AutoModelForCausalLM.from_pretrained(output).config.num_hidden_layers == 2


def test_an_export_over_something_that_exists_is_refused_with_exit_2(
    finished_run: str, tiny_run_config: Path, artifacts: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep me", encoding="utf-8")
    arguments = ["export", str(tiny_run_config), "--artifacts", str(artifacts), "-o", str(tmp_path)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr


def test_serve_hands_the_pair_to_the_serve_stage(
    finished_run: str, tiny_run_config: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        "distill.stages.serve.serve", lambda config, store, **rest: calls.append((config, rest))
    )
    arguments = ["serve", str(tiny_run_config), "--artifacts", str(artifacts)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    ((config, rest),) = calls
    assert config.port == 0
    assert sorted(rest["inputs"]) == ["distill", "measure"]
    assert rest["block"] is True


def test_serving_the_targets_own_layers_builds_nothing_that_is_not_read(
    tiny_run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        "distill.stages.serve.serve", lambda config, store, **rest: calls.append((config, rest))
    )
    arguments = ["serve", str(tiny_run_config), "--artifacts", str(tmp_path / "new")]
    settings = ["--set", "serve.drafter=early_exit", "--set", "serve.num_layers=1"]
    result = RUNNER.invoke(cli.app, [*arguments, *settings])
    assert result.exit_code == 0, result.output
    ((config, rest),) = calls
    assert (config.drafter, rest["inputs"]) == ("early_exit", {})
    assert not list(tmp_path.rglob("manifest.json"))


def test_config_show_prints_a_config_that_reloads_to_an_equal_object(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    result = RUNNER.invoke(cli.app, ["config", "show", str(tiny_run_config)])
    path = tmp_path / "shown.yaml"
    path.write_text(result.stdout, encoding="utf-8")
    assert load_config(path) == load_config(tiny_run_config)


def test_config_show_prints_the_schema(tiny_run_config: Path) -> None:
    result = RUNNER.invoke(cli.app, ["config", "show", str(tiny_run_config), "--schema"])
    assert set(json.loads(result.stdout)["properties"]) >= {"target", "generate", "distill"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "distill.learning_rat=1"], "Did you mean 'distill.learning_rate'?"),
        (["--set", "target.model=./not-there"], "not-there"),
        (["--set", "generate.corpus.path=missing.jsonl"], "missing.jsonl"),
        (["--until", "destill"], "generate, distill, measure, export"),
        (["--rerun", "destill"], "generate, distill, measure, export"),
        (["--until", "generate", "--rerun", "measure"], "the run ends before it, after generate"),
    ],
)
def test_a_users_mistake_is_exit_2_with_one_message_and_no_traceback(
    tiny_run_config: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    command = ["run", str(tiny_run_config), "--artifacts", str(tmp_path), *arguments]
    result = RUNNER.invoke(cli.app, command)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("distill: error:") == 1
    assert expected in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("manifest.json"))


def test_artifacts_that_are_a_file_are_a_users_mistake(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a-file"
    file.write_text("mine", encoding="utf-8")
    result = RUNNER.invoke(cli.app, ["run", str(tiny_run_config), "--artifacts", str(file)])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("distill: error:") == 1
    assert str(file) in result.stderr
    assert "--artifacts" in result.stderr
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("number", "exit_code", "expected"),
    [
        (errno.ENOSPC, 2, "Free some space"),
        (errno.EACCES, 2, "Allow writing there"),
        (errno.EROFS, 2, "Allow writing there"),
        (errno.EISDIR, 2, "Choose another path"),
        (errno.ENAMETOOLONG, 2, "choose another path"),
        (errno.EDQUOT, 2, "Free some space"),
        (errno.ENOENT, 1, ""),
        (errno.EIO, 1, ""),
    ],
)
def test_what_the_disk_refuses_is_named_with_a_way_out_and_what_nobody_expected_is_not(
    tiny_run_config: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    exit_code: int,
    expected: str,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, "refused", "some/file")

    monkeypatch.setattr("distill.cli.build.load_run", refused)
    result = RUNNER.invoke(cli.app, ["run", str(tiny_run_config)])
    assert result.exit_code == exit_code
    assert expected in result.stderr
    assert ("some/file: refused" in result.stderr) == (exit_code == 2)


def test_a_bug_is_not_dressed_up_as_a_users_mistake(
    tiny_run_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("distill.cli.build.load_run", broken)
    result = RUNNER.invoke(cli.app, ["run", str(tiny_run_config)])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_an_interrupt_says_how_to_go_on(
    tiny_run_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distill.cli.build.load_run", interrupted)
    result = RUNNER.invoke(cli.app, ["run", str(tiny_run_config)])
    assert result.exit_code == 130
    assert "run the same command again" in result.stderr


def test_the_version_is_printed() -> None:
    from distill import __version__

    result = RUNNER.invoke(cli.app, ["--version"])
    assert result.stdout == f"distill {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['distill', '--help']\n"
        "try:\n    import distill.__main__; distill.__main__.app()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'pyarrow', 'omegaconf'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "heavy: []" in result.stdout
    assert "Usage" in result.stdout


def test_a_run_is_measured_again_when_asked_and_nothing_else_is_built_again(
    finished_run: str, tiny_run_config: Path, artifacts: Path
) -> None:
    command = ["measure", str(tiny_run_config), "--artifacts", str(artifacts), "--json"]
    before = json.loads(RUNNER.invoke(cli.app, command).stdout)["artifacts"]
    times = {name: _finished(Path(row["path"])) for name, row in before.items()}
    result = RUNNER.invoke(cli.app, [*command, "--rerun"])
    assert result.exit_code == 0, result.output
    after = {name: _finished(Path(row["path"])) for name, row in before.items()}
    assert [name for name in times if after[name] != times[name]] == ["measure"]


def _finished(path: Path) -> str:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    return str(manifest["finished"])


def test_an_occupied_output_is_noticed_before_anything_is_built(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep me", encoding="utf-8")
    store = tmp_path / "store"
    arguments = ["export", str(tiny_run_config), "--artifacts", str(store), "-o", str(output)]
    result = RUNNER.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_draft_that_failed_its_gate_is_exported_only_by_force_and_its_card_says_so(
    finished_run: str, tiny_run_config: Path, artifacts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    arguments = ["export", str(tiny_run_config), "--artifacts", str(artifacts), "-o", str(output)]
    # the other bounds would depend on the clock
    gate = ["--set", "measure.gate.min_alpha=1.0", "--set", "measure.gate.lossless=false"]
    refused = RUNNER.invoke(cli.app, [*arguments, *gate])
    assert refused.exit_code == 3
    assert "measure.gate.min_alpha is 1" in refused.stderr
    assert "Nothing was exported; --force" in refused.stderr
    assert not output.exists()
    forced = RUNNER.invoke(cli.app, [*arguments, *gate, "--force"])
    assert forced.exit_code == 0, forced.output
    card = (output / "README.md").read_bytes()
    assert b"**It failed its gate, and was exported all the same**: measure.gate.min_alpha" in card
    manifest = json.loads((output / "draft_manifest.json").read_text(encoding="utf-8"))
    assert manifest["gate_failures"][0].startswith("measure.gate.min_alpha is 1")
    (entry,) = [row for row in manifest["files"] if row["path"] == "README.md"]
    assert entry["sha256"] == hashlib.sha256(card).hexdigest()
    passed = RUNNER.invoke(
        cli.app, [*arguments[:-1], str(tmp_path / "other"), "--set", "measure.gate.lossless=false"]
    )
    assert passed.exit_code == 0, passed.output
    assert "failed its gate" not in (tmp_path / "other" / "README.md").read_text(encoding="utf-8")


def test_an_artifacts_folder_that_cannot_be_made_is_a_users_mistake(tiny_run_config: Path) -> None:
    command = ["run", str(tiny_run_config), "--artifacts", "/proc/nowhere/store"]
    result = RUNNER.invoke(cli.app, command)
    assert result.exit_code == 2, result.output
    assert "choose another path (--artifacts, --output)" in result.stderr
