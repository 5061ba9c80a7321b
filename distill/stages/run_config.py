"""RunConfig: one YAML, one section per stage, the target written once.

Refuses to know what a stage does with its section, and in which order stages run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    real code reaches.
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML, with ``a.b=c`` overrides, into a :class:`RunConfig`.

    Raises:
        ConfigError: unreadable file, unknown or malformed key; names the key and a way out.
    """
    return mechanism.read_config(path, RunConfig, overrides)


def dump_run_config(config: RunConfig) -> str:
    """YAML of the resolved config, the target once at the top; reloads to an equal object."""
    return mechanism.dump_config(
        config, leave_out=[f"{name}.target" for name in SECTIONS_WITH_TARGET]
    )
