"""Reading models into memory: target, draft, tokenizer. Every weight enters here (or gguf.py).

Refuses to know what a model is used for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distill.artifacts import Artifact
from distill.errors import ConfigError, ModelNotFoundError
from distill.models import sources
from distill.models.config import (
    Dtype,
    ModelConfig,
    ModelShape,
    Quantize,
    check_shape,
    shape_of,
)
from distill.models.resolve import ResolvedModel, resolve_model
from distill.models.vocabulary import DraftVocabulary, read_vocabulary

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class LoadedModel:
    """A model in memory with its tokenizer. Evaluation mode; gradients are the caller's choice.

    ``vocabulary`` says which tokens it may propose where it drafts; None: all.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    resolved: ResolvedModel
    shape: ModelShape
    vocabulary: DraftVocabulary | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in: of the weights, unless they are quantised."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id that ends a text: the generation config's, the model's and the tokenizer's."""
        return stop_token_ids(self.model, self.tokenizer)

    @property
    def vocabulary_token_ids(self) -> tuple[int, ...] | None:
        """The ids it may propose where it drafts, ascending; None: all."""
        return None if self.vocabulary is None else self.vocabulary.token_ids


def load_target(config: ModelConfig) -> LoadedModel:
    """Load a target: evaluation mode, no gradients, tokenizer beside it.

    Raises:
        ModelNotFoundError: nowhere to be found, or the weights file lacks a weight or has one that
            is not a finite number.
        ConfigError: ``config.shape`` is not the model's, the device is not here, or the model
            cannot be quantised.
    """
    loaded = _load(config, resolve_model(config))
    loaded.model.requires_grad_(False)
    return loaded


def load_draft(
    source: Artifact | Path | str,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    quantize: Quantize = "none",
) -> LoadedModel:
    """Load a draft from a model directory, or from an artifact that holds one in ``draft/``.

    The tokens it may propose come with it, from either place.

    Raises:
        ModelNotFoundError: no model there, the weights file lacks a weight or has one that is not a
            finite number, or the file of the tokens it may propose cannot be read.
        ConfigError: the device is not here, or the model cannot be quantised.
    """
    path = source.path if isinstance(source, Artifact) else Path(source)
    path = sources.model_directory(path)
    config = ModelConfig(model=str(path.absolute()), dtype=dtype, device=device, quantize=quantize)
    return _load(config, resolve_model(config))


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer alone; of a hub model no weights are downloaded."""
    reference = sources.parse_reference(config.model)
    if reference.kind == "hub":
        path = sources.hub_snapshot(
            reference.name, reference.revision, with_code=config.trust_remote_code, weights=False
        )
    else:
        path = resolve_model(config).path
    return _tokenizer_at(path, config.trust_remote_code)


def _tokenizer_at(path: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        with sources.quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no usable tokenizer in {path} ({str(error).splitlines()[0]}); copy the tokenizer "
            "files of the model there (tokenizer.json, tokenizer_config.json)"
        ) from error
    return tokenizer


def _load(config: ModelConfig, resolved: ResolvedModel) -> LoadedModel:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from distill.models.quantization import quantize_model

    device = pick_device(config.device)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        with sources.quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(resolved.path),
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelNotFoundError(
            f"transformers cannot load {config.model!r} from {resolved.path}: {error}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelNotFoundError(
            f"the weights in {resolved.path} lack {len(missing)} tensors ({', '.join(missing[:3])}"
            ", ...); they would be random numbers. Fetch or save the model again"
        )
    _require_finite(config.model, model)
    shape = check_shape(config, shape_of(model.config))
    tokenizer = _tokenizer_at(resolved.path, config.trust_remote_code)
    vocabulary = read_vocabulary(resolved.path, num_rows=shape.vocab_size)
    quantize_model(model, config.quantize)
    return LoadedModel(model.to(device).eval(), tokenizer, resolved, shape, vocabulary)


def _require_finite(reference: str, model: PreTrainedModel) -> None:
    """Refuse weights from which only NaN could follow, however far from here it would be seen."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if not weight.is_floating_point() or weight.element_size() < 2:
            continue  # of eight bits only products are known
        if all(bound.isfinite() for bound in weight.aminmax()):
            continue
        num_bad = weight.numel() - int(weight.isfinite().sum())
        raise ModelNotFoundError(
            f"the weights of {reference!r} are not numbers: {num_bad} of {weight.numel()} values "
            f"of {name} are infinite or NaN, and so every answer would be. Fetch or save the model "
            f"again, or name another one"
        )


def pick_device(device: str) -> torch.device:
    """``"auto"``: the first CUDA device, else the CPU.

    Raises:
        ConfigError: the device named is not on this machine, or cannot verify a draft exactly.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] == "mps":
        raise ConfigError(
            f"device {device!r} has no float64, which exact verification of drafts needs; "
            'write "cpu" (or "cuda" on a machine that has it)'
        )
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); "
            'write "auto" or "cpu"'
        ) from error


# ---------------------------------------------------------------- what a loaded model says


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a text.

    A base model and its chat model often differ here (a chat template ends a turn with its own
    token), and a draft trained to the wrong one never stops; hence the union of three places.
    """
    found: list[int | list[int] | None] = [
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    ids: set[int] = set()
    for entry in found:
        ids.update(entry if isinstance(entry, (list, tuple)) else [] if entry is None else [entry])
    return frozenset(ids)


def logits_from_hidden(model: PreTrainedModel, hidden_ND: torch.Tensor) -> torch.Tensor:
    """``logits_NV`` from final hidden states, as the model's own forward computes them.

    ``hidden_ND`` is what the output head receives (after the final norm). Scalings by family:
    Gemma caps with ``final_logit_softcapping``, Granite divides by ``logits_scaling``, Cohere
    multiplies by ``logit_scale``.
    """
    from distill.models.quantization import Int8Linear

    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    config = model.config.get_text_config()
    dtype = head.dtype if isinstance(head, Int8Linear) else head.weight.dtype
    logits_NV: torch.Tensor = head(hidden_ND.to(dtype))
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits_NV = logits_NV * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits_NV = logits_NV / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits_NV = cap * (logits_NV / cap).tanh()
    return logits_NV
