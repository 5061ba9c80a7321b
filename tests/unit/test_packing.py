"""Owns the tests of packed linear layers: the same numbers, and a model left as it was.
Refuses to measure speed. On machines without bfloat16 support in oneDNN nothing is packed, and the
tests that need it are skipped.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from distill.runtime.cache import RaggedCache
from distill.runtime.forward import forward
from distill.runtime.packing import PackedLinears
from tests.helpers import make_llama


@pytest.fixture
def model() -> Any:
    return make_llama(seed=0, dtype=torch.bfloat16)


def packable() -> bool:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    with PackedLinears(layer).applied():
        return "forward" in layer.__dict__


needs_packing = pytest.mark.skipif(not packable(), reason="no bfloat16 in oneDNN here")


@needs_packing
@pytest.mark.parametrize("num_rows", [0, 1, 5, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_computes_the_same(num_rows, has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 72, bias=has_bias, dtype=torch.bfloat16)
    hidden = torch.randn(1, num_rows, 48, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = layer(hidden)
        with PackedLinears(layer).applied():
            got = layer(hidden)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


@needs_packing
def test_outside_a_call_the_model_is_untouched(model):
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    forward(model, cache, [[5, 6, 7]])
    assert all("forward" not in module.__dict__ for module in model.modules())
    with pytest.raises(IndexError):
        forward(model, cache, [[10_000]])
    assert all("forward" not in module.__dict__ for module in model.modules())
    loss = model(torch.tensor([[5, 6, 7]])).logits.float().sum()
    loss.backward()
    assert model.lm_head.weight.grad is not None


@needs_packing
def test_a_weight_changed_in_between_is_packed_again(model):
    """A draft in training is measured between its steps."""
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    forward(model, cache, [[5, 6, 7]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    cache.roll_back(0, 0)
    got = forward(model, cache, [[5, 6, 7]]).logits_NV
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


def test_another_head_for_one_call_is_packed_too(model):
    head = nn.Linear(32, 5, bias=False, dtype=torch.bfloat16)
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    output = forward(model, cache, [[5, 6, 7]], head=head, keep_hidden=True)
    assert output.hidden_ND is not None
    with torch.inference_mode():
        torch.testing.assert_close(output.logits_NV, head(output.hidden_ND), atol=0.02, rtol=0.02)


def test_float32_layers_and_layers_with_their_own_forward_are_left_alone():
    layer = nn.Linear(4, 4)
    with PackedLinears(layer).applied():
        assert "forward" not in layer.__dict__
    wrapped = nn.Linear(4, 4, dtype=torch.bfloat16)
    own = wrapped.forward
    wrapped.forward = own  # type: ignore[method-assign]
    with PackedLinears(wrapped).applied():
        assert wrapped.forward is own
    assert wrapped.forward is own


def test_huge_models_are_not_copied(monkeypatch):
    monkeypatch.setattr("distill.runtime.packing.MAX_BYTES", 10)
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    with PackedLinears(layer).applied():
        assert "forward" not in layer.__dict__


@needs_packing
def test_all_caches_of_a_model_share_one_packed_copy(model):
    first, second = RaggedCache(model, max_rows=1), RaggedCache(model, max_rows=2)
    assert first.packed is second.packed


def test_packed_copies_go_with_their_model():
    model = make_llama(seed=0, dtype=torch.bfloat16)
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    forward(model, cache, [[5, 6, 7]])
    gone = weakref.ref(model)
    del model, cache
    gc.collect()  # modules of transformers have cycles of their own
    assert gone() is None


@needs_packing
def test_a_model_that_changed_its_dtype_is_looked_at_again(model):
    before = RaggedCache(model, max_rows=1).packed
    model.float()
    cache = RaggedCache(model, max_rows=1)
    assert cache.packed is not before
    cache.join()
    assert forward(model, cache, [[5, 6, 7]]).logits_NV.dtype == torch.float32
