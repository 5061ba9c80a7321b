"""Owns the tests of what a measurement may be asked: names, lengths, pairs, servers, sizes.

Refuses to load a model: settings and shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distill.config import dump_config, parse_config
from distill.corpus import CorpusConfig, read_corpus
from distill.errors import ConfigError
from distill.models import ModelConfig, ModelShape
from distill.stages.measure import MeasureConfig, TimingConfig, check_before_measuring
from distill.stages.measure_server import ServedConfig

PAIR = {
    "target": {"model": "org/target"},
    "draft": {"model": "org/draft"},
    "corpus": {"path": "prompts.jsonl"},
}
SERVED = {"server": "http://localhost:8000", "corpus": {"path": "prompts.jsonl"}}
SHAPE = ModelShape(
    num_hidden_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=512,
)


def _measure(**changes: Any) -> MeasureConfig:
    return parse_config({"target": {"model": "org/target"}, **changes}, MeasureConfig)


def _pair(**changes: Any) -> MeasureConfig:
    return parse_config({**PAIR, **changes}, MeasureConfig)


def _served(**changes: Any) -> ServedConfig:
    return parse_config({**SERVED, **changes}, ServedConfig)


# ------------------------------------------------------------------------------ how deep, how long


@pytest.mark.parametrize("depth", [12, 1_000_000])
def test_more_draft_tokens_than_an_answer_holds_are_refused(depth: int) -> None:
    assert _measure(num_draft_tokens=11, max_new_tokens=12).num_draft_tokens == 11
    with pytest.raises(ConfigError, match=f"num_draft_tokens is {depth} .* at most 11"):
        _measure(num_draft_tokens=depth, max_new_tokens=12)
    with pytest.raises(ConfigError, match=f"max_draft_tokens is {depth} .* at most 11"):
        _measure(timing={"max_draft_tokens": depth, "max_new_tokens": 12})


def test_an_answer_of_one_token_has_no_room_for_a_draft() -> None:
    with pytest.raises(
        ConfigError, match=r"max_new_tokens 1: .* raise max_new_tokens to 2 or more"
    ):
        _measure(num_draft_tokens=1, max_new_tokens=1)


def test_the_depth_of_a_timing_that_is_off_is_nobodys_concern() -> None:
    assert TimingConfig(enabled=False, max_new_tokens=1).max_draft_tokens == 8


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["d" * 65], "at most 64 of them"),
        (["small", "Small"], "small, Small differ in upper and lower case alone"),
        (["plain"], "cannot be a draft's name"),
    ],
)
def test_names_that_no_file_can_have_or_two_would_share_are_refused(
    names: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _measure(drafts={name: {"model": "org/d"} for name in names})


# ------------------------------------------------------------------------------ a pair


def test_settings_without_effect_on_a_pair_make_no_other_pair() -> None:
    pair = _pair()
    assert pair.undistilled is False
    assert pair.corpus is not None
    assert pair.corpus.held_out_fraction == 0.0
    assert _pair(undistilled=False, corpus=PAIR["corpus"] | {"held_out_fraction": 0}) == pair
    assert _measure().undistilled is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"undistilled": True}, "undistilled is true, but measure.draft was not trained here"),
        (
            {"corpus": {"path": "prompts.jsonl", "held_out_fraction": 0.2}},
            "measure.corpus.held_out_fraction is 0.2, but nothing is trained on these prompts",
        ),
    ],
)
def test_settings_that_would_be_ignored_in_a_pair_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _pair(**changes)


def test_a_pair_survives_its_own_dump_whether_read_or_built() -> None:
    pair = _pair()
    assert MeasureConfig.model_validate(pair.model_dump(mode="json")) == pair
    built = MeasureConfig(
        target=ModelConfig(model="org/target"),
        draft=ModelConfig(model="org/draft"),
        corpus=CorpusConfig(path=Path("prompts.jsonl")),
    )
    assert built == pair
    assert "held_out_fraction: 0.0" in dump_config(built)


def test_a_corpus_that_is_measured_whole_says_nothing_of_splits(
    tiny_corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = tiny_corpus.read_text(encoding="utf-8").splitlines()[:3]
    path = tmp_path / "three.jsonl"
    path.write_text("\n".join(small) + "\n", encoding="utf-8")
    for config in (_pair(corpus={"path": str(path)}), _served(corpus={"path": str(path)})):
        assert config.corpus is not None
        assert len(read_corpus(config.corpus).prompts) == 3
    assert "hash to one split" not in caplog.text


# ------------------------------------------------------------------------------ a server


def test_an_address_is_a_whole_server() -> None:
    served = _served()
    assert served.server.urls == ("http://localhost:8000",)
    assert served == _served(server={"base_urls": ["http://localhost:8000"]})
    assert parse_config(served.model_dump(mode="json"), ServedConfig) == served


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"server": ["http://localhost:8000"]},
            "server: .*its address, http://host:port, or base_",
        ),
        ({"server": 8000}, "and not of type int"),
        ({"server": "localhost:8000"}, "is not the address of a server"),
        ({"temperatures": [0.7, 0.7]}, "each once"),
        ({"temperatures": [-1.0]}, "none below 0"),
        ({"metrics_path": "metrics"}, "metrics_path"),
        ({"corpus": {"path": "p.jsonl", "held_out_fraction": 0.5}}, "served.corpus.held_out_frac"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_in_words(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _served(**changes)


def test_every_setting_of_a_server_is_described_in_the_schema() -> None:
    schema = ServedConfig.model_json_schema()
    assert set(schema["required"]) == {"server", "corpus"}
    described: Mapping[str, Any] = schema["properties"]
    for name in ("server", "corpus", "max_new_tokens", "max_prompts_per_task", "metrics_path"):
        assert described[name]["description"], name


# ------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"early_exit": [2, 9]}, "early_exit has 9 layers, the target has 4"),
        ({"max_new_tokens": 512}, "measure.max_new_tokens is 512, and the target's context of 512"),
        (
            {"timing": {"max_new_tokens": 600}},
            "measure.timing.max_new_tokens is 600, and the target's context of 512",
        ),
    ],
)
def test_what_the_targets_sizes_do_not_allow_is_refused_before_anything_is_built(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_before_measuring(_measure(**changes), SHAPE)
    check_before_measuring(_measure(**changes), None)


def test_a_measurement_that_fits_is_let_through_and_every_draft_is_looked_up() -> None:
    seen: list[str] = []

    def shape_of(model: ModelConfig) -> ModelShape:
        seen.append(model.model)
        return SHAPE

    config = _pair(
        drafts={"other": {"model": "org/other"}},
        early_exit=[4],
        max_new_tokens=511,
        timing={"enabled": False, "max_new_tokens": 5000},
    )
    check_before_measuring(config, SHAPE, shape_of=shape_of)
    assert sorted(seen) == ["org/draft", "org/other"]
