"""Owns the settings of a corpus: where prompts come from, which are left out, how they divide.

Refuses to read a row.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from distill.config import Config, ConfigPath, setting
from distill.errors import ConfigError
from distill.sampling import SamplingConfig

Split = Literal["train", "held_out"]
SourceKind = Literal["jsonl", "parquet", "csv", "text", "datasets"]


class SourceConfig(Config):
    """One place rows are read from.

    What is read decides the artifact, not where it lies: the rows are hashed (``Corpus.sha256``),
    the settings that led to them are not.
    """

    path: ConfigPath | None = setting(
        None, in_fingerprint=False, description="jsonl, parquet, csv: a file; text: file or folder"
    )
    name: str | None = setting(None, in_fingerprint=False, description="of a `datasets` dataset")
    subset: str | None = setting(None, in_fingerprint=False, description="its configuration")
    split: str = setting("train", in_fingerprint=False, description="which of its splits to read")
    streaming: bool = setting(
        False, in_fingerprint=False, description="datasets: read rows without downloading them all"
    )
    prompt_column: str | None = setting(
        None, in_fingerprint=False, description="the column to read; else turns, prompt, messages"
    )
    glob: str = setting("**/*.txt", in_fingerprint=False, description="text: the folder's files")
    chunk_characters: int | None = setting(
        None, ge=1, in_fingerprint=False, description="text: cut files into prompts of that length"
    )
    limit: int | None = setting(
        None, gt=0, in_fingerprint=False, description="read only the first rows"
    )
    max_turns: int | None = setting(
        None, ge=1, in_fingerprint=False, description="ask only the first turns of a conversation"
    )


class GivenSourceConfig(SourceConfig):
    """A source of prompts that exist: any but the kinds made of other sources."""

    kind: SourceKind = setting("jsonl", in_fingerprint=False)

    @model_validator(mode="after")
    def _check_source(self) -> GivenSourceConfig:
        require_place(self, self.kind)
        return self


class PartConfig(GivenSourceConfig):
    """A part of a mixture; ``weight`` is its share, relative to the other parts."""

    weight: float = setting(1.0, gt=0, in_fingerprint=False)
    label: str | None = setting(
        None,
        min_length=1,
        in_fingerprint=False,
        description="put before the rows' own ids, and the part's name in the counts",
    )


class NearDuplicatesConfig(Config):
    """When two prompts count as one: Jaccard similarity of their character n-grams.

    Candidates come from MinHash LSH (Broder 1997), which may miss a pair near the threshold; each
    candidate is then compared exactly, so no two prompts below it are taken for duplicates.
    """

    threshold: float = setting(0.8, gt=0, lt=1, in_fingerprint=False)
    ngram_characters: int = setting(5, ge=1, in_fingerprint=False)
    num_permutations: int = setting(128, ge=16, in_fingerprint=False)
    seed: int = setting(1, ge=0, in_fingerprint=False)


class DecontaminateConfig(Config):
    """Prompts that share ``ngram`` words in a row with an evaluation prompt are left out."""

    against: tuple[GivenSourceConfig, ...] = setting(min_length=1, in_fingerprint=False)
    ngram: int = setting(13, ge=1, in_fingerprint=False)


class SynthesisConfig(Config):
    """How a target writes prompts itself (Magpie, arXiv 2406.08464), and which are kept."""

    sampling: SamplingConfig = SamplingConfig()
    seed: int = setting(0, ge=0)
    max_new_tokens: int = setting(256, ge=1, description="a longer text is left out")
    min_characters: int = setting(8, ge=1)
    max_repetition: float = setting(
        0.5, gt=0, le=1, description="share of word 3-grams that may be repeats of others"
    )


class CorpusConfig(SourceConfig):
    """Where the prompts are, which of them are left out, and how they are divided."""

    kind: SourceKind | Literal["mixture", "self_synthesis"] = setting("jsonl", in_fingerprint=False)
    parts: tuple[PartConfig, ...] = setting((), in_fingerprint=False, description="of a mixture")
    num_prompts: int | None = setting(
        None,
        ge=1,
        in_fingerprint=False,
        description="self_synthesis: texts to write; mixture: rows in all, else as many as fit",
    )
    synthesis: SynthesisConfig = setting(SynthesisConfig(), in_fingerprint=False)
    held_out_fraction: float = setting(
        0.1,
        ge=0,
        lt=1,
        in_fingerprint=False,
        description="of the rows that name no split themselves: share kept from training",
    )
    raw: bool = setting(False, description="no chat template: the text as it is (base models)")
    deduplicate: bool = setting(
        True, in_fingerprint=False, description="reject a row whose content is another's"
    )
    near_duplicates: NearDuplicatesConfig | None = setting(None, in_fingerprint=False)
    decontaminate: DecontaminateConfig | None = setting(None, in_fingerprint=False)

    @model_validator(mode="after")
    def _check_kind(self) -> CorpusConfig:
        if self.kind == "mixture":
            if not self.parts:
                raise ConfigError("a corpus of kind 'mixture' needs `parts:`, a list of sources")
            labels = [part.label for part in self.parts if part.label is not None]
            if len(set(labels)) < len(labels):
                raise ConfigError(f"two parts have one label: {', '.join(sorted(labels))}")
        elif self.parts:
            raise ConfigError(f"`parts` belongs to kind: mixture, and this corpus is {self.kind!r}")
        if self.kind == "self_synthesis":
            if self.num_prompts is None:
                raise ConfigError("a corpus of kind 'self_synthesis' needs `num_prompts:`")
            if self.raw:
                raise ConfigError(
                    "self_synthesis lets the chat template open the user's turn, and `raw: true` "
                    "uses no template; leave one of the two out"
                )
        elif self.kind != "mixture":
            if self.num_prompts is not None:
                raise ConfigError("`num_prompts` is for self_synthesis and mixture; use `limit`")
            require_place(self, self.kind)
        return self


def require_place(config: SourceConfig, kind: str) -> None:
    """Check that a source says where it is.

    Raises:
        ConfigError: it has no path, or no name where the kind is datasets.
    """
    needed = "name" if kind == "datasets" else "path"
    if getattr(config, needed) is None:
        raise ConfigError(f"a corpus of kind {kind!r} needs `{needed}:`")
