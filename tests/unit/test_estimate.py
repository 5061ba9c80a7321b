"""Estimates of a plan against numbers worked out by hand, on a pair small enough to count.

Refuses to compare with what stages really use: these are upper estimates from shapes alone.

The target has 4 layers of width 8, an MLP of 16, 2 heads of 4 and 1 key-value head, and 10 tokens
with an untied head. A layer has 192 (attention) + 384 (MLP) + 16 (norms) = 592 weights, the tables
160, the last norm 8: 2536 in all, 1352 with 2 layers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill.artifacts import ArtifactKey
from distill.config import parse_config
from distill.corpus import Prompt
from distill.errors import ConfigError
from distill.initialization import ScratchConfig, initialize
from distill.models import ModelConfig, ModelShape, load_target
from distill.stages.candidates import plan_candidates
from distill.stages.estimate import estimate_of, estimate_run
from distill.stages.generate_plan import Chunk, Question
from distill.stages.plan_shapes import draft_shape, known_shapes
from distill.stages.run_config import RunConfig
from distill.stages.speed_plan import plan_speed

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """Ten prompts of 32 characters (8 tokens); held out: two of task a and one of task b."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {
            "id": str(number),
            "task": "b" if number == 2 else "a",
            "split": "held_out" if number < 3 else "train",
            "prompt": "x" * 32,
        }
        for number in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def make(*overrides: str, **distill: Any) -> RunConfig:
        content = {
            "name": "small",
            "target": {"model": "org/not-there", "dtype": "bfloat16", "shape": SHAPE},
            "generate": {
                "corpus": {"path": str(path)},
                "samplings": [{"temperature": 1.0}, {"temperature": 0.0}],
                "max_new_tokens": 16,
                "batch_size": 4,
            },
            "distill": {
                "initialization": {"kind": "pruned", "layers": "first", "num_layers": 2},
                "max_steps": 10,
                "warmup_steps": 2,
                "batch_tokens": 20,
                **distill,
            },
            "measure": {
                "temperatures": [0.0, 1.0],
                "num_draft_tokens": 3,
                "max_new_tokens": 4,
                "batch_size": 2,
                "timing": {"enabled": False},
            },
            "export": {"name": "small-draft"},
            "hardware": {"peak_flops": 1000, "memory_bandwidth": 100, "utilization": 0.5},
        }
        return parse_config(content, RunConfig, overrides)

    return make


def test_generate_stores_a_state_for_every_token_of_every_answer(make_config: MakeConfig) -> None:
    estimate = estimate_run(make_config())["generate"]
    # 10 prompts, 2 samplings, 16 tokens each
    assert estimate.num_tokens == 320
    # a state of 8 numbers of 2 bytes, its log-sum-exp, and 16 bytes of the table; of the 20
    # answers' prompts, of 8 tokens, the table alone
    assert estimate.disk_bytes == 320 * (2 * 8 + 4 + 16) + 20 * 8 * 16
    # 2 bytes a weight; 4 rows of 24 tokens, each with 4 layers of a key and a value of 4 numbers
    assert estimate.memory_bytes == 2536 * 2 + 4 * 24 * 64
    # 500 operations and 50 bytes a second: prompts by arithmetic, 80 steps by weight traffic
    assert estimate.duration_s == pytest.approx(2 * 2536 * 20 * 8 / 500 + 80 * 5072 / 50)


