"""Owns a draft made of the target's own weights: some of its layers, and as wide or narrower.

Refuses to know how importance is measured and how a tensor is cut: importance.py and width.py do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from distill.config import Config, setting
from distill.errors import ConfigError
from distill.initialization.base import (
    Samples,
    Start,
    as_draft,
    layer_prefix,
    like_target,
    load_weights,
    width_changes,
)
from distill.models import LoadedModel, ModelShape

if TYPE_CHECKING:
    from torch import Tensor

LayerRule = Literal["first", "last", "spread", "importance"]


class PrunedConfig(Config):
    """Keep `layers` of the target, an explicit list or a rule that picks `num_layers` of them.

    The widths are the target's unless they are given; which channels and heads stay is measured.
    """

    kind: Literal["pruned"] = "pruned"
    layers: LayerRule | tuple[int, ...] = setting(
        "spread",
        description="first, last, spread (evenly, ends included), importance or a list of indices",
    )
    num_layers: int | None = setting(None, gt=0, description="how many a rule picks")
    hidden_size: int | None = setting(None, gt=0)
    intermediate_size: int | None = setting(None, gt=0)
    num_attention_heads: int | None = setting(
        None, gt=0, description="a multiple of the query heads that share a key/value head"
    )
    sample_tokens: int = setting(
        4096, gt=0, description="tokens of the target's answers on which importance is measured"
    )

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

    @property
    def num_sample_tokens(self) -> int:
        """Tokens on which layers or widths are chosen by importance; 0: nothing is."""
        return self.sample_tokens if self.layers == "importance" or self._is_narrower else 0

    @property
    def _is_narrower(self) -> bool:
        widths = (self.hidden_size, self.intermediate_size, self.num_attention_heads)
        return any(width is not None for width in widths)

    def chosen_layers(
        self, depth: int, influence: tuple[float, ...] | None = None
    ) -> tuple[int, ...]:
        """Return the indices kept of a target with `depth` layers, in the draft's order.

        `influence` is each layer's importance, which the rule of that name needs: it keeps the
        highest, and of equal ones the first.

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
        count = self._count_for(depth)
        if self.layers == "importance":
            assert influence is not None
            return tuple(sorted(sorted(range(depth), key=lambda i: (-influence[i], i))[:count]))
        if self.layers == "first" or count == 1:
            start = depth - 1 if self.layers == "last" else 0
            return tuple(range(start, start + count))
        if self.layers == "last":
            return tuple(range(depth - count, depth))
        return tuple(round(i * (depth - 1) / (count - 1)) for i in range(count))

    def _count_for(self, depth: int) -> int:
        if not isinstance(self.layers, str):
            return len(self.chosen_layers(depth))
        assert self.num_layers is not None
        if self.num_layers > depth:
            raise ConfigError(
                f"initialization.num_layers is {self.num_layers}, but the target has only {depth} "
                f"layers; set it to at most {depth}"
            )
        return self.num_layers

    def shape_from(self, shape: ModelShape) -> ModelShape:
        """Return the draft's shape for a target of the shape given.

        Raises:
            ConfigError: more than the target has, or heads that break up a group.
        """
        wanted = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
        }
        for name, value in wanted.items():
            if value is not None and value > (most := getattr(shape, name)):
                raise ConfigError(
                    f"initialization.{name} is {value}, but the target has only {most}; pruning "
                    f"makes nothing wider: set it to at most {most}"
                )
        sizes: dict[str, Any] = {
            name: value or getattr(shape, name) for name, value in wanted.items()
        }
        width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        group = shape.num_attention_heads // shape.num_key_value_heads
        if heads % group:
            raise ConfigError(
                f"initialization.num_attention_heads is {heads}, but the target's heads share keys "
                f"in groups of {group}, which stay whole; make it a multiple of {group}"
            )
        head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
        return shape.model_copy(
            update={
                "num_hidden_layers": self._count_for(shape.num_hidden_layers),
                **sizes,
                "num_key_value_heads": heads // group,
                # heads keep their size, whatever the width is
                "head_dim": None if head_dim == width // heads else head_dim,
            }
        )

    def build(self, target: LoadedModel, *, seed: int, samples: Samples = ()) -> Start:
        """Return what is kept of the target; embedding, final norm and head are cut alike.

        Raises:
            ConfigError: sizes that do not fit the target, or importance without samples.
        """
        from distill.initialization.importance import block_influence

        after = self.shape_from(target.shape)
        influence = block_influence(target, samples) if self.layers == "importance" else None
        layers = self.chosen_layers(target.shape.num_hidden_layers, influence)
        report: dict[str, Any] = {"kind": self.kind, "layers": list(layers)}
        if influence is not None:
            report["block_influence"] = list(influence)
        weights: Mapping[str, Tensor] = target.model.state_dict()
        changes: dict[str, Any] = {}
        if self._is_narrower:
            weights, changes, about = _narrowed(target, after, layers, samples)
            report |= about
        model = like_target(target, layers=layers, changes=changes, seed=seed)
        prefix = layer_prefix(model)
        load_weights(
            model, {name: weights[_origin(name, prefix, layers)] for name in model.state_dict()}
        )
        listed = ", ".join(str(index) for index in layers)
        return Start(as_draft(model, target, f"layers {listed}"), report)


def _narrowed(
    target: LoadedModel, after: ModelShape, layers: tuple[int, ...], samples: Samples
) -> tuple[Mapping[str, Tensor], dict[str, Any], dict[str, float]]:
    """The weights that are kept of the layers, the changes of the config, and the report."""
    from distill.initialization.importance import width_importance
    from distill.initialization.width import check_width, choose_width, slice_weights

    check_width(target, after)
    before = target.shape
    kept = choose_width(
        width_importance(target, samples), before=before, after=after, layers=layers
    )
    changes = width_changes(target, after)
    # the mean square over fewer channels is larger by D / KD, and so has to be what is added to it
    scale = before.hidden_size / after.hidden_size
    changes["rms_norm_eps"] = target.model.config.rms_norm_eps * scale
    return slice_weights(target, kept), changes, kept.report


def _origin(name: str, prefix: str, layers: tuple[int, ...]) -> str:
    if not name.startswith(prefix):
        return name
    index, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{layers[int(index)]}.{rest}"
