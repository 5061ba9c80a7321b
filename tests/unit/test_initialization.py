"""Owns how a draft starts: pruned, from scratch, existing; and what every kind promises.

Refuses to know training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch

from distill.config import parse_config
from distill.errors import ConfigError, PairMismatchError
from distill.initialization import (
    ExistingConfig,
    PrunedConfig,
    ScratchConfig,
    initialize,
)
from distill.models import LoadedModel, ModelConfig, load_target
from distill.stages.distill_draft import DistillConfig
from tests.helpers import make_llama, save_pretrained_dir


@pytest.fixture
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


@pytest.fixture
def existing(tiny_pair_dirs: tuple[Path, Path]) -> ExistingConfig:
    return ExistingConfig(model=ModelConfig(model=str(tiny_pair_dirs[1]), device="cpu"))


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize(
    ("rule", "count", "expected"),
    [
        ("first", 3, (0, 1, 2)),
        ("last", 3, (27, 28, 29)),
        ("spread", 2, (0, 29)),
        ("spread", 4, (0, 10, 19, 29)),
        ("spread", 1, (0,)),
        ("last", 1, (29,)),
        ("spread", 30, tuple(range(30))),
    ],
)
def test_a_rule_picks_layers_of_a_deep_target(
    rule: Any, count: int, expected: tuple[int, ...]
) -> None:
    assert PrunedConfig(layers=rule, num_layers=count).chosen_layers(30) == expected


def test_a_pruned_draft_holds_the_layers_listed_and_all_that_surrounds_them(
    target: LoadedModel,
) -> None:
    draft = initialize(PrunedConfig(layers=(3, 1)), target, seed=0)
    kept, whole = draft.model.state_dict(), target.model.state_dict()
    assert draft.shape.num_hidden_layers == draft.model.config.num_hidden_layers == 2
    for name, tensor in kept.items():
        origin = name.replace("layers.0.", "layers.3.").replace("layers.1.", "layers.1.")
        assert torch.equal(tensor, whole[origin]), name


def test_a_target_pruned_to_all_its_layers_computes_the_same(target: LoadedModel) -> None:
    draft = initialize(PrunedConfig(layers="first", num_layers=4), target, seed=0)
    tokens_BT = torch.tensor([[5, 9, 17, 3]])
    with torch.no_grad():
        expected = target.model(input_ids=tokens_BT).logits
        assert torch.equal(draft.model(input_ids=tokens_BT).logits, expected)


def test_a_pruned_draft_keeps_float32_rotary_frequencies_of_a_bfloat16_target(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    model = make_llama(len(tiny_tokenizer), layers=3, dtype=torch.bfloat16)
    directory = save_pretrained_dir(tmp_path / "target", model, tiny_tokenizer)
    target = load_target(ModelConfig(model=str(directory), device="cpu"))
    draft = initialize(PrunedConfig(layers=(0,)), target, seed=0)
    assert draft.dtype == torch.bfloat16
    assert draft.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(
        draft.model.model.rotary_emb.inv_freq, target.model.model.rotary_emb.inv_freq
    )


def test_a_tied_target_gives_a_tied_draft(tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = make_llama(len(tiny_tokenizer), tie_word_embeddings=True)
    directory = save_pretrained_dir(tmp_path / "target", model, tiny_tokenizer)
    target = load_target(ModelConfig(model=str(directory), device="cpu"))
    for config in (PrunedConfig(layers=(0,)), ScratchConfig(num_layers=1)):
        draft = initialize(config, target, seed=0).model
        assert draft.lm_head.weight.data_ptr() == draft.model.embed_tokens.weight.data_ptr()
        assert draft.lm_head.weight.data_ptr() != target.model.lm_head.weight.data_ptr()


def test_settings_with_an_entry_per_layer_follow_their_layers(target: LoadedModel) -> None:
    target.model.config.layer_types = ["full_attention"] * 2 + ["sliding_attention"] * 2
    target.model.config.sliding_window = 16
    draft = initialize(PrunedConfig(layers=(0, 3)), target, seed=0)
    assert draft.model.config.layer_types == ["full_attention", "sliding_attention"]
    assert len(target.model.config.layer_types) == 4


def test_a_layer_the_target_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 4.*4 layers \(0 to 3\)"):
        PrunedConfig(layers=(0, 4)).chosen_layers(4)
    with pytest.raises(ConfigError, match="at most 4"):
        PrunedConfig(layers="spread", num_layers=5).chosen_layers(4)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"layers": "first"}, "needs num_layers"),
        ({"layers": [0, 1], "num_layers": 3}, "lists 2"),
        ({"layers": []}, "at least one"),
        ({"layers": "middle", "num_layers": 1}, "layers"),
    ],
)
def test_a_pruning_that_says_nothing_or_too_much_is_refused(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=complaint):
        PrunedConfig(**settings)


def test_a_scratch_draft_of_the_targets_width_takes_over_all_but_the_layers(
    target: LoadedModel,
) -> None:
    draft = initialize(ScratchConfig(num_layers=1, intermediate_size=96), target, seed=3)
    drawn, whole = draft.model.state_dict(), target.model.state_dict()
    assert draft.shape.num_hidden_layers == 1
    assert draft.shape.intermediate_size == 96
    for name, tensor in drawn.items():
        if ".layers." not in name:
            assert torch.equal(tensor, whole[name]), name
    weight = drawn["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(weight, whole["model.layers.0.self_attn.q_proj.weight"])


def test_a_narrower_scratch_draft_runs(target: LoadedModel) -> None:
    config = ScratchConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )
    draft = initialize(config, target, seed=0)
    assert draft.shape.hidden_size == 32
    assert draft.shape.intermediate_size == 64
    with torch.no_grad():
        logits = draft.model(input_ids=torch.tensor([[4, 5]])).logits
    assert logits.shape == (1, 2, target.shape.vocab_size)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 30},
        {"num_attention_heads": 4, "num_key_value_heads": 3},
    ],
)
def test_sizes_that_do_not_divide_are_refused(target: LoadedModel, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        initialize(ScratchConfig(**sizes), target, seed=0)


def test_an_existing_draft_keeps_its_weights_and_gets_the_targets_tokenizer(
    target: LoadedModel, existing: ExistingConfig
) -> None:
    draft = initialize(existing, target, seed=0)
    alone = load_target(existing.model)
    assert _same(draft.model.state_dict(), alone.model.state_dict())
    assert draft.tokenizer is target.tokenizer


def test_an_existing_draft_that_reads_ids_differently_is_refused(
    target: LoadedModel, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    from tests.helpers import make_tokenizer

    other = make_tokenizer(vocab_size=len(tiny_tokenizer) - 20)
    directory = save_pretrained_dir(tmp_path / "other", make_llama(len(other)), other)
    config = ExistingConfig(model=ModelConfig(model=str(directory), device="cpu"))
    with pytest.raises(PairMismatchError):
        initialize(config, target, seed=0)


@pytest.mark.parametrize("kind", ["pruned", "scratch", "existing"])
def test_every_kind_repeats_itself_and_touches_neither_target_nor_global_randomness(
    target: LoadedModel, existing: ExistingConfig, kind: str
) -> None:
    configs: dict[str, Any] = {
        "pruned": PrunedConfig(layers=(0, 2)),
        "scratch": ScratchConfig(num_layers=2),
        "existing": existing,
    }
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    first = initialize(configs[kind], target, seed=5)
    second = initialize(configs[kind], target, seed=5)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert _same(first.model.state_dict(), second.model.state_dict())
    assert not first.model.training
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.zero_()
    assert _same(target.model.state_dict(), before)


def test_two_seeds_give_two_scratch_drafts(target: LoadedModel) -> None:
    first = initialize(ScratchConfig(num_layers=1), target, seed=0)
    second = initialize(ScratchConfig(num_layers=1), target, seed=1)
    assert not _same(first.model.state_dict(), second.model.state_dict())


def test_the_kind_in_a_config_file_chooses_the_schema(tiny_pair_dirs: tuple[Path, Path]) -> None:
    data = {
        "target": {"model": str(tiny_pair_dirs[0])},
        "initialization": {"kind": "scratch", "num_layers": 3},
    }
    config = parse_config(data, DistillConfig)
    assert config.initialization == ScratchConfig(num_layers=3)
    data["initialization"] = {"kind": "pruned", "num_layer": 2}
    with pytest.raises(ConfigError, match="num_layers"):
        parse_config(data, DistillConfig)
