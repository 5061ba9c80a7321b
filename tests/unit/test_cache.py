"""Owns the tests of the ragged cache and of the model call that fills it.
Refuses speculative decoding; the oracle is the model's stock forward without any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distill.errors import CacheRollbackError, ContextLengthError
from distill.runtime import forward as forward_module
from distill.runtime.cache import RaggedCache
from distill.runtime.forward import forward, prefill
from tests.helpers import make_llama

SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_llama(vocab_size=90, seed=0)


def build(name: str, **changes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(SMALL | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@torch.no_grad()
def stock(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one whole row, no cache, no padding."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def text(size: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 90, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def check_ragged_rows(model: Any) -> None:
    """Prompts of different lengths, a ragged continuation with an idle row, then a rollback."""
    rows = [text(40, 1), text(23, 2), text(31, 3)]
    cache = RaggedCache(model, max_rows=3, capacity=16)
    for _ in rows:
        cache.join()
    prompts = [20, 3, 11]
    prefill(model, cache, {n: rows[n][:p] for n, p in enumerate(prompts)})
    assert cache.lengths == prompts
    fed = [rows[0][20:25], [], rows[2][11:12]]
    logits = forward(model, cache, fed).logits_NV
    assert_same(logits[:5], stock(model, rows[0])[20:25])
    assert_same(logits[5:], stock(model, rows[2])[11:12])
    assert cache.lengths == [25, 3, 12]
    # Junk that is rolled back must leave no trace, in its own row or in another.
    forward(model, cache, [text(4, 9), text(2, 8), text(5, 7)])
    assert [cache.roll_back(n, length) for n, length in enumerate([25, 3, 12])] == [4, 2, 5]
    logits = forward(model, cache, [rows[n][c:] for n, c in enumerate([25, 3, 12])]).logits_NV
    expected = [stock(model, rows[n])[c:] for n, c in enumerate([25, 3, 12])]
    assert_same(logits, torch.cat(expected))


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: build("Llama"),
    "llama, one key per query head": lambda: build("Llama", num_key_value_heads=4),
    "mistral with a window": lambda: build("Mistral", sliding_window=8),
    "qwen2": lambda: build("Qwen2"),
    "qwen3 with mixed windows": lambda: build(
        "Qwen3",
        head_dim=8,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "phi3": lambda: build("Phi3"),
    "gemma2 with soft caps and windows": lambda: build(
        "Gemma2",
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gpt-neox": lambda: build("GPTNeoX"),
    "cohere with a logit scale": lambda: build("Cohere", logit_scale=0.3),
    "granite with scaled logits": lambda: build("Granite", logits_scaling=4.0),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_rows_equal_each_row_alone(name):
    """faults: shared positions, masks sliced to the current call, full attention in windows."""
    check_ragged_rows(ARCHITECTURES[name]())


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("Mamba", {"state_size": 4}, "Mamba"),
        ("Qwen3Next", {"head_dim": 8, "num_experts": 4}, "linear_attention"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
    ],
)
def test_models_with_other_state_are_refused_by_name(name, changes, word):
    """faults: recurrent and convolution states that rollback left stale."""
    with pytest.raises(CacheRollbackError, match=word):
        RaggedCache(build(name, **changes), max_rows=1)


def test_a_row_of_equal_starts_and_one_token_needs_no_mask_and_is_right(model):
    rows = [text(9, 1), text(9, 2)]
    cache = RaggedCache(model, max_rows=2)
    cache.join(), cache.join()
    prefill(model, cache, {0: rows[0][:8], 1: rows[1][:8]})
    logits = forward(model, cache, [row[8:] for row in rows]).logits_NV
    assert_same(logits, torch.stack([stock(model, row)[8] for row in rows]))


def test_the_head_runs_on_the_asked_positions_only(model):
    rows = [text(6, 1), text(4, 2), text(5, 3)]
    seen: list[tuple[int, ...]] = []
    hook = model.lm_head.register_forward_hook(lambda *a: seen.append(tuple(a[2].shape)))
    try:
        cache = RaggedCache(model, max_rows=3)
        for _ in rows:
            cache.join()
        nothing = forward(model, cache, [row[:2] for row in rows], logits_of="none").logits_NV
        last = forward(model, cache, [rows[0][2:], [], rows[2][2:4]], logits_of="last").logits_NV
    finally:
        hook.remove()
    assert nothing.shape == (0, 90)
    assert seen == [(1, 0, 90), (1, 2, 90)]
    assert_same(last, torch.stack([stock(model, rows[0])[5], stock(model, rows[2])[3]]))


def test_hidden_states_are_the_inputs_of_the_head(model):
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    output = forward(model, cache, [text(5)], keep_hidden=True)
    assert output.hidden_ND is not None
    with torch.no_grad():
        assert_same(output.hidden_ND @ model.lm_head.weight.T, output.logits_NV)
    assert forward(model, cache, [text(1)]).hidden_ND is None


def test_another_head_is_used_for_one_call_only(model):
    ids = torch.tensor([3, 50, 7])
    head = torch.nn.Linear(32, 3, bias=False)
    head.weight = torch.nn.Parameter(model.lm_head.weight[ids].detach().clone())
    own = model.lm_head
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    some = forward(model, cache, [text(5)], head=head).logits_NV
    assert model.lm_head is own
    assert_same(some, stock(model, text(5))[:, ids])


def test_the_model_is_left_as_it_was_even_after_a_failure(model):
    implementation = model.config._attn_implementation
    hooks = len(model.lm_head._forward_pre_hooks)
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    with pytest.raises(IndexError):
        forward(model, cache, [[10_000]])
    assert cache.lengths == [0]
    assert model.config._attn_implementation == implementation
    assert len(model.lm_head._forward_pre_hooks) == hooks
    assert_same(forward(model, cache, [text(5)]).logits_NV, stock(model, text(5)))


def test_rows_leave_and_the_last_one_takes_the_hole(model):
    rows = [text(12, 1), text(9, 2), text(15, 3)]
    cache = RaggedCache(model, max_rows=3)
    for _ in rows:
        cache.join()
    prefill(model, cache, {n: row[:-1] for n, row in enumerate(rows)})
    assert cache.leave(0) == 2
    assert cache.lengths == [14, 8]
    logits = forward(model, cache, [rows[2][-1:], rows[1][-1:]]).logits_NV
    assert_same(logits, torch.stack([stock(model, rows[2])[-1], stock(model, rows[1])[-1]]))
    assert cache.leave(1) is None


def test_a_new_row_does_not_see_what_an_old_one_left_in_its_slot(model):
    """faults: a draft cache that survived across requests."""
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    forward(model, cache, [text(50, 1)], logits_of="none")
    cache.leave(0)
    cache.join()
    assert_same(forward(model, cache, [text(6, 2)]).logits_NV, stock(model, text(6, 2)))


def test_growing_keeps_what_was_cached_and_doubles(model):
    row = text(100, 4)
    cache = RaggedCache(model, max_rows=2, capacity=64)
    cache.join(), cache.join()
    forward(model, cache, [row[:60], row[:2]], logits_of="none")
    address = cache._memory[0][0].data_ptr()
    forward(model, cache, [row[60:64], []], logits_of="none")
    assert cache._memory[0][0].data_ptr() == address  # written in place
    logits = forward(model, cache, [row[64:], row[2:3]]).logits_NV
    assert cache._memory[0][0].shape[2] == 128
    assert_same(logits[:-1], stock(model, row)[64:])
    assert_same(logits[-1], stock(model, row)[2])


def test_memory_is_taken_for_the_rows_that_are_here(model):
    rows = [text(20, n) for n in range(5)]
    cache = RaggedCache(model, max_rows=64)
    cache.join()
    forward(model, cache, [rows[0][:10]], logits_of="none")
    assert cache._memory[0][0].shape[0] == 1
    for _ in rows[1:]:
        cache.join()
    prefill(model, cache, {n: rows[n][:10] for n in range(1, 5)})
    assert cache._memory[0][0].shape[0] == 5
    logits = forward(model, cache, [row[10:11] for row in rows]).logits_NV
    assert_same(logits, torch.stack([stock(model, row[:11])[10] for row in rows]))


def test_reading_copies_nothing(model):
    cache = RaggedCache(model, max_rows=2)
    cache.join(), cache.join()
    prefill(model, cache, {0: text(5), 1: text(7)})
    seen: list[int] = []
    original = RaggedCache.update

    def spy(self: RaggedCache, *args: Any, **kwargs: Any) -> Any:
        keys, values = original(self, *args, **kwargs)
        seen.append(keys.untyped_storage().data_ptr())
        return keys, values

    RaggedCache.update = spy  # type: ignore[method-assign]
    try:
        forward(model, cache, [text(2), text(1)])
    finally:
        RaggedCache.update = original  # type: ignore[method-assign]
    assert seen == [cache._memory[n][0].untyped_storage().data_ptr() for n in (0, 1)]


def test_rolling_back_reports_how_much_and_never_forward(model):
    cache = RaggedCache(model, max_rows=1)
    cache.join()
    forward(model, cache, [text(5)], logits_of="none")
    assert cache.roll_back(0, 2) == 3
    with pytest.raises(AssertionError):
        cache.roll_back(0, 4)


def test_a_row_longer_than_the_model_is_an_error_with_both_numbers():
    model = make_llama(vocab_size=90, max_positions=16)
    cache = RaggedCache(model, max_rows=2)
    cache.join(), cache.join()
    forward(model, cache, [text(15), text(2)], logits_of="none")
    with pytest.raises(ContextLengthError, match=r"17 .* 16"):
        forward(model, cache, [text(2), text(1)])
    # A full row beside a growing one: padding behind the last position is harmless.
    logits = forward(model, cache, [[7], text(6, 5)]).logits_NV
    assert_same(logits[1:], stock(model, text(2) + text(6, 5))[2:])


def test_a_model_in_training_mode_is_refused(model):
    model.train()
    try:
        cache = RaggedCache(model, max_rows=1)
        cache.join()
        with pytest.raises(AssertionError, match="eval"):
            forward(model, cache, [text(3)])
    finally:
        model.eval()


def test_garbage_in_unused_memory_does_not_leak_as_not_a_number(model):
    cache = RaggedCache(model, max_rows=2)
    cache.join(), cache.join()
    forward(model, cache, [text(3), text(9)], logits_of="none")
    logits = forward(model, cache, [text(1), text(1)]).logits_NV
    assert torch.isfinite(logits).all()


def test_prefill_groups_neighbours_and_caps_the_padded_size(model):
    calls: list[tuple[int, ...]] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda *a: calls.append(tuple(a[1][0].shape))
    )
    try:
        cache = RaggedCache(model, max_rows=5)
        for _ in range(5):
            cache.join()
        rows = {0: text(4), 1: text(6), 2: [], 3: text(6), 4: text(30)}
        prefill(model, cache, rows, max_tokens=16)
    finally:
        hook.remove()
    assert calls == [(2, 6), (1, 6), (1, 30)]
    assert cache.lengths == [4, 6, 0, 6, 30]


def test_prompts_of_unlike_lengths_are_not_padded_to_the_longest(model, monkeypatch):
    calls = []
    real = forward_module.forward

    def spy(model, cache, token_ids, **options):
        calls.append([len(row) for row in token_ids])
        return real(model, cache, token_ids, **options)

    monkeypatch.setattr(forward_module, "forward", spy)
    cache = RaggedCache(model, max_rows=5)
    prompts = {cache.join(): text(size) for size in (10, 11, 12, 90, 91)}
    prefill(model, cache, prompts)
    assert calls == [[10, 11, 12], [90, 91]]
    assert cache.lengths == [10, 11, 12, 90, 91]


def test_memory_that_runs_out_while_growing_leaves_the_cache_as_it_was(model, monkeypatch):
    """Half grown, ragged rows would be written into each other without an error."""
    cache = RaggedCache(model, max_rows=2, capacity=64)
    rows = [text(20, seed=1), text(9, seed=2)]
    for _ in rows:
        cache.join()
    forward(model, cache, rows)
    made = []
    real = torch.zeros

    def scarce(*arguments, **options):
        made.append(arguments)
        if len(made) == 3:  # keys and values of the first layer, then no more
            raise RuntimeError("out of memory")
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.reserve(100)
    monkeypatch.undo()
    more = [[5, 6], [7]]
    got = forward(model, cache, more).logits_NV
    expected = [stock(model, row + new)[len(row) :] for row, new in zip(rows, more, strict=True)]
    assert_same(got, torch.cat(expected))


def test_positions_stretched_by_longrope_end_where_the_stretch_begins():
    """Behind it, transformers rotates a whole call differently: a row would feel its neighbours."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [2.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }
    stretched = build("Llama", rope_parameters=rope)
    cache = RaggedCache(stretched, max_rows=1)
    cache.join()
    assert cache.max_positions == 32
    with pytest.raises(ContextLengthError, match="33 tokens do not fit the model's 32 positions"):
        forward(stretched, cache, [text(33)])
