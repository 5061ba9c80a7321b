"""Writing a model and its tokenizer as a directory another team can load, the same bytes each time.

Refuses to know why the model is saved and where the directory ends up.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.models.sources import quiet

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Where the tokenizer was loaded from is nobody's business downstream, and differs by machine.
_MACHINE_KEYS = ("is_local", "local_files_only", "name_or_path")
# Without sampling these have no meaning, and transformers refuses to save them set.
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff")


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write ``config.json``, ``generation_config.json``, safetensors and the tokenizer.

    The model is not changed. Tied heads are stored once and tied again on load. Saving the same
    weights twice gives the same bytes: no path, time or host is written.

    Raises:
        ConfigError: the model is quantised.
    """
    from distill.models.quantization import require_full_precision

    require_full_precision(model, "save")
    directory.mkdir(parents=True, exist_ok=True)
    before = getattr(model, "generation_config", None)
    try:
        if before is not None:
            model.generation_config = _savable(before)
        with quiet():
            model.save_pretrained(str(directory))
    finally:
        if before is not None:
            model.generation_config = before
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
    for name in ("tokenizer_config.json", "config.json"):
        _drop_machine_keys(directory / name)
    # Weights are written for the owner's eyes only; a shared model folder needs the usual mode.
    for weights in directory.glob("*.safetensors"):
        weights.chmod((directory / "config.json").stat().st_mode)


def _savable(generation_config: GenerationConfig) -> GenerationConfig:
    """A copy that transformers accepts: sampling settings go when sampling is off.

    They are ignored in that case, so nothing changes but that saving works; otherwise the
    mistake in a model's own file would surface only at the end of a training run.
    """
    copied = copy.deepcopy(generation_config)
    if getattr(copied, "do_sample", None):
        return copied
    dropped = [name for name in _SAMPLING_FIELDS if getattr(copied, name, None) is not None]
    for name in dropped:
        setattr(copied, name, None)
    if dropped:
        logger.info("generation_config: %s dropped, do_sample is off", ", ".join(dropped))
    return copied


def _drop_machine_keys(path: Path) -> None:
    if not path.is_file():
        return
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kept = {
        key: value
        for key, value in values.items()
        if key not in _MACHINE_KEYS and key != "_name_or_path"
    }
    if kept != values:
        text = json.dumps(kept, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")
