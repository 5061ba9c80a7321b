"""Owns a ship bundle as files: what lies in it, its manifest of hashes, copying it elsewhere.

Refuses to know how a draft is trained, checked and described (``export.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.artifacts import Artifact
from distill.errors import ExportError

BUNDLE = "draft"
MANIFEST = "draft_manifest.json"
CARD = "README.md"

# vLLM takes a draft for another kind of model when its path holds one of these, whatever its
# launch line says.
_MISLEADING_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
# The section of a card that a reader acts on; a warning stands right before it.
_CARD_USE = "\n## Use\n"


def check_output(output: Path) -> Path:
    """The absolute path of a bundle to be copied there, checked before anything is built for it.

    Raises ExportError when something is there already, or when the path would mislead a runtime.
    """
    output = Path(os.path.abspath(output.expanduser()))
    refuse_misleading(output, "the path of the bundle")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ExportError(f"{output} exists already. Remove it, or give another directory.")
    above = next(path for path in output.parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ExportError(f"{output} cannot be made in {above}. Give another directory.")
    return output


def copy_bundle(artifact: Artifact, output: Path, *, gate_failures: Sequence[str] = ()) -> Path:
    """Copy a bundle to `output`, whole or not at all; returns its absolute path.

    `gate_failures`: what the draft fell short of; the copy's card and manifest say so.

    Raises ExportError when something is there already, or when the path would mislead a runtime.
    """
    bundle = artifact.expect("export").file(BUNDLE)
    output = check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".bundle-") as scratch:
        copied = Path(scratch) / "bundle"
        shutil.copytree(bundle, copied)
        if gate_failures:
            _warn(copied, gate_failures)
        copied.replace(output)  # takes the place of an empty directory as well
    return output


def _warn(bundle: Path, gate_failures: Sequence[str]) -> None:
    """Say in the card, and in the manifest, that the draft failed its gate."""
    card = bundle / CARD
    text = card.read_text(encoding="utf-8")
    assert text.count(_CARD_USE) == 1, "a card says how a draft is used"
    warning = (
        f"\n**It failed its gate, and was exported all the same**: {'; '.join(gate_failures)}.\n"
    )
    card.write_text(text.replace(_CARD_USE, warning + _CARD_USE), encoding="utf-8")
    contract = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    write_manifest(bundle, contract | {"gate_failures": list(gate_failures)})


def write_manifest(bundle: Path, contract: Mapping[str, Any]) -> None:
    """Write the pairing contract, with the size and the hash of every other file of the bundle."""
    content = {**contract, "files": _hashes(bundle)}
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    (bundle / MANIFEST).write_text(text + "\n", encoding="utf-8")


def files_of(bundle: Path) -> list[Path]:
    """Every file, also in sub-folders: a tokenizer keeps its further chat templates in one."""
    return sorted(path for path in bundle.rglob("*") if path.is_file())


def refuse_misleading(name: str | Path, what: str) -> None:
    """Refuse a name or a path that vLLM would read as another kind of draft."""
    found = [word for word in _MISLEADING_NAMES if word in str(name).lower()]
    if found:
        raise ExportError(
            f"{what[0].upper()}{what[1:]}, {str(name)!r}, holds {found[0]!r}: vLLM would load the "
            f"draft as that method, whatever the launch line says. Choose another name."
        )


def _hashes(bundle: Path) -> list[dict[str, Any]]:
    entries = []
    for path in files_of(bundle):
        name = path.relative_to(bundle).as_posix()
        if name == MANIFEST:
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries.append({"path": name, "bytes": path.stat().st_size, "sha256": digest})
    return entries
