"""Owns what happens to an artifact when a build is killed, raced, or runs out of disk.
Refuses to know ordinary use (tests/unit/test_artifacts.py) and any real stage.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distill import artifacts
from distill.artifacts import (
    Artifact,
    ArtifactKey,
    ArtifactStore,
    atomic_write,
    require_free_bytes,
)
from distill.config import Config
from distill.errors import DiskSpaceError

REPOSITORY = Path(__file__).resolve().parents[2]

# Shared by every script below: a build of three resumable shards that counts what it computes.
SCRIPT_HEAD = """
import logging, os, signal, sys
from pathlib import Path
from distill.artifacts import ArtifactStore, atomic_write
from distill.config import Config

ROOT = Path(sys.argv[1])

class Settings(Config):
    seed: int = 0

def build(partial, log=None):
    (partial / "work").mkdir(exist_ok=True)
    for n in range(3):
        shard = partial / "work" / f"shard-{n}"
        if not shard.exists():
            if log:
                with log.open("a") as stream:
                    stream.write(f"{n}\\n")
            atomic_write(shard, f"shard {n};")
    (partial / "sub").mkdir(exist_ok=True)
    text = "".join((partial / "work" / f"shard-{n}").read_text() for n in range(3))
    atomic_write(partial / "sub" / "all.txt", text)
    (partial / "count.txt").write_text("3")
    return {}
"""

# One process forks a child per step, so that "killed before every single file operation" is cheap.
# An audit hook sees each operation just before Python asks the operating system for it.
KILL_SCRIPT = (
    SCRIPT_HEAD
    + """
from distill import artifacts

# A killed process loses nothing that it wrote; asking who we are and waiting for the disk, for each
# of some hundred builds, would be all this test does.
artifacts.code_versions = artifacts.package_versions = artifacts.hardware = dict
os.fsync = lambda descriptor: None
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
MODE, REBUILD = sys.argv[2], sys.argv[3] == "rebuild"

class Interrupted(Exception):
    pass

def stop_before(step):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event not in STEPS or not str(arguments[0]).startswith(str(ROOT)):
            return
        seen += 1
        if seen == step:
            if MODE == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Interrupted(event)
    sys.addaudithook(hook)

def run_child(store, key, step):
    child = os.fork()
    if child == 0:
        stop_before(step)
        try:
            store.get_or_build(key, build, rebuild=REBUILD)
        except Interrupted:
            os._exit(3)
        os._exit(0)
    return os.waitpid(child, 0)[1]

expected, step, status = None, 0, 1
while status != 0:
    step += 1
    store = ArtifactStore(ROOT / str(step))
    key = store.key("train", 1, Settings())
    if REBUILD:
        store.get_or_build(key, build)
    status = run_child(store, key, step)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        assert code == (-signal.SIGKILL if MODE == "kill" else 3), (step, code)
    found = store.find(key)  # raises if anything half-written is visible under the final name
    artifact = store.get_or_build(key, build)
    expected = expected or artifact.manifest.files
    assert artifact.manifest.files == expected, step
    assert found is None or found.manifest.files == expected, step
    assert store.find(key) == artifact
    names = [path.name for path in (store.root / "train").iterdir()]
    assert names == [artifact.path.name], (step, names)
    payload = sorted(p.name for p in artifact.path.rglob("*") if p.is_file())
    assert payload == ["all.txt", "count.txt", "manifest.json"], (step, payload)
print(step)
"""
)


class Settings(Config):
    seed: int = 0


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def key(store: ArtifactStore) -> ArtifactKey:
    return store.key("train", 1, Settings())


def build(partial: Path) -> dict[str, Any]:
    (partial / "table.txt").write_text("rows")
    return {}


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("rebuild", ["fresh", "rebuild"])
@pytest.mark.parametrize("mode", ["kill", "raise"])
def test_stopping_before_any_file_operation_leaves_nothing_half_built_and_resumes(
    tmp_path: Path, mode: str, rebuild: str
) -> None:
    process = start(KILL_SCRIPT, str(tmp_path), mode, rebuild)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert int(output) > 30  # so many operations were stopped before, one after the other


def test_killed_build_resumes_from_its_partial_directory(tmp_path: Path) -> None:
    script = SCRIPT_HEAD + """
