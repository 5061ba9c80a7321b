"""Model references: what the text after ``model:`` means, where its files are, which revision.

Refuses to know torch, transformers and anything inside a model file.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distill.errors import ModelNotFoundError

logger = logging.getLogger(__name__)

ReferenceKind = Literal["hub", "directory", "gguf", "pypi"]

# What a loadable model directory is made of. Anything else in it cannot change a forward pass.
MODEL_FILE_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
)
CODE_FILE_PATTERNS = ("*.py",)
VOCABULARY_FILE = "draft_vocabulary.json"
# Terms travel with the weights they cover, and say nothing about a forward pass.
LICENSE_FILE_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")

_HUB_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_PYPI_PATTERN = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+]+)#(?P<file>[\w./+-]+\.gguf)"
)
_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
_HUB_TIMEOUT_S = 5.0
_WAYS = (
    'a hub id ("org/name" or "org/name@revision"), a directory, a .gguf file, '
    'or "pypi:package==version#file.gguf"'
)


@dataclass(frozen=True)
class Reference:
    """A parsed model reference.

    ``name`` is the hub id, the directory, the .gguf path or the package; ``revision`` the part
    after ``@`` (hub) or the version (pypi); ``file`` the member of the wheel (pypi).
    """

    text: str
    kind: ReferenceKind
    name: str
    revision: str | None = None
    file: str | None = None


def parse_reference(text: str) -> Reference:
    """Decide what ``text`` names. Only the file system is asked, and only "is this a directory?".

    Raises:
        ModelNotFoundError: ``text`` has none of the known forms.
    """
    if text.startswith("pypi:"):
        match = _PYPI_PATTERN.fullmatch(text)
        if match is None:
            raise ModelNotFoundError(
                f"{text!r} is not a package reference; write pypi:NAME==VERSION#FILE.gguf"
            )
        return Reference(text, "pypi", match["name"], match["version"], match["file"])
    path = Path(text).expanduser()
    if text.endswith(".gguf"):
        return Reference(text, "gguf", str(path))
    if path.is_dir() or is_path_like(text):
        return Reference(text, "directory", str(path))
    if _HUB_PATTERN.fullmatch(text) is None:
        raise ModelNotFoundError(f"{text!r} is not a model reference; give {_WAYS}")
    name, _, revision = text.partition("@")
    return Reference(text, "hub", name, revision or None)


def is_path_like(text: str) -> bool:
    """True for text that can only be a path: it starts like one, or names a .gguf file."""
    is_rooted = text.startswith(("/", "./", "../", "~")) or text in (".", "..")
    return is_rooted or (text.endswith(".gguf") and not text.startswith("pypi:"))


def default_cache_dir() -> Path:
    """``$DISTILL_CACHE``, else ``$XDG_CACHE_HOME/distill``, else ``~/.cache/distill``."""
    if own := os.environ.get("DISTILL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "distill"


# ---------------------------------------------------------------- hashes


def file_sha256(path: Path, *, cache_dir: Path | None = None) -> str:
    """sha256 of a file, remembered by its path, size and modification time.

    A 14 GB target is hashed once, not once per stage.
    """
    path = path.resolve()
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    memo_dir = (cache_dir or default_cache_dir()) / "hashes"
    memo = memo_dir / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    known = _read_memo(memo)
    if known is not None and known.get("stamp") == stamp:
        return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    memo_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=memo_dir, suffix=".tmp", delete=False) as new:
        json.dump({"stamp": stamp, "sha256": digest}, new)
    os.replace(new.name, memo)
    return digest


def _read_memo(path: Path) -> dict[str, object] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return content if isinstance(content, dict) else None


def model_directory(path: Path) -> Path:
    """``path`` itself, or its ``draft/`` when ``path`` is an artifact that holds a draft.

    Raises:
        ModelNotFoundError: no ``config.json`` in either place.
    """
    for candidate in (path, path / "draft"):
        if (candidate / "config.json").is_file():
            return candidate
    if not path.exists():
        raise ModelNotFoundError(f"no directory {path}; check the path, or give {_WAYS}")
    present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise ModelNotFoundError(
        f"{path} holds no config.json, nor does {path / 'draft'} (it holds: {present}); "
        "point at the directory that save_pretrained wrote"
    )


def vocabulary_file(directory: Path) -> Path | None:
    """Where a model's own directory keeps the tokens it may propose; None: it may propose all.

    In a shipped draft the file is beside the weights; an artifact has it beside its ``draft/``.
    """
    places = [directory, *([directory.parent] if directory.name == "draft" else [])]
    return next((p / VOCABULARY_FILE for p in places if (p / VOCABULARY_FILE).is_file()), None)


def directory_revision(path: Path, *, cache_dir: Path | None = None) -> str:
    """``sha256:`` over the relative paths and hashes of the files that make the model.

    Sub-folders count (further chat templates live in one), hidden ones do not (a download's or a
    version control's own records). The tokens a draft may propose count where an artifact keeps
    them, too: with others it is another draft.

    Raises:
        ModelNotFoundError: no ``config.json`` there.
    """
    directory = model_directory(path)
    inside = [(entry.relative_to(directory), entry) for entry in directory.rglob("*")]
    files = sorted(
        relative.as_posix()
        for relative, entry in inside
        if entry.is_file()
        and not any(part.startswith(".") for part in relative.parts)
        and _matches(entry.name, MODEL_FILE_PATTERNS + CODE_FILE_PATTERNS)
    )
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0{file_sha256(directory / name, cache_dir=cache_dir)}\n".encode())
    beside = vocabulary_file(directory)
    if beside is not None and beside.parent != directory:
        digest.update(f"../{beside.name}\0{file_sha256(beside, cache_dir=cache_dir)}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


# ---------------------------------------------------------------- the hub


@contextmanager
def quiet() -> Iterator[None]:
    """Telemetry off (for good: it is an environment variable), progress bars off (inside)."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the hub's bars as well
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@functools.lru_cache(maxsize=64)
def _ask_hub(repo: str, revision: str | None) -> tuple[str | None, str]:
    """(the commit, "") from one request, or (None, why there is none).

    Asked before any download: the hub's client retries a download for half a minute, and a name
    that does not resolve will not resolve then either.
    """
    import httpx2
    from huggingface_hub import HfApi

    try:
        with quiet():
            return HfApi().model_info(repo, revision=revision, timeout=_HUB_TIMEOUT_S).sha, ""
    except (OSError, ValueError, httpx2.HTTPError) as error:
        return None, _first_line(error)


@functools.lru_cache(maxsize=64)
def hub_commit(repo: str, revision: str | None) -> str | None:
    """The commit ``revision`` (default branch when None) stands for; None when unreachable.

    A full commit is taken as it is. Otherwise the hub is asked, then the local hub cache. The
    answer is kept for the process, so that all stages of a run agree on a moving branch.
    """
    if revision is not None and _COMMIT_PATTERN.fullmatch(revision):
        return revision
    from huggingface_hub import try_to_load_from_cache

    sha, _ = _ask_hub(repo, revision)
    if sha is not None:
        return sha
    cached = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else None


def hub_snapshot(repo: str, revision: str | None, *, with_code: bool, weights: bool = True) -> Path:
    """The local snapshot of a hub repository: safetensors, tokenizer, JSON and licence files only.

    Raises:
        ModelNotFoundError: not on the hub and not in the hub's cache; says what was tried.
    """
    import httpx2
    from huggingface_hub import snapshot_download

    commit = hub_commit(repo, revision)
    sha, why_not = _ask_hub(repo, revision)
    patterns = [*MODEL_FILE_PATTERNS, *LICENSE_FILE_PATTERNS]
    patterns += CODE_FILE_PATTERNS if with_code else ()
    if not weights:
        patterns.remove("*.safetensors")
    try:
        with quiet():
            path = snapshot_download(
                repo,
                revision=commit or revision,
                allow_patterns=patterns,
                local_files_only=sha is None,
            )
    except (OSError, ValueError, httpx2.HTTPError) as error:
        reason = why_not or _first_line(error)
        shown = f"{repo}@{revision}" if revision else repo
        raise ModelNotFoundError(
            f"cannot find the model {shown!r}. Tried: a directory {Path(repo).absolute()} (none); "
            f"the hub's local cache (no such snapshot); the hub itself ({reason}). "
            "If the repository is gated, run `hf auth login`; without a network, copy the "
            "model here and give its directory"
        ) from error
    return Path(path)


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The snapshot that :func:`hub_snapshot` would give, if it is in the cache. Fetches nothing."""
    from huggingface_hub import snapshot_download

    commit = hub_commit(repo, revision)
    try:
        with quiet():
            return Path(snapshot_download(repo, revision=commit or revision, local_files_only=True))
    except (OSError, ValueError):  # that it is not there is the answer
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


# ---------------------------------------------------------------- packages


def fetch_package_file(reference: Reference, sha256: str, directory: Path) -> Path:
    """Download a wheel with pip, check its sha256, and take one file out of it.

    Args:
        reference: a ``pypi`` reference.
        sha256: of the WHEEL. Wheels only, and never with dependencies: nothing is executed.
        directory: where the extracted file is put.

    Raises:
        ModelNotFoundError: pip fails, the hash differs, or the wheel holds no such file.
    """
    requirement = f"{reference.name}=={reference.revision}"
    logger.info("fetching %s with pip (once; kept in the cache afterwards)", requirement)
    wheel = _download_wheel(requirement, sha256, directory)
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise ModelNotFoundError(
            f"{wheel.name} has sha256 {actual}, the config pins {sha256}; "
            "correct the pin if the new file is meant, otherwise do not use it"
        )
    assert reference.file is not None
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if not name.endswith("/")]
        found = [
            name
            for name in members
            if name == reference.file or name.endswith("/" + reference.file)
        ]
        if len(found) != 1:
            ggufs = ", ".join(name for name in members if name.endswith(".gguf")) or "none"
            raise ModelNotFoundError(
                f"{wheel.name} holds {len(found)} files named {reference.file!r}; "
                f"its .gguf files: {ggufs}"
            )
        target = directory / Path(reference.file).name
        with archive.open(found[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
    wheel.unlink()
    return target


def _download_wheel(requirement: str, sha256: str, directory: Path) -> Path:
    # The hash sits in a requirements file because pip takes it nowhere else.
    listing = directory / "requirements.txt"
    listing.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory)]
    done = subprocess.run(
        [*command, "--require-hashes", "--requirement", str(listing)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = " / ".join(line for line in done.stderr.strip().splitlines() if line.strip())
        raise ModelNotFoundError(
            f"cannot fetch {requirement} with pip (exit {done.returncode}): "
            f"{said or 'it left no wheel'}. Check the name, the version, the pinned sha256 and "
            "the network; or give a directory or a .gguf file instead"
        )
    return wheels[0]
