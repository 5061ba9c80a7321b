"""Owns the settings of a training run, its loss schedule and its learning rate at each step.

Refuses to know models and data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from distill.config import Config, setting
from distill.errors import ConfigError
from distill.losses import LOSSES, HiddenLoss, Knowledge, LogitLoss
from distill.models import ModelConfig

TrackerName = Literal["jsonl", "tensorboard", "trackio", "wandb"]


class LossPhase(Config):
    """One loss for a share of the run."""

    name: str = setting(description="a registered loss")
    fraction: float = setting(1.0, gt=0, le=1, description="share of max_steps")
    temperature: float = setting(1.0, gt=0, description="both models' logits are divided by it")
    options: dict[str, float] = setting(
        {}, description="what else the loss takes, such as beta of jsd"
    )
    keep_fraction: float = setting(
        1.0,
        gt=0,
        le=1,
        description="train on this share of a step's tokens: those whose loss exceeds the "
        "reference draft's most",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        LOSSES.get(name)
        return name

    @model_validator(mode="after")
    def _check_settings(self) -> LossPhase:
        loss = self.make_loss()  # a loss that takes no temperature says so
        if self.keep_fraction < 1 and isinstance(loss, HiddenLoss):
            raise ConfigError(
                f"keep_fraction is {self.keep_fraction:g}, but {self.name} compares hidden states, "
                f"and tokens are chosen by losses on logits; leave it at 1 in this phase"
            )
        return self

    def make_loss(self) -> LogitLoss | HiddenLoss:
        """The loss at the phase's temperature, with its options.

        Raises:
            ConfigError: the loss has no such option, or refuses its value.
        """
        kind = LOSSES.get(self.name)
        known = set(inspect.signature(kind).parameters) - {"temperature"}
        if unknown := sorted(set(self.options) - known):
            raise ConfigError(
                f"the loss {self.name} has no option {', '.join(unknown)}; "
                + (f"it has {', '.join(sorted(known))}" if known else "it has none: remove options")
            )
        return kind(temperature=self.temperature, **self.options)


_PHASES = TypeAdapter(tuple[LossPhase, ...])


def _one_spelling(
    value: Any, _: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> str | tuple[LossPhase, ...]:
    """A name stays a name, one phase is a list of one; what is wrong in a phase is told as such.

    A union would try the name as well, and complain first that a list is none.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | LossPhase):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ConfigError(
            "expected a loss's name such as forward_kl, one phase such as {name: jsd}, or a list "
            "of phases whose fractions sum to 1"
        )
    return _PHASES.validate_python(value, context=info.context)


LossChoice = Annotated[
    str | tuple[LossPhase, ...],
    WrapValidator(_one_spelling, json_schema_input_type=str | LossPhase | tuple[LossPhase, ...]),
]
"""A loss's name, a phase or phases; of one spelling each, so that a run has one fingerprint."""


class DecodeProbeConfig(Config):
    """The short real decode on held-out prompts, at temperature 0 and 1."""

    num_prompts: int = setting(8, gt=0)
    max_new_tokens: int = setting(32, gt=1)
    num_draft_tokens: int = setting(4, gt=0)


class TrlConfig(Config):
    """What TRL's trainer needs beside the settings it shares with ours. Batches count prompts."""

    batch_size: int = setting(8, gt=0, description="prompts in one forward pass")
    accumulation_steps: int = setting(1, gt=0, description="forward passes in an optimiser step")
    max_new_tokens: int = setting(64, gt=0, description="of what the draft writes")


