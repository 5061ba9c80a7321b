"""Owns the settings of a measurement: what is measured, on how much, and what it must reach.

Refuses to know how anything is measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import model_validator

from distill.config import Config, setting
from distill.corpus import CorpusConfig
from distill.errors import ConfigError
from distill.metrics.sentences import ENOUGH_PROMPTS
from distill.metrics.verdict import DISTILLED, PROMPT_LOOKUP, UNDISTILLED
from distill.models import ModelConfig

GIVEN_DRAFT = "draft"
"""The name, in every table, of a draft that was not trained here."""

PLAIN = "plain"
"""Plain decoding's name among the contestants that are timed."""

MIN_LAW_SAMPLES = 32
"""Two contexts of 16 draws each: with fewer hardly a cell is expected often enough to be tested."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names stand in tables and in the names of files, which may not be as long as one likes."""


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Refuse a list that measures one thing twice, or what no distribution has."""
    if len(set(temperatures)) < len(temperatures) or min(temperatures) < 0:
        raise ConfigError(f"temperatures {list(temperatures)}: each once, and none below 0.")


def check_depth(num_draft_tokens: int, max_new_tokens: int, *, name: str) -> None:
    """Refuse more draft tokens than an answer has room for: the last token is the target's own."""
    if num_draft_tokens >= max_new_tokens:
        raise ConfigError(
            f"{name} is {num_draft_tokens} and max_new_tokens {max_new_tokens}: the last token of "
            f"an answer is the target's own, so at most {max_new_tokens - 1} can be drafted. Lower "
            f"{name}, or raise max_new_tokens to {num_draft_tokens + 1} or more."
        )


def measured_whole(corpus: Any, *, name: str) -> Any:
    """The settings of a corpus that nothing is trained on: no part of it is held out.

    Raises:
        ConfigError: a part is asked for; it would change nothing.
    """
    key, is_read = "held_out_fraction", isinstance(corpus, CorpusConfig)
    if not is_read and not isinstance(corpus, Mapping):
        return corpus
    own = corpus.model_dump(include={key}, exclude_unset=True) if is_read else corpus
    if own.get(key, 0):
        raise ConfigError(
            f"{name}.{key} is {own[key]}, but nothing is trained on these prompts, so all of them "
            "are measured on. Remove it; to measure on fewer, set max_prompts_per_task."
        )
    return corpus.model_copy(update={key: 0.0}) if is_read else {**corpus, key: own.get(key, 0.0)}


class TimingConfig(Config):
    """How speed is measured: batch 1, interleaved with plain decoding in the same engine."""

    enabled: bool = setting(True, description="false: no speed, and so no verdict to ship")
    num_prompts: int = setting(
        ENOUGH_PROMPTS, ge=1, description="spread over the lengths of the prompts"
    )
    max_new_tokens: int = setting(64, ge=1)
    repeats: int = setting(3, ge=1, description="passes per contestant, interleaved")
    cost_repeats: int = setting(15, ge=1, description="timings of each single step")
    max_draft_tokens: int = setting(8, ge=1, description="the deepest K the planner may choose")
    baselines: bool = setting(True, description="time the other drafts too, not the first only")
    batch_sizes: tuple[int, ...] = setting(
        (4, 16), description="also predict for so many rows at once; empty: batch 1 only"
    )

    @model_validator(mode="after")
    def _check_batches(self) -> TimingConfig:
        if any(size < 2 for size in self.batch_sizes):
            raise ConfigError(
                f"batch_sizes {list(self.batch_sizes)}: batch 1 is always measured; list sizes of "
                "2 and more"
            )
        return self

    @model_validator(mode="after")
    def _check_depth(self) -> TimingConfig:
        if self.enabled:
            check_depth(self.max_draft_tokens, self.max_new_tokens, name="max_draft_tokens")
        return self


class GateConfig(Config):
    """Bounds a draft must reach; a run that fails one writes everything and exits with 3."""

    min_speedup: float | None = setting(
        None, ge=0, description="measured speedup, at every temperature"
    )
    min_alpha: float | None = setting(
        None, ge=0, le=1, description="analytic acceptance rate, at every temperature"
    )
    lossless: bool = setting(True, description="no greedy answer broken, no law of tokens changed")


