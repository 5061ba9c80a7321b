"""Owns measuring a pair that was never trained here: its file, its prompts, its drafts.

Refuses to know what is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from distill import config as mechanism
from distill.config import Config, setting
from distill.corpus import CorpusConfig, prompt_token_ids, read_corpus
from distill.errors import ConfigError, ContextLengthError, CorpusError, PairMismatchError
from distill.metrics.verdict import PROMPT_LOOKUP
from distill.models import LoadedModel, ModelConfig, load_target, load_tokenizer
from distill.models.config import check_shape
from distill.stages.measure_config import MeasureConfig
from distill.stages.measure_runs import Contestant, HeldOutPrompt
from distill.stages.measure_server import ServedConfig
from distill.vocab import check_pair


class PairConfig(Config):
    """The file of a pair that is only measured: a target, and ``measure`` with its draft.

    Or, with ``served`` instead of ``measure``: a pair that a server runs and counts for us.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    target: ModelConfig
    measure: MeasureConfig | None = None
    served: ServedConfig | None = setting(None, description="read a server's counters instead")

    @model_validator(mode="before")
    @classmethod
    def _give_measure_the_target(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "target" not in data:
            return data
        filled = dict(data)
        section = filled.get("measure")
        if isinstance(section, Mapping):
            if "target" in section:
                raise ConfigError(
                    "measure.target is taken from the top-level target; remove it from measure"
                )
            filled["measure"] = {**section, "target": data["target"]}
        return filled

    @model_validator(mode="after")
    def _check(self) -> PairConfig:
        if (self.measure is None) == (self.served is None):
            raise ConfigError(
                "a file for `distill measure` without training has `measure` (with draft and "
                "corpus) or `served` (a server and a corpus), and exactly one of the two."
            )
        if self.measure is not None and self.measure.target != self.target:
            raise ConfigError(
                f"measure.target is {self.measure.target}, and the top-level target "
                f"{self.target}; a pair has one target: give both the same"
            )
        if self.measure is not None and self.measure.draft is None:
            raise ConfigError(
                "measure.draft is not set, and this file trains none: name a model there, and the "
                "prompts in measure.corpus."
            )
        return self


def sections_of(path: str | Path, overrides: Sequence[str] = ()) -> frozenset[str]:
    """The names at the top of a file; what is overridden counts as written in it.

    None of a file that cannot be read, whose reader says what is wrong with it.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return frozenset()
    if not isinstance(content, Mapping):
        return frozenset()
    given = (re.split(r"[.[=]", item)[0].strip() for item in overrides)
    return frozenset(content) | frozenset(given)


def is_pair_config(path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a file is a pair's, which trains nothing: it has no ``distill`` section.

    A file that cannot be read is taken for a run's.
    """
    sections = sections_of(path, overrides)
    return not {"distill", "generate"} & sections and bool({"measure", "served"} & sections)


def load_pair_config(path: str | Path, overrides: Sequence[str] = ()) -> PairConfig:
    """Read the file of a pair that is only measured.

    Raises:
        ConfigError: as ``load_config``.
    """
    return mechanism.read_config(path, PairConfig, overrides)


def dump_pair_config(config: PairConfig) -> str:
    """YAML of the resolved config, the target once at the top; reloads to an equal object."""
    leave_out = [] if config.measure is None else ["measure.target"]
    return mechanism.dump_config(config, leave_out=leave_out)


def corpus_prompts(
    corpus: CorpusConfig, target: ModelConfig, *, max_prompts_per_task: int | None
) -> list[HeldOutPrompt]:
    """Every askable prompt of a corpus, shortest first; of a conversation the first turn.

    Nothing was trained on them, so no split is looked at.

    Raises:
        CorpusError: the corpus cannot be read, or has no prompt that can be asked.
    """
    if corpus.kind == "self_synthesis":
        raise CorpusError(
            "measure.corpus is of kind self_synthesis; measuring needs prompts that exist: jsonl, "
            "parquet, csv, text or datasets."
        )
    tokenizer = load_tokenizer(target)
    found = []
    per_task: dict[str, int] = {}
    for prompt in read_corpus(corpus).prompts:
        if prompt.reject_reason is not None:
            continue
        if per_task.get(prompt.task, 0) == max_prompts_per_task:
            continue
        per_task[prompt.task] = per_task.get(prompt.task, 0) + 1
        ids = prompt_token_ids(tokenizer, prompt, is_raw=corpus.raw)
        found.append(HeldOutPrompt(prompt.prompt_id, prompt.task, tuple(ids), {}))
    if not found:
        raise CorpusError(
            f"{corpus.path or corpus.name}: no prompt can be asked, so there is nothing to measure "
            "on. Give rows with a user turn."
        )
    return sorted(found, key=lambda p: (len(p.token_ids), p.prompt_id))


def check_lengths(
    prompts: Sequence[HeldOutPrompt], target: LoadedModel, max_new_tokens: int
) -> list[HeldOutPrompt]:
    """The prompts the target has room to answer.

    Raises:
        ContextLengthError: it has room for none.
    """
    limit = target.shape.max_position_embeddings - max_new_tokens
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if not fitting:
        raise ContextLengthError(
            f"the shortest prompt has {len(prompts[0].token_ids)} tokens and measure.max_new_tokens"
            f" is {max_new_tokens}; the target's context is "
            f"{target.shape.max_position_embeddings}. Lower max_new_tokens, or give shorter prompts"
        )
    return fitting


def beside(config: MeasureConfig, target: LoadedModel) -> list[Contestant]:
    """The drafts measured beside the first: further models, early exits, copying."""
    found = [
        load_contestant(name, model, config.target, target) for name, model in config.drafts.items()
    ]
    for number in config.early_exit:
        if number > target.shape.num_hidden_layers:
            raise ConfigError(
                f"measure.early_exit has {number} layers, the target has "
                f"{target.shape.num_hidden_layers}; choose at most as many."
            )
        found.append(Contestant(f"early_exit_{number}", num_layers=number))
    if config.prompt_lookup:
        found.append(Contestant(PROMPT_LOOKUP))
    return found


def load_contestant(
    name: str, config: ModelConfig, target_config: ModelConfig, target: LoadedModel
) -> Contestant:
    """A model as a draft, in the target's precision where its own is left open.

    Only where it is the target in every respect (held the same way, on the same device) is the
    target itself used, and not loaded twice. Ids must mean the same on both sides. A chat template
    or pad token of its own does not stop a draft from proposing, only from being right: that is for
    the diagnosis.

    Raises:
        ConfigError: it cannot be quantised, or its sizes are not those of ``config.shape``.
        PairMismatchError: the draft's token ids mean something else; says which draft.
    """
    if config.dtype == "auto":
        config = config.model_copy(update={"dtype": target_config.dtype})
    if config.device == "auto":
        config = config.model_copy(update={"device": str(target.device)})
    # The sizes in a config are only checked: they say nothing of how a model is held.
    known = {"device": str(target.device), "shape": config.shape}
    if config == target_config.model_copy(update=known):
        check_shape(config, target.shape)
        return Contestant(name, target)
    draft = load_target(config)
    try:
        check_pair(
            target.tokenizer,
            target.shape,
            draft.tokenizer,
            draft.shape,
            takes_target_tokenizer=True,
        )
    except PairMismatchError as error:
        raise PairMismatchError(f"{name} ({config.model}): {error}") from error
    return Contestant(name, draft)
