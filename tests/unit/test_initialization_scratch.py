"""Owns where a new draft's embedding and head come from: copies, projections, random numbers.

Refuses to know how they are trained. Projections are checked on tables whose answer is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distill.errors import ConfigError
from distill.initialization import ScratchConfig, model_of_shape, start_draft
from distill.initialization.projection import principal_directions, project
from distill.models import LoadedModel, ModelConfig, load_target
from distill.training.config import TrainingConfig
from distill.training.trunk import set_trainable
from tests.helpers import make_llama, save_pretrained_dir

NARROW = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


def tied_target(tmp_path: Path, tokenizer: Any) -> LoadedModel:
    model = make_llama(len(tokenizer), hidden=64, tie_word_embeddings=True)
    directory = save_pretrained_dir(tmp_path / "tied", model, tokenizer)
    return load_target(ModelConfig(model=str(directory), device="cpu"))


# ---------------------------------------------------------------- the projection


def test_directions_of_a_table_worked_out_by_hand() -> None:
    """Rows (3, 3), (1, -1): along (1, 1) lies energy 18 of 20, along (1, -1) the other 2."""
    table_VD = torch.tensor([[3.0, 3.0], [1.0, -1.0]])
    projection_DW = principal_directions(table_VD, 1)
    torch.testing.assert_close(projection_DW.flatten().float(), torch.full((2,), 0.5**0.5))
    projected_VW, kept = project(table_VD, projection_DW)
    torch.testing.assert_close(projected_VW, torch.tensor([[18**0.5], [0.0]]), atol=1e-6, rtol=0)
    assert kept == pytest.approx(0.9)


def test_a_table_of_low_rank_loses_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(*size, generator=generator) for size in ((50, 4), (4, 16))]
    table_VD = factors[0] @ factors[1]
    projected_VW, kept = project(table_VD, principal_directions(table_VD, 4))
    assert kept == pytest.approx(1.0)
    # inner products of rows are what attention and a head compute with
    torch.testing.assert_close(projected_VW @ projected_VW.T, table_VD @ table_VD.T)


def test_no_other_projection_keeps_more_of_a_table() -> None:
    generator = torch.Generator().manual_seed(1)
    table_VD = torch.randn(40, 12, generator=generator)
    best = project(table_VD, principal_directions(table_VD, 5))[1]
    for _ in range(20):
        other_DW = torch.linalg.qr(torch.randn(12, 5, generator=generator)).Q.double()
        assert project(table_VD, other_DW)[1] < best


# ---------------------------------------------------------------- drafts


def test_a_projected_draft_of_a_low_rank_head_can_give_the_targets_logits(
    target: LoadedModel,
) -> None:
    """With states R^T h, the projected head gives what the target's head gives for h."""
    head = target.model.lm_head.weight
    with torch.no_grad():
        head[:, 32:] = 0
    start = start_draft(ScratchConfig(embeddings="projected", **NARROW), target, seed=0)
    assert start.report["kept_energy"]["head"] == pytest.approx(1.0)
    assert 0.5 < start.report["kept_energy"]["embedding"] < 1.0
    hidden_D = torch.randn(64, generator=torch.Generator().manual_seed(2))
    states_W = principal_directions(head, 32).float().T @ hidden_D
    torch.testing.assert_close(
        start.draft.model.lm_head.weight @ states_W, head @ hidden_D, atol=1e-5, rtol=1e-4
    )


def test_projected_states_start_as_long_as_the_targets(target: LoadedModel) -> None:
    with torch.no_grad():
        target.model.model.norm.weight.fill_(3.0)
    draft = start_draft(ScratchConfig(embeddings="projected", **NARROW), target, seed=0).draft
    tokens_BT = torch.tensor([[5, 9, 17]])
    with torch.no_grad():
        lengths = [
            one.base_model(input_ids=tokens_BT).last_hidden_state.norm(dim=-1)
            for one in (draft.model, target.model)
        ]
    torch.testing.assert_close(lengths[0], lengths[1], rtol=1e-3, atol=0)


def test_a_tied_target_is_projected_once_and_the_draft_stays_tied(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    start = start_draft(
        ScratchConfig(embeddings="projected", **NARROW),
        tied_target(tmp_path, tiny_tokenizer),
        seed=0,
    )
    model = start.draft.model
    assert set(start.report["kept_energy"]) == {"embedding"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_draft_of_a_tied_target_can_have_two_tables(tmp_path: Path, tiny_tokenizer: Any) -> None:
    target = tied_target(tmp_path, tiny_tokenizer)
    config = ScratchConfig(num_layers=1, tie_word_embeddings=False)
    draft = start_draft(config, target, seed=0).draft
    assert draft.model.lm_head.weight is not draft.model.model.embed_tokens.weight
    for table in (draft.model.lm_head, draft.model.model.embed_tokens):
        assert torch.equal(table.weight, target.model.lm_head.weight)
    assert draft.shape == config.shape_from(target.shape)
    trained = set_trainable(draft.model, TrainingConfig(train_embeddings="head"))
    assert "lm_head.weight" in trained
    assert "model.embed_tokens.weight" not in trained


def test_one_of_two_tables_can_be_trained_and_one_table_only_as_a_whole(
    target: LoadedModel, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    draft = start_draft(ScratchConfig(num_layers=1), target, seed=0).draft.model
    trained = set_trainable(draft, TrainingConfig(train_embeddings="embedding"))
    assert "model.embed_tokens.weight" in trained
    assert "lm_head.weight" not in trained
    tied = start_draft(
        ScratchConfig(num_layers=1), tied_target(tmp_path, tiny_tokenizer), seed=0
    ).draft.model
    with pytest.raises(ConfigError, match=r"train_embeddings is head.*tied.*true or false"):
        set_trainable(tied, TrainingConfig(train_embeddings="head"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({**NARROW, "embeddings": "copied"}, r"copied, but the draft's width is 32 .* 64"),
        ({"hidden_size": 64, "embeddings": "projected"}, r"width 64 is not smaller .* 64.*copied"),
        (
            {"hidden_size": 128, "embeddings": "projected"},
            r"width 128 is not smaller .* 64.*random",
        ),
        ({"tie_word_embeddings": True}, r"two tables and embeddings is copied"),
    ],
)
def test_tables_the_target_cannot_give_are_refused(
    target: LoadedModel, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        start_draft(ScratchConfig(**settings), target, seed=0)


def test_random_tables_are_drawn_though_the_width_is_the_targets(target: LoadedModel) -> None:
    start = start_draft(
        ScratchConfig(num_layers=1, embeddings="random", tie_word_embeddings=True), target, seed=0
    )
    model = start.draft.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, target.model.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, target.model.model.embed_tokens.weight)


def test_a_model_of_a_shape_has_that_shape(target: LoadedModel) -> None:
    shape = ScratchConfig(**NARROW).shape_from(target.shape)
    model = model_of_shape(target, shape, seed=0)
    assert model.shape == shape
    assert shape.num_parameters == sum(p.numel() for p in model.model.parameters())
