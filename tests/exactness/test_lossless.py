"""Owns the proof of what "lossless" promises: 40 prompts, 256 tokens, a draft that often agrees
and one that never does. Refuses real models: the target is tiny and nearly undecided, so that half
precision meets a tie in many answers, which a real target does in few.

In float32 no token may differ. In bfloat16 an answer may part where the target's logits tie, and
nowhere else; the control (verify width, every draft rejected) parts in the same way, so the
difference is arithmetic. Broken logic must be told from that.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.errors import ConfigError
from distill.runtime import rounds
from distill.runtime.decode import DecodeRequest
from distill.runtime.lossless import (
    TIE_ULPS,
    FillerDrafter,
    LosslessAudit,
    audit,
    find_divergence,
)
from distill.runtime.speculative import speculative_decode
from distill.runtime.verify import Verification, verify_greedy
from distill.sampling import SamplingConfig
from tests.helpers import make_llama

PROMPTS: list[Any] = [[*(5 + n, 6, 7)[: 1 + n % 3], n] for n in range(40)]
LENGTH = 256


def loaded(model: Any) -> Any:
    return SimpleNamespace(model=model, tokenizer=None, stop_token_ids=frozenset())


def undecided(dtype: torch.dtype) -> Any:
    """A target whose every token has a twin, which it likes as much but for a rounding error."""
    model = make_llama(64, layers=1, hidden=16, heads=2, kv_heads=1, dtype=dtype)
    noise = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        head_VD = model.lm_head.weight
        head_VD[32:] = (head_VD[:32].float() * (1 + 2**-8 * noise)).to(dtype)
    return model


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def target(request: pytest.FixtureRequest) -> Any:
    return loaded(undecided(request.param))


def trained(dtype: torch.dtype) -> Any:
    """The target's weights, a little wrong: it agrees often."""
    model, generator = undecided(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return loaded(model)


def adversarial(dtype: torch.dtype) -> Any:
    """Proposes what the target likes least."""
    model = undecided(dtype)
    with torch.no_grad():
        model.lm_head.weight *= -1
    return loaded(model)


def run(target: Any, draft: Any, **changes: Any) -> LosslessAudit:
    settings: dict[str, Any] = {"max_new_tokens": LENGTH, "max_batch_size": 20}
    return audit(target, draft, PROMPTS, **(settings | changes))


@pytest.mark.parametrize(("make", "low", "high"), [(trained, 0.2, 0.95), (adversarial, 0.0, 0.05)])
def test_answers_are_equal_in_float32_and_part_at_ties_only_in_bfloat16(target, make, low, high):
    found = run(target, make(target.model.dtype))
    assert found.acceptance_rate is not None
    assert low <= found.acceptance_rate <= high
    assert found.speculative.num_compared == found.control.num_compared == 40
    assert found.is_lossless
    assert found.control.num_broken == 0
    for divergence in (*found.speculative.divergences, *found.control.divergences):
        assert divergence.margin_ulps <= TIE_ULPS[torch.bfloat16]
    if target.model.dtype == torch.float32:
        assert found.verdict == "equal"
        assert found.control.num_identical == 40


def test_the_target_of_these_tests_ties_all_the_time(target):
    """Whatever the machine: how often the two best logits are within the bound of each other."""
    tokens = torch.arange(4, 60).view(7, 8)
    with torch.no_grad():
        best_N2 = target.model(tokens).logits.double().flatten(0, 1).topk(2).values
    margins_N = best_N2[:, 0] - best_N2[:, 1]
    ulps_N = torch.finfo(torch.bfloat16).eps * 2.0 ** best_N2[:, 0].abs().log2().floor()
    assert (margins_N <= TIE_ULPS[torch.bfloat16] * ulps_N).double().mean() > 0.5


def test_edits_of_the_logits_are_part_of_the_audit():
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1.2, bad_token_ids=(3,))
    target = loaded(undecided(torch.float32))
    found = run(target, trained(torch.float32), sampling=sampling, max_new_tokens=60)
    assert found.verdict == "equal"


