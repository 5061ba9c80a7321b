"""Owns the tests of int8 weights: what is rounded, how the product is taken, what is refused.
Refuses to decode: that a quantised pair is exact is shown in ``tests/exactness``.
"""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from distill.artifacts import ArtifactStore
from distill.errors import ArtifactError, ConfigError
from distill.initialization import ExistingConfig, PrunedConfig, initialize
from distill.losses.head import head_of
from distill.models import (
    ModelConfig,
    load_draft,
    load_target,
    logits_from_hidden,
    save_model,
)
from distill.models.quantization import Int8Linear, is_quantized, quantize_model
from distill.stages.distill_draft import DistillConfig, build_undistilled, distill_draft
from distill.stages.generate import generate
from distill.stages.measure import MeasureConfig, measure_acceptance, measure_key
from distill.stages.run_config import load_config
from distill.training.config import TrainingConfig
from distill.training.trunk import set_trainable
from tests import measure_helpers
from tests.helpers import make_llama

INPUTS = [32, 64, 100, 1536]  # 100: the kernel would read behind the end of such a layer


def linear(rows: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rows + width)
        return nn.Linear(width, rows, bias=bias, dtype=dtype)


def inputs(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.Linear, Int8Linear))]


# ---------------------------------------------------------------- one layer


def test_a_row_by_hand():
    layer = nn.Linear(3, 2, bias=False)
    layer.weight.data = torch.tensor([[0.5, -1.27, 0.014], [0.0, 0.0, 0.0]])
    quantized = Int8Linear.of(layer)
    assert quantized.integers_ND.tolist() == [[50, -127, 1], [0, 0, 0]]
    torch.testing.assert_close(quantized.scale_N, torch.tensor([0.01, 1.0]))
    torch.testing.assert_close(quantized.weight[0], torch.tensor([0.5, -1.27, 0.01]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_moves_by_more_than_half_a_scale(dtype):
    layer = linear(5000, 64, dtype)  # more rows than are rounded at a time
    layer.weight.data[7] *= 1e-30
    layer.weight.data[8] *= 100
    quantized = Int8Linear.of(layer)
    scale_N1 = quantized.scale_N.double().unsqueeze(1)
    moved_ND = (quantized.integers_ND * scale_N1 - layer.weight.double()).abs()
    assert (moved_ND <= 0.5 * scale_N1 * (1 + 1e-5)).all()
    assert quantized.integers_ND.abs().max() == 127  # all of the range is used, and -128 is not
    assert quantized.integers_ND.min() == -127


@pytest.mark.parametrize("width", INPUTS)
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.015)])
def test_the_product_is_that_of_the_rounded_weights(width, num_rows, has_bias, dtype, tolerance):
    quantized = Int8Linear.of(linear(70, width, dtype, bias=has_bias))
    hidden_MD = inputs(num_rows, width, dtype)
    weight_ND = quantized.integers_ND.double() * quantized.scale_N.double().unsqueeze(1)
    expected = hidden_MD.double() @ weight_ND.T
    if quantized.bias is not None:
        expected += quantized.bias.double()
    got = quantized(hidden_MD)
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_wide_output_is_computed_in_parts_that_join():
    quantized = Int8Linear.of(linear(9000, 32, torch.float32))
    hidden_MD = inputs(20, 32, torch.float32)
    expected = hidden_MD @ quantized.weight.T
    torch.testing.assert_close(quantized(hidden_MD), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_bits_alone_and_beside_others(dtype):
    """Verifying K + 1 tokens and decoding one take the same path, to the bit."""
    quantized = Int8Linear.of(linear(77, 576, dtype))
    hidden_MD = inputs(16, 576, dtype)
    together = quantized(hidden_MD)
    for start, stop in [(0, 1), (0, 5), (3, 4), (7, 12), (15, 16)]:
        assert torch.equal(quantized(hidden_MD[start:stop]), together[start:stop])


def test_any_shape_of_input_is_taken():
    quantized = Int8Linear.of(linear(12, 32, torch.float32, bias=True))
    hidden = inputs(6, 64, torch.float32)[:, ::2].reshape(2, 3, 32)  # not contiguous before
    assert quantized(hidden).shape == (2, 3, 12)
    strided = inputs(6, 64, torch.float32)[:, ::2]
    torch.testing.assert_close(quantized(strided), quantized(hidden).view(6, 12))
    assert quantized(hidden[:0]).shape == (0, 3, 12)


def test_rows_of_a_layer_give_what_they_give_in_the_whole():
    quantized = Int8Linear.of(linear(40, 64, torch.bfloat16, bias=True))
    ids_U = torch.tensor([3, 5, 39])
    hidden_MD = inputs(5, 64, torch.bfloat16)
    assert torch.equal(quantized.rows(ids_U)(hidden_MD), quantized(hidden_MD)[:, ids_U])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad):
    layer = linear(4, 32, torch.bfloat16)
    layer.weight.data[2, 3] = bad
    with pytest.raises(ConfigError, match="infinite or not a number"):
        Int8Linear.of(layer)


