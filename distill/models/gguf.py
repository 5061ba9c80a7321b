"""GGUF files -> a bfloat16 safetensors directory with its tokenizer, once per file.

Refuses to know where the file came from and where the directory is kept.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

from distill.errors import ModelNotFoundError
from distill.models.saving import save_model
from distill.models.sources import quiet


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Dequantise a GGUF file to a bfloat16 safetensors directory with its tokenizer.

    Raises:
        ModelNotFoundError: not a GGUF file, an architecture transformers cannot read, or a file
            that lacks a weight.
    """
    try:
        model, tokenizer = _read(gguf)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(
            f"cannot read {gguf.name} as a GGUF model ({error}); give the safetensors model "
            "it was made from instead"
        ) from error
    save_model(model, tokenizer, directory)


def _read(gguf: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The GGUF reader draws its bar on stderr whatever the progress settings say.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        quantized, info = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        _require_all_weights(gguf, quantized, info["missing_keys"])
        plain = copy.deepcopy(quantized.config)
        # What is saved is no longer quantised: a config that says so cannot be loaded.
        if hasattr(plain, "quantization_config"):
            del plain.quantization_config
        model = AutoModelForCausalLM.from_config(plain, dtype=torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.tie_weights()
    return model, tokenizer


def _require_all_weights(gguf: Path, model: Any, missing_keys: Collection[str]) -> None:
    """Refuse weights that transformers filled with random numbers; a tied head has its table."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    read = {id(weight) for name, weight in weights.items() if name not in missing_keys}
    missing = sorted(name for name in missing_keys if id(weights.get(name)) not in read)
    if missing:
        raise ModelNotFoundError(
            f"{gguf.name} lacks {len(missing)} tensors ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}); they would be random numbers. Fetch the file "
            "again, or give the safetensors model it was made from"
        )
