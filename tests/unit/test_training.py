"""Owns what training promises: which positions train, in which order, how a run resumes and stops.

Refuses to know artifacts' keys and the draft's files: that is test_distill_stage.py.
Left out: packed rows and template masks (rows are never packed, masks come from generate), hard
labels mixed with soft ones (no such loss), sharded and meta-device loading (not done here).
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pydantic
import pytest
import torch
from torch import Tensor

from distill.artifacts import Artifact, ArtifactStore
from distill.errors import ConfigError, TrainingError
from distill.initialization import PrunedConfig, initialize
from distill.losses.head import head_of
from distill.models import LoadedModel
from distill.training.checkpoint import SavedState, load_state, restore
from distill.training.config import (
    LossPhase,
    TrainingConfig,
    learning_rate_at,
    loss_schedule,
)
from distill.training.data import (
    Row,
    TargetFiles,
    collate,
    pack_by_length,
    plan_epoch,
    plan_steps,
    read_rows,
)
from distill.training.loop import train
from distill.training.run import Followers, TrainingData, TrainingResult
from distill.training.select import Best, HeldOut, HeldOutScore
from distill.training.vocabulary import choose_vocabulary
from tests.distill_helpers import make_generated


def _settings(**changes: Any) -> TrainingConfig:
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "batch_tokens": 40,
        "micro_batch_tokens": 64,
        "warmup_steps": 2,
        "eval_every": 3,
        "checkpoint_every": 2,
        "compute_dtype": "float32",
    }
    return TrainingConfig(**(defaults | changes))


def _train(
    target: LoadedModel,
    generated: Artifact,
    config: TrainingConfig,
    work_dir: Path,
    *,
    token_ids_V: Tensor | None = None,
    draft: Any = None,
    on_step: Any = None,
) -> tuple[dict[str, Tensor], TrainingResult]:
    if draft is None:
        draft = initialize(PrunedConfig(layers=(0, 3)), target, seed=0).model
    length = draft.config.max_position_embeddings
    data = TrainingData(
        rows=read_rows(generated, "train", max_length=length),
        held_out_rows=read_rows(generated, "held_out", max_length=length),
        source=TargetFiles(generated),
        token_ids_V=token_ids_V,
    )
    result = train(
        draft,
        target_head=head_of(target.model),
        data=data,
        config=config,
        work_dir=work_dir,
        followers=Followers() if on_step is None else Followers(on_step),
    )
    return draft.state_dict(), result


def _row(length: int, num_positions: int | None = None, name: str = "") -> Row:
    count = length if num_positions is None else num_positions
    positions_N = np.arange(length - count, length)
    return Row(name, np.zeros(length, dtype=np.int64), positions_N, "file", positions_N)


# ---------------------------------------------------------------- rows and batches


def test_a_position_and_its_target_state_are_of_the_same_prefix(
    target: LoadedModel, generated: Artifact
) -> None:
    rows = read_rows(generated, "train", max_length=512)[:5]
    batch = collate(rows, TargetFiles(generated))
    with torch.no_grad():
        hidden_BTD = target.model.base_model(input_ids=batch.input_ids_BT).last_hidden_state
    hidden_ND = hidden_BTD.flatten(0, 1)[batch.flat_positions_N]
    torch.testing.assert_close(
        batch.target.hidden_ND, hidden_ND.to(torch.bfloat16), rtol=0.01, atol=0.01
    )
    logsumexp_N = torch.logsumexp(head_of(target.model).logits(hidden_ND), -1)
    torch.testing.assert_close(batch.target.logsumexp_N, logsumexp_N)


def test_prompt_positions_and_padding_carry_no_loss(generated: Artifact) -> None:
    rows = read_rows(generated, "train", max_length=512)
    batch = collate(rows, TargetFiles(generated))
    assert len(batch.flat_positions_N) == sum(row.num_positions for row in rows)
    width = batch.input_ids_BT.shape[1]
    for index, row in enumerate(rows):
        mine_N = batch.flat_positions_N[batch.row_index_N == index] - index * width
        assert mine_N.tolist() == row.positions_N.tolist()
        assert mine_N.max() == row.length - 1


def test_splits_share_no_row_and_rejected_rows_are_in_neither(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    nothing: dict[str, Any] = {
        "status": "rejected",
        "prompt_token_ids": [],
        "completion_token_ids": [],
        "loss_mask": [],
    }
    artifact = make_generated(ArtifactStore(tmp_path), tiny_pair_dirs[0], changes={0: nothing})
    train_ids = {row.row_id for row in read_rows(artifact, "train", max_length=512)}
    held_out_ids = {row.row_id for row in read_rows(artifact, "held_out", max_length=512)}
    assert len(train_ids | held_out_ids) == 23
    assert not train_ids & held_out_ids
    assert "row-0" not in train_ids | held_out_ids


def test_a_masked_token_does_not_train_and_nothing_after_the_last_trained_one_is_read(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], generated: Artifact
) -> None:
    whole = next(r for r in read_rows(generated, "train", max_length=512) if r.row_id == "row-2")
    num_prompt = int(whole.positions_N[0]) + 1
    mask = [0] * num_prompt + [1] * whole.num_positions
    mask[num_prompt] = mask[-1] = 0
    artifact = make_generated(
        ArtifactStore(tmp_path), tiny_pair_dirs[0], changes={2: {"loss_mask": mask}}
    )
    row = next(r for r in read_rows(artifact, "train", max_length=512) if r.row_id == "row-2")
    assert row.positions_N.tolist() == whole.positions_N[1:-1].tolist()
    assert row.target_rows_N.tolist() == whole.target_rows_N[1:-1].tolist()
    assert row.length == whole.length - 1


def test_rows_are_cut_to_the_drafts_context_and_dropped_when_nothing_is_left(
    generated: Artifact,
) -> None:
    rows = read_rows(generated, "train", max_length=5)
    whole = {row.row_id: row for row in read_rows(generated, "train", max_length=512)}
    assert 0 < len(rows) < len(whole)
    for row in rows:
        assert row.length <= 5
        kept = whole[row.row_id].positions_N < 5
        assert row.target_rows_N.tolist() == whole[row.row_id].target_rows_N[kept].tolist()


def test_a_corpus_whose_labels_are_all_cut_off_is_an_error(generated: Artifact) -> None:
    with pytest.raises(TrainingError, match=r"no position to train on.*context of 1"):
        read_rows(generated, "train", max_length=1)


def test_a_micro_batch_stays_within_its_padded_tokens_unless_one_row_is_longer() -> None:
    rows = [_row(n) for n in (3, 3, 4, 5, 9, 30)]
    packed = pack_by_length(rows, range(6), 16)
    assert packed == [[0, 1, 2], [3], [4], [5]]


def test_an_epoch_has_every_row_once_in_steps_of_similar_size() -> None:
    rows = [_row(10 + index % 23, 5 + index % 7) for index in range(500)]
    steps = plan_epoch(rows, batch_tokens=200, micro_batch_tokens=128, seed=1, epoch=0)
    seen = [index for step in steps for micro in step for index in micro]
    assert sorted(seen) == list(range(500))
    sizes = [sum(rows[i].num_positions for micro in step for i in micro) for step in steps]
    assert len(steps) == round(sum(sizes) / 200)
    assert min(sizes) > 100
    assert max(sizes) < 300


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    rows = [_row(5 + index % 9) for index in range(60)]

    def order(seed: int, epoch: int) -> list[list[list[int]]]:
        return plan_epoch(rows, batch_tokens=50, micro_batch_tokens=32, seed=seed, epoch=epoch)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize("start", [0, 1, 7, 20, 45])
def test_a_plan_begun_late_is_the_rest_of_the_plan(start: int) -> None:
    """What a resumed run sees: no row twice in an epoch, none skipped (faults: reshuffled skip)."""
    rows = [_row(5 + index % 9) for index in range(40)]

    def steps(first: int, last: int) -> list[Any]:
        plan = plan_steps(rows, batch_tokens=30, micro_batch_tokens=32, seed=3, start=first)
        return [next(plan) for _ in range(first, last)]

    assert steps(start, 50) == steps(0, 50)[start:]


def test_all_epochs_cover_all_rows_equally() -> None:
    rows = [_row(5 + index % 9) for index in range(40)]
    counts: Counter[int] = Counter()
    for epoch, micro_batches in plan_steps(rows, batch_tokens=30, micro_batch_tokens=32, seed=0):
        if epoch == 3:
            break
        counts.update(index for micro in micro_batches for index in micro)
    assert set(counts.values()) == {3}


# ---------------------------------------------------------------- schedule


def test_phases_share_the_steps() -> None:
    config = _settings(
        max_steps=10,
        loss=(
            LossPhase(name="hidden_regression", fraction=0.3),
            LossPhase(name="forward_kl", fraction=0.3),
            LossPhase(name="acceptance", fraction=0.4),
        ),
    )
    schedule = [(phase.name, phase.end_step) for phase in loss_schedule(config)]
    assert schedule == [("hidden_regression", 3), ("forward_kl", 6), ("acceptance", 10)]


def test_the_learning_rate_warms_up_and_ends_at_its_floor() -> None:
    config = _settings(
        max_steps=101, warmup_steps=4, learning_rate=1.0, final_learning_rate_ratio=0.1
    )
    assert [learning_rate_at(config, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate_at(config, 101) == pytest.approx(0.1)
    linear = config.model_copy(update={"scheduler": "linear", "warmup_steps": 1})
    assert learning_rate_at(linear, 51) == pytest.approx(0.55)
    constant = config.model_copy(update={"scheduler": "constant"})
    assert learning_rate_at(constant, 100) == 1.0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss": "forward_kll"}, "Did you mean 'forward_kl'"),
        ({"loss": [{"name": "forward_kl", "fraction": 0.5}]}, "sum to 0.5"),
        ({"loss": []}, "sum to 0"),
        ({"warmup_steps": 6}, "never be reached"),
        ({"max_steps": 0}, "max_steps"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"loss": [{"name": "hidden_regression", "temperature": 2.0}]}, "no temperature"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=complaint):
        _settings(**changes)


# ---------------------------------------------------------------- vocabulary subset


def test_the_subset_is_the_most_frequent_ids_and_all_stop_ids(generated: Artifact) -> None:
    rows = read_rows(generated, "train", max_length=512)
    assert rows
    vocabulary = choose_vocabulary(generated, 40, num_tokens=300, always=[1])
    assert len(vocabulary.token_ids) == 40
    assert list(vocabulary.token_ids) == sorted(set(vocabulary.token_ids))
    assert 1 in vocabulary.token_ids
    larger = choose_vocabulary(generated, 80, num_tokens=300, always=[1])
    assert set(vocabulary.token_ids) < set(larger.token_ids)
    assert 0 < vocabulary.coverage < larger.coverage <= 1


def test_ids_the_target_never_used_fill_up_from_the_lowest(generated: Artifact) -> None:
    rows = pq.read_table(generated.file("vocabulary.parquet")).to_pylist()
    unseen = sorted(set(range(300)) - {row["token_id"] for row in rows})
    vocabulary = choose_vocabulary(generated, 298, num_tokens=300)
    assert vocabulary.coverage == 1.0
    assert set(range(300)) - set(vocabulary.token_ids) == set(unseen[-2:])


@pytest.mark.parametrize(("size", "complaint"), [(301, "share 300"), (1, "2 or more")])
def test_a_subset_of_impossible_size_is_refused(
    generated: Artifact, size: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_vocabulary(generated, size, num_tokens=300, always=[0, 1])


# ---------------------------------------------------------------- held-out score


def _held_out(target: LoadedModel, generated: Artifact, ids_V: Tensor | None) -> HeldOut:
    return HeldOut(
        read_rows(generated, "held_out", max_length=512),
        TargetFiles(generated),
        target_head=head_of(target.model),
        token_ids_V=ids_V,
        max_tokens=1000,
        micro_batch_tokens=64,
        seed=0,
    )


def test_the_target_itself_is_always_accepted(target: LoadedModel, generated: Artifact) -> None:
    score = _held_out(target, generated, None).score(
        lambda batch: batch.target.hidden_ND, head_of(target.model).to(torch.float32)
    )
    assert score.acceptance == pytest.approx(1.0, abs=1e-5)
    assert score.greedy_agreement == 1.0
    held_out = read_rows(generated, "held_out", max_length=512)
    assert score.num_positions == sum(row.num_positions for row in held_out)


def test_what_the_subset_leaves_out_is_not_accepted(
    target: LoadedModel, generated: Artifact
) -> None:
    """A perfect draft on a subset: alpha = sum over the subset of min(p, p / mass) = its mass."""
    head, ids_V = head_of(target.model), torch.arange(0, 300, 3)
    score = _held_out(target, generated, ids_V).score(
        lambda batch: batch.target.hidden_ND, head.subset(ids_V)
    )
    rows = read_rows(generated, "held_out", max_length=512)
    hidden_ND = TargetFiles(generated).of(rows).hidden_ND
    probs_NV = torch.softmax(head.logits(hidden_ND.float()), -1)
    mass_N = probs_NV[:, ids_V].sum(-1)
    assert score.acceptance == pytest.approx(mass_N.mean().item(), abs=2e-2)
    agreed_N = probs_NV.argmax(-1) == ids_V[probs_NV[:, ids_V].argmax(-1)]
    assert score.greedy_agreement == pytest.approx(agreed_N.float().mean().item(), abs=2e-2)


def test_a_held_out_budget_takes_whole_rows_and_at_least_one(
    target: LoadedModel, generated: Artifact
) -> None:
    rows = read_rows(generated, "held_out", max_length=512)
    sizes = {row.num_positions for row in rows}
    held_out = HeldOut(
        rows,
        TargetFiles(generated),
        target_head=head_of(target.model),
        token_ids_V=None,
        max_tokens=1,
        micro_batch_tokens=64,
        seed=0,
    )
    score = held_out.score(lambda batch: batch.target.hidden_ND, head_of(target.model))
    assert score.num_positions in sizes


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("loss", ["forward_kl", "acceptance_hybrid", "hidden_regression"])
def test_training_raises_held_out_acceptance(
    target: LoadedModel, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], loss: str
) -> None:
    artifact = make_generated(
        ArtifactStore(tmp_path / "store"), tiny_pair_dirs[0], num_rows=160, num_held_out=32
    )
    config = _settings(
        loss=loss, max_steps=30, batch_tokens=300, micro_batch_tokens=600, learning_rate=8e-3
    )
    _, result = _train(target, artifact, config, tmp_path / "work")
    assert result.best.score.acceptance > result.before.acceptance + 0.02
    losses = [record["loss"] for record in result.log if "loss" in record]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_the_log_starts_with_the_undistilled_draft_and_has_no_clock(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    _, result = _train(target, generated, _settings(), tmp_path)
    assert result.log[0] == {"step": 0, "held_out": result.log[0]["held_out"]}
    assert [r["step"] for r in result.log if "held_out" in r] == [0, 3, 6]
    assert [r["step"] for r in result.log if "loss" in r] == [1, 2, 3, 4, 5, 6]
    again = _train(target, generated, _settings(), tmp_path / "again")[1]
    assert again.log == result.log


def test_frozen_embeddings_do_not_move_and_everything_else_does(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    before = initialize(PrunedConfig(layers=(0, 3)), target, seed=0).model.state_dict()
    config = _settings(eval_every=1, learning_rate=1e-2)
    after, result = _train(target, generated, config, tmp_path)
    assert result.best.step > 0
    for name, tensor in after.items():
        is_frozen = "embed_tokens" in name or "lm_head" in name
        assert torch.equal(tensor, before[name]) == is_frozen, name


def test_embeddings_train_when_asked_to(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    before = initialize(PrunedConfig(layers=(0, 3)), target, seed=0).model.state_dict()
    config = _settings(train_embeddings=True, eval_every=1, learning_rate=1e-2)
    ids_V = torch.arange(0, 300, 2)
    after, result = _train(target, generated, config, tmp_path, token_ids_V=ids_V)
    assert result.best.step > 0
    moved_V = (after["lm_head.weight"] != before["lm_head.weight"]).any(-1)
    assert moved_V[ids_V].all()
    # weight decay alone moves the rows the loss never sees, by lr * 0.01 of themselves
    torch.testing.assert_close(
        after["lm_head.weight"][1::2], before["lm_head.weight"][1::2], rtol=1e-2, atol=1e-4
    )
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_how_a_step_is_cut_into_micro_batches_changes_nothing(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """One step over all rows, in one piece and in many of unequal size (faults: local means)."""
    config = _settings(max_steps=1, warmup_steps=0, batch_tokens=10_000)
    whole = config.model_copy(update={"micro_batch_tokens": 100_000})
    pieces = config.model_copy(update={"micro_batch_tokens": 20})
    first = _train(target, generated, whole, tmp_path / "1")[1].log[1]
    second = _train(target, generated, pieces, tmp_path / "2")[1].log[1]
    assert first["num_tokens"] == second["num_tokens"]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)


def test_the_kept_weights_are_those_of_the_best_evaluation(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """A learning rate that ruins the draft: what was best, the start, is what comes back."""
    before = initialize(PrunedConfig(layers=(0, 1, 2, 3)), target, seed=0)
    draft = copy.deepcopy(before.model)
    config = _settings(learning_rate=1.0, max_grad_norm=1e6)
    after, result = _train(target, generated, config, tmp_path, draft=draft)
    assert result.best.step == 0
    assert result.best.score == result.before
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_draft_comes_back_as_it_came_except_for_its_weights(
    target: LoadedModel,
    generated: Artifact,
    tmp_path: Path,
    dtype: torch.dtype,
    compute_dtype: str,
) -> None:
    draft = copy.deepcopy(initialize(PrunedConfig(layers=(0,)), target, seed=0).model)
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(dtype)
    config = _settings(compute_dtype=compute_dtype, max_steps=3)
    modes: list[bool] = []
    _, result = _train(
        target,
        generated,
        config,
        tmp_path,
        draft=draft,
        on_step=lambda step, record: modes.append(draft.training),
    )
    assert {parameter.dtype for parameter in draft.parameters()} == {dtype}
    assert not draft.training
    assert all(parameter.grad is None for parameter in draft.parameters())
    assert result.before.num_positions > 0
    # evaluation turns training mode off, the next step turns it on again
    assert modes == [False, True, True, True, False]


@pytest.mark.parametrize("killed_after", [2, 3, 4, 5])
def test_a_resumed_run_ends_with_the_same_bits(
    target: LoadedModel, generated: Artifact, tmp_path: Path, killed_after: int
) -> None:
    class Killed(Exception):
        pass

    def kill(step: int, record: dict[str, Any]) -> None:
        if step == killed_after and "loss" in record:
            raise Killed

    def draft() -> Any:
        model = initialize(PrunedConfig(layers=(0, 3)), target, seed=0).model
        # dropout draws random numbers: they have to be the same ones after a resume
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return model

    config = _settings(loss="acceptance_hybrid")
    whole, expected = _train(target, generated, config, tmp_path / "whole", draft=draft())
    work = tmp_path / "killed"
    with pytest.raises(Killed):
        _train(target, generated, config, work, draft=draft(), on_step=kill)
    saved = load_state(work)
    assert (0 if saved is None else saved.step) == (killed_after - 1) // 2 * 2
    resumed, result = _train(target, generated, config, work, draft=draft())
    assert result.log == expected.log
    assert result.best.step == expected.best.step
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_a_state_names_the_only_tensors_left_beside_it(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    _train(target, generated, _settings(), tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["step"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {
        "state.json",
        state["state_file"],
        state["best"]["file"],
    }


def test_an_optimisers_whole_state_is_put_where_its_parameter_lives() -> None:
    """The step count too: the fused AdamW refuses one on another device than its parameter."""
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    saved = SavedState(
        step=3,
        parameters={"w": torch.ones(2)},
        moments={"w": moments},
        best=Best(0, HeldOutScore(0.0, 0.0, 1), {}),
        log=[],
        seconds=0.0,
    )
    restore(saved, {"w": parameter}, optimizer)
    assert {k: v.device.type for k, v in optimizer.state[parameter].items()} == {
        "step": "meta",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_the_largest_seed_trains(target: LoadedModel, generated: Artifact, tmp_path: Path) -> None:
    config = _settings(seed=2**32 - 1, max_steps=2, warmup_steps=1)
    assert len(_train(target, generated, config, tmp_path)[1].log) == 4


def test_a_loss_that_is_not_a_number_names_step_and_rows(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], target: LoadedModel
) -> None:
    artifact = make_generated(
        ArtifactStore(tmp_path / "store"), tiny_pair_dirs[0], poison_rows=[10]
    )
    with pytest.raises(TrainingError, match=r"step \d.*rows row-10\. .*learning_rate"):
        _train(target, artifact, _settings(), tmp_path / "work")


def test_hidden_states_of_unequal_width_cannot_be_compared(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    from distill.initialization import ScratchConfig

    narrow = ScratchConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
    )
    draft = initialize(narrow, target, seed=0).model
    with pytest.raises(ConfigError, match="width is 32 and the target's 64"):
        _train(target, generated, _settings(loss="hidden_regression"), tmp_path, draft=draft)
    config = _settings(train_embeddings=True, learning_rate=1e-2)
    _, result = _train(target, generated, config, tmp_path, draft=draft)
    assert result.log[-1]["held_out"]["num_positions"] > 0
