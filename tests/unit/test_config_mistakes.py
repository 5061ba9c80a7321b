"""Owns what a user reads about a wrong setting: unions, kinds, lists, sections, suggestions.
Refuses to know any real settings: the schemas are the small ones below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from distill.config import Config, parse_config, setting
from distill.errors import ConfigError


class Copied(Config):
    kind: Literal["copied"] = "copied"
    layers: tuple[int, ...] = (0,)
    noise: float = 0.0


class Fresh(Config):
    kind: Literal["fresh"] = "fresh"
    width: int = 8
    depth: int = 1


class Phase(Config):
    name: str
    fraction: float = setting(1.0, gt=0, le=1)
    heat: float = 1.0


class Server(Config):
    urls: tuple[str, ...] = setting(min_length=1)
    tries: int = 3


class Sampling(Config):
    heat: float = 0.0
    seed: int = 0


class Train(Config):
    start: Annotated[Copied | Fresh, pydantic.Field(discriminator="kind")] = Copied()
    loss: str | tuple[Phase, ...] = "plain"
    trains: bool | Literal["head", "body"] = False
    limit: int | None = None
    trackers: tuple[str, ...] = ("file",)
    by_name: dict[str, Phase] = setting({})


class Write(Config):
    sampling: Sampling = Sampling()
    server: Server | None = None


class Run(Config):
    write: Write = Write()
    train: Train = Train()


def refusal(data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, Run, overrides)
    first, *lines = str(caught.value).splitlines()
    assert first == f"<dict>: {len(lines)} invalid setting(s)"
    return "\n".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ({"name": "a", "fraction": 2}, "train.loss.0.fraction: Input should be less than or equal"),
        ({"fraction": 1}, "train.loss.0.name: required, but not set"),
        ({"name": "a", "heet": 1}, "Did you mean 'train.loss.0.heat'?"),
    ],
)
def test_a_mistake_inside_a_list_does_not_speak_of_the_text_it_could_have_been(
    phase: dict[str, Any], expected: str
) -> None:
    message = refusal({"train": {"loss": [phase]}})
    assert expected in message
    assert message.count("\n") == 0
    assert "tuple[" not in message
    assert "string" not in message


def test_every_mistake_inside_a_list_is_told() -> None:
    phases = [{"name": "a", "fraction": 0}, {"name": "b", "fraction": -1}]
    message = refusal({"train": {"loss": phases}}).splitlines()
    assert [line.split(":")[0] for line in message] == [
        "train.loss.0.fraction",
        "train.loss.1.fraction",
    ]


def test_a_section_where_text_or_a_list_is_expected_is_told_how_to_be_one() -> None:
    message = refusal({"train": {"loss": {"name": "a"}}})
    assert message == "train.loss: expected text or a list; a list of one is written [{...}]"


def test_a_value_of_none_of_the_types_is_told_all_of_them_once() -> None:
    message = refusal({"train": {"trains": "tail"}})
    assert message == "train.trains: expected true or false or 'head' or 'body' (got 'tail')"
    assert "train.limit: Input should be a valid integer" in refusal({"train": {"limit": "many"}})


def test_one_text_where_a_list_is_expected_is_told_how_a_list_of_one_is_written() -> None:
    message = refusal({"train": {"trackers": "file"}})
    assert (
        message == "train.trackers: expected a list (got 'file'); a list of one is written [file]"
    )


def test_a_value_where_a_section_is_expected_is_told_the_settings_there() -> None:
    message = refusal({"write": {"server": "http://here"}})
    assert message == (
        "write.server: expected settings (key: value) (got 'http://here'); "
        "the settings here: tries, urls"
    )


def test_a_setting_of_another_kind_is_told_whose_it_is() -> None:
    message = refusal({"train": {"start": {"kind": "fresh", "layers": [0]}}})
    assert message == (
        "train.start.layers: unknown setting. It belongs to kind copied, and kind here is fresh, "
        "which has: depth, kind, width."
    )


def test_only_settings_of_the_chosen_kind_are_suggested() -> None:
    message = refusal({"train": {"start": {"kind": "fresh", "widht": 4}}})
    assert message == ("train.start.widht: unknown setting. Did you mean 'train.start.width'?")
    message = refusal({"train": {"start": {"kind": "fresh", "zzz": 4}}})
    assert message == "train.start.zzz: unknown setting. Known here: depth, kind, width."


def test_a_kind_that_is_none_or_is_left_out_is_told_which_there_are() -> None:
    assert refusal({"train": {"start": {"kind": "frsh"}}}) == (
        "train.start: no kind 'frsh'; there are: copied, fresh"
    )
    assert refusal({}, "train.start={width: 4}") == (
        "train.start: needs a kind, one of: copied, fresh (from --set train.start={width: 4})"
    )


def test_a_setting_is_looked_for_in_the_nearest_section_first() -> None:
    # write.sampling.heat is the first of its name, but not of this section
    assert refusal({"train": {"heat": 2}}) == (
        "train.heat: unknown setting. Did you mean 'heat' in an entry of 'train.loss'?"
    )
    assert "Did you mean 'write.sampling.heat'?" in refusal({"write": {"heat": 2}})


def test_what_is_suggested_is_never_what_was_written() -> None:
    class Outer(Config):
        left: Copied | None = None
        right: Fresh | None = None

    for data in ({"left": {"width": 1}}, {"right": {"noise": 1}}):
        with pytest.raises(ConfigError) as caught:
            parse_config(data, Outer)
        ((section, inner),) = data.items()
        (written,) = (f"{section}.{name}" for name in inner)
        assert f"Did you mean {written!r}" not in str(caught.value)
        assert "Did you mean" in str(caught.value)


def test_a_suggestion_inside_a_mapping_shows_that_a_name_goes_between() -> None:
    class Outer(Config):
        phases: dict[str, Server] = setting({})

    with pytest.raises(ConfigError, match=r"Did you mean 'phases\.<name>\.tries'\?"):
        parse_config({"tries": 1}, Outer)


# ------------------------------------------------------------------------------ overrides


def test_an_override_replaces_a_section_of_another_kind() -> None:
    data = {"train": {"start": {"kind": "copied", "layers": [1, 2], "noise": 0.5}}}
    config = parse_config(data, Run, ["train.start={kind: fresh, width: 4}"])
    assert config.train.start == Fresh(width=4)


def test_an_override_of_a_section_keeps_nothing_of_what_the_file_had_there() -> None:
    data = {"train": {"start": {"kind": "copied", "layers": [1, 2], "noise": 0.5}}}
    config = parse_config(data, Run, ["train.start={kind: copied, layers: [3]}"])
    assert config.train.start == Copied(layers=(3,))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.loss=other", "other"),
        ("train.loss=[{name: b}]", (Phase(name="b"),)),
    ],
)
@pytest.mark.parametrize("before", ["plain", [{"name": "a"}]])
def test_an_override_may_be_of_another_type_than_what_the_file_has(
    before: Any, override: str, expected: Any
) -> None:
    assert parse_config({"train": {"loss": before}}, Run, [override]).train.loss == expected


def test_an_override_of_a_whole_section_is_named_for_a_mistake_inside_it() -> None:
    message = refusal({}, "train.start={kind: fresh, width: x}")
    assert message.startswith("train.start.width: Input should be a valid integer")
    assert message.endswith("(from --set train.start={kind: fresh, width: x})")


def test_a_file_read_from_disk_is_overridden_alike(tmp_path: Path) -> None:
    from distill.config import read_config

    path = tmp_path / "run.yaml"
    path.write_text("train: {start: {kind: copied, layers: [1]}}\n", encoding="utf-8")
    assert read_config(path, Run, ["train.start={kind: fresh}"]).train.start == Fresh()
