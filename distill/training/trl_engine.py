"""Owns training by TRL's DistillationTrainer, on text the draft writes, behind the same settings.

Refuses to know artifacts. What TRL cannot do is refused; nothing is approximated.

Each step the draft answers a batch of prompts and the target, in memory, says what it would have
done there (on-policy distillation, Agarwal et al. 2023, arXiv 2306.13649). Useful where that is
all one wants, and as the yardstick for our own loop. A killed run starts again.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.errors import ConfigError, TrainingError
from distill.models import LoadedModel
from distill.training.config import (
    DecodeProbeConfig,
    LossPhase,
    TrainingConfig,
    learning_rate_at,
)
from distill.training.trackers import disable_hub_telemetry
from distill.training.trunk import make_optimizer, set_trainable

logger = logging.getLogger(__name__)

# TRL's beta: 0 forward KL, 1 reverse KL, between them the generalised JSD.
_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0}


# What our loop alone does: TRL counts prompts, scores and saves once, at its end, and its step is
# its own. Left out of a run in silence they would make it another one than was asked for.
_OURS_ALONE = (
    "rollout_fraction",
    "batch_tokens",
    "micro_batch_tokens",
    "max_loss_ratio",
    "eval_every",
    "patience",
    "decode_every",
    "decode",
    "checkpoint_every",
)


@dataclass(frozen=True)
class TrlResult:
    """`num_tokens`: written by the draft and trained on; `log`: TRL's own numbers, one a step."""

    log: list[dict[str, Any]]
    num_tokens: int
    num_rows_a_step: int
    seconds: float


def settings_for_trl() -> dict[str, Any]:
    """What to change in a config of our loop, so that :func:`check_for_trl` takes it: defaults."""
    fields = TrainingConfig.model_fields
    return {name: fields[name].default for name in (*_OURS_ALONE, "trackers")}


def check_for_trl(
    config: TrainingConfig, *, vocabulary_size: int | None, has_rollouts: bool = False
) -> None:
    """Check that TRL can do what is asked, here.

    `has_rollouts`: there is text that the draft wrote before, which TRL would not read.

    Raises:
        ConfigError: names the setting, its value and what to write instead.
    """
    check_settings_for_trl(config, vocabulary_size=vocabulary_size)
    if has_rollouts:
        raise ConfigError(
            "engine: trl reads text the draft writes in its own steps, and the rollouts it is "
            "given would be thrown away; use engine: own, or leave out rollouts (pipeline: "
            "standard)"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"engine: trl runs in one process here, and WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}; use engine: own, or start it without a launcher"
        )


def check_settings_for_trl(config: TrainingConfig, *, vocabulary_size: int | None) -> None:
    """Check what a config alone says of a run by TRL.

    Raises:
        ConfigError: names the setting, its value and what to write instead.
    """
    phase = _only_phase(config)
    if phase.name not in _BETA and phase.name != "jsd":
        raise ConfigError(
            f"engine: trl has forward_kl, reverse_kl and jsd, and loss is {phase.name}. Choose one "
            f"of them, or engine: own."
        )
    if phase.temperature != 1.0:
        raise ConfigError(
            f"engine: trl draws the draft's text at the loss's temperature, and that of "
            f"{phase.name} is {phase.temperature:g}; set it to 1, or use engine: own"
        )
    if named := _not_followed(config, phase, vocabulary_size):
        raise ConfigError(
            f"engine: trl knows nothing of {', '.join(named)}; leave each at its default, or use "
            f"engine: own"
        )


def require_equal_rows(draft: int, target: int) -> None:
    """Check that two models have vocabularies of one padded size, which TRL needs.

    Raises:
        ConfigError: they do not.
    """
    if draft != target:
        raise ConfigError(
            f"engine: trl needs equal vocab_size, and the draft has {draft}, the target {target}; "
            f"use engine: own, which compares what both know"
        )


def _not_followed(
    config: TrainingConfig, phase: LossPhase, vocabulary_size: int | None
) -> list[str]:
    """The settings that TRL would drop, as "name (value, and the default)"."""
    found = []
    if vocabulary_size is not None:
        found.append(f"vocabulary_size ({vocabulary_size}, not null)")
    if phase.keep_fraction != 1.0:
        found.append(f"keep_fraction ({phase.keep_fraction:g}, not 1)")
    if not set(config.trackers) <= {"jsonl"}:
        found.append(f"trackers ({', '.join(config.trackers)}, not jsonl alone)")
    for name in _OURS_ALONE:
        value, default = getattr(config, name), TrainingConfig.model_fields[name].default
        # null asks for no decodes, and there are none
        if value != default and not (name == "decode_every" and value is None):
            found.append(f"{name} ({_shown(value)}, not {_shown(default)})")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, DecodeProbeConfig):
        return " ".join(f"{name}={number}" for name, number in value)
    return "null" if value is None else str(value)


