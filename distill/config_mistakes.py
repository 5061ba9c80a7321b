"""Owns what a user reads about a mistake in a configuration: the path, what was found, the way out.
Refuses to know any setting of ours, and how files are read.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic

Schema = type[pydantic.BaseModel]
Location = tuple[str | int, ...]

_SHOWN_VALUE_CHARS = 120
_LISTS = (tuple, list, set, frozenset)
_A_LIST = ("tuple_type", "list_type", "set_type", "frozen_set_type")
_SECTION = ("dict_type", "model_type", "model_attributes_type")
# What pydantic says a value should be, in a user's words.
_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    **dict.fromkeys(_A_LIST, "a list"),
    **dict.fromkeys(_SECTION, "settings (key: value)"),
}
_ENTRY, _NAME = "[]", "<name>"


@dataclass(frozen=True)
class _Mistake:
    """One problem of pydantic's, where a user sees it.

    ``path`` is the location without the names pydantic gives to the alternatives of a union.
    ``union`` is the path of the first union on the way, ``tried`` the alternative tried there.
    ``around`` are the models that may hold the last key; ``others`` those that another kind of the
    same section would have there; ``inside`` those the value itself may be.
    """

    problem: Any
    path: Location
    union: Location | None
    tried: str
    around: Sequence[Schema]
    others: Sequence[Schema]
    inside: Sequence[Schema]

    @property
    def is_of_another_type(self) -> bool:
        """Whether the alternative that was tried does not take such a value at all."""
        kind = self.problem["type"]
        return self.path == self.union and (kind in _EXPECTED or kind == "literal_error")


def explain(error: pydantic.ValidationError, schema: Schema, overrides: Sequence[str]) -> list[str]:
    """One line for each problem: dotted path, what was found, the way out.

    Where a value may be of several types, pydantic reports a problem for each of them: only those
    of the type the value is of are told, or, where it is of none, that it is.
    """
    groups: dict[Location, list[_Mistake]] = {}
    for index, problem in enumerate(error.errors()):
        mistake = _mistake(schema, problem)
        key = (index,) if mistake.union is None else mistake.union
        groups.setdefault(key, []).append(mistake)
    lines: list[str] = []
    for group in groups.values():
        is_choice = len({mistake.tried for mistake in group}) > 1
        wrong = {m.tried for m in group if m.is_of_another_type} if is_choice else set()
        told = [mistake for mistake in group if mistake.tried not in wrong]
        if told:
            lines += [_line(mistake, schema) + _given_by(mistake, overrides) for mistake in told]
        else:
            lines.append(_line_of_none(group) + _given_by(group[0], overrides))
    return lines


def _line(mistake: _Mistake, schema: Schema) -> str:
    problem, path = mistake.problem, dotted(mistake.path)
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown setting.{_suggestion(mistake, schema)}"
    if problem["type"] == "missing":
        return f"{path}: required, but not set"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kinds = ", ".join(kind for model in mistake.inside for kind in _kinds(model))
        tag = problem["ctx"].get("tag")
        message = (
            f"no kind {tag!r}; there are: {kinds}" if tag else f"needs a kind, one of: {kinds}"
        )
    if problem["type"] in (*_A_LIST, *_SECTION):
        message = f"expected {_EXPECTED[problem['type']]}"
    where = f"{path}: " if path else ""
    return f"{where}{message}{_found(problem['input'])}{_as_expected(mistake)}"


def _line_of_none(group: Sequence[_Mistake]) -> str:
    """That a value is of none of the types it may be of."""
    expected = [
        mistake.problem["ctx"]["expected"]
        if mistake.problem["type"] == "literal_error"
        else _EXPECTED[mistake.problem["type"]]
        for mistake in group
    ]
    listed = " or ".join(dict.fromkeys(expected))
    hint = next((hint for mistake in group if (hint := _as_expected(mistake))), "")
    return f"{dotted(group[0].path)}: expected {listed}{_found(group[0].problem['input'])}{hint}"


def _found(value: Any) -> str:
    text = repr(value)
    # a whole section in the message would hide the point
    is_shown = not isinstance(value, Mapping) and len(text) <= _SHOWN_VALUE_CHARS
    return f" (got {text})" if is_shown else ""


def _as_expected(mistake: _Mistake) -> str:
    """How what was found could be written as the list, or the section, that is expected."""
    kind, value = mistake.problem["type"], mistake.problem["input"]
    if kind in _A_LIST and isinstance(value, Mapping):
        return "; a list of one is written [{...}]"
    if kind in _A_LIST and isinstance(value, str | int | float):
        return f"; a list of one is written [{value}]"
    if kind in _SECTION and mistake.inside:
        return f"; the settings here: {', '.join(_names(mistake.inside))}"
    return ""


def _given_by(mistake: _Mistake, overrides: Sequence[str]) -> str:
    path = dotted(mistake.path)
    given = [item for item in overrides if f"{path}.".startswith(f"{override_path(item)}.")]
    return f" (from --set {given[-1]})" if given else ""


def override_path(override: str) -> str:
    """The dotted path an override sets: "phases[0].name=x" -> "phases.0.name"."""
    return re.sub(r"\[(\w+)\]", r".\1", override.partition("=")[0].strip())


def dotted(location: Location) -> str:
    """A location as a user writes it."""
    return ".".join(str(part) for part in location)


# ------------------------------------------------------------------------------ unknown settings


def _suggestion(mistake: _Mistake, schema: Schema) -> str:
    """Whose setting it is, else the nearest name beside it, else where else there is such one."""
    *place, key = mistake.path
    known, kind = _names(mistake.around), _kind_of(mistake.around)
    owners = [other for model in mistake.others if (other := _kind_of([model]))]
    if owners and kind is not None:
        return (
            f" It belongs to kind {' or '.join(owners)}, and kind here is {kind}, which has: "
            f"{', '.join(known)}."
        )
    if near := difflib.get_close_matches(str(key), known, n=1):
        return f" Did you mean {dotted((*place, near[0]))!r}?"
    elsewhere = [path for path in _setting_paths(schema) if path[-1] == key]
    if elsewhere:
        # the nearest section that has it; the first of equally near ones
        return _pointer(max(elsewhere, key=lambda path: _num_shared(path, mistake.path)))
    return f" Known here: {', '.join(known)}."


def _pointer(path: tuple[str, ...]) -> str:
    if _ENTRY not in path:
        return f" Did you mean {dotted(path)!r}?"
    index = len(path) - 1 - path[::-1].index(_ENTRY)
    inner, outer = dotted(path[index + 1 :]), dotted(path[:index])
    return f" Did you mean {inner!r} in an entry of {outer!r}?"


def _num_shared(path: Sequence[str], location: Location) -> int:
    pairs = list(zip(path, location, strict=False))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _names(models: Sequence[Schema]) -> list[str]:
    return sorted({name for model in models for name in model.model_fields})


def _kind_of(models: Sequence[Schema]) -> str | None:
    """The kind by which a section's settings were chosen; None where there is no choice."""
    kinds = {kind for model in models for kind in _kinds(model)}
    return kinds.pop() if len(models) == 1 and len(kinds) == 1 else None


