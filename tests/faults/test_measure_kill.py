"""Owns the proof that a killed measurement goes on where it was and ends in the same bytes.

Refuses to wait: the child is forked, so it starts where this process is, and dies by SIGKILL just
before a unit gets its name.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from distill import files
from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ArtifactCorruptError
from distill.stages import measure_units
from distill.stages.measure import MeasureConfig, measure_acceptance, measure_key
from tests import measure_helpers as given
from tests.fork_helpers import kill_self, run_forked

# Two temperatures, each with one teacher-forced and two decoding units of two prompts, for three
# prompts in chunks of two: 2 * (1 + 2) * 2. The answers come from generate. Self-tests at both
# temperatures; the law and the scan of draft temperatures at the one above 0.
NUM_UNITS = 12 + 2 + 2


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(tiny_pair_dirs: tuple[Path, Path]) -> MeasureConfig:
    return given.measure_config(tiny_pair_dirs[0], max_new_tokens=8, undistilled=False)


@pytest.fixture(scope="module")
def inputs(
    tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Artifact]:
    store = ArtifactStore(tmp_path_factory.mktemp("inputs"))
    rows = given.held_out_rows(tiny_pair_dirs[0], num_prompts=3, max_new_tokens=8)
    return {
        "generate": given.generate_artifact(store, tiny_pair_dirs[0], rows),
        "distill": given.distill_artifact(store, *tiny_pair_dirs),
    }


@pytest.fixture(scope="module")
def expected(
    config: MeasureConfig, inputs: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """What a run that nothing disturbed gives."""
    store = ArtifactStore(tmp_path_factory.mktemp("undisturbed"))
    return measure_acceptance(config, store, inputs=inputs)


def run_and_die(
    config: MeasureConfig, inputs: dict[str, Artifact], root: Path, num_finished: int
) -> int:
    """Measure in a child that kills itself when it would write one unit more; its exit code."""

    def body() -> None:
        written = 0
        write = files.atomic_write

        def write_or_die(path: Path, data: bytes | str) -> None:
            nonlocal written
            if written == num_finished:
                kill_self()
            written += 1
            write(path, data)

        # The name the units look up; the payload's own files are written after the last unit.
        vars(measure_units)["atomic_write"] = write_or_die
        measure_acceptance(config, ArtifactStore(root), inputs=inputs)

    return run_forked(body)


@pytest.mark.parametrize("num_finished", [0, 1, 5, NUM_UNITS - 1])
def test_a_killed_measurement_resumes_to_the_same_bytes(
    config: MeasureConfig,
    inputs: dict[str, Artifact],
    expected: Artifact,
    tmp_path: Path,
    num_finished: int,
) -> None:
    assert run_and_die(config, inputs, tmp_path, num_finished) == -signal.SIGKILL
    store = ArtifactStore(tmp_path)
    key = measure_key(config, store, inputs=inputs)
    assert store.find(key) is None
    assert len(list((store.partial_dir(key) / "work").glob("*.json"))) == num_finished

    resumed = measure_acceptance(config, store, inputs=inputs)
    assert resumed.metrics["num_units_resumed"] == num_finished
    assert resumed.manifest.files == expected.manifest.files
    assert not store.partial_dir(key).exists()


@pytest.mark.parametrize("damage", ["cut", "emptied", "not text", "a digit", "a list"])
def test_a_damaged_unit_is_refused_by_name_and_only_its_part_is_measured_again(
    config: MeasureConfig,
    inputs: dict[str, Artifact],
    expected: Artifact,
    tmp_path: Path,
    damage: str,
) -> None:
    run_and_die(config, inputs, tmp_path, 3)
    store = ArtifactStore(tmp_path)
    partial = store.partial_dir(measure_key(config, store, inputs=inputs))
    unit = min((partial / "work").glob("*.json"))
    content = unit.read_bytes()
    last_digit = max(content.rfind(digit) for digit in b"0123456789")
    changed = b"7" if content[last_digit : last_digit + 1] != b"7" else b"8"
    unit.write_bytes(
        {
            "cut": content[:20],
            "emptied": b"",
            "not text": b"\xff\xfe" + content,
            "a digit": content[:last_digit] + changed + content[last_digit + 1 :],
            "a list": b"[]",
        }[damage]
    )
    with pytest.raises(ArtifactCorruptError) as caught:
        measure_acceptance(config, store, inputs=inputs)
    assert str(unit) in str(caught.value)
    assert f"the folder {partial} to measure" in str(caught.value)
    unit.unlink()
    resumed = measure_acceptance(config, store, inputs=inputs)
    assert resumed.metrics["num_units_resumed"] >= 2
    assert resumed.manifest.files == expected.manifest.files


def test_a_resumed_measurement_repeats_no_finished_unit(
    config: MeasureConfig,
    inputs: dict[str, Artifact],
    expected: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_and_die(config, inputs, tmp_path, NUM_UNITS - 1)
    written: list[str] = []
    write = files.atomic_write

    def counted(path: Path, data: bytes | str) -> None:
        written.append(path.name)
        write(path, data)

    monkeypatch.setattr(measure_units, "atomic_write", counted)
    measure_acceptance(config, ArtifactStore(tmp_path), inputs=inputs)
    assert written == ["scan-t1.0.json"]