def test_every_turn_of_a_conversation_is_counted_with_all_it_reads(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    path = tmp_path / "talk.jsonl"
    turns = ["x" * 32, "y" * 40, "z" * 20]
    path.write_text(json.dumps({"turns": turns, "split": "train"}) + "\n", encoding="utf-8")
    estimate = estimate_run(make_config(f"generate.corpus.path={path}"))["generate"]
    assert estimate.num_tokens == 2 * 3 * 16
    # 8 tokens; these, 16 of the answer and 10 more; these, 16 and 5 more
    read = 2 * (8 + 34 + 55)
    assert estimate.disk_bytes == 96 * (2 * 8 + 4 + 16) + read * 16
    steps = 96 / 4
    assert estimate.duration_s == pytest.approx(2 * 2536 * read / 500 + steps * 5072 / 50)


def test_what_is_checked_before_a_run_is_what_its_plan_says(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    turns = ({"role": "user", "content": "x" * 40},)
    prompt = Prompt("p", "default", "train", turns, later_turns=(turns, turns))
    chunk = Chunk(0, 0, (Question(prompt, tuple(range(10))),))
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"turns": ["x" * 40] * 3}) + "\n", encoding="utf-8")
    planned = estimate_run(
        make_config(f"generate.corpus.path={path}", "generate.target_store=none")
    )["generate"]
    assert chunk.size(16).times(2).disk_bytes(0) == planned.disk_bytes


def test_prompts_that_the_target_writes_itself_are_work_too(make_config: MakeConfig) -> None:
    corpus = ["path=null", "kind=self_synthesis", "num_prompts=50", "synthesis.max_new_tokens=7"]
    estimate = estimate_run(make_config(*(f"generate.corpus.{key}" for key in corpus)))["generate"]
    assert estimate.num_tokens == 50 * 2 * 16 + 50 * 7
    assert estimate.disk_bytes == 1600 * 36 + 100 * 128 * 16 + 350 * 8


def test_distill_needs_room_for_two_states_and_the_best_weights_twice(
    make_config: MakeConfig,
) -> None:
    estimate = estimate_run(make_config())["distill"]
    assert estimate.num_tokens == 200
    # 1352 weights of 2 bytes; 1192 are trained: twice 12 bytes of state and 4 of the best
    assert estimate.disk_bytes == 2704 + 1192 * 32
    # target, frozen tables in float32, 20 bytes a trained weight; beside them, in main memory, the
    # mapped states of 320 tokens
    assert estimate.memory_bytes == 5072 + 4 * 160 + 1192 * 20
    assert estimate.mapped_bytes == 320 * 20
    # 6 operations for each of 1192 weights, which read 8 tokens of prompt with 16 of answer, and
    # for each of 80 of the head, which does not; 2 for each of the target's head
    assert estimate.duration_s == pytest.approx(200 * (6 * (1192 * 1.5 + 80) + 2 * 80) / 500)


def test_a_target_that_is_run_again_reads_the_prompts_too(make_config: MakeConfig) -> None:
    stored = estimate_run(make_config())["distill"].duration_s
    again = estimate_run(make_config("generate.target_store=none"))["distill"].duration_s
    assert again - stored == pytest.approx(200 * 2 * 2536 * 1.5 / 500)


def test_tokens_that_are_chosen_cost_two_forward_passes_and_the_reference_memory(
    make_config: MakeConfig,
) -> None:
    plain = estimate_run(make_config())["distill"]
    phases = [{"name": "forward_kl", "fraction": 0.5}]
    phases.append({"name": "forward_kl", "fraction": 0.5, "keep_fraction": 0.4})
    chosen = estimate_run(make_config(loss=phases))["distill"]
    # a copy of the draft, of 2 bytes a weight, in the half of the steps that choose
    assert chosen.memory_bytes == plain.memory_bytes + 2704
    forward = 1192 * 1.5 + 80
    assert chosen.duration_s - plain.duration_s == pytest.approx(200 * 0.5 * 2 * 2 * forward / 500)

    named = {"model": "org/small", "dtype": "float32", "shape": {**SHAPE, "num_hidden_layers": 1}}
    estimate = estimate_run(make_config(loss=phases, reference=named))["distill"]
    assert estimate.memory_bytes == plain.memory_bytes + 4 * 760
    forward += 600 * 1.5 + 80
    assert estimate.duration_s - plain.duration_s == pytest.approx(200 * 0.5 * 2 * forward / 500)

    unknown = estimate_run(make_config(loss=phases, reference={"model": "org/nowhere"}))["distill"]
    assert unknown.duration_s is None
    assert "reference unknown" in unknown.note