log = Path(sys.argv[2])
store = ArtifactStore(ROOT)
def killed(partial):
    with log.open("a") as stream:
        stream.write("start\\n")
    (partial / "work").mkdir()
    atomic_write(partial / "work" / "shard-0", "shard 0;")
    atomic_write(partial / "work" / "shard-1", "shard 1;")
    os.kill(os.getpid(), signal.SIGKILL)
key = store.key("train", 1, Settings())
store.get_or_build(key, killed if len(sys.argv) > 3 else lambda partial: build(partial, log))
"""  # fmt: skip
    log = tmp_path / "log"
    first = start(script, str(tmp_path / "root"), str(log), "killed")
    first.communicate()
    assert first.returncode == -9
    assert [path.suffix for path in (tmp_path / "root" / "train").iterdir()] == [".partial"]
    second = start(script, str(tmp_path / "root"), str(log))
    _, errors = second.communicate()
    assert second.returncode == 0, errors
    assert log.read_text().split() == ["start", "2"]  # shards 0 and 1 were not computed again


def test_build_killed_after_its_manifest_is_published_without_building_again(
    store: ArtifactStore, key: ArtifactKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.get_or_build(key, build)
    assert store.find(key) is None
    artifact = store.get_or_build(key, lambda partial: pytest.fail("built again"))
    assert artifact.file("table.txt").read_text() == "rows"


def test_finished_partial_directory_that_was_damaged_is_built_again(
    store: ArtifactStore, key: ArtifactKey, caplog: pytest.LogCaptureFixture
) -> None:
    finished = store.get_or_build(key, build)
    partial = store.partial_dir(key)
    finished.path.rename(partial)
    (partial / "table.txt").write_text("r0ws")
    assert store.get_or_build(key, build).file("table.txt").read_text() == "rows"
    assert "left of it is damaged" in caplog.text


def test_exception_keeps_the_partial_directory_for_the_next_run(
    store: ArtifactStore, key: ArtifactKey, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(partial: Path) -> dict[str, Any]:
        (partial / "work").mkdir()
        (partial / "work" / "shard").write_text("done")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.get_or_build(key, fail)
    assert store.find(key) is None
    with caplog.at_level(logging.INFO, logger="distill"):
        store.get_or_build(key, lambda partial: {"kept": (partial / "work" / "shard").read_text()})
    assert store.find(key).metrics == {"kept": "done"}  # type: ignore[union-attr]
    assert "train: resuming" in caplog.text


def test_two_processes_build_once(tmp_path: Path) -> None:
    script = SCRIPT_HEAD + """
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
sys.stdout.reconfigure(line_buffering=True)
store = ArtifactStore(ROOT)
def held(partial):
    print("inside the build")
    sys.stdin.readline()
    return build(partial)