def _only_phase(config: TrainingConfig) -> LossPhase:
    if len(config.phases) != 1:
        raise ConfigError(
            f"engine: trl has one loss for the whole run, and loss and warm_start make "
            f"{len(config.phases)} phases; write one loss, or use engine: own"
        )
    return config.phases[0]


def beta_of(phase: LossPhase) -> float:
    """TRL's one number for a phase's divergence."""
    if phase.name == "jsd":
        return float(getattr(phase.make_loss(), "beta"))  # noqa: B009 - jsd alone has it
    return _BETA[phase.name]


def train_with_trl(
    draft: LoadedModel,
    target: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    config: TrainingConfig,
    work_dir: Path,
) -> TrlResult:
    """Train a draft in place, on its own answers to prompts; it keeps its last weights.

    Raises:
        ConfigError: settings TRL cannot follow, or vocabularies of different padded sizes.
        TrainingError: no prompt survives being text.
    """
    check_for_trl(config, vocabulary_size=None)
    sizes = [model.model.config.get_text_config().vocab_size for model in (draft, target)]
    require_equal_rows(*sizes)
    texts = [text for ids in prompts if (text := as_text(target.tokenizer, ids)) is not None]
    if not texts:
        raise TrainingError(
            f"engine: trl reads prompts as text, and none of {len(prompts)} gives its own token "
            f"ids back when it is read again; use engine: own"
        )
    if len(texts) < len(prompts):
        logger.warning("%d of %d prompts are not text", len(prompts) - len(texts), len(prompts))
    model, dtypes = draft.model, [parameter.dtype for parameter in draft.model.parameters()]
    try:
        parameters = set_trainable(model, config)
        # TRL generates outside of autocast, where mixed dtypes cannot be multiplied
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        with redirect_stdout(_ToLog()):  # standard output is for what the command was asked for
            trainer = _trainer(draft, target, texts, config, list(parameters.values()), work_dir)
            started = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - started
    finally:
        for parameter, dtype in zip(model.parameters(), dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None
        model.requires_grad_(False)
        model.eval()
    log = [record for record in trainer.state.log_history if "loss" in record]
    num_rows = config.trl.batch_size * config.trl.accumulation_steps
    num_tokens = round(sum(num_rows * record["completions/mean_length"] for record in log))
    return TrlResult(log, num_tokens, num_rows, seconds)


class _ToLog(io.TextIOBase):
    """What is printed to it goes to the log, line by line."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(None, lines):
            logger.info("trl: %s", line)
        return len(text)


def as_text(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """The text that a tokenizer reads as exactly these ids; None where there is none.

    A tokenizer that begins every text with a token of its own would add a second one.
    """
    for rest in (list(ids), list(ids)[1:]):
        text: str = tokenizer.decode(rest, skip_special_tokens=False)
        if tokenizer(text)["input_ids"] == list(ids):
            return text
    return None


def _trainer(
    draft: LoadedModel,
    target: LoadedModel,
    texts: list[str],
    config: TrainingConfig,
    parameters: list[torch.Tensor],
    work_dir: Path,
) -> Any:
    disable_hub_telemetry()
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    phase, is_cpu = config.phases[0], draft.device.type == "cpu"
    optimizer = make_optimizer(parameters, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_at(config, step) / config.learning_rate
    )
    arguments = DistillationConfig(
        output_dir=str(work_dir / "trl"),
        max_steps=config.max_steps,
        per_device_train_batch_size=config.trl.batch_size,
        gradient_accumulation_steps=config.trl.accumulation_steps,
        max_completion_length=config.trl.max_new_tokens,
        temperature=phase.temperature,
        beta=beta_of(phase),
        top_k=0,
        top_p=1.0,
        max_grad_norm=config.max_grad_norm,
        bf16=config.compute_dtype == "bfloat16",
        gradient_checkpointing=config.gradient_checkpointing,
        use_cpu=is_cpu,
        dataloader_pin_memory=not is_cpu,
        seed=config.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return DistillationTrainer(
        model=draft.model,
        teacher_model=target.model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=target.tokenizer,
        optimizers=(optimizer, schedule),
    )
