"""Owns the comparison of draft shapes before training: bytes, measured steps, speedups by alpha.

Refuses to compare with trained drafts. Byte counts are worked out by hand on the shape below.

The target has 4 layers of 592 weights, a last norm of 8 and two tables of 10 x 8. A step reads all
but the embedding: 4 x 592 + 8 + 80 = 2456 weights; of a draft of 2 layers 1272.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import parse_config
from distill.errors import ConfigError
from distill.metrics.planner_tables import speedups_by_alpha
from distill.models import ModelConfig, has_weights_here, load_target
from distill.stages.candidates import candidate_table, plan_candidates
from distill.stages.run_config import RunConfig
from tests.helpers import save_pretrained_dir

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
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")

    def make(target: dict[str, Any], *candidates: dict[str, Any], **distill: Any) -> RunConfig:
        content = {
            "name": "shapes",
            "target": target,
            "generate": {"corpus": {"path": str(tmp_path / "prompts.jsonl")}},
            "distill": {
                "initialization": {"kind": "pruned", "layers": "first", "num_layers": 2},
                **distill,
            },
            "measure": {"timing": {"max_draft_tokens": 3}},
            "export": {"name": "draft"},
            "candidates": list(candidates),
        }
        return parse_config(content, RunConfig, base_dir=tmp_path)

    return make


@pytest.fixture
def on_a_hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A target whose shape is stated and whose weights are nowhere near."""
    monkeypatch.setattr("distill.models.sources.cached_snapshot", lambda repo, revision: None)
    return {"model": "org/not-there", "dtype": "bfloat16", "shape": SHAPE}


