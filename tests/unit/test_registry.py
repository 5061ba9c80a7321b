"""Owns the behaviour of Registry: registration, look-up by name, discovery of a package's files.
Refuses to know the three real registries: it uses packages written into a temporary folder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError, RegistryError
from distill.registry import Registry

BASE = """
from distill.registry import Registry
COLOURS = Registry("colour", package="{package}")
"""
MODULE = """
from {package}.base import COLOURS

@COLOURS.register("{name}")
class Colour:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a registry in base.py and two colours nobody imports."""
    name = f"colours_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "base.py").write_text(BASE.format(package=name))
    for colour in ("red", "green"):
        (folder / f"{colour}.py").write_text(MODULE.format(package=name, name=colour))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [key for key in sys.modules if key.split(".")[0] == name]:
        del sys.modules[module]


def registry_of(package: str) -> Registry[Any]:
    registry: Registry[Any] = importlib.import_module(f"{package}.base").COLOURS
    return registry


def test_look_up_imports_every_file_of_the_package(package: str) -> None:
    registry = registry_of(package)
    assert f"{package}.red" not in sys.modules
    assert registry.get("red").__name__ == "Colour"
    assert registry.names() == ("green", "red")


def test_names_alone_also_discover(package: str) -> None:
    assert registry_of(package).names() == ("green", "red")


def test_unknown_name_gets_the_nearest_and_all_known_ones(package: str) -> None:
    with pytest.raises(RegistryError) as caught:
        registry_of(package).get("gren")
    assert str(caught.value) == "Unknown colour 'gren'. Did you mean 'green'? Known: green, red."


def test_unknown_name_without_a_likely_match_lists_the_known_ones(package: str) -> None:
    with pytest.raises(RegistryError, match=r"^Unknown colour 'zzzz'\. Known: green, red\.$"):
        registry_of(package).get("zzzz")


def test_registry_error_is_a_configuration_error() -> None:
    assert issubclass(RegistryError, ConfigError)


def test_registering_a_name_twice_names_both(package: str) -> None:
    registry = registry_of(package)
    registry.get("red")
    with pytest.raises(RegistryError, match=rf"'red' is registered twice: {package}\.red\.Colour"):

        @registry.register("red")
        class Crimson:
            pass


def test_reloading_a_module_registers_its_new_definition(package: str) -> None:
    registry = registry_of(package)
    before = registry.get("red")
    importlib.reload(sys.modules[f"{package}.red"])
    assert registry.get("red") is not before


def test_registered_item_is_returned_unchanged(package: str) -> None:
    def blue() -> None: ...

    registry = registry_of(package)
    assert registry.register("blue")(blue) is blue
    assert registry.get("blue") is blue


def test_a_broken_file_in_the_package_is_not_hidden(package: str) -> None:
    registry = registry_of(package)
    folder = Path(str(sys.modules[package].__file__)).parent
    (folder / "broken.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        registry.get("red")
