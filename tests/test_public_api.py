"""Owns the public surface: the names in distill.__all__, that they load, and how light import is.
Refuses to know what the names do.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import distill

REPOSITORY = Path(__file__).resolve().parents[1]
HEAVY = ("accelerate", "datasets", "numpy", "pandas", "pyarrow", "torch", "transformers", "trl")
MAX_HELP_CPU_S = 0.5

PUBLIC = [
    "ArtifactStore",
    "__version__",
    "distill_draft",
    "export_draft",
    "generate",
    "load_config",
    "load_draft",
    "measure_acceptance",
    "serve",
    "speculative_decode",
]
# A stage is one function (config, store, *, inputs): the command line, a notebook and a test make
# the same call. generate reads no artifact, so its inputs may be left out.
STAGES = ["generate", "distill_draft", "measure_acceptance", "serve", "export_draft"]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_all_is_the_agreed_surface() -> None:
    assert distill.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(distill))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_public_name_loads_and_is_documented(name: str) -> None:
    item = getattr(distill, name)
    assert callable(item)
    assert inspect.getdoc(item)
    assert not inspect.ismodule(item)


@pytest.mark.parametrize("name", STAGES)
def test_stages_share_one_signature(name: str) -> None:
    parameters = inspect.signature(getattr(distill, name)).parameters
    assert list(parameters)[:2] == ["config", "store"]
    assert parameters["inputs"].kind is inspect.Parameter.KEYWORD_ONLY


def test_at_most_two_positional_arguments_with_defaults_to_name() -> None:
    """Past two, arguments are keyword-only, so that a call can be read."""
    wrong = []
    for name in PUBLIC[2:]:
        item = getattr(distill, name)
        kinds = [p.kind for p in inspect.signature(item).parameters.values()]
        num_positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # speculative_decode(target, draft, prompts, sampling) reads in the order of its own name.
        if num_positional > (4 if name == "speculative_decode" else 2):
            wrong.append(f"{name}: {num_positional}")
    assert wrong == []


def test_importing_a_stage_module_does_not_hide_the_function() -> None:
    code = "import distill.stages.generate, distill.stages.serve, distill; "
    code += "print(distill.generate.__name__, distill.serve.__name__)"
    assert run_python(code).split() == ["generate", "serve"]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'distill' has no attribute 'teacher'"):
        _ = distill.teacher


def test_version_is_the_one_of_the_package() -> None:
    assert distill.__version__.count(".") == 2
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {distill.__version__}" in changelog


def test_types_are_shipped() -> None:
    assert resources.files("distill").joinpath("py.typed").is_file()


def test_importing_the_library_and_its_command_line_loads_nothing_heavy() -> None:
    code = "import json, sys, distill, distill.cli; dir(distill); print(json.dumps([*sys.modules]))"
    loaded = json.loads(run_python(code))
    assert [name for name in HEAVY if name in loaded] == []


def test_help_answers_at_once() -> None:
    """CPU time, not wall time: other work on the machine must not fail this test."""
    seconds = []
    for _ in range(3):
        before = os.times()
        command = [sys.executable, "-m", "distill", "--help"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        after = os.times()
        used = after.children_user - before.children_user
        seconds.append(used + after.children_system - before.children_system)
    assert "distill" in done.stdout
    assert min(seconds) < MAX_HELP_CPU_S