def wrong_extra_token(target_BS: Any, draft_BK: Any, number_B: Any) -> Verification:
    """Takes the token after the accepted ones from the row before the right one."""
    right = verify_greedy(target_BS, draft_BK, number_B)
    row_B1 = (right.num_accepted_B - 1).clamp_min(0).unsqueeze(-1)
    return Verification(right.num_accepted_B, target_BS.gather(1, row_B1).squeeze(-1))


def accepting_one_too_many(target_BS: Any, draft_BK: Any, number_B: Any) -> Verification:
    """Commits the first draft unverified."""
    right = verify_greedy(target_BS, draft_BK, number_B)
    accepted_B = right.num_accepted_B.clamp_min(1).minimum(number_B)
    return Verification(accepted_B, target_BS.gather(1, accepted_B.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize("broken", [wrong_extra_token, accepting_one_too_many])
def test_broken_logic_is_told_from_arithmetic(monkeypatch, target, broken):
    monkeypatch.setattr(rounds, "verify_greedy", broken)
    found = run(target, trained(target.model.dtype), max_new_tokens=40)
    assert found.verdict == "logic"
    assert not found.is_lossless
    assert found.speculative.num_broken > 20
    assert found.control.num_broken == 0


def test_a_rollback_that_is_forgotten_is_told_from_arithmetic(monkeypatch):
    from distill.runtime.cache import RaggedCache

    original = RaggedCache.roll_back

    def lazy(self: RaggedCache, row: int, length: int) -> int:
        held = self.lengths[row]
        removed = original(self, row, length)
        if removed == 1:  # one rejected token stays, and another one is missing at its end
            for keys, values in self._memory.values():
                keys[row, :, length - 1] = keys[row, :, held - 1]
                values[row, :, length - 1] = values[row, :, held - 1]
        return removed

    target = loaded(undecided(torch.float32))
    draft = trained(torch.float32)
    monkeypatch.setattr(RaggedCache, "roll_back", lazy)
    found = run(target, draft, max_new_tokens=40)
    assert found.verdict == "logic"
    assert found.control.num_broken == 0  # it rejects four tokens in every full round


def test_arithmetic_that_depends_on_the_width_beyond_the_bound_is_no_fault_of_the_logic():
    """A kernel that switches with the number of tokens, and is far off in one of its forms."""
    target = loaded(undecided(torch.float32))
    head = target.model.lm_head

    def switching(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        return output.roll(1, dims=-1) if target.is_wide else output

    def watch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        target.is_wide = inputs[0].shape[1] > 1

    target.is_wide = False
    target.model.model.embed_tokens.register_forward_pre_hook(watch)
    head.register_forward_hook(switching)
    found = run(target, trained(torch.float32), max_new_tokens=24)
    assert found.verdict == "numerics"
    assert found.control.num_broken > 20


def test_the_control_decodes_plainly_at_the_width_of_speculation():
    target = loaded(undecided(torch.float32))
    widths: list[int] = []
    hook = target.model.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: widths.append(inputs[0].shape[1])
    )
    found = run(target, FillerDrafter(), max_new_tokens=30, num_draft_tokens=5)
    hook.remove()
    assert widths.count(6) >= 2 * 25  # the speculative run and its control, but for their ends
    assert found.control.num_identical == 40


def test_a_control_request_samples_what_plain_decoding_samples():
    """The random numbers of a row are those of its positions, so this holds above 0 as well."""
    from dataclasses import replace

    from distill.drafters.causal_lm import CausalLMDrafter
    from distill.runtime.decode import DecodeEngine, DecodeRequest
    from distill.runtime.speculative import decode_batch

    model = undecided(torch.float32)
    request = DecodeRequest([5, 6], 60, SamplingConfig(temperature=0.8), 3, frozenset())

    def answer(drafter: Any, asked: DecodeRequest) -> Any:
        engine = DecodeEngine(model, drafter, num_draft_tokens=4, max_batch_size=1, max_length=99)
        return decode_batch(engine, [asked])[0]

    plain = answer(None, request)
    control = answer(CausalLMDrafter(model), replace(request, is_control=True))
    assert control.token_ids == plain.token_ids
    assert control.stats.num_accepted == 0
    assert control.stats.num_proposed > 100
    assert answer(CausalLMDrafter(model), request).stats.num_accepted > 30


def test_an_audit_of_drawn_answers_or_without_drafts_is_refused():
    target = loaded(undecided(torch.float32))
    with pytest.raises(ConfigError, match="must be 0"):
        audit(target, target, PROMPTS, SamplingConfig())
    with pytest.raises(ConfigError, match="at least 1"):
        audit(target, target, PROMPTS, num_draft_tokens=0)


def test_the_answers_that_are_audited_are_those_of_the_call():
    target, draft = loaded(undecided(torch.float32)), trained(torch.float32)
    greedy = SamplingConfig(temperature=0.0)
    plain = speculative_decode(target, None, PROMPTS, greedy, max_new_tokens=30)
    fast = speculative_decode(target, draft, PROMPTS, greedy, max_new_tokens=30)
    assert [a.token_ids for a in plain] == [a.token_ids for a in fast]


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [
        ([5, 2], [5, 2, 9], 2),  # goes on behind the stop
        ([5], [5, 2, 9], 2),  # so it does beside a plain answer with a smaller budget
        ([5, 6, 7, 8], [5, 6, 7, 8, 9], 4),  # behind the budget
        ([5, 6, 7], [5, 6], 2),  # ends for no reason
        ([5, 6], [5, 6, 7], None),
        ([5, 6, 2], [5, 6, 2], None),
    ],
)
def test_an_answer_has_to_end_where_its_request_ends_it(plain, other, position):
    target = loaded(undecided(torch.float32))
    request = DecodeRequest([3, 4], 4, SamplingConfig(temperature=0.0), 0, frozenset({2}))
    found = find_divergence(target, request, plain, other, tie_ulps=1e9)
    if position is None:
        assert found is None
        return
    assert found is not None
    assert (found.position, found.is_tie) == (position, False)
    assert (found.plain_token is None) is (len(plain) <= position)
    assert (found.other_token is None) is (len(other) <= position)


def test_a_commit_that_passes_over_the_stop_is_a_fault_of_the_logic(monkeypatch):
    """As if a stop counted at the end of a block only."""
    from distill.runtime import decode
    from distill.runtime.commit import Boundary, find_boundary

    def late(block: Any, **settings: Any) -> Boundary:
        found = find_boundary(block, **settings)
        if found.finish_reason == "stop" and found.num_tokens < len(block):
            return Boundary(len(block), "stop")
        return found

    target, draft = loaded(undecided(torch.float32)), loaded(undecided(torch.float32))
    greedy = SamplingConfig(temperature=0.0)
    plain = speculative_decode(target, None, PROMPTS[:8], greedy, max_new_tokens=12)
    target.stop_token_ids = frozenset({answer.token_ids[5] for answer in plain})
    assert audit(target, draft, PROMPTS[:8], max_new_tokens=40).verdict == "equal"
    monkeypatch.setattr(decode, "find_boundary", late)
    monkeypatch.setattr(decode, "_up_to_a_stop", lambda draft, stops: draft)
    found = audit(target, draft, PROMPTS[:8], max_new_tokens=40)
    assert found.verdict == "logic"


def test_a_precision_without_a_bound_is_refused_before_anything_is_decoded():
    target = loaded(undecided(torch.float64))

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was run")

    hook = target.model.model.embed_tokens.register_forward_hook(broken)
    with pytest.raises(ConfigError, match=r"torch\.float64.*Give tie_ulps"):
        audit(target, target, PROMPTS[:2])
    hook.remove()
    found = audit(target, target, PROMPTS[:2], max_new_tokens=8, tie_ulps=0)
    assert found.is_lossless


def test_the_example_of_the_exactness_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    target = loaded(undecided(torch.float32))
    names: dict[str, Any] = {
        "target": target,
        "draft": trained(torch.float32),
        "prompts": [[5, 6], [7]],
    }
    exec(code, names)
    assert names["found"].verdict == "equal"
