"""Owns the name -> implementation table behind losses, drafters and backends.
Refuses to know what is registered: three instances exist, one in each package's ``base.py``.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from distill.errors import RegistryError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Implementations of one contract by name; a new one is one new file in the package.

    Nobody lists the files: the first look-up imports every module of ``package``, and each
    registers itself. ``T`` is what is stored, usually ``type[Contract]``.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._items: dict[str, Any] = {}
        self._is_loaded = False

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator storing a class or factory under ``name``.

        Raises:
            RegistryError: another implementation already has the name.
        """

        def store(item: F) -> F:
            known = self._items.get(name)
            # The same definition again is a module reload (notebooks), not a clash.
            if known is not None and _origin(known) != _origin(item):
                raise RegistryError(
                    f"{self.kind} {name!r} is registered twice: {_origin(known)} and "
                    f"{_origin(item)}. Give one of them another name."
                )
            self._items[name] = item
            return item

        return store

    def get(self, name: str) -> T:
        """Return what was registered under ``name``.

        Raises:
            RegistryError: nothing was; the message has the nearest name and all known ones.
        """
        self._load()
        if name not in self._items:
            known = self.names()
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(known) or "none"
            raise RegistryError(f"Unknown {self.kind} {name!r}.{hint} Known: {listed}.")
        item: T = self._items[name]
        return item

    def names(self) -> tuple[str, ...]:
        """Return every registered name, sorted."""
        self._load()
        return tuple(sorted(self._items))

    def _load(self) -> None:
        if self._is_loaded:
            return
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        self._is_loaded = True


def _origin(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"
