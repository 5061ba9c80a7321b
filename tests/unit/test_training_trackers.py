"""Owns who follows a run: the file of JSON lines, trackers by name, what is missing.

Refuses to know training; a tracker's own library is a stand-in here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pydantic
import pytest

from distill.errors import ConfigError
from distill.training import trackers
from distill.training.config import TrainingConfig
from distill.training.trackers import flat, open_trackers

RECORD: dict[str, Any] = {
    "step": 4,
    "held_out": {"acceptance": 0.5},
    "decoded": [
        {"temperature": 0.0, "block_efficiency": 2.0},
        {"temperature": 1.0, "block_efficiency": 1.5},
    ],
}


def test_lines_are_appended_with_their_time_and_survive_a_second_run(tmp_path: Path) -> None:
    for step in (1, 2):
        (tracker,) = open_trackers(["jsonl"], directory=tmp_path, run_name="run", settings={})
        tracker.log({"step": step, "loss": 0.5})
        tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["time"].endswith("+00:00") for line in lines)


def test_records_are_told_as_numbers_under_flat_names() -> None:
    assert dict(flat(RECORD)) == {
        "step": 4,
        "held_out/acceptance": 0.5,
        "decoded/T0/temperature": 0.0,
        "decoded/T0/block_efficiency": 2.0,
        "decoded/T1/temperature": 1.0,
        "decoded/T1/block_efficiency": 1.5,
    }
    assert dict(flat({"trackers": ("jsonl",), "loss": [{"name": "jsd"}]})) == {
        "trackers": "('jsonl',)",
        "loss/0/name": "jsd",
    }


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_tracker_that_is_not_installed_is_an_error_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"trackers names {name}.*`pip install {name}`"):
        open_trackers(["jsonl", name], directory=tmp_path, run_name="run", settings={})
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_refused_when_it_is_read() -> None:
    with pytest.raises(pydantic.ValidationError, match="'jsonl', 'tensorboard', 'trackio'"):
        TrainingConfig(trackers=("mlflow",))
    assert TrainingConfig().trackers == ("jsonl",)


def test_a_named_tracker_is_started_told_numbers_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through accelerate's own class, on a stand-in for the library behind it."""
    told: list[Any] = []

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            told.append((step, values))

        def finish(self) -> None:
            told.append("finished")

    library = types.ModuleType("trackio")
    library.__spec__ = importlib.util.spec_from_loader("trackio", loader=None)
    library.init = lambda project, name: told.append((project, name)) or Run()  # type: ignore[attr-defined]
    library.config = types.SimpleNamespace(  # type: ignore[attr-defined]
        update=lambda values, **_: told.append(values)
    )
    monkeypatch.setitem(sys.modules, "trackio", library)
    (tracker,) = open_trackers(
        ["trackio"], directory=tmp_path, run_name="distill-12", settings={"seed": 1}
    )
    tracker.log(RECORD | {"loss_name": "jsd"})
    tracker.finish()
    numbers = {k: v for k, v in flat(RECORD) if k != "step"}
    assert told == [("distill", "distill-12"), {"seed": 1}, (4, numbers), "finished"]


def test_no_trackers_library_is_imported_unless_it_is_named(tmp_path: Path) -> None:
    open_trackers(["jsonl"], directory=tmp_path, run_name="run", settings={})
    assert not {"wandb", "trackio", "tensorboard"} & set(sys.modules)
    assert set(trackers.PACKAGES) == {"tensorboard", "trackio", "wandb"}
