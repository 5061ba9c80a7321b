"""Owns the behaviour of distill.provenance: versions, commit and machine, without naming either.
Refuses to know what is done with the answers.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import distill
from distill import provenance


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, with a copy of provenance.py that believes it lives there."""
    source = tmp_path / "distill" / "provenance.py"
    source.parent.mkdir()
    shutil.copy(str(provenance.__file__), source)
    git(tmp_path, "init", "--quiet")
    monkeypatch.setattr(provenance, "__file__", str(source))
    return tmp_path


def test_commit_of_a_clean_checkout(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "one")
    assert provenance.code_versions() == {
        "version": distill.__version__,
        "git_sha": git(checkout, "rev-parse", "HEAD"),
        "dirty": False,
    }


def test_changed_file_makes_it_dirty(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "one")
    (checkout / "untracked.txt").write_text("does not count")
    assert provenance.code_versions()["dirty"] is False
    with (checkout / "distill" / "provenance.py").open("a") as stream:
        stream.write("\n")
    assert provenance.code_versions()["dirty"] is True


def test_copy_inside_somebody_elses_repository_reports_no_commit(checkout: Path) -> None:
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "not ours")
    assert provenance.code_versions()["git_sha"] is None
    assert provenance.code_versions()["dirty"] is None


def test_without_git_there_is_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert provenance.code_versions()["git_sha"] is None


def test_packages_that_can_change_results_are_listed() -> None:
    versions = provenance.package_versions()
    assert versions["python"] == platform.python_version()
    assert {"torch", "transformers", "tokenizers", "safetensors"} <= set(versions)


def test_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_PACKAGES", ("no-such-package-anywhere",))
    assert list(provenance.package_versions()) == ["python"]


def test_hardware_is_json_and_names_no_host() -> None:
    hardware = provenance.hardware()
    assert hardware["cpu_count"] >= 1
    assert hardware["memory_bytes"] > 0
    assert platform.node() not in json.dumps(hardware)


def test_unknown_hardware_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(platform, "processor", lambda: "")
    hardware = provenance.hardware()
    assert hardware["memory_bytes"] is None
    assert hardware["cpu"] is None
    assert hardware["cpu_count"] == os.cpu_count()
