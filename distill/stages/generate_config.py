"""Owns what the generate stage can be told: whom to ask, what, how, and what is kept.

Refuses to know how any of it is done.
"""

from __future__ import annotations

from datetime import date

from pydantic import model_validator

from distill.backends.settings import BackendChoice
from distill.config import Config, setting
from distill.corpus import CorpusConfig
from distill.corpus.templates import DEFAULT_DATE
from distill.errors import ConfigError
from distill.models import ModelConfig
from distill.sampling import SamplingConfig
from distill.stages.generate_plan import parse_shard
from distill.target_store.config import TargetStoreChoice


class GenerateConfig(Config):
    """What is asked, how it is answered, and what is kept.

    Each prompt is answered ``num_samples`` times for each entry of ``samplings``. ``batch_size``
    and ``chunk_size`` belong to the fingerprint: the shapes of matrix products change last bits.
    """

    target: ModelConfig
    corpus: CorpusConfig
    samplings: tuple[SamplingConfig, ...] = setting((SamplingConfig(),), min_length=1)
    num_samples: int = setting(1, ge=1)
    max_new_tokens: int = setting(256, ge=1)
    max_prompt_tokens: int | None = setting(
        None, ge=1, description="longer prompts are rejected; else the context decides"
    )
    seed: int = setting(0, ge=0)
    backend: BackendChoice = "local"
    batch_size: int = setting(64, ge=1, description="rows decoded at once")
    chunk_size: int = setting(256, ge=1, description="rows in a shard: the unit of resume")
    target_store: TargetStoreChoice = setting(
        "final_hidden",
        description="what is kept of the target for training: none (it is run again then), "
        "final_hidden, top_k or sampled; {kind: top_k, k: 64}, {kind: sampled, num_draws: 50}",
    )
    system_prompt: str | None = setting(None, description="for rows without a system message")
    template_date: date = setting(
        DEFAULT_DATE, description="what a chat template that prints the date is told"
    )
    shard: str | None = setting(
        None,
        in_fingerprint=False,
        description="i/n: answer only this part; the last of n to finish puts all together",
    )
    retry_failed: bool = setting(
        False,
        in_fingerprint=False,
        description="ask the failed rows of a finished build again, and keep its other answers",
    )

    @model_validator(mode="after")
    def _check(self) -> GenerateConfig:
        if self.corpus.raw and self.system_prompt is not None:
            raise ConfigError("corpus.raw uses no chat template, so system_prompt has no place")
        if self.shard is not None:
            parse_shard(self.shard)
        return self
