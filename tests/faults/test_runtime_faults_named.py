"""Owns that what fault tests and docs/exactness.md point at is there: tests by name, files by path.
Refuses to judge whether a test shows what it is named for.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = sorted((ROOT / "tests" / "faults").glob("test_runtime_faults_*.py"))
TESTS = {
    node.name
    for path in (ROOT / "tests").rglob("test_*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef)
} | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("path", FAULTS, ids=lambda path: path.stem)
def test_every_test_that_a_docstring_names_exists(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert [name for name in re.findall(r"\btest_\w+", docstring) if name not in TESTS] == []


def test_every_file_of_the_exactness_page_exists() -> None:
    page = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:distill|tests)/[\w/*]+\.py)`", page)
    assert len(named) > 8
    assert [name for name in named if not list(ROOT.glob(name))] == []
