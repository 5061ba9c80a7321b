"""What a target is, without its weights: its tokenizer, sizes, stop ids and revision.

Refuses to know where the model runs: that is for whoever only needs to talk about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from distill.errors import ModelNotFoundError
from distill.models import sources
from distill.models.config import ModelConfig, ModelShape
from distill.models.loading import load_tokenizer, stop_token_ids
from distill.models.resolve import model_revision, read_shape, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFacts:
    """A model's tokenizer and what is known of it; equal to what the loaded model would say."""

    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    stop_token_ids: frozenset[int]
    revision: str


def read_facts(config: ModelConfig) -> ModelFacts:
    """The facts of a model; of a hub model only small files are fetched.

    Raises:
        ModelNotFoundError: nowhere to be found, or files that transformers cannot read.
        ConfigError: ``config.shape`` is not the model's.
    """
    tokenizer = load_tokenizer(config)
    shape = read_shape(config)
    assert shape is not None, "a model whose tokenizer is here has its config.json beside it"
    return ModelFacts(tokenizer, shape, _stop_token_ids(config, tokenizer), model_revision(config))


def _stop_token_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    from transformers import AutoConfig, GenerationConfig

    path = _directory(config)
    try:
        with sources.quiet():
            own = AutoConfig.from_pretrained(str(path), trust_remote_code=config.trust_remote_code)
            generation = None
            if (path / "generation_config.json").is_file():
                generation = GenerationConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(
            f"transformers cannot read the config.json or generation_config.json in {path}: "
            f"{error}. Fetch or save the model again"
        ) from error
    described = SimpleNamespace(config=own, generation_config=generation)
    return stop_token_ids(described, tokenizer)


def _directory(config: ModelConfig) -> Path:
    reference = sources.parse_reference(config.model)
    if reference.kind != "hub":
        return resolve_model(config).path
    return sources.hub_snapshot(
        reference.name, reference.revision, with_code=config.trust_remote_code, weights=False
    )
