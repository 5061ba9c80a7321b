"""Owns a backend for tests that answers from a script, and a config around it.
Refuses to load a model: what is said is a function of what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from distill.artifacts import Artifact
from distill.backends.base import BACKENDS, Completion, Unanswered
from distill.corpus import CorpusConfig
from distill.models import ModelConfig
from distill.sampling import SamplingConfig
from distill.stages.generate import GenerateConfig
from tests.helpers import make_tokenizer

Said = str | Completion | Unanswered | None
Script = Callable[[str, int], Said]
"""(text asked, sample index) -> text said before the stop token, or what came instead."""


def text_said(text: str, prompt_index: int, sample_index: int) -> Completion:
    """A completed answer of these words."""
    ids = (*make_tokenizer()(text)["input_ids"], 1)
    return Completion(prompt_index, sample_index, ids, "stop")


def use_script(monkeypatch: pytest.MonkeyPatch, script: Script) -> list[str]:
    """Register the backend "scripted"; returns the list of texts it will have been asked."""
    asked: list[str] = []
    tokenizer = make_tokenizer()

    class Scripted:
        def __init__(self, config: ModelConfig, *, max_batch_size: int, settings: Any) -> None:
            del config, max_batch_size, settings

        def generate(
            self,
            prompts: Sequence[Sequence[int]],
            sampling: SamplingConfig,
            *,
            num_samples: int = 1,
            on_tokens: Callable[[int], None] | None = None,
            **rest: Any,
        ) -> Iterator[Completion | Unanswered]:
            for prompt_index, prompt in enumerate(prompts):
                text = tokenizer.decode(prompt)
                asked.append(text)
                for sample in range(num_samples):
                    said = script(text, sample)
                    if said is None:
                        continue
                    if isinstance(said, str):
                        yield text_said(said, prompt_index, sample)
                    elif isinstance(said, Completion):
                        ids, reason = said.token_ids, said.finish_reason
                        yield Completion(prompt_index, sample, ids, reason)
                    else:
                        yield Unanswered(prompt_index, sample, said.status, said.reason)
                    if on_tokens is not None:
                        on_tokens(1)

    monkeypatch.setitem(BACKENDS._items, "scripted", Scripted)
    return asked


def scripted_config(target: Path, corpus: Path | CorpusConfig, **changes: Any) -> GenerateConfig:
    """A config that keeps no states, as a script has none."""
    source = corpus if isinstance(corpus, CorpusConfig) else CorpusConfig(path=corpus)
    settings: dict[str, Any] = {
        "target": ModelConfig(model=str(target), device="cpu"),
        "corpus": source,
        "backend": "scripted",
        "target_store": "none",
        "max_new_tokens": 10,
        "batch_size": 4,
        "chunk_size": 4,
    }
    return GenerateConfig(**{**settings, **changes})


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    """The rows of completions.parquet."""
    rows: list[dict[str, Any]] = pq.read_table(artifact.file("completions.parquet")).to_pylist()
    return rows


def hashes_of(artifact: Artifact) -> dict[str, str]:
    """sha256 of each payload file."""
    return {entry.path: entry.sha256 for entry in artifact.manifest.files}
