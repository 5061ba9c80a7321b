"""From a ModelConfig to files on this machine: a directory transformers loads, and its revision.

Refuses to know how weights are read into memory; only the GGUF conversion asks for that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from distill.errors import ModelNotFoundError
from distill.models import sources
from distill.models.config import ModelConfig, ModelShape, check_shape, shape_of
from distill.models.gguf import convert_gguf

logger = logging.getLogger(__name__)

# Raised when the bytes of a converted model would change for the same source file.
_CONVERSION_VERSION = 1


UNRESOLVED = "unresolved:"


@dataclass(frozen=True)
class ResolvedModel:
    """A reference whose files are here: ``path`` loads with transformers (safetensors)."""

    reference: str
    path: Path
    revision: str


def model_revision(config: ModelConfig) -> str:
    """What the reference stands for today, without reading a weight into memory.

    A commit (hub), "sha256:..." (directory: of its files; .gguf: of the file; pypi: the pinned
    hash of the wheel, and the file in it), or "unresolved:<reference>" when neither the hub nor
    its cache answers.

    Raises:
        ModelNotFoundError: a malformed reference, or a path that is not there.
    """
    reference = sources.parse_reference(config.model)
    if reference.kind == "pypi":
        return f"sha256:{config.sha256}#{reference.file}"
    if reference.kind == "gguf":
        return f"sha256:{_checked_gguf_sha256(config, reference)}"
    if reference.kind == "directory":
        return sources.directory_revision(Path(reference.name))
    commit = sources.hub_commit(reference.name, reference.revision)
    return commit or f"{UNRESOLVED}{config.model}"


def resolve_model(config: ModelConfig, *, cache_dir: Path | None = None) -> ResolvedModel:
    """Bring the files of a model here, in a form transformers loads; a second call is instant.

    GGUF weights (a file, or inside a package) are dequantised once to bfloat16 safetensors under
    ``cache_dir``.

    Raises:
        ModelNotFoundError: says everything that was tried.
    """
    reference = sources.parse_reference(config.model)
    cache_dir = cache_dir or sources.default_cache_dir()
    if reference.kind == "directory":
        path = sources.model_directory(Path(reference.name))
        _require_safetensors(path)
    elif reference.kind == "hub":
        path = sources.hub_snapshot(
            reference.name, reference.revision, with_code=config.trust_remote_code
        )
        _require_safetensors(path)
        # The snapshot folder is named by the commit, which is what was really loaded.
        return ResolvedModel(config.model, path, path.name)
    else:
        if reference.kind == "gguf":
            _checked_gguf_sha256(config, reference)
        path = _converted(config, reference, cache_dir)
    return ResolvedModel(config.model, path, model_revision(config))


def has_weights_here(config: ModelConfig) -> bool:
    """Whether the model could be loaded without fetching or converting anything.

    Raises:
        ModelNotFoundError: a malformed reference, or a .gguf file that is not there.
    """
    reference = sources.parse_reference(config.model)
    path: Path | None
    if reference.kind == "directory":
        path = Path(reference.name)
        path = path if (path / "config.json").is_file() else path / "draft"
    elif reference.kind == "hub":
        path = sources.cached_snapshot(reference.name, reference.revision)
    else:
        path = _conversion_path(config, reference, sources.default_cache_dir())
    if path is None or not any(path.glob("*.safetensors")):
        return False
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return True
    files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((path / name).is_file() for name in files)


def read_shape(config: ModelConfig) -> ModelShape | None:
    """The sizes in the model's config.json, else ``config.shape``, else None. No weights are read.

    A packaged model answers only once it has been converted.

    Raises:
        ModelNotFoundError: transformers cannot read the config.json that is there.
        ConfigError: ``config.shape`` is not the model's.
    """
    reference = sources.parse_reference(config.model)
    try:
        if reference.kind == "directory":
            path = sources.model_directory(Path(reference.name))
        elif reference.kind == "hub":
            path = sources.hub_snapshot(
                reference.name,
                reference.revision,
                with_code=config.trust_remote_code,
                weights=False,
            )
        else:
            path = _conversion_path(config, reference, sources.default_cache_dir())
            if not path.is_dir():
                return config.shape
    except ModelNotFoundError as error:
        logger.info("using the shape in the config, not the model's own: %s", error)
        return config.shape
    # Not the JSON itself: a key at its family's default (tied heads in Gemma) is left out of it.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        with sources.quiet():
            own = AutoConfig.from_pretrained(str(path), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelNotFoundError(
            f"transformers cannot read {path / 'config.json'}: {error}. Fetch or save the model "
            "again; a model with code of its own needs `trust_remote_code: true`"
        ) from error
    return check_shape(config, shape_of(own))


def _require_safetensors(path: Path) -> None:
    if any(path.glob("*.safetensors")):
        return
    old = ", ".join(sorted(p.name for p in path.glob("*.bin"))) or "none"
    raise ModelNotFoundError(
        f"{path} has a config.json but no *.safetensors (pickled weights: {old}); pickles are "
        "never loaded. Convert once: load it where you trust it and call save_pretrained"
    )


def _checked_gguf_sha256(config: ModelConfig, reference: sources.Reference) -> str:
    path = Path(reference.name)
    if not path.is_file():
        raise ModelNotFoundError(f"no file {path.absolute()}; check the path of the .gguf model")
    actual = sources.file_sha256(path)
    if config.sha256 not in (None, actual):
        raise ModelNotFoundError(
            f"{path} has sha256 {actual}, the config pins {config.sha256}; "
            "correct the pin if the new file is meant, otherwise do not use it"
        )
    return actual


def _conversion_path(config: ModelConfig, reference: sources.Reference, cache_dir: Path) -> Path:
    if reference.kind == "pypi":
        assert config.sha256 is not None
        assert reference.file is not None
        # One wheel may hold several files of one stem, in folders of their own.
        member = f"{config.sha256}#{reference.file}"
        identity = hashlib.sha256(member.encode()).hexdigest()
        name = Path(reference.file).stem
    else:
        identity, name = _checked_gguf_sha256(config, reference), Path(reference.name).stem
    name = re.sub(r"[^\w.-]", "_", name)
    return cache_dir / "models" / f"{name}-{identity[:16]}-v{_CONVERSION_VERSION}"


def _converted(config: ModelConfig, reference: sources.Reference, cache_dir: Path) -> Path:
    """The converted model's directory: built beside its place, then renamed into it."""
    from filelock import FileLock

    path = _conversion_path(config, reference, cache_dir)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        if path.is_dir():
            return path
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as scratch:
            if reference.kind == "pypi":
                assert config.sha256 is not None
                gguf = sources.fetch_package_file(reference, config.sha256, Path(scratch))
            else:
                gguf = Path(reference.name).absolute()
            built = Path(scratch) / "model"
            logger.info("converting %s to safetensors (once)", gguf.name)
            convert_gguf(gguf, built)
            built.rename(path)
    return path
