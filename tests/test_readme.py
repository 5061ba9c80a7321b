"""The README's commands and Python are run, on a tiny pair; its quickstart for what it calls.

Refuses to run scripts/setup, scripts/test and scripts/quickstart themselves: they are this run.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distill import cli, load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIG = "configs/quickstart.yaml"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def shell_lines() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


DISTILL_LINES = [line for line in shell_lines() if line.startswith("distill ")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.mark.parametrize("line", DISTILL_LINES)
def test_every_distill_command_of_the_readme_runs(
    line: str, tiny_run_config: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr("distill.stages.serve.serve", lambda *_, **__: None)
    words = shlex.split(line.replace(CONFIG, str(tiny_run_config)))[1:]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output


def test_the_readme_shows_each_command_of_the_pipeline() -> None:
    shown = {line.split()[1] for line in DISTILL_LINES}
    assert shown >= {"run", "plan", "serve", "export", "config"}


@pytest.mark.parametrize("line", [line for line in shell_lines() if "/" in line.split()[0]])
def test_every_script_of_the_readme_is_there_and_executable(line: str) -> None:
    path = ROOT / line.split()[0]
    assert path.is_file()
    assert path.stat().st_mode & 0o100


def test_the_quickstart_script_runs_the_quickstart_config() -> None:
    assert f'distill" run {CONFIG}' in (ROOT / "scripts/quickstart").read_text(encoding="utf-8")


def test_the_readme_s_single_stages_and_its_runtime_alone_run(
    tiny_run_config: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    stages, runtime = [block for block in blocks("python") if "distill." in block]
    names: dict[str, Any] = {}
    exec(compile(stages.replace(CONFIG, str(tiny_run_config)), "README.md", "exec"), names)
    exec(compile(runtime, "README.md", "exec"), names)
    assert len(names["answers"][0].token_ids) <= 8


def test_the_readme_s_client_asks_for_the_model_that_the_quickstart_serves() -> None:
    (client,) = [block for block in blocks("python") if "OpenAI(" in block]
    asked = re.search(r'model="([^"]+)"', client)
    assert asked is not None
    assert load_config(ROOT / CONFIG).serve.model_id == asked[1]


def test_the_readme_s_client_streams_from_a_served_pair(
    tiny_run_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import distill
    from pipelines import standard

    config = distill.load_config(tiny_run_config)
    store = distill.ArtifactStore(tmp_path)
    artifacts = standard.run(config, store, until="distill").artifacts
    inputs: dict[str, Any] = {"distill": artifacts["distill"]}
    (code,) = [block for block in blocks("python") if "from openai" in block]
    with distill.serve(config.serve, store, inputs=inputs, block=False) as server:
        code = code.replace("http://127.0.0.1:8000/v1", server.base_url)
        code = code.replace("SmolLM2-135M-Instruct", "target")
        exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_readme_s_results_come_from_a_run() -> None:
    results = README.split("<!-- results:begin -->")[1].split("<!-- results:end -->")[0]
    assert "| temperature |" in results
    for fact in ("configs/quickstart.yaml", "commit", "cores"):
        assert fact in results
