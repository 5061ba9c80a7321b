"""Owns every error this library raises for its users, drawn as one tree.
Refuses to know who raises them or how they are shown: no imports, no printing, no exit.

    DistillError                    a user can act on it; the command line exits with 2
    |-- ConfigError                 a setting is unknown, malformed, out of range
    |   `-- RegistryError           a loss, drafter or backend name that nobody registered
    |-- ArtifactError               an artifact cannot be used as asked
    |   |-- ArtifactMissingError    it, or a file in it, is not there
    |   |-- ArtifactCorruptError    its bytes are not the bytes its manifest promises
    |   |-- ArtifactStaleError      it is whole, but belongs to another key or another schema
    |   `-- ShardsPendingError      this shard of it is done; others are not (not a fault: exit 0)
    |-- ModelNotFoundError          a model reference that leads nowhere
    |-- PairMismatchError           a target and a draft that cannot work together
    |-- CorpusError                 a prompt file that cannot be read as prompts
    |-- ContextLengthError          a prompt longer than the model's context
    |-- DiskSpaceError              the disk is full, or would be
    |-- SamplingError               a sampling setting that no distribution satisfies
    |-- LogitsProcessorError        a logits processor that remembers, or gives back no logits
    |-- CacheRollbackError          a model whose cache cannot be rolled back
    |-- TrainingError               training cannot go on (not-a-number, nothing to train on)
    |-- BackendUnavailableError     nobody answers where the target should run
    |-- ExportError                 the draft cannot be shipped as it is
    |-- GateFailedError             a measured draft is below a bound that was set: exit 3
    `-- ServerError                 the server cannot start or has stopped

A message holds what was found, what was expected, where (file, dotted setting) and the way out.
"""

from __future__ import annotations


class DistillError(Exception):
    """Base of every error a user can act on; anything else that escapes is a bug of ours."""

    exit_code = 2


class ConfigError(DistillError, ValueError):
    """A setting is unknown, malformed or out of range.

    Also a ``ValueError``, so that a pydantic validator may raise it and the reader of a
    configuration file still learns the dotted path of the setting.
    """


class RegistryError(ConfigError):
    """A name that no loss, drafter or backend was registered under, or one registered twice."""


class ArtifactError(DistillError):
    """An artifact cannot be used as asked, for example a draft where a corpus is expected."""


class ArtifactMissingError(ArtifactError):
    """The artifact, or a file asked of it, does not exist."""


class ArtifactCorruptError(ArtifactError):
    """The bytes on disk are not the bytes the manifest promises."""


class ArtifactStaleError(ArtifactError):
    """The artifact is whole, but was written for another key or by another schema version."""


class ShardsPendingError(ArtifactError):
    """The part this process was given is done, and parts given to others are not yet."""

    exit_code = 0


class ModelNotFoundError(DistillError):
    """A model reference that leads nowhere; the message lists everything that was tried."""


class PairMismatchError(DistillError):
    """A target and a draft that cannot work together: vocabulary, special ids, architecture."""


class CorpusError(DistillError):
    """A prompt source that is empty, malformed or unreadable; names the file and the line."""


class ContextLengthError(DistillError):
    """A prompt does not fit the context of the model that has to read it."""


class DiskSpaceError(DistillError):
    """The disk is full, or what is about to be written would fill it."""


class SamplingError(DistillError):
    """Sampling settings that no distribution satisfies, such as every token being banned."""


class LogitsProcessorError(DistillError):
    """A logits processor that cannot be honoured exactly: it remembers, or returns no logits."""


class CacheRollbackError(DistillError):
    """A model whose cache cannot be rolled back, so that rejected tokens would stay in it."""


class TrainingError(DistillError):
    """Training cannot go on: a loss that is not a number, or nothing to train on."""


class BackendUnavailableError(DistillError):
    """Nobody answers where the target is supposed to run, or a dependency of it is missing."""


class ExportError(DistillError):
    """The draft cannot be shipped as it is: a name, a weight or a licence stands in the way."""


class GateFailedError(DistillError):
    """A draft was measured, all of it is written, and it is below a bound of ``measure.gate``."""

    exit_code = 3


class ServerError(DistillError):
    """The server cannot start, or has stopped while a request was waiting."""
