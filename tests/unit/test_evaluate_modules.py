"""Owns the tests that the `evaluate` modules load from their folders, offline, and count right.

Refuses to test the counting itself twice: test_metrics.py does; here two golden values suffice.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")

evaluate = pytest.importorskip("evaluate")

from distill.errors import ConfigError, RegistryError  # noqa: E402
from distill.metrics.evaluate_modules import MODULES, module_path  # noqa: E402

SPEEDUP = (MODULES[2], {"draft_cost_ratio": 0.125})
ROUNDS = {"predictions": [2, 0, 4], "references": [4, 4, 4]}


@pytest.fixture(autouse=True, scope="module")
def _private_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # evaluate copies a module before importing it; keep the copies out of the user's cache. Once
    # for all tests: Python remembers where the package of copies was first found.
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("modules")
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(cache))
        yield


def _load(name: str, tmp_path: Path) -> Any:
    return evaluate.load(str(module_path(name)), cache_dir=str(tmp_path), keep_in_memory=True)


def test_acceptance_rate_is_over_tested_tokens(tmp_path: Path) -> None:
    result = _load("acceptance_rate", tmp_path).compute(**ROUNDS)
    assert result["acceptance_rate"] == 6 / 8
    assert result["draft_acceptance_rate"] == 6 / 12


def test_block_efficiency_includes_the_bonus_token(tmp_path: Path) -> None:
    result = _load("block_efficiency", tmp_path).compute(**ROUNDS)
    assert result == {"block_efficiency": 3.0, "num_emitted": 9, "num_target_calls": 3}


def test_expected_speedup_by_hand(tmp_path: Path) -> None:
    # 3 tokens per round over 4 * .125 + 1 = 1.5 target steps.
    result = _load("expected_speedup", tmp_path).compute(**ROUNDS, draft_cost_ratio=0.125)
    assert result == {"expected_speedup": 2.0, "block_efficiency": 3.0}


def test_expected_speedup_pays_for_verification(tmp_path: Path) -> None:
    result = _load("expected_speedup", tmp_path).compute(
        **ROUNDS, draft_cost_ratio=0.125, verify_cost_ratio=1.5
    )
    assert result["expected_speedup"] == 1.5


@pytest.mark.parametrize(("name", "options"), [*((n, {}) for n in MODULES[:2]), SPEEDUP])
def test_the_class_itself_gives_what_the_loaded_module_gives(
    name: str, options: dict[str, float], tmp_path: Path
) -> None:
    module = importlib.import_module(f"distill.metrics.evaluate_modules.{name}.{name}")
    class_name = "".join(word.title() for word in name.split("_"))
    metric = getattr(module, class_name)(cache_dir=str(tmp_path / "own"), keep_in_memory=True)
    loaded = _load(name, tmp_path)
    assert metric.compute(**ROUNDS, **options) == loaded.compute(**ROUNDS, **options)


def test_batches_add_up(tmp_path: Path) -> None:
    metric = _load("acceptance_rate", tmp_path)
    metric.add_batch(predictions=[2, 0], references=[4, 4])
    metric.add_batch(predictions=[4], references=[4])
    assert metric.compute()["acceptance_rate"] == 6 / 8


def test_impossible_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accepted 5 of 4"):
        _load("acceptance_rate", tmp_path).compute(predictions=[5], references=[4])


@pytest.mark.parametrize("name", MODULES)
def test_every_module_describes_its_inputs(name: str, tmp_path: Path) -> None:
    module = _load(name, tmp_path)
    assert "predictions" in module.inputs_description
    assert "2211.17192" in module.citation


def test_an_unknown_module_lists_the_known_ones() -> None:
    with pytest.raises(RegistryError, match="block_efficiency"):
        module_path("nope")
