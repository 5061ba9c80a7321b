"""RunConfig: one YAML, one section per stage, the target written once.

Refuses to know what a stage does with its section, and in which order stages run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from distill import config as mechanism
from distill.config import Config, setting
from distill.errors import ConfigError
from distill.export import ExportConfig
from distill.initialization import InitializationConfig
from distill.models import ModelConfig
from distill.stages.distill_draft import DistillConfig
from distill.stages.generate import GenerateConfig
from distill.stages.measure import MeasureConfig
from distill.stages.measure_pair import is_pair_config, sections_of
from distill.stages.rollouts import RolloutConfig
from distill.stages.serve import ServeConfig
from distill.target_store.config import kind_of, knowledge_of

# The stages whose section names the target: filled from the top level, so that each
# section is complete by itself and `generate(config.generate, store)` needs nothing else.
SECTIONS_WITH_TARGET = ("generate", "rollouts", "distill", "measure", "serve", "export")


class HardwareConfig(Config):
    """What `distill plan` assumes about the machine; used for estimates only.

    ``peak_flops`` is in floating point operations per second at the compute dtype,
    ``memory_bandwidth`` in bytes per second, ``utilization`` the share of either that
    real code reaches. ``memory_bytes`` is the memory of the device that computes: of the
    accelerator where there is one, else main memory.
    """

    name: str = "2-core x86 CPU with AVX512_BF16"
    peak_flops: float = Field(default=4.0e11, gt=0)
    memory_bandwidth: float = Field(default=2.3e10, gt=0)
    memory_bytes: int = Field(default=16 * 1024**3, gt=0)
    utilization: float = Field(default=0.5, gt=0, le=1)


class RunConfig(Config):
    """The whole YAML of a (target, draft) pair."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    target: ModelConfig
    pipeline: Literal["standard", "on_policy"] = setting(
        "standard", description="on_policy: rounds on text the draft writes follow the training"
    )
    generate: GenerateConfig
    rollouts: RolloutConfig
    distill: DistillConfig
    measure: MeasureConfig
    serve: ServeConfig
    export: ExportConfig
    hardware: HardwareConfig = HardwareConfig()
    candidates: tuple[InitializationConfig, ...] = Field(
        default=(), description="other starts that `distill plan` compares with the draft's own"
    )

    @model_validator(mode="after")
    def _check_target_store(self) -> RunConfig:
        store = self.generate.target_store
        kind = kind_of(store)
        if self.distill.engine != "trl":  # which runs the target itself, and reads no store
            source = f"generate.target_store: {kind}"
            self.distill.check_for_knowledge(knowledge_of(store), source=source)
        if self.pipeline == "on_policy" and knowledge_of(store) != "full":
            raise ConfigError(
                f"pipeline is on_policy and generate.target_store {kind}, but text the draft wrote "
                f"is scored in full, and one step cannot mix the two; set generate.target_store "
                f"to final_hidden or none, or pipeline: standard"
            )
        return self

    @model_validator(mode="after")
    def _check_measured_draft(self) -> RunConfig:
        if self.measure.draft is not None:
            raise ConfigError(
                f"measure.draft names {self.measure.draft.model}, a draft that exists already, but "
                "this file trains one, and that is the one a run measures. Remove measure.draft "
                "and measure.corpus (models to be measured beside it go into measure.drafts), or "
                "write name, target and measure alone into a file for `distill measure`."
            )
        return self

    @model_validator(mode="after")
    def _check_unread(self) -> RunConfig:
        for path, value, reason, remedy in self._unread():
            raise ConfigError(
                f"{path} is {value}, and nothing would read it, since {reason}; set {remedy}, or "
                f"remove {path}"
            )
        return self

    def _unread(self) -> Iterator[tuple[str, Any, str, str]]:
        """Settings given to something this run does not do: path, value, why, and the way in."""
        if self.pipeline == "standard":
            reason, remedy = "pipeline is standard and writes no rollouts", "pipeline: on_policy"
            for name, value in _changed(self.rollouts, RolloutConfig(target=self.target)):
                yield f"rollouts.{name}", value, reason, remedy
            default = DistillConfig.model_fields["rollout_fraction"].default
            if self.distill.rollout_fraction != default:
                yield "distill.rollout_fraction", self.distill.rollout_fraction, reason, remedy
        if self.distill.engine == "own":
            for name, value in _changed(self.distill.trl, type(self.distill.trl)()):
                yield (
                    f"distill.trl.{name}",
                    value,
                    "distill.engine is own and not TRL's",
                    "distill.engine: trl",
                )

    @model_validator(mode="before")
    @classmethod
    def _give_every_section_the_target(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "target" not in data:
            return data
        filled = dict(data)
        for name in SECTIONS_WITH_TARGET:
            section = filled.get(name)
            if section is None:
                filled[name] = {"target": data["target"]}
            elif isinstance(section, Mapping):
                if "target" in section:
                    raise ValueError(
                        f"{name}.target is taken from the top-level target; remove it from {name}"
                    )
                filled[name] = {**section, "target": data["target"]}
        return filled


def _changed(config: Config, default: Config) -> Iterator[tuple[str, Any]]:
    for name in type(config).model_fields:
        if getattr(config, name) != getattr(default, name):
            yield name, getattr(config, name)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML, with ``a.b=c`` overrides, into a :class:`RunConfig`.

    Raises:
        ConfigError: unreadable file, unknown or malformed key, or the file of a pair that is only
            measured; names the key and a way out.
    """
    if is_pair_config(path, overrides):
        raise ConfigError(
            f"{path} is the file of a pair that exists already: it has no generate and no distill "
            f"section, so there is nothing to build. `distill measure {path}` measures it; to "
            "train a draft, give it generate.corpus, the prompts, and leave out measure.draft, "
            "measure.corpus and served."
        )
    try:
        return mechanism.read_config(path, RunConfig, overrides)
    except ConfigError as error:
        sections = sections_of(path, overrides)
        if "target" not in sections or sections & {"generate", "distill", "measure", "served"}:
            raise
        raise ConfigError(
            f"{error}\n  This file has neither generate (the prompts of a run that trains a draft) "
            "nor measure or served (a pair that exists, for `distill measure`): add one of them."
        ) from error


def dump_run_config(config: RunConfig) -> str:
    """YAML of the resolved config, the target once at the top; reloads to an equal object."""
    return mechanism.dump_config(
        config, leave_out=[f"{name}.target" for name in SECTIONS_WITH_TARGET]
    )
