"""Owns the tests of comparing runs: what is paired, what is noted, what is refused and how.

Refuses to run a model: measure artifacts are built in a real store from numbers worked out here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from distill.artifacts import Artifact, ArtifactStore
from distill.config import Config
from distill.errors import ArtifactError, ArtifactMissingError
from distill.metrics import acceptance, summary
from distill.metrics.sentences import difference_sentence
from distill.metrics.summary import PromptRecord
from distill.report import compare_runs, comparison_table, served_table


class Model(Config):
    """Stands in for the settings of a model."""

    model: str = "org/target"
    dtype: str = "auto"
    quantize: str = "none"


class Settings(Config):
    """Stands in for the settings of a measurement."""

    target: Model = Model()
    draft: Model | None = Model(model="org/draft", quantize="int8")
    seed: int = 0


def _records(gain: int, num_prompts: int) -> list[PromptRecord]:
    records = []
    for n in range(num_prompts):
        rounds = [(gain + n + i) % 5 for i in range(6)]
        counts = {
            **acceptance.summarize_rounds(rounds, 4),
            "proposed_by_position": [6] * 4,
            "tested_by_position": [sum(a >= i for a in rounds) for i in range(4)],
            "accepted_by_position": [sum(a > i for a in rounds) for i in range(4)],
            "num_rounds": len(rounds),
            "accepted_length_histogram": [rounds.count(k) for k in range(5)],
        }
        sums = {rule: 6.0 + gain + 0.3 * n for rule in acceptance.RULES}
        records.append(PromptRecord("draft", 0.0, f"p{n}", "chat", counts, 30, sums))
    return records


def _rows(records: Sequence[PromptRecord]) -> list[dict[str, Any]]:
    return [
        {"draft": r.draft, "temperature": r.temperature, "prompt_id": r.prompt_id, "task": r.task}
        | dict(r.counts)
        | {"num_positions": r.num_positions}
        | {f"analytic_{rule}": value for rule, value in r.acceptance_sums.items()}
        for r in records
    ]


def _measured(
    root: Path,
    *,
    gain: int = 1,
    num_prompts: int = 9,
    settings: Settings | None = None,
    corpus: str | None = "sha256:one",
    inputs: Mapping[str, str] | None = None,
    timing: Mapping[str, Any] | None = None,
    **content: Any,
) -> Artifact:
    """A measure artifact of one draft at temperature 0."""
    store, records = ArtifactStore(root), _records(gain, num_prompts)
    told = {
        "schema_version": 2,
        "num_draft_tokens": 4,
        "max_new_tokens": 64,
        "drafts": ["draft"],
        "primary": "draft",
        "cells": summary.summarize(records, num_draft_tokens=4, seed=0),
        "lossless": {"dtype": "bfloat16"},
    }

    def build(partial: Path) -> dict[str, Any]:
        (partial / "acceptance.json").write_text(json.dumps(told | content), encoding="utf-8")
        pq.write_table(pa.Table.from_pylist(_rows(records)), partial / "records.parquet")
        return {"timing": timing or {}, "verdict": {"ship": True}}

    revisions = {"target": "t1", "draft/draft": "d1", "salt": f"{gain} {num_prompts} {content}"}
    revisions |= {} if corpus is None else {"corpus": corpus}
    key = store.key("measure", 5, settings or Settings(), inputs=inputs or {}, revisions=revisions)
    return store.get_or_build(key, build)


def _run(root: Path, name: str, **changes: Any) -> Artifact:
    """A measured run with a report, as far as a comparison reads one."""
    artifact = _measured(root, **changes)
    report = {
        "name": name,
        "artifacts": {"measure": {"path": str(artifact.path), "fingerprint": artifact.fingerprint}},
    }
    path = root / "reports" / name / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(report), encoding="utf-8")
    return artifact


def _compare(root: Path, *names: str) -> Any:
    return compare_runs(ArtifactStore(root), names or ("a", "b"))


def _printed(table: Any) -> str:
    console = Console(width=130, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


# ---------------------------------------------------------------- which prompts are the same


def test_equal_ids_of_different_corpora_are_not_paired_and_the_note_names_both(
    tmp_path: Path,
) -> None:
    _run(tmp_path, "a")
    _run(tmp_path, "b", gain=2, corpus="sha256:two")
    found = _compare(tmp_path)
    assert found["differences"] == []
    assert [run["corpus"] for run in found["runs"]] == ["sha256:one", "sha256:two"]
    (note,) = found["notes"]
    assert "a and b were asked the prompts of different corpora (sha256:one and sha256:two)" in note


def test_prompts_of_one_corpus_are_paired_without_a_note(tmp_path: Path) -> None:
    _run(tmp_path, "a")
    _run(tmp_path, "b", gain=2)
    found = _compare(tmp_path)
    assert [row["num_prompts"] for row in found["differences"]] == [9, 9]
    assert found["notes"] == []


def _answers(root: Path, corpus: str, seed: int) -> str:
    store = ArtifactStore(root)
    key = store.key("generate", 1, Settings(seed=seed), revisions={"corpus": corpus})
    return store.get_or_build(key, lambda partial: {}).fingerprint


def test_trained_runs_are_paired_by_the_corpus_their_answers_were_to(tmp_path: Path) -> None:
    one, again = (_answers(tmp_path, "sha256:one", seed) for seed in (1, 2))
    two = _answers(tmp_path, "sha256:two", 3)
    own = _answers(tmp_path, "self_synthesis:x", 4)
    other = _answers(tmp_path, "self_synthesis:x", 5)
    for name, answers in {"one": one, "again": again, "two": two, "own": own, "x": other}.items():
        _run(tmp_path, name, corpus=None, inputs={"generate": answers}, gain=len(name))
    _run(tmp_path, "own2", corpus=None, inputs={"generate": own}, gain=5)
    assert _compare(tmp_path, "one", "again")["notes"] == []
    assert "different corpora" in _compare(tmp_path, "one", "two")["notes"][0]
    # What a target made up has no text of a file: the same answers are the same prompts.
    assert _compare(tmp_path, "own", "own2")["notes"] == []
    assert (
        "whether the texts are the same is not known" in _compare(tmp_path, "own", "x")["notes"][0]
    )


def test_a_run_whose_answers_were_deleted_is_paired_with_a_note(tmp_path: Path) -> None:
    answers = _answers(tmp_path, "sha256:one", 1)
    _run(tmp_path, "a", corpus=None, inputs={"generate": answers})
    _run(tmp_path, "b", gain=2)
    shutil.rmtree(tmp_path / "generate")
    found = _compare(tmp_path)
    assert len(found["differences"]) == 2
    assert "paired by the ids of their prompts; whether" in found["notes"][0]


# ---------------------------------------------------------------- what else has to be the same


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"lossless": {"dtype": "float32"}},
            "target.dtype is not the same (a bfloat16, b float32)",
        ),
        (
            {"settings": Settings(target=Model(quantize="int8"))},
            "target.quantize is not the same (a none, b int8)",
        ),
        ({"max_new_tokens": 96}, "max_new_tokens is not the same (a 64, b 96)"),
        ({"num_draft_tokens": 3}, "num_draft_tokens is not the same (a 4, b 3)"),
    ],
)
def test_what_differs_beside_the_draft_is_noted_with_both_values(
    changes: dict[str, Any], note: str, tmp_path: Path
) -> None:
    _run(tmp_path, "a")
    _run(tmp_path, "b", **changes)
    (found,) = _compare(tmp_path)["notes"]
    assert note in found


def _timing(**changes: Any) -> dict[str, Any]:
    conditions = {"device_name": "a CPU", "num_threads": 2, "dtype": "bfloat16", "torch": "2"}
    speedup = {"value": 1.5, "low": 1.4, "high": 1.6, "num_prompts": 8}
    run = {"draft": "draft", "temperature": 0.0, "num_draft_tokens": 3, "speedup": speedup}
    longest = changes.pop("max_new_tokens", 64)
    return {
        "conditions": conditions | changes,
        "max_new_tokens": longest,
        "runs": [run | {"predicted_speedup": 1.6}],
    }


@pytest.mark.parametrize(
    ("name", "value"), [("num_threads", 8), ("device_name", "a GPU"), ("max_new_tokens", 32)]
)
def test_speedups_of_other_machines_or_lengths_are_noted(
    name: str, value: Any, tmp_path: Path
) -> None:
    _run(tmp_path, "a", timing=_timing())
    _run(tmp_path, "b", gain=2, timing=_timing(**{name: value}))
    (note,) = _compare(tmp_path)["notes"]
    assert f"timing.{name} is not the same" in note
    assert f"b {value})" in note


def test_a_comparison_names_every_runs_target_and_draft(tmp_path: Path) -> None:
    _run(tmp_path, "a")
    _run(tmp_path, "b", settings=Settings(draft=Model(model="org/other", dtype="float32")))
    rows = _compare(tmp_path)["runs"]
    assert rows[0]["target"] == {
        "model": "org/target",
        "dtype": "bfloat16",
        "quantize": "none",
        "revision": "t1",
    }
    assert [row["draft"]["model"] for row in rows] == ["org/draft", "org/other"]
    assert [row["draft"]["quantize"] for row in rows] == ["int8", "none"]


# ---------------------------------------------------------------- where runs lie


def test_runs_are_found_where_the_artifacts_folder_was_moved_to(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _run(old, "a")
    _run(old, "b", gain=2)
    old.rename(new)
    by_name = _compare(new)
    assert len(by_name["differences"]) == 2
    # A report's own folder tells where its artifact is, whatever --artifacts says.
    by_path = _compare(tmp_path / "elsewhere", *(str(new / "reports" / name) for name in "ab"))
    assert by_path["differences"] == by_name["differences"]


def test_another_artifact_in_the_old_place_is_not_taken_for_the_reports(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    measured = _run(old, "a")
    _run(old, "b", gain=2)
    old.rename(new)
    other = _measured(old, gain=3)
    other.path.rename(measured.path)
    assert len(_compare(new)["differences"]) == 2


def test_a_report_whose_artifact_is_gone_names_it_and_the_way_out(tmp_path: Path) -> None:
    measured = _run(tmp_path, "a")
    shutil.rmtree(measured.path)
    with pytest.raises(ArtifactMissingError) as caught:
        _compare(tmp_path, "a", "a")
    assert measured.fingerprint[:12] in str(caught.value)
    assert "--artifacts" in str(caught.value)


def test_a_run_is_found_although_a_folder_here_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "store", "a")
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _compare(tmp_path / "store", "a", "a")["notes"] == []


def test_a_measure_artifact_is_found_by_folder_fingerprint_and_leading_digits(
    tmp_path: Path,
) -> None:
    artifact = _measured(tmp_path)
    digits = artifact.fingerprint
    names = (digits, digits[:6], f"measure/{digits[:12]}", str(artifact.path))
    assert len(_compare(tmp_path, *names)["runs"]) == 4
    with pytest.raises(ArtifactMissingError, match="neither a run"):
        _compare(tmp_path, digits[:12] + "0" * 52, digits)


# ---------------------------------------------------------------- what is refused


def test_an_unknown_run_is_answered_with_what_can_be_compared_and_nothing_else(
    tmp_path: Path,
) -> None:
    artifact = _run(tmp_path, "a")
    answers = _answers(tmp_path, "sha256:one", 1)
    with pytest.raises(ArtifactMissingError) as caught:
        _compare(tmp_path, "a", "nosuch")
    message = str(caught.value)
    assert "Runs: a." in message
    assert f"Measure artifacts: measure/{artifact.path.name}." in message
    assert answers[:12] not in message
    assert "generate" not in message


def test_many_runs_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    for n in range(15):
        _run(tmp_path, f"run{n:02}", gain=n)
    with pytest.raises(ArtifactMissingError, match="run11 and 3 more"):
        _compare(tmp_path, "nosuch", "run00")


@pytest.mark.parametrize("reference", ["", " ", ".", "..", "folder", "x" * 300, "\0", "a/b/c"])
def test_what_names_no_run_is_refused_and_nothing_is_said_to_be_deleted(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    _run(tmp_path / "store", "a")
    with pytest.raises(ArtifactMissingError) as caught:
        _compare(tmp_path / "store", "a", reference)
    assert "elete" not in str(caught.value)
    assert "Runs: a." in str(caught.value)


def _served(**changes: Any) -> dict[str, Any]:
    records = _records(1, 9)
    return {
        "name": "served",
        "url": "http://127.0.0.1:1",
        "primary": "draft",
        "num_draft_tokens": 4,
        "num_prompts": 9,
        "num_unanswered": 0,
        "num_foreign_tokens": 0,
        "cells": summary.summarize(records, num_draft_tokens=4, seed=0),
        "records": [
            {k: v for k, v in row.items() if not k.startswith("analytic")} for row in _rows(records)
        ],
    } | changes


def test_a_served_measurement_is_paired_by_ids_with_a_note(tmp_path: Path) -> None:
    _run(tmp_path, "a")
    path = tmp_path / "served.json"
    path.write_text(json.dumps(_served()))
    found = _compare(tmp_path, "a", str(path))
    assert found["differences"][0]["num_prompts"] == 9
    assert "whether the texts are the same is not known" in found["notes"][0]


_CELL = _served()["cells"][0]
_RECORD = _served()["records"][0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"name": 5, "artifacts": {"measure": {"path": 5, "fingerprint": "x"}}}, "name: "),
        ({"name": "n", "artifacts": {"measure": {"path": 5}}}, "artifacts.measure.path: "),
        ({"name": "n", "artifacts": {"measure": {"path": "x"}}}, "artifacts.measure.fingerprint: "),
        ({"name": "n", "artifacts": {"measure": None}}, "artifacts.measure: "),
        (_served(cells=[{}]), "cells.0.draft: "),
        (_served(cells=[_CELL | {"acceptance_rate": 0.5}]), "cells.0.acceptance_rate: "),
        (_served(cells=[_CELL | {"temperature": "0"}]), "cells.0.temperature: "),
        (_served(cells=5), "cells: "),
        (_served(records=[{}]), "records.0.draft: "),
        (_served(records=[_RECORD | {"num_tested": -1}]), "records.0.num_tested: "),
        (_served(records=[_RECORD | {"num_tested": "1"}]), "records.0.num_tested: "),
        (_served(records={"a": 1}), "records: "),
        (_served(name=5), "name: "),
        (_served(num_draft_tokens=None), "num_draft_tokens: "),
    ],
)
def test_a_file_of_the_wrong_shape_is_refused_by_the_place_that_is_wrong(
    content: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError) as caught:
        _compare(tmp_path, str(path), str(path))
    assert f"({words}" in str(caught.value)
    assert str(path) in str(caught.value)


def test_json_that_is_nested_too_deeply_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ArtifactError, match="is not JSON"):
        _compare(tmp_path, str(path), str(path))


def test_an_artifact_of_another_version_is_to_be_measured_again(tmp_path: Path) -> None:
    _run(tmp_path, "a", cells=[{"draft": "draft"}])
    with pytest.raises(ArtifactError, match="measure the run again"):
        _compare(tmp_path, "a", "a")


# ---------------------------------------------------------------- few prompts


@pytest.mark.parametrize("low_high", [(-0.1, 0.1), (0.01, 0.1), (-0.1, -0.01), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("num_prompts", [7, 8])
def test_every_sentence_over_few_prompts_says_so(
    low_high: tuple[float, float], num_prompts: int
) -> None:
    low, high = low_high
    estimate = {"value": (low + high) / 2, "low": low, "high": high}
    row = {"analytic_acceptance_rate": estimate, "acceptance_rate": estimate}
    sentence = difference_sentence("b", "a", row, temperature=0.0, num_prompts=num_prompts)
    assert ("fewer than 8 prompts are too few to rely on" in sentence) is (num_prompts < 8)


def test_intervals_over_few_prompts_are_marked_in_the_table(tmp_path: Path) -> None:
    _run(tmp_path, "a", num_prompts=7)
    _run(tmp_path, "b", num_prompts=8)
    text = _printed(comparison_table(_compare(tmp_path)))
    line = next(line for line in text.splitlines() if "acceptance rate, decoded" in line)
    assert line.count("]") == 2
    assert line.count("]*") == 1
    assert "* fewer than 8 prompts are too few to rely on" in text
    _run(tmp_path, "c", num_prompts=9)
    assert "*" not in _printed(comparison_table(_compare(tmp_path, "b", "c")))


def test_a_served_table_marks_few_prompts(tmp_path: Path) -> None:
    few = summary.summarize(_records(1, 7), num_draft_tokens=4, seed=0)
    assert "* fewer than 8 prompts are too few" in _printed(served_table(_served(cells=few)))
    assert "*" not in _printed(served_table(_served()))


def test_a_name_is_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    path.write_text(json.dumps(_served(name="[/red] run")))
    found = _compare(tmp_path, str(path), str(path))
    assert "[/red] run (1)" in _printed(comparison_table(found))
    assert "[/red] run" in _printed(served_table(_served(name="[/red] run")))
