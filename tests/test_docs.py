"""The numbers and lists that the pages of docs/ give are the code's.

Refuses to judge prose; what a page shows as code to run is run where its subject is tested.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from distill.models import ModelConfig
from distill.stages.measure import MeasureConfig
from distill.stages.measure_pair import load_pair_config
from distill.target_store.config import TopKSettings, bytes_per_token
from distill.training import guards
from distill.training.trl_engine import settings_for_trl

DOCS = Path(__file__).parent.parent / "docs"


def page(name: str) -> str:
    """A page as one line, however its paragraphs are broken."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def test_the_page_on_losses_has_the_bytes_of_a_top_k_token_for_every_size_of_vocabulary() -> None:
    sizes = [
        bytes_per_token(TopKSettings(k=64), hidden_size=1, vocab_size=vocab_size)
        for vocab_size in (65_536, 262_144, 1_048_576, 1_048_577)
    ]
    *first, last = map(str, sizes)
    assert f"{', '.join(first)} and {last} bytes a token at K = 64" in page("losses.md")
    assert f"| {sizes[0]} to {sizes[-1]} at K = 64 |" in page("losses.md")


def test_the_page_on_training_lists_every_setting_that_trl_refuses() -> None:
    section = page("training.md").split("## TRL")[1].split("## Benchmarks")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    assert set(settings_for_trl()) - {"trackers"} <= named
    assert "other trackers than `jsonl`" in section


def test_the_page_on_training_says_from_when_and_from_what_a_leap_is_a_leap() -> None:
    text = page("training.md")
    assert f"the last {guards._NUM_REMEMBERED} steps" in text
    assert f"a loss's first {guards._NUM_NEEDED} steps" in text
    assert f"below {guards._SMALL_LOSS} counts as {guards._SMALL_LOSS}" in text


def blocks(name: str, language: str) -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_every_file_on_the_page_on_measuring_is_one_that_measure_reads(tmp_path: Path) -> None:
    of_a_run, *of_pairs = blocks("measuring.md", "yaml")
    assert len(of_pairs) == 2
    section = yaml.safe_load(of_a_run)["measure"]
    gate = MeasureConfig.model_validate({**section, "target": {"model": "a-target"}}).bounds
    assert gate == {"min_speedup": 1.2, "min_alpha": 0.4, "lossless": True}
    for number, text in enumerate(of_pairs):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        pair = load_pair_config(path)
        assert (pair.measure is None) == (number == 1)


def test_the_page_on_measuring_has_the_defaults_of_the_settings_it_lists() -> None:
    defaults = MeasureConfig(target=ModelConfig(model="a-target"))
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (DOCS / "measuring.md").read_text(), re.M)
    words = {None: "none", True: "true", (): "none"}
    assert len(rows) >= 10
    for name, said in rows:
        value = getattr(defaults, name)
        if name == "max_prompts_per_task":
            assert (value, said) == (None, "all")
        elif name == "timing":
            assert (value.enabled, said) == (True, "on")
        elif name == "temperatures":
            assert said == ", ".join(f"{one:g}" for one in value)
        elif value == {}:
            assert said == "none"
        else:
            assert said == (words[value] if value in (None, ()) or value is True else str(value))


def test_the_block_on_counting_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("measuring.md", "python")
    exec(block, {})  # the page is in this repository
    assert capsys.readouterr().out == re.search(r"# ([\d.]+)\n$", block)[1] + "\n"  # type: ignore[index]
