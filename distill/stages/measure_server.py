"""Owns measuring a pair that a server runs: prompts go out, its counters are read around each.

Refuses to know what the counters' names are (``metrics.counters``) and to load any weights.
"""

from __future__ import annotations

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import field_validator, model_validator

from distill.backends.base import Unanswered, open_backend, stable_seed
from distill.backends.settings import HttpSettings
from distill.config import Config, setting
from distill.corpus import CorpusConfig
from distill.errors import BackendUnavailableError, ConfigError
from distill.metrics import summary
from distill.metrics.counters import SpeculationCounters, counts_of, read_counters
from distill.metrics.summary import PromptRecord
from distill.models import ModelConfig
from distill.sampling import SamplingConfig
from distill.stages.measure_config import check_temperatures, measured_whole
from distill.stages.measure_runs import HeldOutPrompt

logger = logging.getLogger(__name__)

SERVED = "served"
"""The name, in every table, of the draft a server runs."""


class ServedConfig(Config):
    """A server that decodes speculatively and counts, and what it is asked.

    The smallest such section is ``{server: "http://host:port", corpus: {path: prompts.jsonl}}``.
    """

    server: HttpSettings = setting(
        description="its address, http://host:port, or base_urls: [that] with further settings"
    )
    corpus: CorpusConfig = setting(description="the prompts, all of which are asked")
    temperatures: tuple[float, ...] = setting((0.0, 0.7, 1.0), min_length=1)
    max_new_tokens: int = setting(96, ge=1, description="the longest answer")
    max_prompts_per_task: int | None = setting(
        None, ge=1, description="prompts of each task; null: all"
    )
    metrics_path: str = setting(
        "/metrics", pattern="^/", description="where the counters are, on the server"
    )
    seed: int = setting(0, ge=0)

    @field_validator("server", mode="before")
    @classmethod
    def _read_address(cls, server: Any) -> Any:
        """One address is all most servers need."""
        if isinstance(server, str):
            return {"base_urls": [server]}
        if not isinstance(server, Mapping | HttpSettings):
            raise ConfigError(
                f"a server is its address, http://host:port, or base_urls: [http://host:port] with "
                f"further settings, and not of type {type(server).__name__}"
            )
        return server

    @field_validator("corpus", mode="before")
    @classmethod
    def _ask_everything(cls, corpus: Any) -> Any:
        return measured_whole(corpus, name="served.corpus")

    @model_validator(mode="after")
    def _check(self) -> ServedConfig:
        check_temperatures(self.temperatures)
        return self


def measure_served(
    config: ServedConfig, target: ModelConfig, prompts: Sequence[HeldOutPrompt]
) -> dict[str, Any]:
    """Ask a server every prompt, one at a time, and read its counters before and after each.

    One at a time, so that a count belongs to a prompt and intervals are over prompts. Other traffic
    on the server would be counted as well: ``num_foreign_tokens`` says how many tokens it handed
    out that were not ours. Rates follow from counts by the same definitions as everywhere; the
    server tells no distributions, so there is no analytic rate.

    Raises:
        BackendUnavailableError: no server answers, or it reports no speculation.
        ConfigError: more than one server: their counters cannot be told apart.
    """
    urls = config.server.urls
    if len(urls) != 1:
        raise ConfigError(
            f"served.server.base_urls lists {len(urls)} servers; counters are read around each "
            "prompt, so list one."
        )
    backend = open_backend(config.server, target, max_batch_size=1)
    read = _reader(f"{urls[0]}{config.metrics_path}", config.server)
    records: list[PromptRecord] = []
    num_ours = num_theirs = num_unanswered = 0
    for temperature in config.temperatures:
        for prompt in prompts:
            before = read()
            (answer,) = backend.generate(
                [prompt.token_ids],
                SamplingConfig(temperature=temperature),
                max_new_tokens=config.max_new_tokens,
                seeds=[stable_seed(config.seed, prompt.prompt_id)],
            )
            stretch = read() - before
            num_theirs += stretch.num_generated_tokens
            if isinstance(answer, Unanswered):
                num_unanswered += 1
                logger.warning("%s was not answered: %s", prompt.prompt_id, answer.reason)
                continue
            num_ours += len(answer.token_ids)
            records.append(
                PromptRecord(
                    SERVED, temperature, prompt.prompt_id, prompt.task, counts_of(stretch), 0, {}
                )
            )
    depth = max((len(r.counts["accepted_by_position"]) for r in records), default=0)
    return {
        "url": urls[0],
        "drafts": [SERVED],
        "primary": SERVED,
        "temperatures": list(config.temperatures),
        "num_draft_tokens": depth,
        "num_prompts": len(prompts),
        "num_unanswered": num_unanswered,
        "num_foreign_tokens": max(0, num_theirs - num_ours),
        "cells": summary.summarize(records, num_draft_tokens=depth, seed=config.seed),
        "records": [
            {
                "draft": r.draft,
                "temperature": r.temperature,
                "prompt_id": r.prompt_id,
                "task": r.task,
                **r.counts,
            }
            for r in records
        ],
    }


def _reader(url: str, settings: HttpSettings) -> Callable[[], SpeculationCounters]:
    headers = {}
    if settings.api_key_env is not None:
        headers["authorization"] = f"Bearer {os.environ.get(settings.api_key_env, '')}"
    request = urllib.request.Request(url, headers=headers)

    def read() -> SpeculationCounters:
        try:
            with urllib.request.urlopen(request, timeout=settings.connect_timeout_s) as answer:
                text = answer.read().decode("utf-8", errors="replace")
        except (urllib.error.URLError, OSError) as error:
            raise BackendUnavailableError(
                f"{url} cannot be read ({error}). Start the server with its metrics on, or set "
                "served.metrics_path"
            ) from error
        return read_counters(text)

    return read
