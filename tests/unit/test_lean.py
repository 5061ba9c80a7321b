"""Owns the tests of the lean pass: for every family it knows, the model's own numbers.
Refuses to measure speed. The oracle is the model's stock forward, without cache and padding.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from distill.models.quantization import quantize_model
from distill.runtime.cache import RaggedCache
from distill.runtime.forward import forward, prefill
from distill.runtime.lean import lean_decoder
from tests.helpers import make_llama

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Llama with wide heads": {"head_dim": 16},
    "Llama with stretched positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
}
TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23], [40]]


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    family = name.split()[0]
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[name]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()


def decoded(model: Any, *, is_lean: bool, num_layers: int | None = None) -> torch.Tensor:
    """Logits of three ragged rows, read in two calls."""
    cache = RaggedCache(model, max_rows=3)
    assert cache.lean is not None
    if not is_lean:
        cache.lean = None
    for _ in TEXTS:
        cache.join()
    starts = {row: tokens[: len(tokens) // 2] for row, tokens in enumerate(TEXTS)}
    prefill(model, cache, starts, num_layers=num_layers)
    rest = [tokens[len(tokens) // 2 :] for tokens in TEXTS]
    return forward(model, cache, rest, num_layers=num_layers).logits_NV


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_models_own_code_to_the_bit(name):
    model = build(name)
    assert torch.equal(decoded(model, is_lean=True), decoded(model, is_lean=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_the_stock_forward(name):
    model = build(name)
    with torch.no_grad():
        expected = [
            model(torch.tensor([tokens]), use_cache=False).logits[0, len(tokens) // 2 :]
            for tokens in TEXTS
        ]
    got = decoded(model, is_lean=True)
    torch.testing.assert_close(got, torch.cat(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_it_rounds_like_the_model_or_better(name):
    exact = decoded(build(name), is_lean=False)
    model = build(name, torch.bfloat16)
    own_error = (decoded(model, is_lean=False) - exact).abs().mean()
    lean_error = (decoded(model, is_lean=True) - exact).abs().mean()
    assert lean_error < 1.3 * own_error


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_the_first_layers_alone_give_what_a_shorter_model_gives(name):
    model = build(name)
    lean = decoded(model, is_lean=True, num_layers=2)
    own = decoded(model, is_lean=False, num_layers=2)
    assert len(model.model.layers) == 3
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    shorter = decoded(model, is_lean=False)
    assert torch.equal(lean, shorter)
    assert torch.equal(own, shorter)


def test_a_model_of_another_family_or_with_other_layers_runs_its_own_code():
    import transformers

    config = transformers.GPTNeoXConfig(**(SIZES | {"num_key_value_heads": 4}))
    assert lean_decoder(transformers.GPTNeoXForCausalLM(config)) is None

    class Adapted(nn.Linear):
        """As adapters do it: a subclass that computes something else."""

    model = make_llama(seed=0)
    assert lean_decoder(model) is not None
    model.model.layers[0].mlp.up_proj = Adapted(32, 48, bias=False)
    assert lean_decoder(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_layers_compute_the_same_in_both(dtype):
    model = build("Llama", dtype)
    quantize_model(model, "int8")
    got, expected = decoded(model, is_lean=True), decoded(model, is_lean=False)
    torch.testing.assert_close(got, expected, atol=0.0 if dtype == torch.float32 else 0.1, rtol=0)


def test_a_hook_on_any_module_is_honoured():
    model = build("Llama")
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    before = forward(model, cache, [[5, 6, 7]]).logits_NV
    cache.roll_back(0, 0)
    handle = model.model.layers[1].register_forward_hook(lambda *arguments: arguments[2] * 2)
    steered = forward(model, cache, [[5, 6, 7]]).logits_NV
    handle.remove()
    cache.roll_back(0, 0)
    assert not torch.allclose(before, steered)
    assert torch.equal(before, forward(model, cache, [[5, 6, 7]]).logits_NV)


def test_a_layer_put_in_anothers_place_is_seen_by_the_next_cache():
    model = build("Llama")
    before = decoded(model, is_lean=True)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 48, bias=False)
    after = decoded(model, is_lean=True)
    assert not torch.equal(before, after)
    assert torch.equal(after, decoded(model, is_lean=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_changed_in_between_counts_at_once(dtype):
    """A draft in training is measured between its steps."""
    model = build("Llama", dtype)
    before = decoded(model, is_lean=True)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(3.0)
    after = decoded(model, is_lean=True)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, decoded(model, is_lean=False), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_change_behind_autograds_back_is_seen_by_the_next_cache(name):
    """As adapters are merged: ``weight.data += delta`` counts nowhere in PyTorch."""
    model = build("Llama with biases", torch.bfloat16)
    before = decoded(model, is_lean=True)
    getattr(model.model.layers[1].self_attn.q_proj, name).data += 0.5
    after = decoded(model, is_lean=True)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, decoded(model, is_lean=False), atol=0.1, rtol=0.1)


def test_a_bias_changed_in_between_counts_at_once():
    model = build("Qwen2", torch.bfloat16)
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    before = forward(model, cache, [[5, 6, 7]]).logits_NV
    cache.roll_back(0, 0)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.bias.add_(1.0)
    assert not torch.equal(before, forward(model, cache, [[5, 6, 7]]).logits_NV)


@pytest.mark.parametrize("where", ["layer", "self_attn", "mlp", "norm"])
def test_a_module_with_a_forward_of_its_own_is_called(where):
    model = build("Llama")
    layer = model.model.layers[1]
    module = {
        "layer": layer,
        "self_attn": layer.self_attn,
        "mlp": layer.mlp,
        "norm": model.model.norm,
    }[where]
    assert lean_decoder(model) is not None
    module.forward = module.forward
    assert lean_decoder(model) is None


def test_a_subclass_of_attention_or_mlp_is_called():
    import transformers.models.llama.modeling_llama as llama

    class Steered(llama.LlamaMLP):
        pass

    model = build("Llama")
    model.model.layers[0].mlp = Steered(model.config)
    assert lean_decoder(model) is None


def test_heads_of_others_go_with_the_cache_that_used_them():
    model = build("Llama", torch.bfloat16)
    head = nn.Linear(32, 5, bias=False, dtype=torch.bfloat16)
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    logits = forward(model, cache, [[5, 6, 7]], head=head).logits_NV
    assert logits.shape == (3, 5)
    gone = weakref.ref(head)
    del head, cache, logits
    gc.collect()
    assert gone() is None


def test_padding_behind_the_last_position_does_not_stretch_the_others():
    """A dynamic rotation takes the longest position of a call for the length of the text."""
    import transformers

    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = transformers.LlamaConfig(
        **(SIZES | {"max_position_embeddings": 12, "rope_parameters": rope})
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    # The row of ten tokens gets one more, and is padded to four: behind the twelfth position.
    rows, fed = [list(range(5, 15)), [5]], [[30], [31, 32, 33, 34]]

    def last(is_lean: bool) -> torch.Tensor:
        cache = RaggedCache(model, max_rows=2)
        if not is_lean:
            cache.lean = None
        for _ in rows:
            cache.join()
        prefill(model, cache, dict(enumerate(rows)))
        return forward(model, cache, fed).logits_NV

    with torch.no_grad():
        alone = model(torch.tensor([[*rows[0], *fed[0]]]), use_cache=False).logits[0, -1:]
    for is_lean in (False, True):
        torch.testing.assert_close(last(is_lean)[:1], alone, atol=2e-5, rtol=1e-4)
