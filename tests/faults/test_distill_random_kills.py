"""Owns kills of training at random moments: mid-epoch, mid-accumulation, anywhere.

Refuses to know files and stages: those kills are in test_distill_kill.py.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.artifacts import Artifact
from distill.models import LoadedModel
from distill.training import loop
from distill.training.checkpoint import saved_step
from distill.training.run import Followers
from tests.fork_helpers import kill_self, run_forked
from tests.training_helpers import make_draft, train_draft, training_config

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_KILLS = 10
# about three micro-batches a step and two steps and a half an epoch, so few kills hit a boundary
CONFIG = training_config(
    max_steps=24,
    batch_tokens=50,
    micro_batch_tokens=24,
    checkpoint_every=3,
    eval_every=4,
    loss="acceptance_hybrid",
)


class Killed(Exception):
    """Stands for SIGKILL: nothing in the loop handles it."""


def _call_each_micro_batch(patch: pytest.MonkeyPatch, call: Callable[[int], None]) -> None:
    """`call(n)` before the n-th micro-batch of a process, counted from 0."""
    collate, number = loop.collate, 0

    def counting(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal number
        call(number)
        number += 1
        return collate(*args, **kwargs)

    patch.setattr(loop, "collate", counting)


def test_ten_kills_at_random_micro_batches_end_with_the_bits_of_an_undisturbed_run(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """With dropout, whose random numbers have to be the same ones after each resume."""
    total, total_at = 0, {0: 0}

    def count(number: int) -> None:
        nonlocal total
        total = number + 1

    def remember(step: int, record: dict[str, Any]) -> None:
        total_at[step] = total

    with pytest.MonkeyPatch.context() as patch:
        _call_each_micro_batch(patch, count)
        whole, expected = train_draft(
            target,
            generated,
            CONFIG,
            tmp_path / "whole",
            draft=make_draft(target, dropout=0.1),
            followers=Followers(remember),
        )
    assert total > 2 * CONFIG.max_steps, "a step has to have several micro-batches"
    assert expected.num_epochs > 3

    def kill_at(place: int) -> Callable[[int], None]:
        def kill(number: int) -> None:
            if number == place:
                raise Killed

        return kill

    work, chosen, left = tmp_path / "killed", random.Random(0), []
    for _ in range(NUM_KILLS):
        # soon after the last resume, so that ten of them do not all fall at the end
        place = chosen.randrange(min(30, total - total_at[saved_step(work) or 0]))
        with pytest.MonkeyPatch.context() as patch:
            _call_each_micro_batch(patch, kill_at(place))
            with pytest.raises(Killed):
                train_draft(target, generated, CONFIG, work, draft=make_draft(target, dropout=0.1))
        left.append(saved_step(work))
    assert len(set(left)) >= 4, left
    resumed, result = train_draft(
        target, generated, CONFIG, work, draft=make_draft(target, dropout=0.1)
    )
    assert result.log == expected.log
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_a_process_killed_in_an_accumulation_leaves_a_state_that_resumes_to_the_same_bits(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """SIGKILL for real, in forked processes that die in the second micro-batch of a step."""
    whole, expected = train_draft(target, generated, CONFIG, tmp_path / "whole")
    work = tmp_path / "killed"
    for place in (20, 7):

        def body(place: int = place) -> None:
            with pytest.MonkeyPatch.context() as patch:
                _call_each_micro_batch(patch, lambda n: n < place or kill_self())
                train_draft(target, generated, CONFIG, work)

        assert run_forked(body) == -signal.SIGKILL
    assert saved_step(work)
    resumed, result = train_draft(target, generated, CONFIG, work)
    assert result.log == expected.log
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_an_early_stop_is_the_same_after_a_kill(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(
        update={"max_steps": 40, "patience": 2, "learning_rate": 1.0, "max_loss_ratio": None}
    )
    _, expected = train_draft(target, generated, config, tmp_path / "whole")
    assert expected.is_stopped_early
    work = tmp_path / "killed"

    def kill(number: int) -> None:
        if number == 17:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        _call_each_micro_batch(patch, kill)
        with pytest.raises(Killed):
            train_draft(target, generated, config, work)
    assert saved_step(work)
    _, result = train_draft(target, generated, config, work)
    assert result.is_stopped_early
    assert result.log == expected.log
