"""Ctrl-C, a disk that fills while generating, and the log that tells of both."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.artifacts import ArtifactStore
from distill.errors import DiskSpaceError
from distill.stages.generate import GenerateConfig, generate, generate_key
from distill.stages.generate_resume import finishing_on_interrupt
from tests.generate_helpers import hashes_of, scripted_config, use_script
from tests.helpers import make_corpus_rows, write_jsonl

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _ctrl_c_as_in_a_terminal() -> Iterator[None]:
    """A shell starts what it runs in the background with SIGINT ignored, and so these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> GenerateConfig:
    path = write_jsonl(tmp_path / "p.jsonl", make_corpus_rows(12))
    return scripted_config(tiny_pair_dirs[1], path)


def lines_of(root: Path) -> list[dict[str, Any]]:
    (log,) = (root / "logs").iterdir()
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------- Ctrl-C


def test_ctrl_c_finishes_the_rows_in_flight_keeps_them_and_says_how_to_go_on(
    config: GenerateConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = hashes_of(run_quietly(config, tmp_path / "whole", monkeypatch))
    num_asked = 0

    def script(text: str, sample: int) -> str:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 6:  # the second of three chunks, its second row of four
            os.kill(os.getpid(), signal.SIGINT)
        return "fine"

    use_script(monkeypatch, script)
    store = ArtifactStore(tmp_path / "store")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generate(config, store)
    assert num_asked == 8
    assert signal.getsignal(signal.SIGINT) is before
    assert "finishing the rows in flight" in caplog.text
    assert "stopped after 2 of 3 chunks" in caplog.text
    assert "the same command goes on from there" in caplog.text
    assert lines_of(store.root)[-1]["event"] == "interrupted"
    artifact = generate(config, store)
    assert num_asked == 12
    assert artifact.metrics["num_chunks_resumed"] == 2
    assert hashes_of(artifact) == whole


def run_quietly(config: GenerateConfig, root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    use_script(monkeypatch, lambda text, sample: "fine")
    return generate(config, ArtifactStore(root))


def test_a_second_ctrl_c_stops_at_once() -> None:
    with finishing_on_interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_command_line_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from distill.cli.errors import reports_user_errors

    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as exit_:
        reports_user_errors(command)()
    assert exit_.value.exit_code == 130


# ---------------------------------------------------------------- the disk


def test_a_disk_that_others_fill_stops_the_run_before_it_is_full(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10**9

    def script(text: str, sample: int) -> str:
        nonlocal free
        free -= 12 * 10**7
        return "fine"

    use_script(monkeypatch, script)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, max(0, free)))
    store = ArtifactStore(tmp_path / "store")
    # four answers of at most 1.5 million tokens, 16 bytes each: 96 MB, 106 with the margin
    greedy = config.model_copy(update={"max_new_tokens": 1_500_000})
    with pytest.raises(DiskSpaceError, match=r"10% margin.*2 of 3 chunks were answered and are"):
        generate(greedy, store)
    assert lines_of(store.root)[-1] == {
        "time": lines_of(store.root)[-1]["time"],
        "event": "disk_full",
        "num_done": 2,
    }
    work = store.partial_dir(generate_key(greedy, store)) / "work"
    assert len(list(work.glob("shard-*.parquet"))) == 2
    free = 10**12
    assert generate(greedy, store).metrics["num_chunks_resumed"] == 2


def test_a_run_needs_a_tenth_more_than_it_may_write(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, lambda text, sample: "fine")
    roomy = config.model_copy(update={"max_new_tokens": 1_000_000})
    answers = 12 * 1_000_000 * 16
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, int(1.05 * answers)))
    with pytest.raises(DiskSpaceError, match="12 completions of up to 1000000 tokens"):
        generate(roomy, ArtifactStore(tmp_path / "tight"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, int(1.15 * answers)))
    generate(roomy, ArtifactStore(tmp_path / "enough"))


# ---------------------------------------------------------------- the log


def test_the_log_tells_rows_rates_and_what_went_wrong(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.backends.base import Completion
    from distill.stages import progress

    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.0)
    said: list[Any] = ["fine", Completion(0, 0, (5, 6), "length"), None]
    asked = use_script(monkeypatch, lambda text, sample: said[len(asked) % 3])
    store = ArtifactStore(tmp_path / "store")
    artifact = generate(config, store)
    lines = lines_of(store.root)
    assert [line["event"] for line in lines if line["event"] != "progress"] == [
        "started",
        *["chunk"] * 3,
        "finished",
    ]
    assert lines[0] | {"time": ""} == {
        "time": "",
        "event": "started",
        "num_chunks": 3,
        "num_pending": 3,
    }
    chunks = [line for line in lines if line["event"] == "chunk"]
    assert [line["num_done"] for line in chunks] == [4, 8, 12]
    last = chunks[-1]
    assert last["num_answers"] == 12
    assert last["num_truncated"] == artifact.metrics["num_truncated"] == 4
    assert last["num_failed"] == artifact.metrics["num_failed"] == 4
    assert last["eta_s"] == 0.0
    assert last["num_tokens"] == 8
    progressed = [line for line in lines if line["event"] == "progress"]
    assert {"tokens_per_s", "elapsed_s", "eta_s", "num_rejected"} <= set(progressed[0])
    assert lines[-1]["num_prompts"] == 12