def test_without_the_target_c_is_the_ratio_of_bytes_and_marked_so(
    make_config: MakeConfig, on_a_hub: dict[str, Any]
) -> None:
    narrow = {"kind": "scratch", "num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    plan = plan_candidates(make_config(on_a_hub, narrow))
    own, other = plan.candidates
    assert not plan.is_measured
    assert plan.target_step_ms is None
    assert "bytes" in plan.note
    assert (own.kind, own.num_parameters) == ("pruned", 1352)
    assert own.draft_cost_ratio == 1272 / 2456
    # 1 layer of width 4: 64 (attention) + 96 (MLP) + 8 (norms), the last norm 4, a head of 40
    assert other.draft_cost_ratio == (168 + 4 + 40) / 2456
    table = candidate_table(plan)
    assert list(table.columns[3].cells) == ["~0.518", "~0.086"]


def test_a_head_for_fewer_tokens_is_read_in_part(
    make_config: MakeConfig, on_a_hub: dict[str, Any]
) -> None:
    (own,) = plan_candidates(make_config(on_a_hub, vocabulary_size=5)).candidates
    assert own.draft_cost_ratio == (1272 - 40) / 2456


def test_bytes_and_not_weights_are_compared(
    make_config: MakeConfig, on_a_hub: dict[str, Any]
) -> None:
    """An int8 target reads half as much; its draft starts from what was not rounded."""
    (own,) = plan_candidates(make_config({**on_a_hub, "quantize": "int8"})).candidates
    assert own.draft_cost_ratio == 2 * 1272 / 2456


def test_nothing_is_measured_and_nothing_loaded_when_the_target_is_not_here(
    make_config: MakeConfig, on_a_hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("distill.models.load_target", fail)
    monkeypatch.setattr("distill.initialization.model_of_shape", fail)
    plan = plan_candidates(make_config(on_a_hub), measure=True)
    assert not plan.is_measured
    assert "not on this machine" in plan.note


def test_an_unknown_target_has_no_candidates_and_the_way_out(
    make_config: MakeConfig, on_a_hub: dict[str, Any]
) -> None:
    plan = plan_candidates(make_config({**on_a_hub, "shape": None}))
    assert plan.candidates == ()
    assert "set target.shape" in plan.note
    assert "none: shape" in str(candidate_table(plan).caption)


def test_a_candidate_that_does_not_fit_the_target_is_refused(
    make_config: MakeConfig, on_a_hub: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="num_layers is 5, but the target has only 4"):
        plan_candidates(
            make_config(on_a_hub, {"kind": "pruned", "layers": "importance", "num_layers": 5})
        )
    unknown = {"kind": "existing", "model": {"model": "org/not-there-either"}}
    with pytest.raises(ConfigError, match=r"'org/not-there-either' is unknown.*`shape:`"):
        plan_candidates(make_config(on_a_hub, unknown))


def test_a_transplanted_candidate_has_the_targets_rows(
    make_config: MakeConfig, on_a_hub: dict[str, Any]
) -> None:
    model = {"model": "org/not-there-either", "shape": {**SHAPE, "vocab_size": 7}}
    start = {"kind": "existing", "model": model}
    plan = plan_candidates(make_config(on_a_hub, start, {**start, "vocabulary": "transplanted"}))
    assert [one.shape.vocab_size for one in plan.candidates] == [10, 7, 10]


# ---------------------------------------------------------------- measured


def test_shallow_and_wide_is_faster_than_deep_and_narrow_though_it_has_more_weights(
    make_config: MakeConfig, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """arXiv 2402.01528: a draft's depth decides its latency. One layer beside sixteen."""
    target = {"model": str(tiny_pair_dirs[0]), "dtype": "float32", "device": "cpu"}
    wide = {"kind": "scratch", "num_layers": 1, "hidden_size": 64}
    deep = {"kind": "scratch", "num_layers": 16, "hidden_size": 16, "num_attention_heads": 2}
    config = make_config(target, wide, deep, train_embeddings=True)
    plan = plan_candidates(config, measure=True)
    _, shallow, narrow = plan.candidates
    assert plan.is_measured
    assert plan.conditions is not None
    assert plan.conditions["dtype"] == "float32"
    assert shallow.num_parameters > 1.4 * narrow.num_parameters
    assert 0 < 3 * shallow.draft_cost_ratio < narrow.draft_cost_ratio
    assert shallow.break_even_acceptance_rate is None or (
        narrow.break_even_acceptance_rate is None
        or shallow.break_even_acceptance_rate < narrow.break_even_acceptance_rate
    )
    for fast, slow in zip(shallow.by_alpha, narrow.by_alpha, strict=True):
        assert fast["curve"] > slow["curve"]
    assert json.loads(json.dumps(plan.to_dict()))["candidates"][2]["shape"]["hidden_size"] == 16
    assert not any("~" in str(cell) for cell in candidate_table(plan).columns[3].cells)


def test_an_existing_model_is_timed_as_it_is_and_one_that_is_not_here_is_marked(
    make_config: MakeConfig,
    tiny_pair_dirs: tuple[Path, Path],
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another family, dtype and vocabulary than the target, whose class is not its own."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from distill.stages import measure_batch

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    other = Qwen2Config(vocab_size=310, hidden_size=16, intermediate_size=32, **sizes)
    model = Qwen2ForCausalLM(other).to(torch.bfloat16)
    here = save_pretrained_dir(tmp_path / "qwen", model, tiny_tokenizer)
    timed: list[Any] = []
    draft_call = measure_batch.draft_call

    def look(target: Any, draft: Any, *rest: Any) -> Any:
        timed.append(draft.model.model)
        return draft_call(target, draft, *rest)

    monkeypatch.setattr(measure_batch, "draft_call", look)
    target = {"model": str(tiny_pair_dirs[0]), "dtype": "float32", "device": "cpu"}
    start = {"kind": "existing", "model": {"model": str(here)}}
    elsewhere = {"model": "org/not-there", "shape": SHAPE}
    config = make_config(
        target,
        start,
        {**start, "vocabulary": "transplanted"},
        {"kind": "existing", "model": elsewhere},
    )
    plan = plan_candidates(config, measure=True)
    classes = [type(one).__name__ for one in timed]
    assert classes == ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen2ForCausalLM"]
    assert [str(one.dtype) for one in timed[1:]] == ["torch.bfloat16"] * 2
    assert [one.get_output_embeddings().weight.shape[0] for one in timed[1:]] == [310, 300]
    assert [one.draft_step_ms is None for one in plan.candidates] == [False, False, False, True]
    body, whole = 4 * 592 + 8 + 80, plan.candidates[3].draft_cost_ratio
    assert whole == pytest.approx(2 * body / (4 * target_step_weights(tiny_pair_dirs[0])))
    cells = [str(cell) for cell in candidate_table(plan).columns[3].cells]
    assert [cell.startswith("~") for cell in cells] == [False, False, False, True]
    assert "not on this machine" in plan.note


def target_step_weights(directory: Path) -> int:
    """Weights a step of the target reads: all but its embedding."""
    model = load_target(ModelConfig(model=str(directory), device="cpu")).model
    embedding = model.get_input_embeddings().weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - embedding


def test_a_better_draft_that_costs_five_times_as_much_is_the_worse_choice() -> None:
    """By hand: alpha 0.7 at c = 0.06 against alpha 0.8 at c = 0.3, each at its best K."""
    shallow = speedups_by_alpha(draft_cost_ratio=0.06, max_draft_tokens=8, alphas=(0.7,))[0]
    deep = speedups_by_alpha(draft_cost_ratio=0.3, max_draft_tokens=8, alphas=(0.8,))[0]
    # (1 - 0.7^6) / 0.3 / 1.3 and (1 - 0.8^4) / 0.2 / 1.9
    assert (shallow["num_draft_tokens"], deep["num_draft_tokens"]) == (5, 3)
    assert shallow["predicted_speedup"] == pytest.approx(2.26244, abs=1e-4)
    assert deep["predicted_speedup"] == pytest.approx(1.55368, abs=1e-4)


# ---------------------------------------------------------------- what is here


def test_weights_are_here_when_every_file_of_them_is(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    assert has_weights_here(ModelConfig(model=str(tiny_pair_dirs[0])))
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text("{}", encoding="utf-8")
    assert not has_weights_here(ModelConfig(model=str(half)))
    (half / "model-1-of-2.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert not has_weights_here(ModelConfig(model=str(half)))
    (half / "model-2-of-2.safetensors").write_bytes(b"")
    assert has_weights_here(ModelConfig(model=str(half)))


def test_a_package_that_was_never_converted_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.models.sources.default_cache_dir", lambda: tmp_path)
    config = ModelConfig(model="pypi:some-package==1.0#weights.gguf", sha256="0" * 64)
    assert not has_weights_here(config)


def test_the_plan_on_the_command_line_has_the_shapes_and_measures_when_asked(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from distill import cli

    arguments = ["plan", str(tiny_run_config), "--artifacts", str(tmp_path), "--json"]
    arguments += ["--set", "candidates=[{kind: scratch, num_layers: 1}]"]
    for flags, is_measured in (([], False), (["--measure"], True)):
        result = CliRunner().invoke(cli.app, [*arguments, *flags])
        assert result.exit_code == 0, result.output
        shapes = json.loads(result.stdout)["shapes"]
        assert shapes["is_measured"] == is_measured
        assert [one["kind"] for one in shapes["candidates"]] == ["pruned", "scratch"]
        assert (shapes["target_step_ms"] is not None) == is_measured
