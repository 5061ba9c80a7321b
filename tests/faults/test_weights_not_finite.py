"""Faults of files: a weight that is NaN or infinite, in whichever model a run reads.

Refuses to know what NaN does further on: it never gets there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distill import load_config
from distill.artifacts import ArtifactStore
from distill.config import parse_config
from distill.errors import DistillError, ModelNotFoundError
from distill.models import ModelConfig, load_draft, load_target
from distill.stages.distill_draft import DistillConfig, distill_draft
from pipelines import standard
from tests.distill_helpers import make_generated
from tests.helpers import make_llama, save_pretrained_dir

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A model like the tiny target, with three values of one tensor NaN."""
    model = make_llama(len(tiny_tokenizer), layers=2, hidden=64, seed=5)
    with torch.no_grad():
        model.get_parameter(TENSOR)[0, :3] = torch.nan
    return save_pretrained_dir(tmp_path_factory.mktemp("broken") / "m", model, tiny_tokenizer)


def _names(path: Path) -> str:
    return rf"(?s){path}.* 3 of 8192 values of {TENSOR.replace('.', '[.]')}"


@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [("auto", "none"), ("bfloat16", "none"), ("float16", "none"), ("auto", "int8")],
)
def test_a_target_is_refused_when_it_is_loaded(broken: Path, dtype: Any, quantize: Any) -> None:
    config = ModelConfig(model=str(broken), dtype=dtype, quantize=quantize, device="cpu")
    with pytest.raises(ModelNotFoundError, match=_names(broken)):
        load_target(config)


def test_a_draft_is_refused_when_it_is_loaded(broken: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=_names(broken)):
        load_draft(broken, device="cpu")


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_an_infinite_weight_is_one_too(bad: float, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = make_llama(len(tiny_tokenizer))
    with torch.no_grad():
        model.model.norm.weight[3] = bad
    path = save_pretrained_dir(tmp_path / "infinite", model, tiny_tokenizer)
    with pytest.raises(ModelNotFoundError, match=r"1 of 32 values of model\.norm\.weight"):
        load_draft(path, device="cpu")


@pytest.mark.parametrize(
    "role",
    [
        {"initialization": {"kind": "existing"}},
        {"initialization": {"kind": "existing", "vocabulary": "transplanted"}},
        {"reference": {}, "loss": {"name": "forward_kl", "keep_fraction": 0.5}},
    ],
    ids=["start", "transplanted", "reference"],
)
def test_a_training_does_not_begin_with_such_a_model(
    broken: Path, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], role: dict[str, Any]
) -> None:
    model = {"model": str(broken), "device": "cpu"}
    settings: dict[str, Any] = {
        "target": {"model": str(tiny_pair_dirs[0]), "device": "cpu"},
        "initialization": {"kind": "pruned", "layers": [0, 3]},
        "max_steps": 2,
        "warmup_steps": 1,
    } | role
    if "reference" in role:
        settings["reference"] = model
    else:
        settings["initialization"] = role["initialization"] | {"model": model}
    store = ArtifactStore(tmp_path)
    generated = make_generated(store, tiny_pair_dirs[0])
    config = parse_config(settings, DistillConfig)
    with pytest.raises(DistillError, match=_names(broken)):
        distill_draft(config, store, inputs={"generate": generated})


def test_a_run_does_not_ask_such_a_target(
    broken: Path, tmp_path: Path, tiny_run_config: Path
) -> None:
    overrides = [f"target.model={broken}", "distill.initialization={kind: pruned, layers: [0]}"]
    config = load_config(tiny_run_config, overrides)
    with pytest.raises(DistillError, match=_names(broken)):
        standard.run(config, ArtifactStore(tmp_path))
