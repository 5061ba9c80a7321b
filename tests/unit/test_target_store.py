"""Owns the target store's packed forms: what they cost, what they keep, that a sample is unbiased.

Refuses to know generate and the training loop.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pydantic
import pytest
import torch
from torch import Tensor

from distill.config import Config, fingerprint_view, parse_config
from distill.errors import ConfigError
from distill.losses import LOSSES, DraftColumns, Head, LogitLoss, SampledKnowledge
from distill.target_store import (
    SampledSettings,
    TargetStoreChoice,
    TopKSettings,
    bytes_per_token,
    settings_of,
)
from distill.target_store.files import file_name, kind_of_file
from distill.target_store.sampled import SampledRows, concatenate, draw, sampled_of_law
from distill.target_store.top_k import (
    acceptance_caps,
    top_k_of_law,
    top_k_of_scores,
    unpack_top_k,
)


def _law(num_positions: int, vocab_size: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_positions, vocab_size, generator=generator) * scale).log_softmax(-1)


def _num_bytes(packed: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in packed.values())


class _Holder(Config):
    store: TargetStoreChoice = "final_hidden"


# ---------------------------------------------------------------- settings and cost


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("none", "none"),
        ("final_hidden", "final_hidden"),
        ({"kind": "none"}, "none"),
        ({"kind": "final_hidden"}, "final_hidden"),
        ("top_k", TopKSettings(k=64)),
        ("sampled", SampledSettings(num_draws=50)),
        ({"kind": "top_k", "k": 8}, TopKSettings(k=8)),
        ({"kind": "sampled", "num_draws": 12}, SampledSettings(num_draws=12)),
    ],
    ids=str,
)
def test_a_store_is_written_by_name_or_with_its_settings(written: Any, expected: Any) -> None:
    holder = parse_config({"store": written}, _Holder)
    assert settings_of(holder.store) == expected
    assert parse_config(holder.model_dump(mode="json"), _Holder) == holder


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("topk", "no target store 'topk'; there are none, final_hidden, top_k, sampled"),
        ({"kind": "topk", "k": 3}, "no target store 'topk'; there are none, final_hidden, top_k"),
        ({"k": 3}, "no target store None; there are none, final_hidden, top_k, sampled"),
        ({"kind": "none", "k": 3}, "none has no settings; remove k"),
        ({"kind": "top_k", "num_draws": 3}, "num_draws"),
        ({"kind": "sampled", "num_draws": 65}, "64"),
    ],
    ids=str,
)
def test_a_mistake_in_a_store_is_named(written: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_config({"store": written}, _Holder)
    with pytest.raises(pydantic.ValidationError):
        _Holder(store=written)


@pytest.mark.parametrize(
    ("name", "settings"), [("top_k", TopKSettings()), ("sampled", SampledSettings())]
)
def test_a_bare_name_has_the_fingerprint_of_the_settings_it_stands_for(
    name: str, settings: Config
) -> None:
    spelled: list[Any] = [name, {"kind": name}, settings.model_dump(), settings]
    views = [fingerprint_view(_Holder(store=one)) for one in spelled]
    assert views == [{"store": settings.model_dump()}] * 4


@pytest.mark.parametrize("vocab_size", [49_152, 128_256, 151_936, 262_208])
def test_top_k_of_64_takes_at_most_300_bytes_a_token(vocab_size: int) -> None:
    packed = top_k_of_law(_law(4, vocab_size), 64)
    stated = bytes_per_token(TopKSettings(k=64), hidden_size=1, vocab_size=vocab_size)
    assert _num_bytes(packed) == 4 * stated
    assert stated <= 300


def test_each_store_states_its_bytes() -> None:
    sizes = {"hidden_size": 576, "vocab_size": 49_152}
    assert bytes_per_token("none", **sizes) == 0
    assert bytes_per_token("final_hidden", **sizes) == 2 * 576 + 4
    assert bytes_per_token("top_k", **sizes) == 128 + 128 + 8
    assert bytes_per_token("sampled", **sizes) == 3 * 50 + 3


def test_a_dozen_distinct_draws_take_39_bytes() -> None:
    law_NV = torch.full((5, 1000), -torch.inf)
    law_NV[:, :12] = math.log(1 / 12)
    packed = sampled_of_law(law_NV, seed=0, num_draws=60, vocab_size=1000)
    assert packed["num_entries_N"].tolist() == [12] * 5
    assert _num_bytes(packed) == 5 * (12 * 3 + 3)


@pytest.mark.parametrize("kind", ["final_hidden", "top_k", "sampled"])
def test_a_files_name_tells_its_kind(kind: Any) -> None:
    assert kind_of_file(str(file_name(kind, 7))) == kind
    assert file_name("none", 7) is None


# ---------------------------------------------------------------- top_k


@pytest.mark.parametrize("vocab_size", [300, 65_536, 70_000, 262_145, 1_100_000])
@pytest.mark.parametrize("k", [1, 5, 8])
def test_ids_survive_packing_exactly_and_probabilities_nearly(vocab_size: int, k: int) -> None:
    law_NV = _law(3, vocab_size, scale=3.0)
    law_NV[0, vocab_size - 1] += 30.0  # the largest id there is
    law_NV = law_NV.log_softmax(-1)
    known = unpack_top_k(top_k_of_law(law_NV, k))
    log_probs_NK, ids_NK = law_NV.topk(k)
    assert torch.equal(known.token_ids_NK, ids_NK)
    assert known.token_ids_NK[0, 0] == vocab_size - 1
    torch.testing.assert_close(
        known.log_probs_NK, log_probs_NK.clamp_min(-32), rtol=0, atol=32 / 65535 / 2 + 1e-5
    )
    torch.testing.assert_close(
        known.tail_mass_N, 1 - log_probs_NK.exp().sum(-1), rtol=1e-3, atol=1e-6
    )


def test_more_tokens_than_there_are_means_all_of_them() -> None:
    known = unpack_top_k(top_k_of_law(_law(2, 6), 64))
    assert known.token_ids_NK.shape == (2, 6)
    assert known.tail_mass_N.tolist() == [0.0, 0.0]


def test_the_cap_is_the_mass_of_what_is_kept_at_both_temperatures() -> None:
    """p = .5 .3 .2, K = 1. At 0.7: weights .5^(1/.7), .3^(1/.7), .2^(1/.7)."""
    law_NV = torch.tensor([[0.5, 0.3, 0.2]]).log()
    caps = acceptance_caps([top_k_of_law(law_NV, 1)["tail_mass_NT"]])
    weights = [p ** (1 / 0.7) for p in (0.5, 0.3, 0.2)]
    assert caps["1"] == pytest.approx(0.5, abs=1e-6)
    assert caps["0.7"] == pytest.approx(weights[0] / sum(weights), abs=1e-6)


def test_the_cap_is_a_mean_over_all_positions_of_all_files() -> None:
    first, second = torch.tensor([[0.1, 0.0], [0.3, 0.0]]), torch.tensor([[0.5, 0.3]])
    assert acceptance_caps([first, second])["1"] == pytest.approx(0.7)
    assert acceptance_caps([first, second])["0.7"] == pytest.approx(0.9)


def test_what_a_server_gives_packs_like_a_law_and_bounds_the_colder_tail() -> None:
    law_NV = _law(20, 50)
    exact = top_k_of_law(law_NV, 6)
    log_probs_NK, ids_NK = law_NV.topk(6)
    tail_N = 1 - log_probs_NK.exp().sum(-1)
    given = top_k_of_scores(ids_NK, log_probs_NK, tail_N, vocab_size=50)
    assert torch.equal(given["id_low_NK"], exact["id_low_NK"])
    assert torch.equal(given["log_prob_NK"], exact["log_prob_NK"])
    torch.testing.assert_close(
        given["tail_mass_NT"][:, 0], exact["tail_mass_NT"][:, 0], rtol=1e-3, atol=1e-6
    )
    assert (given["tail_mass_NT"][:, 1] >= exact["tail_mass_NT"][:, 1] - 1e-6).all()


# ---------------------------------------------------------------- sampled


def _cells(probs_V: Tensor, num_draws: int) -> list[tuple[float, Tensor]]:
    """(length, counts_V) of every interval of u on which the draws are constant."""
    total_V = probs_V.double().cumsum(0) * num_draws
    edges = sorted({0.0, 1.0, *(total_V % 1.0).tolist()})
    cells = []
    for low, high in itertools.pairwise(edges):
        if high - low > 1e-12:
            middle = torch.tensor([(low + high) / 2])
            cells.append((high - low, draw(probs_V[None], middle, num_draws)[0]))
    return cells


@pytest.mark.parametrize("num_draws", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "probs", [[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], [0.97, 0.0, 0.02, 0.01]], ids=str
)
def test_the_expected_gradient_of_a_sample_is_forward_kls_by_enumeration(
    num_draws: int, probs: list[float]
) -> None:
    """Every cell of u, weighted by its length: no sampling, no tolerance beyond rounding."""
    probs_V = torch.tensor(probs, dtype=torch.float64)
    draft_NV = torch.tensor([[0.3, -1.0, 0.7, 0.1]], dtype=torch.float64)
    loss = LOSSES.get("forward_kl")()
    assert isinstance(loss, LogitLoss)
    columns = DraftColumns(Head(torch.zeros(4, 1)))
    entropy_N = torch.special.entr(probs_V).sum()[None]
    length_sum, value, grad_V = 0.0, 0.0, torch.zeros(4, dtype=torch.float64)
    for length, counts_V in _cells(probs_V, num_draws):
        assert counts_V.sum() == num_draws
        known = SampledKnowledge(torch.arange(4)[None], counts_V[None] / num_draws, entropy_N)
        loss_N, grad_NV = known.value_and_grad(loss, draft_NV, slice(None), columns)
        length_sum += length
        value += length * loss_N.item()
        grad_V += length * grad_NV[0]
    exact_N, exact_NV = loss.value_and_grad(draft_NV, probs_V.log()[None])
    assert length_sum == pytest.approx(1.0, abs=1e-12)
    assert value == pytest.approx(exact_N.item(), abs=1e-6)
    torch.testing.assert_close(grad_V, exact_NV[0], rtol=0, atol=1e-7)


def test_each_count_is_the_expected_number_rounded_down_or_up() -> None:
    probs_NV = _law(200, 40).exp()
    counts_NV = draw(probs_NV, torch.rand(200, generator=torch.Generator().manual_seed(1)), 30)
    assert (counts_NV.sum(-1) == 30).all()
    assert ((counts_NV - 30 * probs_NV.double()).abs() < 1 + 1e-6).all()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    probs_NV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(50, -1)
    counts_NV = draw(probs_NV, torch.linspace(0.001, 0.999, 50), 7)
    assert not counts_NV[:, [0, 2, 4]].any()


@pytest.mark.parametrize("vocab_size", [40, 2**18, 2**18 + 5])
def test_draws_survive_packing(vocab_size: int) -> None:
    law_NV = torch.full((70, vocab_size), -torch.inf)
    ids = [0, 7, vocab_size - 1]
    law_NV[:, ids] = torch.tensor([0.5, 0.3, 0.2]).log()
    law_NV[33] = -torch.inf
    law_NV[33, 5] = 0.0  # certain: one entry of all draws
    packed = sampled_of_law(law_NV, seed=3, num_draws=64, vocab_size=vocab_size)
    known = SampledRows(packed).of(torch.tensor([69, 33, 0]))
    assert known.token_ids_NM[0].tolist() == known.token_ids_NM[2].tolist() == ids
    assert known.token_ids_NM[1].tolist() == [5, 0, 0]
    assert known.weights_NM[1].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(
        known.weights_NM[0], torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=1 / 64
    )
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert known.entropy_N.tolist() == pytest.approx([entropy, 0.0, entropy], abs=1e-3)


def test_a_position_has_its_own_random_numbers_whatever_else_is_drawn() -> None:
    law_NV = _law(150, 30)
    whole = sampled_of_law(law_NV, seed=5, num_draws=9, vocab_size=30)
    part = sampled_of_law(law_NV[:90], seed=5, num_draws=9, vocab_size=30)
    num = len(part["entries_EC"])
    assert torch.equal(whole["entries_EC"][:num], part["entries_EC"])
    other = sampled_of_law(law_NV, seed=6, num_draws=9, vocab_size=30)
    assert not torch.equal(other["num_entries_N"], whole["num_entries_N"])
    repeated = sampled_of_law(law_NV[:1].expand(60, -1), seed=5, num_draws=9, vocab_size=30)
    assert len(set(repeated["num_entries_N"].tolist())) > 1


def test_positions_with_different_numbers_of_draws_join() -> None:
    few = SampledKnowledge(torch.tensor([[3]]), torch.tensor([[1.0]]), torch.zeros(1))
    more = SampledKnowledge(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]), torch.ones(1))
    both = concatenate([few, more])
    assert both.token_ids_NM.tolist() == [[3, 0], [1, 2]]
    assert both.weights_NM.tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_an_empty_answer_packs_to_nothing() -> None:
    packed = sampled_of_law(torch.zeros(0, 9), seed=0, num_draws=4, vocab_size=9)
    assert [len(tensor) for tensor in packed.values()] == [0, 0, 0]
