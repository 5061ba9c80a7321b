"""Owns the behaviour of distill.config: reading, overriding, mistakes, dumping, fingerprint views.
Refuses to know any real settings: the schemas are the small ones below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.config import (
    Config,
    ConfigPath,
    dump_config,
    fingerprint_view,
    json_schema,
    parse_config,
    read_config,
    setting,
)
from distill.errors import ConfigError


class Phase(Config):
    loss: Literal["forward_kl", "acceptance"] = "forward_kl"
    temperature: float = setting(1.0, gt=0)
    num_workers: int = setting(2, in_fingerprint=False)


class Train(Config):
    learning_rate: float = setting(1e-4, gt=0, description="Peak learning rate.")
    max_steps: int = setting(100, ge=1)
    phases: tuple[Phase, ...] = (Phase(),)
    log_every: int = setting(10, in_fingerprint=False)
    tags: frozenset[str] = frozenset()
    biases: dict[int, float] = setting({})
    by_name: dict[str, Phase] = setting({})


class Data(Config):
    path: ConfigPath | None = setting(None, in_fingerprint=False)
    name: str | None = None
    template: str | None = None


class Run(Config):
    name: str
    train: Train = Train()
    data: Data = Data()


def write(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(text: str, tmp_path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, text), Run, overrides)
    return str(caught.value)


def test_scientific_notation_is_a_number(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "name: a\ntrain: {learning_rate: 3e-5}"), Run)
    assert config.train.learning_rate == 3e-5


def test_override_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ntrain: {learning_rate: 3e-5, max_steps: 7}")
    config = read_config(path, Run, ["train.learning_rate=1e-3"])
    assert (config.train.learning_rate, config.train.max_steps, config.train.log_every) == (
        1e-3,
        7,
        10,
    )


def test_override_reaches_into_lists_and_replaces_them(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ntrain: {phases: [{temperature: 2.0}, {temperature: 3.0}]}")
    config = read_config(
        path, Run, ["train.phases[1].temperature=5", "train.phases.0.loss=acceptance"]
    )
    assert [phase.temperature for phase in config.train.phases] == [2.0, 5.0]
    assert [phase.loss for phase in config.train.phases] == ["acceptance", "forward_kl"]
    assert read_config(path, Run, ["train.phases=[{temperature: 9}]"]).train.phases == (
        Phase(temperature=9),
    )


def test_override_value_may_hold_an_equals_sign_and_be_null(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ndata: {name: x}")
    config = read_config(path, Run, ["name=a=b", "data.name=null"])
    assert (config.name, config.data.name) == ("a=b", None)


def test_unknown_key_is_named_with_its_path_and_the_nearest_known_one(tmp_path: Path) -> None:
    message = refusal("name: a\ntrain: {learning_rat: 1}", tmp_path)
    assert "run.yaml" in message
    assert "train.learning_rat: unknown setting" in message
    assert "Did you mean 'train.learning_rate'?" in message


def test_unknown_key_inside_a_list_is_named_with_its_index(tmp_path: Path) -> None:
    message = refusal("name: a\ntrain: {phases: [{}, {temprature: 2}]}", tmp_path)
    assert "train.phases.1.temprature" in message
    assert "'train.phases.1.temperature'" in message


def test_unknown_key_inside_a_mapping_of_models_gets_a_suggestion(tmp_path: Path) -> None:
    message = refusal("name: a\ntrain: {by_name: {warm: {temprature: 2}}}", tmp_path)
    assert "'train.by_name.warm.temperature'" in message


def test_key_in_the_wrong_section_is_told_where_it_belongs(tmp_path: Path) -> None:
    assert "Did you mean 'train.max_steps'?" in refusal("name: a\nmax_steps: 3", tmp_path)


def test_unknown_key_without_a_likely_match_lists_the_known_ones(tmp_path: Path) -> None:
    assert "Known here: data, name, train." in refusal("name: a\nzzz: 3", tmp_path)


def test_bad_override_is_named_as_the_culprit(tmp_path: Path) -> None:
    message = refusal("name: a", tmp_path, ("train.max_steps=0",))
    assert "train.max_steps: Input should be greater than or equal to 1 (got 0)" in message
    assert "(from --set train.max_steps=0)" in message
    message = refusal(
        "name: a\ntrain: {phases: [{}]}", tmp_path, ("train.phases[0].temperature=0",)
    )
    assert "(from --set train.phases[0].temperature=0)" in message


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    message = refusal("nam: a\ntrain: {max_steps: x, learning_rate: -1}", tmp_path)
    assert "4 invalid setting(s)" in message
    assert "name: required, but not set" in message


@pytest.mark.parametrize("override", ["train.max_steps", "=3", "train..x=3", "", ".a=1", "a[=1"])
def test_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    assert "--set" in refusal("name: a", tmp_path, (override,))


def test_override_beyond_the_end_of_a_list_is_refused(tmp_path: Path) -> None:
    message = refusal("name: a\ntrain: {phases: [{}]}", tmp_path, ("train.phases[3].loss=x",))
    assert "train.phases[3].loss=x" in message


def test_override_value_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    assert "--set 'name=[a'" in refusal("name: a", tmp_path, ("name=[a",))


def test_yaml_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    assert "run.yaml:4:" in refusal("name: a\ntrain:\n  x: [1\ny: 2\n", tmp_path)


def test_duplicate_key_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refusal("name: a\nname: b\n", tmp_path)
    assert "run.yaml:2:" in message
    assert "duplicate key" in message


def test_list_at_the_top_is_refused(tmp_path: Path) -> None:
    assert "found a list" in refusal("- a\n- b\n", tmp_path)


def test_empty_file_says_what_is_required(tmp_path: Path) -> None:
    assert "name: required" in refusal("", tmp_path)


def test_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "name: a", "quickstart.yaml")
    with pytest.raises(ConfigError, match=r"Did you mean .*quickstart\.yaml"):
        read_config(tmp_path / "quickstar.yaml", Run)
    with pytest.raises(ConfigError, match="No configuration file"):
        read_config(tmp_path / "no" / "such.yaml", Run)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(tmp_path / "latin.yaml", Run)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path, Run)
    with pytest.raises(ConfigError, match="not a configuration"):
        read_config(write(tmp_path, "name: a\x00b"), Run)


def test_interpolation_copies_a_value_and_its_failure_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_config(write(tmp_path, "name: a\ndata: {name: '${name}'}"), Run).data.name == "a"
    monkeypatch.delenv("DISTILL_NO_SUCH", raising=False)
    message = refusal("name: a\ndata: {name: '${oc.env:DISTILL_NO_SUCH}'}", tmp_path)
    assert "data.name" in message
    assert "DISTILL_NO_SUCH" in message


def test_not_a_number_and_infinity_are_refused(tmp_path: Path) -> None:
    assert "finite" in refusal("name: a\ntrain: {learning_rate: .nan}", tmp_path)
    assert "finite" in refusal("name: a\ntrain: {learning_rate: .inf}", tmp_path)


def test_relative_path_is_resolved_against_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    path = write(folder, "name: a\ndata: {path: ../prompts/x.jsonl}")
    monkeypatch.chdir(tmp_path)
    expected = tmp_path / "prompts" / "x.jsonl"
    assert read_config(path, Run).data.path == expected
    assert read_config(Path("configs/run.yaml"), Run).data.path == expected


def test_relative_path_without_a_file_is_resolved_against_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Data(path=Path("x.jsonl")).path == tmp_path / "x.jsonl"
    assert parse_config({"name": "a", "data": {"path": "x.jsonl"}}, Run).data.path == (
        tmp_path / "x.jsonl"
    )


def test_absolute_and_home_paths_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = {"name": "a", "data": {"path": "~/x.jsonl"}}
    assert parse_config(data, Run, base_dir=Path("/else")).data.path == tmp_path / "home/x.jsonl"
    data = {"name": "a", "data": {"path": str(tmp_path / "y")}}
    assert parse_config(data, Run, base_dir=Path("/else")).data.path == tmp_path / "y"


def test_parse_config_names_its_source() -> None:
    with pytest.raises(ConfigError, match="notebook: 1 invalid"):
        parse_config({"name": 3}, Run, source="notebook")
    with pytest.raises(ConfigError, match="notebook"):
        parse_config({"name": object()}, Run, source="notebook")


def test_config_error_raised_by_a_validator_keeps_the_path_of_the_setting() -> None:
    class Picky(Config):
        even: int = 0

        @pydantic.field_validator("even")
        @classmethod
        def _check(cls, value: int) -> int:
            if value % 2:
                raise ConfigError(f"{value} is odd; use {value + 1}")
            return value

    class Outer(Config):
        picky: Picky = Picky()

    with pytest.raises(ConfigError, match=r"picky\.even: 3 is odd; use 4 \(got 3\)"):
        parse_config({"picky": {"even": 3}}, Outer)


def test_a_long_value_is_kept_out_of_the_message(tmp_path: Path) -> None:
    message = refusal(f"name: a\ntrain: {{max_steps: {'x' * 5000}}}", tmp_path)
    assert "train.max_steps: Input should be a valid integer" in message
    assert len(message) < 300


def test_error_about_a_whole_section_does_not_print_the_section() -> None:
    class Both(Config):
        a: int = 0
        b: int = 0

        @pydantic.model_validator(mode="after")
        def _check(self) -> Both:
            raise ConfigError("a and b exclude each other")

    with pytest.raises(ConfigError) as caught:
        parse_config({"a": 1, "b": 2}, Both)
    assert str(caught.value) == "<dict>: 1 invalid setting(s)\n  a and b exclude each other"


def test_configs_are_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        Phase().temperature = 2.0


TEXT = st.text(max_size=30).filter(lambda text: text != "???")


@settings(max_examples=60)
@given(
    text=TEXT | st.sampled_from(["1e-4", "no", "${name}", r"\${x}", "null", "a: b", " x", "a\nb"]),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    key=st.integers(min_value=0, max_value=10**6),
)
def test_dumped_config_reloads_to_an_equal_object(
    tmp_path_factory: pytest.TempPathFactory, text: str, rate: float, key: int
) -> None:
    config = Run(
        name=text,
        train=Train(
            learning_rate=rate,
            phases=(Phase(loss="acceptance"), Phase(temperature=rate)),
            tags=frozenset({"b", "a"}),
            biases={key: -rate},
            by_name={"x": Phase(num_workers=9)},
        ),
        data=Data(path=Path("some/file.jsonl"), template=text),
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert read_config(path, Run) == config


def test_dumped_config_holds_every_field_even_those_outside_the_fingerprint() -> None:
    assert "log_every: 10" in dump_config(Run(name="a"))


def test_dump_leaves_out_what_the_schema_fills_in() -> None:
    config = Run(name="a", train=Train(by_name={"x": Phase(temperature=3)}))
    dumped = dump_config(config, leave_out=["train.by_name", "data"])
    assert "by_name" not in dumped
    assert "data" not in dumped
    assert "phases" in dumped
    assert config.train.by_name == {"x": Phase(temperature=3)}


def test_fingerprint_view_leaves_out_marked_fields_at_any_depth() -> None:
    view = fingerprint_view(
        Run(name="a", train=Train(by_name={"x": Phase()}), data=Data(path=Path("x")))
    )
    assert view["data"] == {"name": None, "template": None}
    assert "log_every" not in view["train"]
    assert view["train"]["phases"] == [{"loss": "forward_kl", "temperature": 1.0}]
    assert view["train"]["by_name"] == {"x": {"loss": "forward_kl", "temperature": 1.0}}


def test_fingerprint_view_is_json_and_orders_sets() -> None:
    many = frozenset(f"tag-{n}" for n in range(50))
    view = fingerprint_view(Train(tags=many, biases={10: 1.0, 2: 2.0}))
    assert view["tags"] == sorted(many)
    assert json.loads(json.dumps(view)) == view


def test_json_schema_describes_fields_and_marks() -> None:
    schema: dict[str, Any] = json_schema(Train)
    assert schema["properties"]["learning_rate"]["description"] == "Peak learning rate."
    assert schema["properties"]["log_every"]["in_fingerprint"] is False
    assert schema["additionalProperties"] is False
