"""Owns faults of others in numerics and ties: greedy speculation that differs from greedy decoding.
Refuses to forbid rounding; what is promised is in docs/exactness.md.

Shown elsewhere: huggingface/transformers#39421 (multi-row products) and ml-explore/mlx-swift-lm#542
(parity tested on too few tokens): tests/exactness/test_lossless.py, 256 tokens, and for quantised
targets test_quantized.py. vllm-project/vllm#41758 (an n-gram draft changed repeated text):
test_greedy.py, test_repeated_token_prompts_change_nothing. vllm-project/vllm#22987 (drift with a
penalty at a low temperature): test_enumeration.py, the law of edits, whose settings include it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.runtime.cache import RaggedCache
from distill.runtime.decode import DecodeRequest
from distill.runtime.forward import forward, prefill
from distill.runtime.lossless import TIE_ULPS, audit
from tests.helpers import make_llama
from tests.runtime_helpers import GREEDY, disturbed, engine_for


def logits_after(model: Any, prefix: list[int], fed: list[int]) -> torch.Tensor:
    """Logits of the first fed token's position, in a pass over all of them."""
    cache = RaggedCache(model, max_rows=1)
    prefill(model, cache, {cache.join(): prefix})
    return forward(model, cache, [fed]).logits_NV[0].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_width_of_a_pass_changes_logits_by_rounding_only(dtype):
    """vllm-project/vllm#54506: a verify pass and a decode pass were not equal bit for bit."""
    model = make_llama(seed=0, hidden=64, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for n in range(20):
        prefix = torch.randint(300, (5 + 3 * n,), generator=generator).tolist()
        fed = torch.randint(300, (6,), generator=generator).tolist()
        narrow, wide = (logits_after(model, prefix, fed[:width]) for width in (1, 6))
        ulp = torch.finfo(dtype).eps * 2.0 ** narrow.abs().max().log2().floor()
        assert (narrow - wide).abs().max() <= TIE_ULPS[dtype] * ulp


def test_a_half_precision_target_that_drafts_for_itself_parts_at_ties_only_and_seldom():
    """ml-explore/mlx-lm#1470, #1423: exact ties of the two best logits; vllm-project/vllm#54506:
    a target was accepted by itself at 72 instead of 100 percent."""
    model = make_llama(seed=0, dtype=torch.bfloat16)
    target = SimpleNamespace(model=model, tokenizer=None, stop_token_ids=frozenset())
    found = audit(
        target, target, [[5 + n, 6, 7] for n in range(12)], max_new_tokens=100, max_batch_size=4
    )
    assert found.verdict in ("equal", "ties")
    assert found.acceptance_rate is not None
    assert found.acceptance_rate > 0.98


@pytest.mark.parametrize("has_draft", [False, True])
def test_both_ways_of_decoding_read_the_prompt_alike(has_draft):
    """ml-explore/mlx-lm PR#1109: one path read the last prompt token with the rest, the other did
    not, and the first token fell on the other side of a tie."""
    target = make_llama(seed=0)
    fed: list[list[int]] = []
    target.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: fed.append(inputs[0][0].tolist())
    )
    drafter = CausalLMDrafter(disturbed(make_llama(seed=0), 0.02)) if has_draft else None
    engine = engine_for(target, drafter, batch=1)
    prompt = [5, 6, 7, 8, 9]
    engine.add(DecodeRequest(prompt, 20, GREEDY, 0, frozenset()))
    engine.step()
    assert fed[0] == prompt[:-1]
    assert fed[1][0] == prompt[-1]
    assert len(fed[1]) == (5 if has_draft else 1)
