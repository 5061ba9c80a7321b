"""Owns the artifact store: naming a build, building it atomically under a lock, finding it again.
Refuses to know what a payload means, which stages exist, and torch.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from distill.config import Config, fingerprint_view
from distill.errors import (
    ArtifactError,
    ArtifactMissingError,
    ArtifactStaleError,
    DiskSpaceError,
)
from distill.files import atomic_write, require_free_bytes, sync
from distill.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Artifact,
    ArtifactKey,
    FileEntry,
    Manifest,
    describe_changes,
    fingerprint,
    listed,
    plain_metrics,
    read_manifest,
    sync_payload,
    verify,
    way_out,
)
from distill.provenance import code_versions, hardware, package_versions

__all__ = [
    "Artifact",
    "ArtifactKey",
    "ArtifactStore",
    "FileEntry",
    "Manifest",
    "atomic_write",
    "fingerprint",
    "require_free_bytes",
]

logger = logging.getLogger(__name__)

WORK_DIR = "work"

_NAME_CHARS = 12  # of the fingerprint, in a finished artifact's folder name
_MIN_LOOKUP_CHARS = 4
_POLL_S = 0.2
_NOTHING: Mapping[str, str] = MappingProxyType({})
_PROCESS_STARTED = datetime.now(UTC)  # what is older was not made by this distributed run


class ArtifactStore:
    """Finished artifacts under one root: ``<root>/<stage>/<first 12 digits of the fingerprint>``.

    A directory there is whole: it was built in ``<fingerprint>.partial`` under a file lock and
    renamed once its files, and after them its manifest, had reached the disk.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(os.path.abspath(Path(root).expanduser()))

    def key(
        self,
        stage: str,
        code_version: int,
        config: Config,
        *,
        inputs: Mapping[str, str] = _NOTHING,
        revisions: Mapping[str, str] = _NOTHING,
    ) -> ArtifactKey:
        """Name a build by everything that could change its bytes.

        Args:
            stage: name of the stage, and of its folder.
            code_version: the stage's own number, raised whenever its results change.
            config: the stage's resolved settings; ``in_fingerprint=False`` fields are left out.
            inputs: name -> fingerprint of the artifacts it reads.
            revisions: name -> revision or content hash of what else it reads (models, corpora).
        """
        parts = {
            "stage": stage,
            "code_version": code_version,
            "config": fingerprint_view(config),
            "inputs": dict(inputs),
            "revisions": dict(revisions),
        }
        return ArtifactKey(stage, fingerprint(parts), parts)

    def path(self, key: ArtifactKey) -> Path:
        """Where the finished artifact of a key is, or would be."""
        return self.root / key.stage / key.fingerprint[:_NAME_CHARS]

    def partial_dir(self, key: ArtifactKey) -> Path:
        """Where a build of a key works, and where a killed one left what it had."""
        return self.root / key.stage / f"{key.fingerprint}.partial"

    def find(self, key: ArtifactKey) -> Artifact | None:
        """Return the finished artifact of a key, verified byte by byte, or None.

        Raises:
            ArtifactCorruptError: it is damaged (names the file and both hashes).
            ArtifactMissingError: its folder is there, but not its manifest.
            ArtifactStaleError: the folder belongs to another key or another schema.
        """
        path = self.path(key)
        if not path.is_dir():
            return None
        artifact = Artifact(path, read_manifest(path))
        if artifact.fingerprint != key.fingerprint:
            raise ArtifactStaleError(
                f"{path} has fingerprint {artifact.fingerprint}, but {key.fingerprint} is "
                f"expected there. {way_out(path)}"
            )
        self.verify(artifact)
        return artifact

    def get_or_build(
        self,
        key: ArtifactKey,
        build: Callable[[Path], Mapping[str, Any]],
        *,
        rebuild: bool = False,
        every_rank: bool = False,
    ) -> Artifact:
        """Return the finished artifact of a key, building it first when there is none.

        ``build(partial_dir)`` writes the payload and returns the metrics (JSON-able; timings go
        there, so that payload bytes are reproducible). It finds there what a killed build of the
        same key left, and may keep scratch in ``partial_dir / "work"``: it survives a kill, not
        the commit.

        Args:
            key: from :meth:`key`.
            build: called at most once, while this process holds the lock of the key.
            rebuild: build anew from nothing and replace what exists; never done unasked.
            every_rank: in a distributed run (RANK in the environment) call ``build`` on every
                rank, as collective training needs. Without it rank 0 alone builds. Either way
                rank 0 alone commits, and the other ranks wait for that.

        Raises:
            ArtifactError: what exists is unusable (as :meth:`find`) and ``rebuild`` is false.
            DiskSpaceError: the disk filled up; what was built is kept for the next run.
        """
        if os.environ.get("RANK", "0") != "0":
            return self._follow(key, build if every_rank else None, rebuild=rebuild)
        if not rebuild and (hit := self._hit(key)):
            return hit
        with self._locked(key):
            # Another process may have finished it while this one waited for the lock.
            if not rebuild and (hit := self._hit(key)):
                return hit
            try:
                return self._build(key, build, rebuild=rebuild)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise DiskSpaceError(
                    f"The disk under {self.root} is full; stage {key.stage!r} stopped. What it "
                    f"built so far is kept in {self.partial_dir(key)}. Free some space and run "
                    f"the same command again: it resumes."
                ) from error

    def load(self, path_or_fingerprint: Path | str) -> Artifact:
        """Return a finished artifact by its directory or by leading digits of its fingerprint.

        Raises:
            ArtifactMissingError: nothing finished is there, or the digits fit several.
            ArtifactCorruptError, ArtifactStaleError: as :meth:`find`.
        """
        path = self._locate(path_or_fingerprint)
        if not _is_finished_name(path.name):
            raise ArtifactMissingError(
                f"{path} is an unfinished build. Run its stage again: it resumes from there."
            )
        artifact = Artifact(path, read_manifest(path))
        self.verify(artifact)
        return artifact

    def verify(self, artifact: Artifact) -> None:
        """Check the manifest against its own fingerprint, and every file against the manifest.

        Raises:
            ArtifactCorruptError: names the first file that differs and both sizes or hashes.
        """
        verify(artifact)

    def explain_miss(self, key: ArtifactKey) -> str | None:
        """Say in which settings a key differs from the nearest finished artifact of its stage.

        None when the stage has no finished artifact yet, or when the key itself is built.
        """
        nearest: tuple[int, str, list[str]] | None = None
        for path in self._finished(key.stage):
            try:
                changes = describe_changes(read_manifest(path).parts, key.parts)
            except ArtifactError as error:
                logger.debug("not compared: %s", error)  # this sentence is advice, nothing more
                continue
            if nearest is None or len(changes) < nearest[0]:
                nearest = (len(changes), path.name, changes)
        if nearest is None or nearest[0] == 0:
            return None
        return f"nearest is {nearest[1]}, which differs in {listed(nearest[2])}"

    def _build(
        self, key: ArtifactKey, build: Callable[[Path], Mapping[str, Any]], *, rebuild: bool
    ) -> Artifact:
        partial = self.partial_dir(key)
        marker = self._rebuild_marker(key)
        # A killed rebuild is gone on with; what a killed first build left was not asked for.
        if rebuild and partial.exists() and not marker.exists():
            shutil.rmtree(partial)
        if (finished := self._finished_partial(key)) is not None:
            return self._publish(key, finished)
        reason = "asked to rebuild" if rebuild else self.explain_miss(key) or "nothing like it yet"
        verb = "resuming" if partial.exists() else "building"
        logger.info("%s: %s %s (%s)", key.stage, verb, key.fingerprint[:_NAME_CHARS], reason)
        partial.mkdir(parents=True, exist_ok=True)
        if rebuild:
            marker.touch()
        started = datetime.now(UTC)
        metrics = plain_metrics(build(partial))
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            stage=key.stage,
            fingerprint=key.fingerprint,
            config=key.parts["config"],
            inputs=key.parts["inputs"],
            revisions=key.parts["revisions"],
            files=sync_payload(partial, scratch=WORK_DIR),
            code={**code_versions(), "code_version": key.parts["code_version"]},
            packages=package_versions(),
            hardware=hardware(),
            started=started.isoformat(timespec="microseconds"),
            finished=datetime.now(UTC).isoformat(timespec="microseconds"),
            metrics=metrics,
        )
        atomic_write(partial / MANIFEST_NAME, manifest.to_json())
        return self._publish(key, manifest)

    def _finished_partial(self, key: ArtifactKey) -> Manifest | None:
        """The manifest of a build that was killed after writing it: only the rename is missing."""
        partial = self.partial_dir(key)
        if not (partial / MANIFEST_NAME).exists():
            return None
        try:
            manifest = read_manifest(partial)
            verify(Artifact(partial, manifest))
        except ArtifactError as error:
            logger.warning(
                "starting %s again, what was left of it is damaged: %s", key.stage, error
            )
            shutil.rmtree(partial)
            return None
        return manifest

    def _publish(self, key: ArtifactKey, manifest: Manifest) -> Artifact:
        """Give a complete partial directory its final name, replacing what a rebuild replaces."""
        partial, final, retired = self.partial_dir(key), self.path(key), self._retired_dir(key)
        # Scratch goes only now: had it gone before the manifest, a kill in between would have
        # thrown away the work of a build that was already complete.
        for leftover in (partial / WORK_DIR, retired):
            if leftover.exists():
                shutil.rmtree(leftover)
        if final.exists():
            final.rename(retired)
        partial.rename(final)
        sync(final.parent)
        if retired.exists():
            shutil.rmtree(retired)
        self._rebuild_marker(key).unlink(missing_ok=True)
        logger.info("%s: finished %s", key.stage, final)
        return Artifact(final, manifest)

    def _hit(self, key: ArtifactKey) -> Artifact | None:
        artifact = self.find(key)
        if artifact is None:
            return None
        logger.info("%s: reusing %s", key.stage, artifact.path)
        places = (self.partial_dir(key), self._retired_dir(key), self._rebuild_marker(key))
        leftovers = [path for path in places if path.exists()]
        if leftovers:  # of a rebuild that was killed; unless it is still running
            try:
                with self._lock(key).acquire(timeout=0):
                    for path in leftovers:
                        if path.is_dir():
                            shutil.rmtree(path)
                        else:
                            path.unlink()
            except Timeout:
                logger.debug("%s: being rebuilt by another process", key.stage)
        return artifact

    def _follow(
        self,
        key: ArtifactKey,
        build: Callable[[Path], Mapping[str, Any]] | None,
        *,
        rebuild: bool,
    ) -> Artifact:
        """What a rank other than 0 does: take part if asked to, then wait for rank 0's commit."""
        if not rebuild and (found := self.find(key)):
            return found
        if build is not None:
            build(self.partial_dir(key))
        while True:
            # What a rebuild replaces stays in place until rank 0 commits; it is told from the new
            # one by its age, since every rank has started before rank 0 can finish.
            if (found := self.find(key)) and (not rebuild or _is_of_this_run(found.manifest)):
                return found
            time.sleep(_POLL_S)

    def _rebuild_marker(self, key: ArtifactKey) -> Path:
        """A file beside an unfinished build that is a rebuild."""
        return self.root / key.stage / f"{key.fingerprint}.rebuild"

    def _retired_dir(self, key: ArtifactKey) -> Path:
        return self.root / key.stage / f"{key.fingerprint}.retired"

    def work_lock(self, key: ArtifactKey) -> AbstractContextManager[object]:
        """A lock beside the build's own, for what processes that share a build do one at a time."""
        return self._lock(key, "-work")

    def _lock(self, key: ArtifactKey, suffix: str = "") -> FileLock:
        directory = self.root / ".locks"
        directory.mkdir(parents=True, exist_ok=True)
        return FileLock(directory / f"{key.stage}-{key.fingerprint[:_NAME_CHARS]}{suffix}.lock")

    @contextmanager
    def _locked(self, key: ArtifactKey) -> Iterator[None]:
        """Hold the lock of a key; the operating system frees it when the process is killed."""
        lock = self._lock(key)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("%s: waiting for another process that builds it", key.stage)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _finished(self, stage: str) -> list[Path]:
        """Directories of a stage's finished artifacts, sorted by name."""
        candidates = (self.root / stage).glob(f"*/{MANIFEST_NAME}")
        return sorted(path.parent for path in candidates if _is_finished_name(path.parent.name))

    def _locate(self, reference: Path | str) -> Path:
        for path in (Path(reference).expanduser(), self.root / reference):
            if path.is_dir():
                return path.absolute()
        digits = str(reference)
        known = [path for stage in sorted(self._stages()) for path in self._finished(stage)]
        if len(digits) >= _MIN_LOOKUP_CHARS:
            found = [path for path in known if path.name.startswith(digits[:_NAME_CHARS])]
            if len(found) == 1:
                return found[0]
            known = found or known
        names = ", ".join(str(path.relative_to(self.root)) for path in known) or "none yet"
        raise ArtifactMissingError(
            f"No single artifact {digits!r} in {self.root}. Candidates: {names}."
        )

    def _stages(self) -> list[str]:
        folders = self.root.iterdir() if self.root.is_dir() else ()
        return [path.name for path in folders if path.is_dir() and path.name[0] != "."]


def _is_finished_name(name: str) -> bool:
    return not name.endswith((".partial", ".retired"))


def _is_of_this_run(manifest: Manifest) -> bool:
    return datetime.fromisoformat(manifest.finished) >= _PROCESS_STARTED
