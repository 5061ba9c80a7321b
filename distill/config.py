"""Owns configuration files: read, override, check and write YAML <-> frozen pydantic models.
Refuses to know any setting of ours: each schema lives beside the code that uses it. No torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, ValidationInfo

from distill.config_mistakes import explain
from distill.errors import ConfigError


class Config(pydantic.BaseModel):
    """Base of every settings model: frozen, unknown keys refused, every number finite.

    Built directly in Python a mistake is pydantic's ``ValidationError``; read through
    :func:`read_config` or :func:`parse_config` it is a :class:`~distill.errors.ConfigError`.
    """

    # validate_default: a relative default path must be resolved like a written one, or the
    # dumped configuration would not reload to an equal object.
    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


C = TypeVar("C", bound=Config)


def setting(
    default: Any = ..., *, description: str = "", in_fingerprint: bool = True, **kwargs: Any
) -> Any:
    """Declare a field: a pydantic ``Field`` plus whether it belongs to the fingerprint.

    ``in_fingerprint=False`` is for fields that cannot change a byte of the result: workers, log
    intervals, devices, paths whose content is hashed elsewhere.
    """
    extra: dict[str, Any] | None = None if in_fingerprint else {"in_fingerprint": False}
    return pydantic.Field(
        default, description=description or None, json_schema_extra=extra, **kwargs
    )


def _resolve_path(path: Path, info: ValidationInfo) -> Path:
    base_dir = (info.context or {}).get("base_dir") or Path.cwd()
    # abspath, not resolve(): a symlinked data folder keeps the name its owner gave it.
    return Path(os.path.abspath(Path(base_dir) / path.expanduser()))


ConfigPath = Annotated[Path, AfterValidator(_resolve_path)]
"""A path; a relative one is resolved against the directory of the YAML file, else the cwd."""


def read_config(path: Path | str, schema: type[C], overrides: Sequence[str] = ()) -> C:
    """Read a YAML file into ``schema``; ``overrides`` ("a.b=c") win over the file.

    An override puts its value where the key is: a section or a list there is replaced whole.

    Raises:
        ConfigError: no such file, a YAML syntax error (with file and line), an unknown or
            invalid setting (with its dotted path and the nearest known name).
    """
    path = Path(path)
    text = _read_text(path)
    try:
        tree = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not a configuration: {_first_line(error)}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{path}: expected settings (key: value), found a list.")
    return _build(tree, schema, overrides, base_dir=path.absolute().parent, source=str(path))


def parse_config(
    data: Mapping[Any, Any],
    schema: type[C],
    overrides: Sequence[str] = (),
    *,
    base_dir: Path | None = None,
    source: str = "<dict>",
) -> C:
    """Check a nested mapping against ``schema``, as :func:`read_config` does for a file.

    Raises:
        ConfigError: as :func:`read_config`; ``source`` stands where the file name would.
    """
    try:
        tree = OmegaConf.create(dict(data))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {_first_line(error)}") from error
    return _build(tree, schema, overrides, base_dir=base_dir, source=source)


def dump_config(config: Config, *, leave_out: Collection[str] = ()) -> str:
    """Return YAML that :func:`read_config` reads back to an equal object.

    ``leave_out`` names settings by dotted path that the schema itself fills in when they are
    absent, such as a value that one section takes from another.
    """
    tree = OmegaConf.create(_escaped(_jsonable(config, drop_excluded=False)))
    for path in leave_out:
        section, _, name = path.rpartition(".")
        del (OmegaConf.select(tree, section) if section else tree)[name]
    return OmegaConf.to_yaml(tree)


def fingerprint_view(config: Config) -> dict[str, Any]:
    """Return the JSON-able settings that can change bytes: all but ``in_fingerprint=False``."""
    view: dict[str, Any] = _jsonable(config, drop_excluded=True)
    return view


def json_schema(schema: type[Config]) -> dict[str, Any]:
    """Return the JSON schema of a settings model, for editors and documentation."""
    return schema.model_json_schema()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(item.name for item in path.parent.glob("*.y*ml"))
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"No configuration file {path}.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _build(
    tree: DictConfig,
    schema: type[C],
    overrides: Sequence[str],
    *,
    base_dir: Path | None,
    source: str,
) -> C:
    """Apply overrides and interpolations, then validate; every failure is a ConfigError."""
    for override in overrides:
        _apply_override(tree, override)
    try:
        data = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {error.full_key}: {_first_line(error)}") from error
    try:
        return schema.model_validate(data, context={"base_dir": base_dir})
    except pydantic.ValidationError as error:
        problems = explain(error, schema, overrides)
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"{source}: {len(problems)} invalid setting(s)\n{listed}") from error


def _apply_override(tree: DictConfig, override: str) -> None:
    key, equals, _ = override.partition("=")
    key = key.strip()
    if not equals or not key or not all(re.split(r"[.\[]", key)):
        raise ConfigError(f"--set {override!r}: expected KEY=VALUE, as in --set distill.seed=1.")
    try:
        # The value goes through the same YAML reader as the file: 1e-4 is a number, [1, 2] a list.
        parsed = OmegaConf.from_dotlist([f"value={override.partition('=')[2]}"])
        value = OmegaConf.to_container(parsed, resolve=False)
        assert isinstance(value, dict)
        OmegaConf.update(tree, key, value["value"], merge=False)
    except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"--set {override!r}: {_first_line(error)}") from error


def _jsonable(config: Config, *, drop_excluded: bool) -> Any:
    """JSON-able copy of a model, field by field, so that exclusion marks are seen at any depth."""

    def walk(value: Any, dumped: Any) -> Any:
        if isinstance(value, Config):
            return {
                name: walk(getattr(value, name), dumped[name])
                for name, field in type(value).model_fields.items()
                if not (drop_excluded and _is_excluded(field))
            }
        if isinstance(value, Mapping):
            pairs = zip(value.values(), dumped.items(), strict=True)
            return {key: walk(item, plain) for item, (key, plain) in pairs}
        if isinstance(value, set | frozenset):
            return sorted(dumped, key=json.dumps)  # set order differs from run to run
        if isinstance(value, list | tuple):
            return [walk(item, plain) for item, plain in zip(value, dumped, strict=True)]
        return dumped

    return walk(config, config.model_dump(mode="json", serialize_as_any=True))


def _is_excluded(field: pydantic.fields.FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get("in_fingerprint") is False


def _escaped(value: Any) -> Any:
    """Escape ``${`` in strings, which OmegaConf would read back as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
