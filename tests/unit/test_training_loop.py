"""Owns what the loop promises beside its order: memory for time, early stops, decodes, guards.

Refuses to know batches and resume: test_training.py, and tests/faults for kills and processes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.artifacts import Artifact
from distill.errors import ConfigError, TrainingError
from distill.losses.head import head_of
from distill.models import LoadedModel
from distill.runtime.speculative import speculative_decode
from distill.sampling import SamplingConfig
from distill.training.config import DecodeProbeConfig
from distill.training.guards import Guard
from distill.training.loop import train
from distill.training.probe import DecodeProbe, as_served
from distill.training.run import Followers
from distill.training.select import Best, HeldOutScore, evaluations_since
from distill.training.trunk import recompute_activations
from tests.training_helpers import make_draft, train_draft, training_config, training_data

# ---------------------------------------------------------------- accumulation and memory


def test_gradients_of_any_split_are_those_of_the_whole(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    def gradients(micro_batch_tokens: int) -> dict[str, torch.Tensor]:
        draft, seen = make_draft(target), {}

        def look(*args: Any) -> None:
            seen.update({n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad})

        config = training_config(
            max_steps=1, warmup_steps=0, batch_tokens=10_000, max_grad_norm=1e9
        ).model_copy(update={"micro_batch_tokens": micro_batch_tokens})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Guard, "check_norm", lambda *args, **kwargs: look())
            train_draft(target, generated, config, tmp_path / str(micro_batch_tokens), draft=draft)
        return seen

    whole, pieces = gradients(100_000), gradients(20)
    assert whole
    for name, gradient in whole.items():
        torch.testing.assert_close(pieces[name], gradient, rtol=1e-4, atol=1e-7)


def test_activations_computed_again_give_the_same_bits(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """With dropout: the second forward pass has to draw the numbers of the first."""
    weights, logs = [], []
    for number, is_again in enumerate((False, True)):
        draft = make_draft(target, dropout=0.2)
        draft.config._attn_implementation = "eager"  # the same products in both runs
        config = training_config(compute_dtype="bfloat16", gradient_checkpointing=is_again)
        after, result = train_draft(target, generated, config, tmp_path / str(number), draft=draft)
        assert not draft.is_activation_checkpointing
        weights.append(after)
        logs.append(result.log)
    assert logs[0] == logs[1]
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name


def test_activations_are_computed_again_when_asked_to(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """Each layer runs once more for every forward pass that has a backward pass."""
    counts = []
    for number, is_again in enumerate((False, True)):
        draft, calls = make_draft(target), []
        draft.model.layers[0].mlp.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        config = training_config(
            max_steps=1, warmup_steps=0, micro_batch_tokens=10_000, gradient_checkpointing=is_again
        )
        train_draft(target, generated, config, tmp_path / str(number), draft=draft)
        counts.append(len(calls))
    assert counts == [3, 4]  # two evaluations and one step; the step's layer again


def test_a_model_that_cannot_compute_activations_again_is_refused(target: LoadedModel) -> None:
    class Stubborn(torch.nn.Module):
        supports_gradient_checkpointing = False

    with pytest.raises(ConfigError, match=r"Stubborn does not support it.*micro_batch_tokens"):
        recompute_activations(Stubborn())


def test_weights_under_autocast_are_float32_while_they_train(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """A step of 1e-5 is below what bfloat16 weights can hold: it must not be lost."""
    draft = make_draft(target).to(torch.bfloat16)
    seen: list[dict[str, torch.Tensor]] = []

    def look(step: int, record: dict[str, Any]) -> None:
        trained = {n: p.detach().clone() for n, p in draft.named_parameters() if p.requires_grad}
        seen.append(trained)

    config = training_config(
        compute_dtype="bfloat16", learning_rate=1e-5, max_steps=3, warmup_steps=0, weight_decay=0.0
    )
    train_draft(target, generated, config, tmp_path, draft=draft, followers=Followers(look))
    name = "model.layers.0.mlp.up_proj.weight"
    assert {tensor.dtype for tensor in seen[-1].values()} == {torch.float32}
    moved = (seen[-1][name] - seen[0][name]).abs()
    assert 0 < moved.max() < 1e-4
    assert (seen[-1][name].bfloat16() == seen[0][name].bfloat16()).float().mean() > 0.5
    assert draft.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------- early stop


def test_a_run_stops_when_its_best_is_as_old_as_the_patience(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """A learning rate that ruins the draft: the start stays the best."""
    config = training_config(
        max_steps=50, eval_every=2, patience=3, learning_rate=1.0, max_grad_norm=1e6
    )
    before = make_draft(target).state_dict()
    after, result = train_draft(target, generated, config, tmp_path)
    assert result.is_stopped_early
    assert result.best.step == 0
    assert [r["step"] for r in result.log if "held_out" in r] == [0, 2, 4, 6]
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_a_run_without_patience_goes_to_its_end(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    config = training_config(eval_every=1, learning_rate=1.0, max_grad_norm=1e6)
    result = train_draft(target, generated, config, tmp_path)[1]
    assert not result.is_stopped_early
    assert result.log[-1]["step"] == 6


def test_evaluations_are_counted_from_the_best_one() -> None:
    best = Best(4, HeldOutScore(0.5, 0.5, 1), {})
    log = [{"step": s, "held_out": {}} for s in (0, 2, 4, 6, 8)] + [{"step": 7, "loss": 1.0}]
    assert evaluations_since(best, log) == 2


# ---------------------------------------------------------------- the short real decode


def _probe(target: LoadedModel, generated: Artifact, **changes: Any) -> DecodeProbe:
    settings = DecodeProbeConfig(num_prompts=4, max_new_tokens=8, num_draft_tokens=3)
    return DecodeProbe(
        target,
        training_data(generated).held_out_rows,
        settings.model_copy(update=changes),
        token_ids_V=None,
        seed=0,
    )


def test_a_probe_of_the_target_itself_accepts_everything(
    target: LoadedModel, generated: Artifact
) -> None:
    greedy, sampled = _probe(target, generated).score(target.model)
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 1.0)
    assert greedy["acceptance_rate"] == sampled["acceptance_rate"] == 1.0
    assert greedy["block_efficiency"] > 3.0


def test_a_probe_is_the_real_decode_of_held_out_prompts(
    target: LoadedModel, generated: Artifact
) -> None:
    draft = make_draft(target)
    rows = training_data(generated).held_out_rows
    prompts = [row.input_ids_T[: row.positions_N[0] + 1].tolist() for row in rows]
    prompts.sort(key=lambda ids: (len(ids), ids))
    prompts = [prompts[(2 * i + 1) * len(prompts) // 8] for i in range(4)]
    wrapped = LoadedModel(draft, target.tokenizer, target.resolved, target.shape)
    for found in _probe(target, generated).score(draft):
        expected = speculative_decode(
            target,
            wrapped,
            prompts,
            SamplingConfig(temperature=found["temperature"]),
            num_draft_tokens=3,
            max_new_tokens=8,
        ).stats
        assert found["acceptance_rate"] == expected.acceptance_rate
        assert found["block_efficiency"] == expected.block_efficiency


def test_a_probed_draft_is_the_one_that_would_be_served_and_training_goes_on_unchanged(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    draft = make_draft(target)
    served = as_served(draft.train(), [torch.bfloat16] * len(list(draft.parameters())))
    assert {p.dtype for p in served.parameters()} == {torch.bfloat16}
    assert draft.training
    assert not served.training
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    assert as_served(draft).lm_head.weight.data_ptr() == draft.lm_head.weight.data_ptr()
    config = training_config(decode_every=3)
    plain, _ = train_draft(target, generated, config, tmp_path / "plain")
    probed, result = train_draft(
        target,
        generated,
        config,
        tmp_path / "probed",
        followers=Followers(probe=_probe(target, generated)),
    )
    for name, tensor in plain.items():
        assert torch.equal(probed[name], tensor), name
    assert [r["step"] for r in result.log if "decoded" in r] == [0, 3, 6]


@pytest.mark.parametrize(
    ("decode_every", "expected"), [(3, [0, 4, 6, 8]), (100, [0, 8]), (None, [])]
)
def test_a_decode_is_due_at_the_start_the_end_and_the_evaluation_after_each_interval(
    target: LoadedModel,
    generated: Artifact,
    tmp_path: Path,
    decode_every: int | None,
    expected: list[int],
) -> None:
    """Evaluations at 2, 4, 6, 8; intervals of 3 end at 3, 6, 9."""
    config = training_config(max_steps=8, eval_every=2, decode_every=decode_every)
    probe = _probe(target, generated, num_prompts=1, max_new_tokens=2)
    followers = Followers(probe=probe)
    result = train_draft(target, generated, config, tmp_path, followers=followers)[1]
    assert [r["step"] for r in result.log if "decoded" in r] == expected


def test_a_run_that_patience_stops_is_decoded_at_its_last_evaluation(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """A draft that cannot move: no evaluation is better than the first, and the third ends it."""
    config = training_config(
        **{"max_steps": 40, "eval_every": 1, "patience": 3, "decode_every": 100},
        **{"learning_rate": 1e-30, "weight_decay": 0.0},
    )
    followers = Followers(probe=_probe(target, generated, num_prompts=1, max_new_tokens=2))
    result = train_draft(target, generated, config, tmp_path, followers=followers)[1]
    assert result.is_stopped_early
    assert [r["step"] for r in result.log if "held_out" in r] == [0, 1, 2, 3]
    assert [r["step"] for r in result.log if "decoded" in r] == [0, 3]


def test_a_prompt_with_several_answers_is_decoded_once(
    target: LoadedModel, generated: Artifact
) -> None:
    rows = training_data(generated).held_out_rows
    config = DecodeProbeConfig(num_prompts=4, max_new_tokens=8, num_draft_tokens=3)
    draft = make_draft(target)
    once, thrice = (
        DecodeProbe(target, given, config, token_ids_V=None, seed=0).score(draft)
        for given in (rows, [*rows, *rows, *rows])
    )
    assert thrice == once
    alone = DecodeProbe(target, [rows[0]] * 4, config, token_ids_V=None, seed=0).score(draft)
    assert all(found["num_tokens"] <= 8 for found in alone)


def test_a_prompt_that_leaves_no_room_is_not_decoded(
    target: LoadedModel, generated: Artifact
) -> None:
    context = target.shape.max_position_embeddings
    assert _probe(target, generated, max_new_tokens=context).score(target.model) == []


# ---------------------------------------------------------------- guards


def _history(losses: list[float], name: str = "forward_kl") -> list[dict[str, Any]]:
    return [{"step": i + 1, "loss_name": name, "loss": x} for i, x in enumerate(losses)]


def test_a_loss_that_leaps_stops_the_run_with_its_rows_and_the_last_good_state(
    tmp_path: Path,
) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"step": 20}))
    log = _history([2.0 - 0.01 * i for i in range(25)])
    guard = Guard(10.0, tmp_path)
    guard.check_step(25, "forward_kl", 18.7, row_ids=["a"], log=log)
    with pytest.raises(TrainingError, match=r"step 25: forward_kl leapt to 18\.9") as caught:
        guard.check_step(25, "forward_kl", 18.9, row_ids=["row-3", "row-7"], log=log)
    message = str(caught.value)
    assert "10 times the median 1.88 of" in message
    assert "on rows row-3, row-7." in message
    assert f"state is of step 20, in {tmp_path}" in message
    assert "max_loss_ratio" in message


@pytest.mark.parametrize(
    ("ratio", "log"),
    [
        (None, _history([1.0] * 30)),  # asked not to look
        (10.0, _history([1.0] * 19)),  # too few to compare with
        (10.0, _history([1.0] * 30, "acceptance")),  # another loss, another scale
        (10.0, _history([1.0] * 5 + [1000.0] * 60)),  # that is where it stands by now
    ],
)
def test_a_loss_is_compared_with_enough_recent_steps_of_its_own_kind(
    tmp_path: Path, ratio: float | None, log: list[dict[str, Any]]
) -> None:
    Guard(ratio, tmp_path).check_step(99, "forward_kl", 500.0, row_ids=[], log=log)


def test_a_multiple_of_almost_nothing_is_no_leap(tmp_path: Path) -> None:
    log = _history([1e-6] * 30)
    Guard(10.0, tmp_path).check_step(30, "forward_kl", 0.05, row_ids=[], log=log)


def test_a_gradient_that_is_not_finite_names_the_rows_and_says_when_nothing_was_saved(
    tmp_path: Path,
) -> None:
    guard = Guard(None, tmp_path)
    rows = [f"row-{i}" for i in range(20)]
    for norm in (math.inf, math.nan):
        with pytest.raises(TrainingError, match=r"No state was saved yet") as caught:
            guard.check_norm(3, "forward_kl", norm, loss=1.5, row_ids=rows)
        assert "row-15, ... (20 in all)" in str(caught.value)


def test_a_leap_in_a_real_run_stops_before_the_weights_move_and_a_looser_bound_goes_on(
    target: LoadedModel, generated: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.training import guards

    monkeypatch.setattr(guards, "_NUM_NEEDED", 2)
    config = training_config(max_steps=8, warmup_steps=0, max_loss_ratio=1.0000001)
    jump = config.model_copy(update={"learning_rate": 1.0, "max_grad_norm": 1e6})
    draft = make_draft(target)
    with pytest.raises(TrainingError, match=r"leapt .* state is of step 2"):
        train_draft(target, generated, jump, tmp_path, draft=draft)
    going_on = jump.model_copy(update={"max_loss_ratio": None})
    result = train_draft(target, generated, going_on, tmp_path)[1]
    assert [r["step"] for r in result.log if "loss" in r] == list(range(1, 9))


def test_training_mode_is_back_on_after_an_evaluation(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """faults: eval() never undone, so that dropout is off from the first evaluation on."""
    draft, modes = make_draft(target), []

    def look(step: int, record: dict[str, Any]) -> None:
        if "loss" in record:
            modes.append(draft.training)

    train(
        draft,
        target_head=head_of(target.model),
        data=training_data(generated),
        config=training_config(eval_every=1),
        work_dir=tmp_path,
        followers=Followers(look, probe=_probe(target, generated)),
    )
    assert modes == [True] * 6
    assert not target.model.training


def test_before_the_first_step_no_learning_rate_is_blamed(tmp_path: Path) -> None:
    guard = Guard(None, tmp_path)
    for step, is_blamed in ((0, False), (1, True)):
        with pytest.raises(TrainingError) as caught:
            guard.check_norm(step, "forward_kl", math.nan, loss=1.5, row_ids=["row-3"])
        assert ("learning_rate" in str(caught.value)) == is_blamed
        assert ("distill.initialization" in str(caught.value)) != is_blamed