class MeasureConfig(Config):
    """What is measured, and on how much.

    A draft trained here comes from its artifact. ``draft`` and ``corpus`` measure a pair that was
    not: two model references, and the prompts.
    """

    target: ModelConfig
    draft: ModelConfig | None = setting(
        None, description="a draft that exists already, instead of one trained by this run"
    )
    corpus: CorpusConfig | None = setting(
        None, description="with draft: the prompts, all of which are measured on"
    )
    temperatures: tuple[float, ...] = setting((0.0, 0.7, 1.0), min_length=1)
    num_draft_tokens: int = setting(4, ge=1, description="K of the acceptance runs")
    max_new_tokens: int = setting(96, ge=1)
    max_prompts_per_task: int | None = setting(
        None, ge=1, description="held-out prompts per task; null: all"
    )
    batch_size: int = setting(32, ge=1, description="prompts decoded together: the unit of resume")
    undistilled: bool = setting(
        True,
        description="also measure the draft as it was before training; with draft: false, for "
        "there is none",
    )
    prompt_lookup: bool = setting(True, description="also measure drafting by copying")
    early_exit: tuple[int, ...] = setting(
        (), description="also measure the target's own first so many layers as drafts"
    )
    drafts: dict[str, ModelConfig] = setting(
        {}, description="also measure these models as drafts, by name"
    )
    law_samples: int = setting(
        512,
        ge=0,
        description=f"continuations drawn above temperature 0 to test the law, {MIN_LAW_SAMPLES} "
        "or more; 0: none, and so no verdict to ship",
    )
    seed: int = setting(0, ge=0)
    gate: GateConfig | None = setting(
        None, in_fingerprint=False, description="bounds that decide the exit code; null: none"
    )
    timing: TimingConfig = TimingConfig()

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_a_pair_has_not(cls, data: Any) -> Any:
        """Settings that a given draft leaves without effect may not make another artifact of it."""
        if not isinstance(data, Mapping) or data.get("draft") is None:
            return data
        if data.get("undistilled"):
            raise ConfigError(
                "undistilled is true, but measure.draft was not trained here, so there is no draft "
                "from before its training. Remove undistilled, or name that draft in "
                "measure.drafts."
            )
        filled = {**data, "undistilled": data.get("undistilled", False)}
        if "corpus" in filled:
            filled["corpus"] = measured_whole(filled["corpus"], name="measure.corpus")
        return filled

    @model_validator(mode="after")
    def _check_ranges(self) -> MeasureConfig:
        check_temperatures(self.temperatures)
        check_depth(self.num_draft_tokens, self.max_new_tokens, name="num_draft_tokens")
        return self

    @model_validator(mode="after")
    def _check_law_samples(self) -> MeasureConfig:
        if 0 < self.law_samples < MIN_LAW_SAMPLES:
            raise ConfigError(
                f"law_samples {self.law_samples}: so few draws test nothing; give at least "
                f"{MIN_LAW_SAMPLES}, or 0 for no test."
            )
        return self

    @model_validator(mode="after")
    def _check_drafts(self) -> MeasureConfig:
        if (self.draft is None) != (self.corpus is None):
            has, lacks = ("draft", "corpus") if self.corpus is None else ("corpus", "draft")
            raise ConfigError(
                f"measure.{has} is set and measure.{lacks} is not: a pair that was not trained "
                "here needs both, a draft and the prompts; one that was, neither."
            )
        taken = (PLAIN, DISTILLED, UNDISTILLED, PROMPT_LOOKUP, GIVEN_DRAFT)
        for name in self.drafts:
            if name in taken or name.startswith("early_exit") or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"measure.drafts: {name!r} cannot be a draft's name; letters, digits, '.', '_' "
                    f"and '-', at most 64 of them, and none of {', '.join(taken)}, early_exit."
                )
        # Results lie in files by these names, and some file systems take A and a for one.
        folded = [name.casefold() for name in self.drafts]
        if len(set(folded)) < len(folded):
            raise ConfigError(
                f"measure.drafts: two of {', '.join(self.drafts)} differ in upper and lower case "
                "alone; give one another name."
            )
        if any(n < 1 for n in self.early_exit) or len(set(self.early_exit)) < len(self.early_exit):
            raise ConfigError(
                f"measure.early_exit {list(self.early_exit)}: numbers of layers, at least 1, each "
                "once."
            )
        return self

    @property
    def primary(self) -> str:
        """The draft the verdict is about."""
        return DISTILLED if self.draft is None else GIVEN_DRAFT

    @property
    def bounds(self) -> dict[str, Any] | None:
        """The gate as plain data, for whoever judges a finished measurement by it."""
        return None if self.gate is None else self.gate.model_dump(mode="json")

    @property
    def baseline(self) -> str | None:
        """The draft the primary one is compared with, prompt by prompt."""
        return UNDISTILLED if self.draft is None and self.undistilled else None