def _kinds(model: Schema) -> tuple[str, ...]:
    field = model.model_fields.get("kind")
    is_fixed = field is not None and get_origin(field.annotation) is Literal
    return get_args(field.annotation) if field is not None and is_fixed else ()


def _setting_paths(schema: Schema, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in schema.model_fields.items():
        yield (*prefix, name)
        for way, nested in _models_in(field.annotation):
            yield from _setting_paths(nested, (*prefix, name, *way))


def _models_in(annotation: Any) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Every model inside a type such as ``tuple[Phase, ...] | None``, and the way to it."""
    for one in _alternatives(annotation):
        origin = get_origin(one)
        if _is_model(one):
            yield (), one
        elif origin in _LISTS:
            yield from (((_ENTRY, *w), m) for a in get_args(one) for w, m in _models_in(a))
        elif origin is dict:
            yield from (((_NAME, *way), model) for way, model in _models_in(get_args(one)[1]))


# ------------------------------------------------------------------------------ where it is


def _mistake(schema: Schema, problem: Any) -> _Mistake:
    """Walk the types along a location: a part that none of them has is the name of a choice."""
    location: Location = problem["loc"]
    here: list[Any] = [schema]
    around: list[Any] = []
    others: list[Any] = []
    path: list[str | int] = []
    union: Location | None = None
    tried = ""
    refused: list[Any] = []  # by the last choice of a kind
    for index, part in enumerate(location):
        is_unknown = problem["type"] == "extra_forbidden" and index == len(location) - 1
        inner = [child for one in here for child in _children(one, part)]
        if inner or is_unknown:
            around = [one for one in here if _is_model(one)]
            others = [one for one in refused if part in one.model_fields]
            path.append(part)
            here, refused = inner, []
            continue
        chosen = [one for one in here if _is_named(one, str(part))]
        if union is None:
            union, tried = tuple(path), str(part)
        refused = [one for one in here if _is_model(one) and chosen and one not in chosen]
        here = chosen or here
    inside = [one for one in here if _is_model(one)]
    return _Mistake(problem, tuple(path), union, tried, around, others, inside)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types a value may be of: a union's, whatever stands around them taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _alternatives(argument)
    else:
        yield annotation


def _children(annotation: Any, part: str | int) -> list[Any]:
    """The types that may stand at a key, or at a place of a list."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if _is_model(annotation):
        field = annotation.model_fields.get(part)
        return [] if field is None else list(_alternatives(field.annotation))
    if origin is dict and part != "[key]":
        return list(_alternatives(arguments[1]))
    if origin in _LISTS and isinstance(part, int):
        return [one for argument in arguments for one in _alternatives(argument)]
    return []


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def _is_named(annotation: Any, choice: str) -> bool:
    """Whether pydantic's name of a choice stands for this type: its kind, its name, its origin."""
    origin = get_origin(annotation)
    if _is_model(annotation):
        return choice in _kinds(annotation) or choice == annotation.__name__
    if origin in (*_LISTS, dict):
        return choice.startswith(f"{origin.__name__}[")
    return choice == getattr(annotation, "__name__", None)