# ---------------------------------------------------------------- a model


@pytest.mark.parametrize("is_tied", [False, True])
def test_all_linear_layers_and_the_head_change_and_nothing_else_does(is_tied):
    model = make_llama(tie_word_embeddings=is_tied, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quantize_model(model, "int8")
    assert len(linears(model)) == 2 * 7 + 1
    assert all(isinstance(layer, Int8Linear) for layer in linears(model))
    kept = {name for name, _ in model.named_parameters()}
    assert kept == {name for name in before if "norm" in name or "embed" in name}
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")


def test_quantized_layers_take_half_the_bytes_of_bfloat16():
    model = make_llama(hidden=256, dtype=torch.bfloat16)
    before = sum(layer.weight.nbytes for layer in linears(model))
    old = [weakref.ref(layer.weight) for layer in linears(model)]
    quantize_model(model, "int8")
    gc.collect()
    assert not any(weight() is not None for weight in old)
    after = sum(layer.num_bytes for layer in linears(model))
    assert 0.5 <= after / before < 0.51


def test_quantizing_twice_changes_nothing():
    model = make_llama()
    quantize_model(model, "int8")
    before = copy.deepcopy(model.state_dict())
    quantize_model(model, "int8")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_none_leaves_a_model_as_it_is():
    model = make_llama()
    quantize_model(model, "none")
    assert not is_quantized(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_kinds_of_linear_layers_are_left_alone():
    class Adapter(nn.Linear):
        pass

    model = make_llama()
    adapter = Adapter(32, 32, bias=False)
    model.model.layers[0].self_attn.q_proj = adapter
    quantize_model(model, "int8")
    assert model.model.layers[0].self_attn.q_proj is adapter
    assert isinstance(model.model.layers[0].self_attn.o_proj, Int8Linear)


def test_a_model_without_plain_linear_layers_is_refused():
    model: Any = nn.Sequential(nn.Embedding(4, 4))
    with pytest.raises(ConfigError, match=r"no plain linear layers.*quantize: none"):
        quantize_model(model, "int8")


def test_float16_is_refused_in_the_config_and_in_a_file(tmp_path, tiny_tokenizer):
    with pytest.raises(ValueError, match=r"float16.*bfloat16"):
        ModelConfig(model="org/name", dtype="float16", quantize="int8")
    save_model(make_llama(dtype=torch.float16), tiny_tokenizer, tmp_path)
    with pytest.raises(ConfigError, match=r"float16.*dtype: bfloat16"):
        load_target(ModelConfig(model=str(tmp_path), quantize="int8"))


def test_what_reads_the_head_reads_the_rounded_weights():
    model = make_llama(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    quantize_model(model, "int8")
    hidden_ND = inputs(3, 32, torch.float32)
    expected = hidden_ND @ model.lm_head.weight.T
    assert not torch.equal(model.lm_head.weight, embedding)
    torch.testing.assert_close(logits_from_hidden(model, hidden_ND), expected)
    torch.testing.assert_close(head_of(model).logits(hidden_ND), expected)


# ---------------------------------------------------------------- what needs the weights


def test_a_quantized_model_is_not_saved(tmp_path, tiny_tokenizer):
    model = make_llama()
    quantize_model(model, "int8")
    with pytest.raises(ConfigError, match=r"cannot save.*quantize: none"):
        save_model(model, tiny_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_not_trained_and_no_draft_starts_from_one(tiny_pair_dirs):
    path = str(tiny_pair_dirs[0])
    quantized = load_target(ModelConfig(model=path, quantize="int8"))
    with pytest.raises(ConfigError, match=r"cannot train.*quantize: none"):
        set_trainable(quantized.model, TrainingConfig())
    with pytest.raises(ConfigError, match=r"cannot start a draft from.*quantize: none"):
        initialize(PrunedConfig(num_layers=1), quantized, seed=0)
    with pytest.raises(ValueError, match=r"quantize is int8.*leave quantize out"):
        ExistingConfig(model=ModelConfig(model=path, quantize="int8"))


# ---------------------------------------------------------------- stages


def measure_config(target_dir: Path, quantize: Literal["none", "int8"]) -> MeasureConfig:
    target = ModelConfig(model=str(target_dir), dtype="float32", quantize=quantize)
    return measure_helpers.measure_config(target_dir).model_copy(update={"target": target})


def test_quantization_is_part_of_what_was_measured(tiny_pair_dirs, tmp_path):
    store = ArtifactStore(tmp_path)
    keys = set()
    for quantize in ("none", "int8"):
        config = measure_config(tiny_pair_dirs[0], quantize)
        inputs = {"generate": "a" * 64, "distill": "b" * 64}
        keys.add(measure_key(config, store, inputs=inputs).fingerprint)
    assert len(keys) == 2


def test_a_quantized_target_goes_through_the_stages(tiny_run_config, tmp_path):
    config = load_config(tiny_run_config, ["target.quantize=int8"])
    store = ArtifactStore(tmp_path)
    generated = generate(config.generate, store)
    distilled = distill_draft(config.distill, store, inputs={"generate": generated})
    assert not is_quantized(load_draft(distilled).model)
    measured = measure_acceptance(
        config.measure, store, inputs={"generate": generated, "distill": distilled}
    )
    lossless = measure_helpers.read_acceptance(measured)["lossless"]
    assert lossless["num_compared"] > 0
    assert lossless["num_identical"] == lossless["num_compared"]


def test_the_answers_of_another_quantization_are_refused(tiny_pair_dirs, tmp_path):
    target_dir, draft_dir = tiny_pair_dirs
    store = ArtifactStore(tmp_path)
    rows = measure_helpers.held_out_rows(target_dir, num_prompts=1)
    inputs = {"generate": measure_helpers.generate_artifact(store, target_dir, rows)}
    config = measure_config(target_dir, "int8")
    with pytest.raises(ArtifactError, match=r"quantize: int8.*quantize: none.*run generate again"):
        distill_draft(DistillConfig(target=config.target), store, inputs=inputs)
    inputs["distill"] = measure_helpers.distill_artifact(store, target_dir, draft_dir)
    with pytest.raises(ArtifactError, match=r"quantize: int8.*quantize: none.*run generate again"):
        measure_acceptance(config, store, inputs=inputs)


def test_a_draft_for_a_quantized_target_starts_from_unrounded_weights(tiny_pair_dirs):
    config = ModelConfig(model=str(tiny_pair_dirs[0]), dtype="float32", quantize="int8")
    settings = DistillConfig(target=config, initialization=PrunedConfig(layers=(0,)))
    draft = build_undistilled(settings).model
    target = load_target(config.unquantized).model
    assert not is_quantized(draft)
    assert torch.equal(
        draft.model.layers[0].mlp.up_proj.weight, target.model.layers[0].mlp.up_proj.weight
    )