def test_a_target_that_nothing_runs_leaves_its_head_in_memory(make_config: MakeConfig) -> None:
    estimate = estimate_run(make_config(decode_every=None))["distill"]
    assert estimate.memory_bytes == 160 + 4 * 160 + 1192 * 20
    small = estimate_run(make_config("generate.max_new_tokens=1", decode_every=None))["distill"]
    assert small.mapped_bytes == 20 * 20


def test_trained_embeddings_are_part_of_the_state(make_config: MakeConfig) -> None:
    estimate = estimate_run(make_config(train_embeddings=True))["distill"]
    assert estimate.disk_bytes == 2704 + 1352 * 32
    assert estimate.memory_bytes == 5072 + 1352 * 20


def test_answers_without_states_take_no_room_for_them(make_config: MakeConfig) -> None:
    estimates = estimate_run(make_config("generate.target_store=none"))
    assert estimates["generate"].disk_bytes == 320 * 16 + 20 * 8 * 16
    assert estimates["distill"].memory_bytes == 5072 + 4 * 160 + 1192 * 20
    assert estimates["distill"].mapped_bytes == 0


def test_measure_counts_the_half_of_the_held_out_prompts_that_it_decodes(
    make_config: MakeConfig,
) -> None:
    estimate = estimate_run(make_config())["measure"]
    # 2 of 3 prompts of 4 tokens, at 2 temperatures, plain and with each of 3 drafts
    assert estimate.num_tokens == 2 * 4 * 2 * 4
    assert estimate.disk_bytes == 64 * 16
    assert estimate.memory_bytes == 5072 + 3 * 2704 + 2 * 4 * 64
    assert estimate.duration_s == pytest.approx(32 * 5072 / 50)


def test_measure_counts_no_more_prompts_a_task_than_it_reads(make_config: MakeConfig) -> None:
    estimate = estimate_run(make_config("measure.max_prompts_per_task=1"))["measure"]
    assert estimate.num_tokens == 2 * 4 * 2 * 4


def test_of_a_dataset_on_a_hub_the_fraction_is_counted(make_config: MakeConfig) -> None:
    corpus = ["kind=datasets", "name=org/prompts", "limit=50", "held_out_fraction=0.25"]
    estimates = estimate_run(make_config(*(f"generate.corpus.{key}" for key in corpus)))
    assert estimates["generate"].num_tokens == 50 * 2 * 16
    assert estimates["measure"].num_tokens == 7 * 4 * 2 * 4  # of 13 held out


def test_a_dataset_of_unknown_size_is_said_to_be_one_in_every_stage_that_reads_it(
    make_config: MakeConfig,
) -> None:
    corpus = ["kind=datasets", "name=org/prompts"]
    estimates = estimate_run(make_config(*(f"generate.corpus.{key}" for key in corpus)))
    for name in ("generate", "distill", "measure"):
        assert "set corpus.limit" in estimates[name].note


def test_export_writes_the_drafts_weights(make_config: MakeConfig) -> None:
    estimate = estimate_run(make_config())["export"]
    assert (estimate.disk_bytes, estimate.memory_bytes) == (2704, 5408)
    assert estimate.duration_s == pytest.approx(2704 / 100)


def test_a_scratch_draft_is_estimated_at_its_own_depth_and_width(make_config: MakeConfig) -> None:
    scratch = {"kind": "scratch", "num_layers": 3, "hidden_size": 4, "num_attention_heads": 1}
    config = make_config(initialization=scratch, train_embeddings=True)
    draft = draft_shape(config, ModelShape(**SHAPE))
    assert draft is not None
    assert (draft.num_hidden_layers, draft.hidden_size, draft.intermediate_size) == (3, 4, 8)
    # tables 2 * 10 * 4; a layer: 2 * 4 * 4 * 2 + 3 * 4 * 8 + 2 * 4; the last norm
    assert draft.num_parameters == 80 + 3 * 168 + 4
    assert estimate_run(config)["distill"].disk_bytes == 588 * 2 + 588 * 32


