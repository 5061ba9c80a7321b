"""A run that is SIGKILLed in each stage and started again ends where an uninterrupted one ends.

Refuses to know where inside a stage the kill falls: each stage has kill tests of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distill.artifacts import ArtifactStore
from distill.stages.run_config import load_config
from pipelines import standard

# What a stage leaves in its unfinished folder once it is at work.
AT_WORK = {
    "generate": "generate/*.partial/work/shard-*",
    "distill": "distill/*.partial/work/*",
    "measure": "measure/*.partial/work/*",
}
TIMEOUT_S = 120


def start(config: Path, root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "distill", "run", str(config), "--artifacts", str(root)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"CI": "1"}
    )


def kill_once_at_work(config: Path, root: Path, pattern: str) -> None:
    process = start(config, root)
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and not list(root.glob(pattern)):
        assert time.monotonic() < deadline, f"nothing appeared at {pattern}"
        time.sleep(0.005)  # polling another process, not waiting for luck
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


def finished(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/*/manifest.json"))


def test_kills_in_every_stage_change_no_fingerprint_and_no_byte(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    config = load_config(tiny_run_config)
    whole = standard.run(config, ArtifactStore(tmp_path / "whole")).artifacts

    root = tmp_path / "killed"
    for number, pattern in enumerate(AT_WORK.values()):
        kill_once_at_work(tiny_run_config, root, pattern)
        visible = [path for path in finished(root) if path.suffix != ".partial"]
        assert len(visible) == number, "a half artifact is visible, or a whole one is not"

    last = start(tiny_run_config, root)
    _, errors = last.communicate(timeout=TIMEOUT_S)
    assert last.returncode == 0, errors.decode()
    killed = standard.run(config, ArtifactStore(root))
    assert killed.hits == standard.STAGES
    for name, artifact in killed.artifacts.items():
        assert artifact.fingerprint == whole[name].fingerprint
        assert artifact.manifest.files == whole[name].manifest.files, name
    assert not list(root.rglob("*.partial"))
