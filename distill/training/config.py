"""Owns the settings of a training run, its loss schedule and its learning rate at each step.

Refuses to know models and data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator, model_validator

from distill.config import Config, setting
from distill.errors import ConfigError
from distill.losses import LOSSES, HiddenLoss, LogitLoss


class LossPhase(Config):
    """One loss for a share of the run."""

    name: str = setting(description="a registered loss")
    fraction: float = setting(1.0, gt=0, le=1, description="share of max_steps")
    temperature: float = setting(1.0, gt=0, description="both models' logits are divided by it")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        LOSSES.get(name)
        return name

    @model_validator(mode="after")
    def _check_temperature(self) -> LossPhase:
        self.make_loss()  # a loss that takes no temperature says so
        return self

    def make_loss(self) -> LogitLoss | HiddenLoss:
        """The loss at the phase's temperature."""
        return LOSSES.get(self.name)(temperature=self.temperature)


class TrainingConfig(Config):
    """How a draft is trained. Tokens are positions that carry loss, unless said otherwise."""

    loss: str | tuple[LossPhase, ...] = setting(
        "forward_kl", description="one loss, or phases whose fractions sum to 1"
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
    train_embeddings: bool = setting(
        False, description="false: the embedding and the head stay as they start"
    )
    compute_dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", description="of the matrix products; weights and moments are float32"
    )
    # a step seeds torch with seed * 1_000_003 + step, which has to stay below 2**64
    seed: int = setting(0, ge=0, le=2**32 - 1)
    eval_every: int = setting(50, gt=0, description="steps between held-out evaluations")
    eval_max_tokens: int = setting(4096, gt=0)
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

    @property
    def phases(self) -> tuple[LossPhase, ...]:
        """The schedule, a single loss being a schedule of one."""
        return (LossPhase(name=self.loss),) if isinstance(self.loss, str) else self.loss

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


def loss_schedule(config: TrainingConfig) -> list[ScheduledLoss]:
    """Return the phases of a run in order; the last ends at max_steps."""
    schedule: list[ScheduledLoss] = []
    done = 0.0
    for phase in config.phases:
        done += phase.fraction
        end_step = round(done * config.max_steps)
        schedule.append(ScheduledLoss(phase.name, end_step, phase.make_loss()))
    return schedule


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
