"""Owns how losses are written in a config: a name, a phase, phases; and that each gets a step.

Refuses to know what a loss computes and how a step is taken.
"""

from __future__ import annotations

from typing import Any

import pytest

from distill.config import dump_config, fingerprint_view, json_schema, parse_config
from distill.errors import ConfigError
from distill.training.config import LossPhase, TrainingConfig, loss_schedule


def _read(**settings: Any) -> TrainingConfig:
    return parse_config(settings, TrainingConfig)


def _complaint(**settings: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _read(**settings)
    return str(caught.value).splitlines()


# ---------------------------------------------------------------- one spelling


def test_one_phase_may_be_written_without_its_list() -> None:
    phase = {"name": "jsd", "options": {"beta": 0.3}}
    config = _read(loss=phase)
    assert config.loss == (LossPhase(name="jsd", options={"beta": 0.3}),)
    assert config == _read(loss=[phase])
    assert fingerprint_view(config) == fingerprint_view(_read(loss=[phase]))
    assert TrainingConfig(loss=LossPhase(name="jsd")).loss == (LossPhase(name="jsd"),)
    import yaml

    assert _read(**yaml.safe_load(dump_config(config))) == config


def test_the_loss_of_a_config_written_before_is_what_it_was_to_its_fingerprint() -> None:
    assert fingerprint_view(_read())["loss"] == "forward_kl"
    assert fingerprint_view(_read(loss="jsd"))["loss"] == "jsd"
    rest = {"temperature": 1.0, "options": {}, "keep_fraction": 1.0}
    phases = [{"name": "forward_kl", "fraction": 0.6}, {"name": "acceptance", "fraction": 0.4}]
    assert fingerprint_view(_read(loss=phases))["loss"] == [{**one, **rest} for one in phases]


def test_an_editor_is_told_all_three_ways_to_write_a_loss() -> None:
    ways = json_schema(TrainingConfig)["properties"]["loss"]["anyOf"]
    assert [way.get("type", "a phase") for way in ways] == ["string", "a phase", "array"]


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        ({"name": "jsd", "options": {"gamma": 1}}, "loss.0: the loss jsd has no option gamma"),
        ([{"name": "jsdd"}], "loss.0.name: unknown loss 'jsdd'. Did you mean 'jsd'"),
        ([{"name": "jsd"}, {"name": "jsd", "bta": 1}], "loss.1.bta: unknown setting"),
        ([{"name": "jsd", "fraction": 2}], "loss.0.fraction: Input should be less than"),
        ({"name": "jsd", "temperature": -1}, "loss.0.temperature: Input should be greater"),
        (5, "loss: expected a loss's name such as forward_kl, one phase"),
        ("jsdd", "loss: unknown loss 'jsdd'. Did you mean 'jsd'"),
    ],
)
def test_the_first_line_of_a_mistake_in_a_phase_is_the_mistake(loss: Any, line: str) -> None:
    _, first, *rest = _complaint(loss=loss)
    assert line.lower() in first.lower()
    for each in (first, *rest):
        assert "str" not in each.split(": ")[0]
        assert "valid string" not in each
        assert "tuple[" not in each


# ---------------------------------------------------------------- a step for each


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {
                "loss": [
                    {"name": "forward_kl", "fraction": 0.99},
                    {"name": "acceptance", "fraction": 0.01},
                ]
            },
            "the loss phase acceptance has 0.01 of 8 steps, which rounds to 0 steps",
        ),
        (
            {
                "loss": [
                    {"name": "forward_kl", "fraction": 0.01},
                    {"name": "acceptance", "fraction": 0.99},
                ]
            },
            "the loss phase forward_kl has 0.01 of 8 steps",
        ),
        (
            {"warm_start": {"name": "jsd", "fraction": 0.01}},
            "the loss phase jsd has 0.01 of 8 steps",
        ),
        (
            {"warm_start": {"name": "jsd", "fraction": 0.99}, "loss": "acceptance"},
            "the loss phase acceptance has 0.01 of 8 steps",
        ),
    ],
)
def test_a_phase_without_a_step_is_an_error_and_not_left_out(
    settings: dict[str, Any], complaint: str
) -> None:
    assert complaint in "\n".join(_complaint(max_steps=8, warmup_steps=1, **settings))
    config = _read(max_steps=800, warmup_steps=1, **settings)
    ends = [phase.end_step for phase in loss_schedule(config)]
    assert ends == sorted(set(ends))
    assert (len(ends), ends[-1]) == (2, 800)


def test_a_later_round_is_a_whole_training_of_its_own_length() -> None:
    config = _read(
        max_steps=100,
        warmup_steps=20,
        warm_start={"name": "jsd", "fraction": 0.25},
        loss="acceptance",
    )
    later = config.for_round(8)
    assert [(phase.name, phase.end_step) for phase in loss_schedule(later)] == [
        ("jsd", 2),
        ("acceptance", 8),
    ]
    assert (later.max_steps, later.warmup_steps) == (8, 7)
    assert config.for_round(40).warmup_steps == 20
    with pytest.raises(ConfigError, match=r"steps_per_round is 1: the loss phase jsd has 0\.25"):
        config.for_round(1)