class TrainingConfig(Config):
    """How a draft is trained. Tokens are positions that carry loss, unless said otherwise."""

    loss: LossChoice = setting(
        "forward_kl", description="one loss, one phase, or phases whose fractions sum to 1"
    )
    warm_start: LossPhase | None = setting(
        None, description="a loss for the first fraction of the run; `loss` has the rest"
    )
    reference: ModelConfig | None = setting(
        None,
        description="the draft that keep_fraction compares with; null: this draft as it starts",
    )
    engine: Literal["own", "trl"] = setting(
        "own", description="trl: TRL's DistillationTrainer, on the draft's own text alone"
    )
    trl: TrlConfig = TrlConfig()
    rollout_fraction: float = setting(
        0.5, gt=0, le=1, description="share of the draft's own text, where there is any"
    )
    max_steps: int = setting(400, gt=0, description="optimiser steps")
    batch_tokens: int = setting(2048, gt=0, description="tokens in an optimiser step")
    micro_batch_tokens: int = setting(
        2048, gt=0, description="padded tokens, prompts included, in one forward pass"
    )
    learning_rate: float = setting(1e-3, gt=0)
    scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    final_learning_rate_ratio: float = setting(0.05, ge=0, le=1)
    warmup_steps: int = setting(20, ge=0)
    weight_decay: float = setting(0.01, ge=0)
    beta1: float = setting(0.9, ge=0, lt=1)
    beta2: float = setting(0.98, ge=0, lt=1)
    max_grad_norm: float = setting(1.0, gt=0)
    train_embeddings: bool | Literal["embedding", "head"] = setting(
        False,
        description="embedding and head; false: both stay as they start; or the one to train",
    )
    compute_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", description="of the matrix products; weights and moments are float32"
    )
    gradient_checkpointing: bool = setting(
        False, description="compute a layer's activations again in the backward pass: less memory"
    )
    max_loss_ratio: float | None = setting(
        10.0,
        gt=1,
        in_fingerprint=False,
        description="stop when a step's loss is this many times the last steps' median",
    )
    seed: int = setting(0, ge=0, le=2**32 - 1)
    eval_every: int = setting(50, gt=0, description="steps between held-out evaluations")
    eval_max_tokens: int = setting(4096, gt=0)
    patience: int | None = setting(
        None, gt=0, description="stop after so many evaluations without a better acceptance"
    )
    decode_every: int | None = setting(
        200, gt=0, description="steps between short real decodes; null: none, for less memory"
    )
    decode: DecodeProbeConfig = DecodeProbeConfig()
    trackers: tuple[TrackerName, ...] = setting(
        ("jsonl",), in_fingerprint=False, description="who follows a run while it trains"
    )
    checkpoint_every: int = setting(
        50, gt=0, in_fingerprint=False, description="steps a kill can cost"
    )

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: str | tuple[LossPhase, ...]) -> str | tuple[LossPhase, ...]:
        if isinstance(loss, str):
            LOSSES.get(loss)
            return loss
        total = sum(phase.fraction for phase in loss)
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ConfigError(
                f"the fractions of the {len(loss)} loss phases sum to {total:g}; make them sum to 1"
            )
        return loss

    @model_validator(mode="after")
    def _check_steps(self) -> TrainingConfig:
        if self.warmup_steps >= self.max_steps:
            raise ConfigError(
                f"warmup_steps is {self.warmup_steps} and max_steps {self.max_steps}: the full "
                f"learning rate would never be reached; lower warmup_steps"
            )
        return self

    @model_validator(mode="after")
    def _check_warm_start(self) -> TrainingConfig:
        if self.warm_start is not None and self.warm_start.fraction == 1:
            raise ConfigError(
                "warm_start takes the whole run (fraction: 1), and nothing is left for `loss`; "
                "give it a part, such as fraction: 0.2, or make it the loss"
            )
        if self.reference is not None and not self.is_selecting:
            raise ConfigError(
                "reference names a draft, but no phase selects tokens by it; give a phase of "
                "`loss` a keep_fraction below 1, or remove reference"
            )
        loss_schedule(self)  # every phase has a step
        return self

    @property
    def phases(self) -> tuple[LossPhase, ...]:
        """The schedule, a single loss being a schedule of one; the warm start comes first."""
        given = (LossPhase(name=self.loss),) if isinstance(self.loss, str) else self.loss
        if self.warm_start is None:
            return given
        left = 1.0 - self.warm_start.fraction
        rest = (phase.model_copy(update={"fraction": phase.fraction * left}) for phase in given)
        return (self.warm_start, *rest)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding is trained."""
        return self.train_embeddings in (True, "embedding")

    @property
    def trains_head(self) -> bool:
        """Whether the head is trained."""
        return self.train_embeddings in (True, "head")

    @property
    def is_selecting(self) -> bool:
        """Whether a phase trains on a part of the tokens."""
        return any(phase.keep_fraction < 1 for phase in self.phases)

    def as_used(self, *, has_rollouts: bool) -> Self:
        """Itself, with the settings that such a run never reads at their defaults.

        What a fingerprint is made of: a setting nothing reads must not make a draft another one.
        """
        unused = [] if has_rollouts else ["rollout_fraction"]
        if self.engine == "own":
            unused.append("trl")
        fields = TrainingConfig.model_fields
        return self.model_copy(update={name: fields[name].default for name in unused})

    def for_round(self, num_steps: int) -> Self:
        """Itself, as a later round trains: so many steps, on text the draft wrote too.

        A round is a whole training: the loss schedule, the warm start and the learning rate begin
        anew. A warm-up that would outlast the round is cut.

        Raises:
            ConfigError: a loss phase would have no step in such a round.
        """
        warmup = min(self.warmup_steps, num_steps - 1)
        config = self.model_copy(update={"max_steps": num_steps, "warmup_steps": warmup})
        try:
            loss_schedule(config)
        except ConfigError as error:
            raise ConfigError(f"rollouts.steps_per_round is {num_steps}: {error}") from error
        return config

    def check_for_knowledge(self, knowledge: Knowledge, *, source: str) -> None:
        """Check that every loss can be taken from what `source` knows of the target.

        Raises:
            ConfigError: a phase cannot; the message has the reason and the losses that could.
        """
        for phase in self.phases:
            if knowledge == "sampled" and phase.keep_fraction < 1:
                # a gradient is unbiased over all draws, not over those that made a token be kept
                raise ConfigError(
                    f"keep_fraction is {phase.keep_fraction:g}, but from {source} the loss of a "
                    f"token is an estimate by the very draws that train it, and keeping the "
                    f"largest would bias the gradient. Leave keep_fraction at 1, or generate with "
                    f"target_store: final_hidden, top_k or none."
                )
            reason = phase.make_loss().why_not(knowledge)
            if reason is None:
                continue
            fit = [name for name in LOSSES.names() if LOSSES.get(name)().why_not(knowledge) is None]
            raise ConfigError(
                f"the loss {phase.name} cannot be taken from {source}: {reason}. From it these "
                f"can, at temperature 1: {', '.join(fit)}. Use one of them, or generate with "
                f"target_store: final_hidden (or none, which runs the target again)."
            )

    def check_for_subset(self) -> None:
        """Check that every loss can be taken when the draft proposes a vocabulary subset only.

        Raises:
            ConfigError: a phase needs the target's whole mass, whose log-sum-exp is stored at
                temperature 1, at another temperature.
        """
        for phase in self.phases:
            if LOSSES.get(phase.name).needs_whole_mass and phase.temperature != 1.0:
                raise ConfigError(
                    f"vocabulary_size is set, and on a vocabulary subset the loss {phase.name} is "
                    f"taken at temperature 1.0 only, but its phase has {phase.temperature}. Set "
                    f"that to 1.0, use forward_kl, or train on the whole vocabulary "
                    f"(vocabulary_size: null)."
                )


@dataclass(frozen=True)
class ScheduledLoss:
    """A loss and the step before which it is used."""

    name: str
    end_step: int
    loss: LogitLoss | HiddenLoss
    keep_fraction: float = 1.0


def loss_schedule(config: TrainingConfig) -> list[ScheduledLoss]:
    """Return the phases of a run in order; the last ends at max_steps.

    Raises:
        ConfigError: a phase's share of the steps rounds to none.
    """
    schedule: list[ScheduledLoss] = []
    done = 0.0
    start_step = 0
    for phase in config.phases:
        done += phase.fraction
        end_step = round(done * config.max_steps)
        if end_step == start_step:
            raise ConfigError(
                f"the loss phase {phase.name} has {phase.fraction:g} of {config.max_steps} steps, "
                f"which rounds to 0 steps, and would be left out; raise its fraction, train more "
                f"steps, or remove the phase"
            )
        start_step = end_step
        schedule.append(ScheduledLoss(phase.name, end_step, phase.make_loss(), phase.keep_fraction))
    return schedule


def require_equal_widths(schedule: list[ScheduledLoss], draft: int, target: int) -> None:
    """Check that losses on hidden states have states of one width.

    Raises:
        ConfigError: they do not.
    """
    for phase in schedule:
        if isinstance(phase.loss, HiddenLoss) and draft != target:
            raise ConfigError(
                f"loss {phase.name} compares hidden states, but the draft's width is {draft} and "
                f"the target's {target}. Use a loss on logits, such as forward_kl, or a draft of "
                f"the target's width."
            )


def learning_rate_at(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of a step (counted from 0): linear warm-up, then the scheduler."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.scheduler == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    left = 1.0 - done if config.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    floor = config.final_learning_rate_ratio
    return config.learning_rate * (floor + (1.0 - floor) * left)
