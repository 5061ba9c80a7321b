"""What each kind of server is sent and how its answer is read: bodies from its documentation.

Only the shape of `distill serve` was also run against a server (tests/contracts); see
docs/backends.md.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from distill.backends.http_probe import SHAPES
from distill.backends.http_wire import (
    Question,
    RowRejected,
    Scorer,
    Shape,
    TopK,
    TryAgain,
    check_sampling,
)
from distill.errors import SamplingError
from distill.sampling import SamplingConfig

SAMPLING = SamplingConfig(
    temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.2, logit_bias={7: -1.5}
)


def question(sampling: SamplingConfig = SAMPLING, *, seed: int = 2**40 + 5) -> Question:
    return Question((5, 6, 7), sampling, 16, seed, (1, 2))


def body(kind: str, asked: Question | None = None) -> dict[str, Any]:
    return SHAPES[kind].body(asked or question(), "org/target")


def encoded(data: Any) -> bytes:
    return json.dumps(data).encode()


def scorer(kind: str) -> Scorer:
    shape: Shape = SHAPES[kind]
    assert isinstance(shape, Scorer)
    return shape


COMMON = {
    "model": "org/target",
    "prompt": [5, 6, 7],
    "max_tokens": 16,
    "seed": 2**40 + 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {"7": -1.5},
}
FULLER = COMMON | {
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "min_tokens": 0,
    "return_token_ids": True,
}


def test_each_kind_that_the_settings_know_has_a_shape() -> None:
    assert set(SHAPES) == {"vllm", "sglang", "llama_cpp", "distill", "openai"}
    assert {kind for kind, shape in SHAPES.items() if not shape.gives_token_ids} == {"openai"}
    assert {kind for kind, shape in SHAPES.items() if isinstance(shape, Scorer)} == {
        "vllm",
        "sglang",
    }


def test_v1_completions_is_asked_in_token_ids_with_every_default_written_out() -> None:
    assert body("openai") == COMMON
    assert body("distill") == FULLER
    assert body("vllm") == FULLER | {"stop_token_ids": [1, 2]}
    assert "logit_bias" not in body("vllm", question(SamplingConfig()))


def test_sglangs_generate_is_asked_by_its_own_names() -> None:
    settings = {
        "max_new_tokens": 16,
        "min_new_tokens": 0,
        "sampling_seed": 2**40 + 5,
        "stop_token_ids": [1, 2],
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {"7": -1.5},
    }
    expected = {"input_ids": [5, 6, 7], "sampling_params": settings, "return_logprob": False}
    assert body("sglang") == expected
    everything = body("sglang", question(SamplingConfig()))["sampling_params"]
    assert everything["top_k"] == -1  # its word for all


def test_llama_server_is_asked_with_our_order_of_samplers_and_a_seed_of_32_bits() -> None:
    sampling = SAMPLING.model_copy(update={"bad_token_ids": (9,)})
    sent = body("llama_cpp", question(sampling))
    assert sent["prompt"] == [5, 6, 7]
    assert (sent["n_predict"], sent["return_tokens"], sent["n_probs"]) == (16, True, 0)
    assert sent["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert sent["logit_bias"] == [[7, -1.5], [9, False]]
    assert (sent["repeat_penalty"], sent["repeat_last_n"]) == (1.2, -1)
    assert sent["seed"] == (2**40 + 5) % (2**32 - 1)
    biggest = body("llama_cpp", question(seed=2**63 - 1))["seed"]
    assert 0 <= biggest < 2**32 - 1  # the last value asks for a random seed


@pytest.mark.parametrize(
    ("kind", "sampling", "said"),
    [
        ("openai", {"top_k": 5}, "top_k: 5"),
        ("openai", {"min_p": 0.1}, "min_p"),
        ("openai", {"repetition_penalty": 1.1}, "repetition_penalty"),
        ("openai", {"min_tokens": 2}, "min_tokens"),
        ("openai", {"temperature": 2.5}, "temperature: 2.5 (it takes 0 to 2)"),
        ("vllm", {"bad_token_ids": (3,)}, "bad_token_ids: (3,)"),
        ("vllm", {"logit_bias": {3: -500.0}}, "logit_bias: -500.0 (it takes -100 to 100)"),
        ("vllm", {"presence_penalty": 2.5}, "presence_penalty"),
        ("sglang", {"bad_token_ids": (3,)}, "bad_token_ids"),
        ("sglang", {"repetition_penalty": 1.1}, "repetition_penalty: 1.1 (in some versions it"),
        ("llama_cpp", {"min_tokens": 2}, "min_tokens"),
        ("llama_cpp", {"presence_penalty": 0.5}, "presence_penalty"),
        ("llama_cpp", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("distill", {"bad_token_ids": (3,)}, "bad_token_ids"),
    ],
)
def test_a_setting_that_would_be_dropped_or_clamped_is_refused(
    kind: str, sampling: dict[str, Any], said: str
) -> None:
    with pytest.raises(SamplingError) as caught:
        check_sampling(SHAPES[kind], SamplingConfig(**sampling))
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_every_setting_is_sent_or_refused(kind: str) -> None:
    """Set one setting after the other: the body changes, or it never gets that far."""
    shape, neutral = SHAPES[kind], SamplingConfig()
    others: dict[str, Any] = {
        "logit_bias": {4: 1.0},
        "bad_token_ids": (4,),
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.5,
    }
    assert shape.honours <= set(others)
    for name, value in others.items():
        sampling = SamplingConfig(**{name: value})
        changed = shape.body(question(sampling), "m") != shape.body(question(neutral), "m")
        assert changed == (name in shape.honours), name


# ---------------------------------------------------------------- answers


def test_a_vllm_answer_is_read_whole() -> None:
    choice = {
        "index": 0,
        "text": "of France",
        "logprobs": {
            "text_offset": [0, 3],
            "token_logprobs": [-0.25, -1.5],
            "tokens": [" of", " France"],
            "top_logprobs": [{" of": -0.25}, {" France": -1.5}],
        },
        "finish_reason": "stop",
        "stop_reason": 128009,
        "token_ids": [315, 9822],
        "prompt_logprobs": None,
        "prompt_token_ids": [5, 6, 7],
    }
    usage = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    data = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}
    answer = SHAPES["vllm"].read(encoded(data | {"usage": usage}))
    assert answer.token_ids == (315, 9822)
    assert answer.prompt_token_ids == (5, 6, 7)
    assert (answer.num_prompt_tokens, answer.num_new_tokens) == (3, 2)
    assert (answer.finish, answer.stop_token_id, answer.text) == ("stop", 128009, "of France")


SGLANG = {
    "text": " Paris.",
    "output_ids": [12095, 13, 128009],
    "meta_info": {
        "id": "d1",
        "finish_reason": {"type": "stop", "matched": 128009},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "output_token_logprobs": [[-0.25, 12095, None], [-1.5, 13, None], [-0.5, 128009, None]],
        "e2e_latency": 0.5,
    },
}


def test_an_sglang_answer_is_read_whole() -> None:
    answer = SHAPES["sglang"].read(encoded(SGLANG))
    assert answer.token_ids == (12095, 13, 128009)
    assert (answer.num_prompt_tokens, answer.num_new_tokens) == (3, 3)
    assert (answer.finish, answer.stop_token_id) == ("stop", 128009)


def test_an_sglang_answer_that_was_aborted_is_asked_for_again() -> None:
    finish = {"type": "abort", "message": "memory", "status_code": 503}
    meta: dict[str, Any] = SGLANG["meta_info"] | {"finish_reason": finish}  # type: ignore[operator]
    with pytest.raises(TryAgain, match="memory"):
        SHAPES["sglang"].read(encoded(SGLANG | {"meta_info": meta}))


LLAMA = {
    "content": " Paris",
    "tokens": [12095, 2],
    "id_slot": 0,
    "stop": True,
    "model": "target.gguf",
    "tokens_predicted": 2,
    "tokens_evaluated": 3,
    "tokens_cached": 4,
    "truncated": False,
    "stop_type": "eos",
    "stopping_word": "",
    "completion_probabilities": [
        {"id": 12095, "token": " Paris", "bytes": [32], "logprob": -0.25, "top_logprobs": []},
        {"id": 2, "token": "", "bytes": [], "logprob": -1.5, "top_logprobs": []},
    ],
    "timings": {"predicted_n": 2},
}


@pytest.mark.parametrize(
    ("stop_type", "finish"), [("eos", "stop"), ("limit", "length"), ("none", "none")]
)
def test_a_llama_server_answer_is_read_whole(stop_type: str, finish: str) -> None:
    answer = SHAPES["llama_cpp"].read(encoded(LLAMA | {"stop_type": stop_type}))
    assert answer.token_ids == (12095, 2)
    assert (answer.num_prompt_tokens, answer.num_new_tokens) == (3, 2)
    assert (answer.finish, answer.stop_token_id) == (finish, None)


def test_a_llama_server_whose_context_ran_full_is_not_believed() -> None:
    with pytest.raises(RowRejected, match=r"context is full; start it with a larger one \(-c\)"):
        SHAPES["llama_cpp"].read(encoded(LLAMA | {"truncated": True}))


def test_an_answer_of_another_kind_of_server_is_named_by_what_is_missing() -> None:
    with pytest.raises(RowRejected, match="choices: Field required"):
        SHAPES["vllm"].read(encoded(LLAMA))
    with pytest.raises(RowRejected, match="output_ids: Field required"):
        SHAPES["sglang"].read(encoded({"text": "x", "meta_info": SGLANG["meta_info"]}))
    with pytest.raises(TryAgain, match="not JSON"):
        SHAPES["llama_cpp"].read(b"<html>")


# ---------------------------------------------------------------- scores


def test_vllm_scores_are_the_k_best_of_every_position_after_the_first() -> None:
    sent = scorer("vllm").score_body([5, 6, 7], 2, "m")
    assert (sent["prompt"], sent["max_tokens"], sent["prompt_logprobs"]) == ([5, 6, 7], 1, 2)
    # The token that follows is added, whatever its rank: here it is the third of position 1.
    first = {"6": {"logprob": -4.0, "rank": 30, "decoded_token": "f"}}
    first |= {"8": {"logprob": -0.5, "rank": 1}, "3": {"logprob": -1.5, "rank": 2}}
    second = {"7": {"logprob": -0.25, "rank": 1}, "9": {"logprob": -2.0, "rank": 2}}
    data = encoded({"choices": [{"index": 0, "prompt_logprobs": [None, first, second]}]})
    assert scorer("vllm").read_scores(data, 3, 2) == [
        TopK((8, 3), (-0.5, -1.5)),
        TopK((7, 9), (-0.25, -2.0)),
    ]
    with pytest.raises(RowRejected, match="3 positions came for 4 tokens"):
        scorer("vllm").read_scores(data, 4, 2)
    with pytest.raises(RowRejected, match="2 candidates for a position where 3"):
        scorer("vllm").read_scores(data, 3, 3)


def test_sglang_scores_are_the_k_best_of_every_position_after_the_first() -> None:
    sent = scorer("sglang").score_body([5, 6, 7], 2, "m")
    assert (sent["input_ids"], sent["top_logprobs_num"]) == ([5, 6, 7], 2)
    assert (sent["return_logprob"], sent["logprob_start_len"]) == (True, 0)
    positions = [None, [[-0.5, 8, None], [-1.5, 3, None]], [[-0.25, 7, None], [-2.0, 9, None]]]
    data = encoded({"text": "", "meta_info": {"input_top_logprobs": positions}})
    assert scorer("sglang").read_scores(data, 3, 2) == [
        TopK((8, 3), (-0.5, -1.5)),
        TopK((7, 9), (-0.25, -2.0)),
    ]
