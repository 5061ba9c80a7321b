"""Owns a draft made of some of the target's own layers, between its embedding and its head.

Refuses to know width pruning: every tensor kept is kept whole.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from distill.config import Config, setting
from distill.errors import ConfigError
from distill.initialization.base import as_draft, copy_weights, layer_prefix, like_target
from distill.models import LoadedModel

LayerRule = Literal["first", "last", "spread"]


class PrunedConfig(Config):
    """Keep `layers` of the target, an explicit list or a rule that picks `num_layers` of them."""

    kind: Literal["pruned"] = "pruned"
    layers: LayerRule | tuple[int, ...] = setting(
        "spread", description="first, last, spread (evenly, ends included) or a list of indices"
    )
    num_layers: int | None = setting(None, gt=0, description="how many a rule picks")

    @model_validator(mode="after")
    def _check_count(self) -> PrunedConfig:
        if isinstance(self.layers, str):
            if self.num_layers is None:
                raise ConfigError(
                    f"layers: {self.layers} needs num_layers, the number of layers to keep"
                )
        elif self.num_layers not in (None, len(self.layers)):
            raise ConfigError(
                f"num_layers is {self.num_layers}, but layers lists {len(self.layers)}; "
                f"leave num_layers out"
            )
        elif not self.layers:
            raise ConfigError("layers is an empty list; keep at least one layer")
        return self

    def chosen_layers(self, depth: int) -> tuple[int, ...]:
        """Return the indices kept of a target with `depth` layers, in the draft's order.

        Raises:
            ConfigError: more layers than there are, or an index outside them.
        """
        if not isinstance(self.layers, str):
            outside = [index for index in self.layers if not 0 <= index < depth]
            if outside:
                raise ConfigError(
                    f"initialization.layers names layer {outside[0]}, but the target has {depth} "
                    f"layers (0 to {depth - 1})"
                )
            return self.layers
        assert self.num_layers is not None
        count = self.num_layers
        if count > depth:
            raise ConfigError(
                f"initialization.num_layers is {count}, but the target has only {depth} layers; "
                f"set it to at most {depth}"
            )
        if self.layers == "first" or count == 1:
            start = depth - 1 if self.layers == "last" else 0
            return tuple(range(start, start + count))
        if self.layers == "last":
            return tuple(range(depth - count, depth))
        return tuple(round(i * (depth - 1) / (count - 1)) for i in range(count))

    def build(self, target: LoadedModel, *, seed: int) -> LoadedModel:
        """Return the target without the other layers; embedding, final norm and head are copies."""
        layers = self.chosen_layers(target.model.config.num_hidden_layers)
        model = like_target(target, layers=layers, changes={}, seed=seed)
        prefix = layer_prefix(model)
        copy_weights(
            model, target, {name: _origin(name, prefix, layers) for name in model.state_dict()}
        )
        listed = ", ".join(str(index) for index in layers)
        return as_draft(model, target, f"layers {listed}")


def _origin(name: str, prefix: str, layers: tuple[int, ...]) -> str:
    if not name.startswith(prefix):
        return name
    index, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{layers[int(index)]}.{rest}"
