"""Owns the tests of a server's counters: vLLM's page, and the rates that follow by definition.

Refuses to open a socket.
"""

from __future__ import annotations

import pytest

from distill.errors import BackendUnavailableError
from distill.metrics import summary
from distill.metrics.counters import counts_of, read_counters
from distill.metrics.summary import PromptRecord
from distill.runtime.stats import DecodeStats

# A page as prometheus_client prints vLLM's counters: types, _created stamps, two engines.
PAGE = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{model_name="org/t",engine="0"} 2.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="org/t"} 1.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{model_name="org/t",engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{model_name="org/t",engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_total{model_name="org/t",engine="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="org/t",position="0"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="org/t",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="org/t",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="org/t",position="3"} 1.0
vllm:generation_tokens_total{model_name="org/t",engine="0"} 9.0
vllm:generation_tokens_total{engine="0",model_name="another"} 100.0
"""


def test_the_golden_rounds_come_out_of_a_vllm_page() -> None:
    # accepted = [2, 0, 4] with K = 4.
    counts = counts_of(read_counters(PAGE, model="org/t"))
    record = PromptRecord("served", 1.0, "p", "chat", counts, 0, {})
    cell = summary.summarize([record], num_draft_tokens=4, seed=0)[0]
    assert cell["acceptance_rate"]["value"] == 6 / 8
    assert cell["draft_acceptance_rate"]["value"] == 6 / 12
    assert cell["block_efficiency"]["value"] == 3.0
    assert [e["value"] for e in cell["acceptance_by_position"]] == [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    conditional = [e["value"] for e in cell["conditional_acceptance_by_position"]]
    assert conditional == [2 / 3, 1.0, 1 / 2, 1.0]
    histogram = [e["value"] for e in cell["accepted_length_histogram"]]
    assert histogram == [1 / 3, 0.0, 1 / 3, 0.0, 1 / 3]
    assert cell["analytic_acceptance_rate"]["value"] is None


def test_only_the_named_models_counters_are_read() -> None:
    assert read_counters(PAGE, model="org/t").num_generated_tokens == 9
    assert read_counters(PAGE).num_generated_tokens == 109


def test_a_published_run_satisfies_its_own_identities() -> None:
    # A vLLM run with K = 4: 71.4 / 49.8 / 36.3 / 27.0% by position, rate 46.13%, length 2.85.
    by_position = (714, 498, 363, 270)
    text = "vllm:spec_decode_num_drafts 1000\nvllm:spec_decode_num_draft_tokens 4000\n"
    text += f"vllm:spec_decode_num_accepted_tokens {sum(by_position)}\n"
    text += "".join(
        f'vllm:spec_decode_num_accepted_tokens_per_pos{{position="{i}"}} {n}\n'
        for i, n in enumerate(by_position)
    )
    counts = counts_of(read_counters(text))
    assert f"{100 * counts['num_accepted'] / counts['num_proposed']:.2f}" == "46.12"
    assert f"{counts['num_emitted'] / counts['num_target_calls']:.2f}" == "2.85"


def _page(drafts: int, proposed: int, by_position: tuple[int, ...], generated: int) -> str:
    lines = [
        f"vllm:spec_decode_num_drafts {drafts}",
        f"vllm:spec_decode_num_draft_tokens {proposed}",
        f"vllm:spec_decode_num_accepted_tokens {sum(by_position)}",
        f"vllm:generation_tokens {generated}",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos{{position="{i}"}} {n}'
        for i, n in enumerate(by_position)
    ]
    return "\n".join(lines)


def test_a_round_that_ends_at_an_accepted_end_of_text_emits_no_token_behind_it() -> None:
    # One round: [d1, d2, end] of five, accepted and emitted; no server's counter says it ended.
    truth = DecodeStats.from_rounds([(5, 5, 3)])
    counts = counts_of(read_counters(_page(1, 5, (1, 1, 1, 0, 0), 3)))
    assert counts["num_emitted"] == truth.num_emitted == 3
    assert counts["num_accepted"] == truth.num_accepted == 3
    # The one that cannot be told: at most one a round's end too many.
    assert counts["num_tested"] == truth.num_tested + 1


def test_a_server_that_counts_the_prompts_own_token_keeps_its_rounds_count() -> None:
    # vLLM: the same round, and the token that came with the prompt.
    assert counts_of(read_counters(_page(1, 5, (1, 1, 1, 0, 0), 4)))["num_emitted"] == 4


def test_a_stretch_is_what_came_between_two_readings() -> None:
    before = read_counters(PAGE, model="org/t")
    later = read_counters(PAGE.replace("} 6.0", "} 10.0"), model="org/t")
    stretch = later - before
    assert (stretch.num_accepted_tokens, stretch.num_drafts) == (4, 0)
    assert stretch.accepted_by_position == (0, 0, 0, 0)


def test_a_server_without_speculation_is_told_apart_with_a_way_out() -> None:
    with pytest.raises(BackendUnavailableError, match="speculative-config"):
        read_counters('vllm:generation_tokens_total{model_name="m"} 5\n')
