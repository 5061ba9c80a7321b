"""Owns who follows a run while it trains: a file of JSON lines, or a tracker by its name.

Refuses to know what is trained. What is followed here holds clocks and may repeat steps after a
kill; the log in the artifact does neither.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from distill.errors import ConfigError
from distill.training.config import TrackerName

# The package behind each tracker that comes with no installation of ours.
PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}
_PROJECT = "distill"


class Tracker(Protocol):
    """What is told about a run."""

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of the training log; its ``step`` is in it."""

    def finish(self) -> None:
        """The run ended, well or not."""


class JsonTracker:
    """A file that grows by one JSON object a line: ``time`` (UTC) and the record."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line; opened anew each time, so that a kill loses at most this line."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **record}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """Nothing is held open."""


def disable_hub_telemetry() -> None:
    """Switch off the hub client's usage reports, whether it was imported already or not.

    It reads the environment once, when it is imported, and its own constant ever after.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True


class NamedTracker:
    """One of accelerate's trackers: tensorboard, trackio or wandb."""

    def __init__(
        self, name: TrackerName, *, directory: Path, run_name: str, settings: Mapping[str, Any]
    ) -> None:
        require_package(name)
        # read at the first import of the library: errors stay here, and so does who uses it
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        disable_hub_telemetry()
        self._tracker = _make(name, directory, run_name)
        self._tracker.start()
        self._tracker.store_init_configuration(dict(flat(settings)))

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand the record's numbers on, under names such as ``held_out/acceptance``."""
        values = {name: value for name, value in flat(record) if isinstance(value, int | float)}
        self._tracker.log(values, step=values.pop("step"))

    def finish(self) -> None:
        """Close the run."""
        self._tracker.finish()


def open_trackers(
    names: Sequence[TrackerName], *, directory: Path, run_name: str, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Start the trackers named; their files go under ``directory``, named after the run.

    Raises:
        ConfigError: a tracker's package is not installed.
    """
    for name in names:
        require_package(name)
    trackers: list[Tracker] = []
    for name in names:
        if name == "jsonl":
            trackers.append(JsonTracker(directory / f"{run_name}.jsonl"))
        else:
            trackers.append(
                NamedTracker(name, directory=directory, run_name=run_name, settings=settings)
            )
    return trackers


def require_package(name: TrackerName) -> None:
    """Check that a tracker's package is here, without importing it.

    Raises:
        ConfigError: it is not; the message has the line that installs it.
    """
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"distill.trackers names {name}, and the package {package} is not installed. Run "
            f"`pip install {package}`, or leave {name} out."
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested records, as ("held_out/acceptance", 0.7); settings stay readable.

    The entries of a list are told apart by their temperature, else by their place.
    """
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}/")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for place, entry in enumerate(value):
                part = f"T{entry['temperature']:g}" if "temperature" in entry else str(place)
                yield from flat(entry, f"{name}/{part}/")
        elif value is None or isinstance(value, bool | int | float | str):
            yield name, value
        else:
            yield name, str(value)


def _make(name: TrackerName, directory: Path, run_name: str) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

    PartialState()  # the trackers ask it whether they are the main process
    if name == "tensorboard":
        return TensorBoardTracker(run_name, directory)
    if name == "wandb":
        return WandBTracker(_PROJECT, name=run_name, dir=str(directory))
    return TrackioTracker(_PROJECT, name=run_name)