@pytest.mark.parametrize(
    "scratch",
    [
        ScratchConfig(num_layers=1),
        ScratchConfig(num_layers=3, hidden_size=32, num_attention_heads=2, num_key_value_heads=1),
        ScratchConfig(num_layers=2, num_attention_heads=8),
    ],
)
def test_the_shape_of_a_scratch_draft_is_the_shape_it_is_built_with(
    tiny_pair_dirs: tuple[Path, Path], scratch: ScratchConfig
) -> None:
    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    draft = initialize(scratch, target, seed=0)
    shape = scratch.shape_from(target.shape)
    assert shape == draft.shape
    assert shape.num_parameters == sum(p.numel() for p in draft.model.parameters())


def test_a_scratch_draft_that_cannot_be_built_is_refused_by_the_plan(
    make_config: MakeConfig,
) -> None:
    config = make_config(initialization={"kind": "scratch", "num_attention_heads": 3})
    with pytest.raises(ConfigError, match="not a multiple of num_attention_heads 3"):
        estimate_run(config)


def test_an_unknown_target_leaves_only_tokens_to_be_estimated(make_config: MakeConfig) -> None:
    estimates = estimate_run(make_config("target.shape=null"))
    for name in ("generate", "distill", "measure", "export"):
        assert estimates[name].disk_bytes is None
        assert "set `shape:`" in estimates[name].note
    assert estimates["generate"].num_tokens == 320


def test_a_later_round_trains_for_its_own_number_of_steps(make_config: MakeConfig) -> None:
    estimates = estimate_run(make_config("pipeline=on_policy", "rollouts.steps_per_round=3"))
    first, later = (
        estimate_of(estimates, ArtifactKey("distill", "0" * 64, {"inputs": dict.fromkeys(names)}))
        for names in (("generate",), ("generate", "rollouts", "distill"))
    )
    assert (first.num_tokens, later.num_tokens) == (10 * 20, 3 * 20)
    assert first.duration_s is not None
    assert later.duration_s == pytest.approx(0.3 * first.duration_s)
    assert later.memory_bytes == first.memory_bytes


def test_a_stage_that_needs_more_memory_than_the_hardware_has_says_so(
    make_config: MakeConfig,
) -> None:
    # generate needs 11,216 bytes, distill more
    estimates = estimate_run(make_config("hardware.memory_bytes=11216"))
    assert "hardware.memory_bytes" not in estimates["generate"].note
    assert estimates["distill"].note.startswith("MORE than hardware.memory_bytes, 0 MB")
    enough = estimate_run(make_config())
    assert not any("hardware.memory_bytes" in one.note for one in enough.values())


def test_mapped_files_are_not_counted_against_the_memory_that_computes(
    make_config: MakeConfig,
) -> None:
    needed = 5072 + 4 * 160 + 1192 * 20
    estimate = estimate_run(make_config(f"hardware.memory_bytes={needed}"))["distill"]
    assert estimate.mapped_bytes > 0
    assert "hardware.memory_bytes" not in estimate.note


def test_each_model_is_looked_up_once_in_a_plan(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    draft = {"model": "org/no-draft", "shape": SHAPE}
    config = make_config(initialization={"kind": "existing", "model": draft})
    caplog.set_level(logging.INFO)
    shape_of = known_shapes()
    estimate_run(config, shape_of)
    plan_candidates(config, shape_of)
    plan_speed(config, shape_of=shape_of)
    said = [text for text in caplog.messages if "using the shape in the config" in text]
    assert len(said) == 2
    assert len(set(said)) == 2