artifact = store.get_or_build(store.key("train", 1, Settings()), held)
print("has", artifact.path.name)
"""  # fmt: skip
    first = start(script, str(tmp_path))
    assert first.stdout
    assert first.stdin
    lines = [first.stdout.readline() for _ in range(2)]
    assert lines[1] == "inside the build\n"
    second = start(script, str(tmp_path))
    assert second.stdout
    assert second.stdout.readline() == "train: waiting for another process that builds it\n"
    first.stdin.write("go on\n")
    first.stdin.flush()
    one, errors = first.communicate()
    assert first.returncode == 0, errors
    two, errors = second.communicate()
    assert second.returncode == 0, errors
    assert "inside the build" not in two
    assert one.splitlines()[-1] == two.splitlines()[-1]


# --- rebuilds that were killed -------------------------------------------------------------------


def test_leftovers_of_a_killed_rebuild_are_removed_on_reuse(
    store: ArtifactStore, key: ArtifactKey
) -> None:
    store.get_or_build(key, build)
    store.partial_dir(key).mkdir()
    store.get_or_build(key, build)
    assert not store.partial_dir(key).exists()


def test_reuse_leaves_a_rebuild_that_is_still_running_alone(
    store: ArtifactStore, key: ArtifactKey
) -> None:
    old = store.get_or_build(key, build)

    def rebuilding(partial: Path) -> dict[str, Any]:
        assert store.get_or_build(key, build) == old  # a reader, meanwhile
        assert partial.is_dir()
        return build(partial)

    assert store.get_or_build(key, rebuilding, rebuild=True).file("table.txt").is_file()


def test_failed_rebuild_leaves_the_old_artifact_in_place(
    store: ArtifactStore, key: ArtifactKey
) -> None:
    old = store.get_or_build(key, build)
    with pytest.raises(ZeroDivisionError):
        store.get_or_build(key, lambda partial: {"x": 1 / 0}, rebuild=True)
    assert store.find(key) == old


# --- disks ---------------------------------------------------------------------------------------


def disk_with(free: int) -> Any:
    return lambda path: SimpleNamespace(total=10**12, used=10**12 - free, free=free)


def test_room_is_checked_with_a_margin_of_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", disk_with(1_100_000))
    require_free_bytes(tmp_path / "not" / "made" / "yet", 1_000_000, what="500 completions")
    with pytest.raises(DiskSpaceError) as caught:
        require_free_bytes(tmp_path / "x", 1_000_001_000, what="500 completions")
    message = str(caught.value)
    assert "500 completions needs about 1.1 GB" in message
    assert "only 1.1 MB is free" in message
    assert str(tmp_path / "x") in message


def test_sizes_are_written_for_people() -> None:
    from distill.files import readable_bytes

    assert [readable_bytes(n) for n in (0, 999, 1500, 2.5e6, 3e9, 4.2e12, 5e15)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.2 TB",
        "5000.0 TB",
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_keeps_the_work_and_says_how_to_go_on(
    store: ArtifactStore, key: ArtifactKey, code: int
) -> None:
    def fill(partial: Path) -> dict[str, Any]:
        (partial / "work").mkdir()
        (partial / "work" / "shard").write_text("done")
        raise OSError(code, os.strerror(code))

    with pytest.raises(DiskSpaceError, match=r"is full; stage 'train' stopped.*resumes"):
        store.get_or_build(key, fill)
    assert (store.partial_dir(key) / "work" / "shard").read_text() == "done"


def test_full_disk_during_the_commit_is_reported_the_same_way(
    store: ArtifactStore, key: ArtifactKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskSpaceError):
            store.get_or_build(key, build)
    assert store.get_or_build(key, build).file("table.txt").is_file()


def test_other_disk_errors_are_not_renamed(store: ArtifactStore, key: ArtifactKey) -> None:
    def fail(partial: Path) -> dict[str, Any]:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        store.get_or_build(key, fail)


def test_failed_atomic_write_keeps_the_old_file_and_leaves_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    atomic_write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            atomic_write(path, "new")
    assert [item.read_text() for item in tmp_path.iterdir()] == ["old"]


# --- several ranks -------------------------------------------------------------------------------


def commit_while_rank_one_waits(
    store: ArtifactStore, key: ArtifactKey, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Artifact]:
    """Let rank 0 build during the first poll of rank 1; returns what rank 0 got."""
    committed: list[Artifact] = []

    def rank_zero(_seconds: float) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "0")
            committed.append(store.get_or_build(key, build, **options))

    monkeypatch.setattr(artifacts, "time", SimpleNamespace(sleep=rank_zero))
    monkeypatch.setenv("RANK", "1")
    return committed


def test_other_ranks_wait_for_the_artifact_of_rank_zero(
    store: ArtifactStore, key: ArtifactKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = commit_while_rank_one_waits(store, key, monkeypatch)
    got = store.get_or_build(key, lambda partial: pytest.fail("built on rank 1"))
    assert [got] == committed
    assert store.get_or_build(key, build) == got  # a hit needs no waiting
    assert len(committed) == 1


def test_collective_builds_run_on_every_rank_but_only_rank_zero_commits(
    store: ArtifactStore, key: ArtifactKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = commit_while_rank_one_waits(store, key, monkeypatch)
    took_part = []

    def take_part(partial: Path) -> dict[str, Any]:
        took_part.append(partial)
        return {"ignored": 1}

    assert [store.get_or_build(key, take_part, every_rank=True)] == committed
    assert took_part == [store.partial_dir(key)]
    assert committed[0].metrics == {}


def test_other_ranks_do_not_take_the_artifact_that_a_rebuild_replaces(
    store: ArtifactStore, key: ArtifactKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = store.get_or_build(key, build)
    monkeypatch.setattr(artifacts, "_PROCESS_STARTED", datetime.now(UTC))
    committed = commit_while_rank_one_waits(store, key, monkeypatch, rebuild=True)
    got = store.get_or_build(key, build, rebuild=True)
    assert [got] == committed
    assert got.manifest.started > old.manifest.started
