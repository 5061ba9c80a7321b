"""Generate killed at every step it takes on disk, then run again: the same payload, byte for byte.

The child is forked, so it starts where this process is, and dies by SIGKILL: no handler, no
cleanup.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.artifacts import Artifact, ArtifactStore
from distill.corpus import CorpusConfig
from distill.models import ModelConfig
from distill.sampling import SamplingConfig
from distill.stages.generate import GenerateConfig, generate, generate_key
from tests.fork_helpers import kill_self, run_forked
from tests.helpers import make_corpus_rows, write_jsonl

# Two chunks: states and rows of each, the rejected, two tables, the manifest, the final name.
NUM_STEPS = 9


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(
    tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> GenerateConfig:
    rows = [*make_corpus_rows(8), {"id": "long", "turns": ["sea " * 600]}]
    return GenerateConfig(
        target=ModelConfig(model=str(tiny_pair_dirs[1]), device="cpu"),
        corpus=CorpusConfig(
            path=write_jsonl(tmp_path_factory.mktemp("corpus") / "p.jsonl", rows),
            held_out_fraction=0.5,
        ),
        samplings=(SamplingConfig(temperature=1.0), SamplingConfig(temperature=0.0)),
        max_new_tokens=6,
        batch_size=4,
        chunk_size=8,
    )


@pytest.fixture(scope="module")
def expected(config: GenerateConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The payload's hashes of a run that nothing disturbed."""
    return hashes_of(generate(config, ArtifactStore(tmp_path_factory.mktemp("undisturbed"))))


def hashes_of(artifact: Artifact) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in artifact.manifest.files}


def run_and_die(config: GenerateConfig, root: Path, step: int) -> int:
    """Generate in a child that kills itself just before its ``step``-th rename; its exit code."""

    def body() -> None:
        die_before_rename(step)
        generate(config, ArtifactStore(root))

    return run_forked(body)


def die_before_rename(step: int) -> None:
    """Every file and the artifact itself get their name by a rename: those are the steps."""
    done = 0

    def counted(rename: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == step:
                kill_self()
            return rename(*args, **kwargs)

        return call

    os.replace, os.rename = counted(os.replace), counted(os.rename)


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_a_kill_at_any_step_changes_no_byte(
    step: int, config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    store = ArtifactStore(tmp_path)
    assert run_and_die(config, tmp_path, step) == -signal.SIGKILL
    assert store.find(generate_key(config, store)) is None
    resumed = generate(config, store)
    assert hashes_of(resumed) == expected
    assert not list(tmp_path.glob("generate/*.partial"))
    if step < NUM_STEPS:  # the last one finds a complete build, whose manifest is already written
        assert resumed.metrics["num_chunks_resumed"] == min((step - 1) // 2, 2)


def test_there_is_no_step_after_the_last(
    config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    assert run_and_die(config, tmp_path, NUM_STEPS + 1) == 0
    store = ArtifactStore(tmp_path)
    found = store.find(generate_key(config, store))
    assert found is not None
    assert hashes_of(found) == expected


def test_killed_again_and_again_it_still_arrives_at_the_same_bytes(
    config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    for step in (2, 1, 2, 3):
        assert run_and_die(config, tmp_path, step) == -signal.SIGKILL
    assert hashes_of(generate(config, ArtifactStore(tmp_path))) == expected


def test_half_written_files_of_a_killed_run_are_overwritten(
    config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    store = ArtifactStore(tmp_path)
    partial = store.partial_dir(generate_key(config, store))
    assert run_and_die(config, tmp_path, 2) == -signal.SIGKILL  # states are there, rows are not
    states = partial / "hidden-00000.safetensors"
    states.write_bytes(states.read_bytes()[:100])
    (unfinished,) = (partial / "work").iterdir()
    unfinished.write_bytes(unfinished.read_bytes()[:100])
    assert hashes_of(generate(config, store)) == expected
