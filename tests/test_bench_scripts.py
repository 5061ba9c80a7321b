"""Owns the benchmarks' tests: every script on a tiny pair, its columns, counts and arithmetic.
Refuses to assert a time: what is fast here says nothing, and differs from run to run.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.runtime.stats import DecodeStats
from scripts.benchmarks import (
    contest,
    gpu_check,
    measuring,
    ours,
    report,
    rivals,
    runtime,
    throughput,
)
from scripts.benchmarks import generate as bench_generate
from scripts.benchmarks.measuring import Run, Sample
from scripts.benchmarks.ours import Pair
from scripts.benchmarks.pairs import made_up_pair

REPOSITORY = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SCRIPTS = {
    "bench_runtime": "scripts.benchmarks.runtime",
    "bench_generate": "scripts.benchmarks.generate",
    "gpu_check": "scripts.benchmarks.gpu_check",
}
SHORT = ["--new-tokens", "6", "--rounds", "2", "--num-prompts", "2", "--cost-repeats", "1"]
SHORT += ["--pilot-tokens", "4", "--sweep-tokens", "2", "--assistant-tokens", "2"]
SHORT += ["--max-draft-tokens", "3", "--threads", str(torch.get_num_threads())]
FAMILIES = [contest.PLAIN, contest.FIXED, contest.ADAPTIVE]
FAMILIES += [contest.HF_PLAIN, contest.HF_DEFAULT, contest.HF_TUNED]


@pytest.fixture(scope="module")
def small_pair() -> Pair:
    return made_up_pair(
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=64,
        device=CPU,
        dtype=torch.float32,
        depth_scale=0.4,
    )


@pytest.fixture(scope="module")
def runtime_report(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_run_config: Path,
    tiny_pair_dirs: tuple[Path, Path],
) -> dict[str, Any]:
    """What one short bench_runtime wrote, with what it printed under ``text``."""
    out = tmp_path_factory.mktemp("bench") / "runtime.json"
    options = ["--config", str(tiny_run_config), "--draft", str(tiny_pair_dirs[1])]
    options += ["--batch-sizes", "1", "2", "--temperatures", "0", "1", "--json", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: printed.append(str(a[0])))
        patch.setattr(rivals, "has_llama_cpp", lambda: False)
        assert runtime.main([*options, *SHORT]) == 0
    return json.loads(out.read_text(encoding="utf-8")) | {"text": "\n".join(printed)}


# ------------------------------------------------------------------------------ bench_runtime


def test_every_system_is_timed_in_every_cell_every_round(runtime_report):
    cells = [(r["batch_size"], r["temperature"], r["system"]) for r in runtime_report["rows"]]
    assert cells == list(itertools.product((1, 2), (0.0, 1.0), FAMILIES))
    assert all(len(row["seconds"]) == 2 for row in runtime_report["rows"])


def test_every_system_decodes_the_same_number_of_tokens(runtime_report):
    for row in runtime_report["rows"]:
        # Assisted generation takes no batch: one prompt a round at every batch size.
        is_alone = row["system"] in (contest.HF_DEFAULT, contest.HF_TUNED)
        assert row["num_tokens"] == [6 * (1 if is_alone else row["batch_size"])] * 2


def test_speedups_and_efficiency_follow_from_the_raw_numbers(runtime_report):
    rows = {(r["batch_size"], r["temperature"], r["system"]): r for r in runtime_report["rows"]}
    for (batch, temperature, system), row in rows.items():
        rates = [n / s for n, s in zip(row["num_tokens"], row["seconds"], strict=True)]
        assert row["tokens_per_s"]["median"] == pytest.approx(statistics.median(rates))
        baseline = contest.BASELINE.get(system)
        if baseline is None:
            assert row["measured_speedup"] is None
            continue
        base = rows[batch, temperature, baseline]
        plain = [n / s for n, s in zip(base["num_tokens"], base["seconds"], strict=True)]
        ratios = [a / b for a, b in zip(rates, plain, strict=True)]
        assert row["measured_speedup"] == pytest.approx(statistics.median(ratios))
        if system in (contest.FIXED, contest.ADAPTIVE):
            share = row["measured_speedup"] / row["predicted_speedup"]
            assert row["efficiency"] == pytest.approx(share)
        else:
            assert row["predicted_speedup"] is None


def test_counts_of_both_speculating_engines_add_up(runtime_report):
    for row in runtime_report["rows"]:
        if row["stats"] is None:
            continue
        stats = DecodeStats.from_dict(row["stats"])
        assert stats.num_emitted == sum(row["num_tokens"])
        if row["system"] not in (contest.PLAIN,) and stats.num_proposed:
            assert row["block_efficiency"] == stats.num_emitted / stats.num_target_calls
            assert row["acceptance_rate"] == stats.num_accepted / stats.num_tested


def test_ratios_compare_the_better_of_our_two_with_the_tuned_rival(runtime_report):
    rows = {(r["batch_size"], r["temperature"], r["system"]): r for r in runtime_report["rows"]}
    assert len(runtime_report["ratios"]) == 2 * 4
    for ratio in runtime_report["ratios"]:
        cell = (ratio["batch_size"], ratio["temperature"])
        if ratio["kind"] == "plain":
            assert (ratio["ours"], ratio["theirs"]) == (contest.PLAIN, contest.HF_PLAIN)
            continue
        assert ratio["theirs"] == contest.HF_TUNED
        best = rows[(*cell, ratio["ours"])]["tokens_per_s"]["median"]
        for name in (contest.FIXED, contest.ADAPTIVE):
            assert best >= rows[(*cell, name)]["tokens_per_s"]["median"]


def test_a_goal_is_met_above_a_floor_and_below_a_ceiling(runtime_report):
    goals = {(goal["goal"], goal["where"]): goal for goal in runtime_report["goals"]}
    assert {name for name, _ in goals} == {name for name, _ in report.GOALS.values()}
    python_name = report.GOALS["python"][0]
    for (name, _), goal in goals.items():
        if goal["value"] is not None:
            is_ceiling = name in (python_name, report.GOALS["memory"][0])
            assert goal["is_met"] == (
                goal["value"] <= goal["bound"] if is_ceiling else goal["value"] >= goal["bound"]
            )


def test_the_table_has_its_columns_and_says_under_which_conditions(runtime_report):
    lines = runtime_report["text"].splitlines()
    header = next(line for line in lines if line.startswith("batch"))
    assert header.split() == " ".join(report.COLUMNS).split()
    said = runtime_report["text"]
    for words in ("interleaved rounds", "threads", "no token ends a text", "left-padded"):
        assert words in said
    assert "one prompt at a time" in said
    assert "llama_cpp: not installed" in said
    assert "v(4)" in said  # K + 1 of the deepest K


def test_a_profile_divides_the_whole_round(runtime_report):
    for shares in runtime_report["profile"].values():
        parts = ("target_forward", "draft_forward", "probabilities", "python")
        assert sum(shares[part] for part in parts) == pytest.approx(1.0)
        assert min(shares[part] for part in parts) > 0.0


def test_a_random_pair_needs_no_draft_and_a_missing_one_says_what_to_do(
    tmp_path, tiny_run_config, capsys, monkeypatch
):
    monkeypatch.setattr(rivals, "has_llama_cpp", lambda: False)
    options = ["--config", str(tiny_run_config), "--artifacts", str(tmp_path)]
    options += ["--batch-sizes", "1", "--temperatures", "1", *SHORT]
    assert runtime.main(options) == 2
    assert "--random-pair" in capsys.readouterr().err
    assert (
        runtime.main([*options, "--random-pair", "--rounds", "1", "--prompt-lookup", "--int8"]) == 0
    )
    said = capsys.readouterr().out
    assert "1 new layers" in said
    for name in (contest.LOOKUP, contest.INT8_PLAIN, contest.INT8_FIXED):
        assert name in said


def test_llama_cpp_is_timed_at_batch_1_where_it_is_installed(small_pair, monkeypatch):
    asked: list[dict[str, Any]] = []

    class Llama:
        def __init__(self, **settings: Any) -> None:
            asked.append(settings)

        def generate(self, tokens: list[int], **settings: Any) -> Any:
            asked.append(settings | {"tokens": tokens})
            return itertools.count()

    module = types.ModuleType("llama_cpp")
    module.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    engine = rivals.LlamaCpp(Path("model.gguf"), max_length=32, num_threads=2)
    assert engine.run([1, 2], temperature=0.0, new_tokens=5) == Run(5)
    assert asked[0]["model_path"] == "model.gguf"
    assert (asked[1]["tokens"], asked[1]["temp"], asked[1]["top_k"]) == ([1, 2], 0.0, 0)
    settings = contest.Settings(batch_sizes=(1, 2), temperatures=(0.0,), new_tokens=4)
    built = contest.Contest(small_pair, [[1, 2], [3]], settings, llama_cpp=engine)
    built.assistant_tokens = {0.0: 2}
    assert contest.LLAMA_CPP in built._theirs(1, 0.0)
    assert contest.LLAMA_CPP not in built._theirs(2, 0.0)


# ------------------------------------------------------------------------------ arithmetic


def test_everyone_is_first_equally_often():
    names = ["a", "b", "c"]
    orders = [measuring.rotated(names, turn) for turn in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_rounds_interleave_cells_and_systems():
    order: list[str] = []
    ticks = itertools.count()

    def system(name: str) -> measuring.System:
        def run(turn: int) -> Run:
            order.append(f"{name}{turn}")
            return Run(10)

        return run

    cells = {"x": {"a": system("xa"), "b": system("xb")}, "y": {"a": system("ya")}}
    samples = measuring.run_rounds(cells, rounds=2, clock=lambda: float(next(ticks)))
    assert order == ["xa0", "xb0", "ya0", "xb1", "xa1", "ya1"]
    assert samples["x"]["a"] == [Sample(1.0, Run(10)), Sample(1.0, Run(10))]


def test_a_ratio_is_taken_round_by_round():
    ours_ = [Sample(1.0, Run(20)), Sample(4.0, Run(20)), Sample(1.0, Run(30))]
    theirs = [Sample(2.0, Run(20)), Sample(4.0, Run(10)), Sample(1.0, Run(10))]
    ratio = measuring.paired_ratio(ours_, theirs)
    assert (ratio.median, ratio.minimum, ratio.maximum) == (2.0, 2.0, 3.0)


def test_predicted_speedup_costs_every_call_at_its_own_depth():
    # Two calls with 2 drafts, one with 1, one without: 3 + 1 + 2 + 1 tokens.
    stats = DecodeStats.from_rounds([(2, 2, 3), (2, 0, 1), (1, 1, 2), (0, 0, 1)])
    predicted = ours.predicted_speedup(
        stats, draft_cost_ratio=0.25, verify_cost_ratio={1: 1.0, 2: 1.25, 3: 1.5}.__getitem__
    )
    assert predicted == 7 / (2 * (0.5 + 1.5) + (0.25 + 1.25) + 1.0)


def test_a_subset_head_is_the_head_on_its_ids_and_minus_infinity_elsewhere():
    head = torch.nn.Linear(4, 6, bias=False)
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    logits = rivals.SubsetHead(head, [5, 1])(hidden)
    assert torch.allclose(logits[..., [1, 5]], head(hidden)[..., [1, 5]])
    assert bool((logits[..., [0, 2, 3, 4]] == -torch.inf).all())


def test_assisted_rounds_are_counted_and_a_perfect_draft_is_always_accepted(small_pair):
    model = small_pair.target.model
    run = rivals.generate_assisted(
        model,
        copy.deepcopy(model),
        [[1, 2, 3]],
        temperature=0.0,
        new_tokens=8,
        seed=0,
        assistant=rivals.tuned_assistant(3),
    )
    assert run.num_tokens == 8
    assert run.stats is not None
    assert run.stats.acceptance_rate == 1.0
    assert run.stats.num_target_calls == 2  # 3 drafts and the next token, twice


def test_a_greedy_rival_gives_our_tokens_so_both_run_the_same_model(small_pair):
    engine = ours.Ours(small_pair.target, None, num_draft_tokens=0, max_batch_size=2, max_length=20)
    run = engine.run([[4, 5], [6]], temperature=0.0, new_tokens=7, seed=0)
    theirs = rivals.generate_plain(
        small_pair.target.model, [[4, 5], [6]], temperature=0.0, new_tokens=7, seed=0
    )
    assert run.num_tokens == theirs.num_tokens == 14
    assert gpu_check.check_greedy(CPU, new_tokens=24).is_passed


def test_allowed_memory_is_weights_caches_and_one_block(small_pair):
    # Target: 2 layers, 1 key/value head of width 16, float32; the draft has one of the layers.
    caches = (2 + 1) * 2 * 16 * 4 * (3 * 10)
    weights = ours.weight_bytes(small_pair.target.model, small_pair.draft.model)
    assert weights == sum(
        4 * model.num_parameters() for model in (small_pair.target.model, small_pair.draft.model)
    )
    allowed = ours.allowed_bytes(small_pair, num_rows=3, num_tokens=10, num_draft_tokens=4)
    assert allowed == weights + caches + 4 * 3 * 5 * 64


# ------------------------------------------------------------------------------ bench_generate


def test_bench_generate_answers_every_prompt_in_every_system(
    tmp_path, tiny_run_config, capsys, tiny_corpus
):
    out = tmp_path / "generate.json"
    options = ["--config", str(tiny_run_config), "--prompts", str(tiny_corpus)]
    options += ["--num-prompts", "7", "--turns", "2", "--new-tokens", "5", "--batch-sizes", "2"]
    options += ["--tune-tokens", "2", "--generate-batch-tokens", "3", "--score-texts", "2"]
    options += ["--score-repeats", "1", "--top-k", "4", "--json", str(out)]
    options += ["--threads", str(torch.get_num_threads())]
    assert bench_generate.main(options) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["system"]: row for row in found["rows"]}
    assert list(rows) == [bench_generate.OURS, bench_generate.HF, bench_generate.HF_BATCH]
    for name, row in rows.items():
        assert row["num_answers"] == 7
        assert row["mean_length"] == pytest.approx(sum(row["num_tokens"]) / 7)
        assert row["mean_length"] <= (3 if name == bench_generate.HF_BATCH else 5)
        assert row["overall_tokens_per_s"] == pytest.approx(
            sum(row["num_tokens"]) / sum(row["seconds"])
        )
        assert 0.0 <= row["padding_waste"] < 1.0
    ratio = found["ratio"]
    rates = {name: row["overall_tokens_per_s"] for name, row in rows.items()}
    assert rates[ratio["over"]] == max(rates[bench_generate.HF], rates[bench_generate.HF_BATCH])
    assert ratio["value"] == pytest.approx(rates[bench_generate.OURS] / rates[ratio["over"]])
    scoring = found["scoring"]
    share = scoring["tokens_per_s"]["median"] / scoring["products_tokens_per_s"]["median"]
    assert scoring["share"] == pytest.approx(share)
    header = capsys.readouterr().out.splitlines()
    assert (
        " ".join(bench_generate.COLUMNS).split()
        == next(line for line in header if line.startswith("system")).split()
    )


def test_padding_waste_is_what_no_answer_needed():
    work = throughput.Work(num_processed=16)
    work.add([[1, 2, 3], [1, 2, 3, 4, 5]], [2, 4])
    # 3 + 2 - 1 and 5 + 4 - 1: the last token of an answer is never read.
    assert (work.num_needed, work.num_tokens, work.num_answers) == (12, 6, 2)
    assert work.padding_waste == 0.25


def test_an_answer_ends_with_its_first_stop_token():
    assert throughput.answer_length([4, 9, 2, 9, 2], [2, 9]) == 2
    assert throughput.answer_length([4, 5], [2, 9]) == 2


def test_our_stream_wastes_nothing_on_equal_prompts_and_answers_the_rest_last(tiny_pair_dirs):
    from distill.models import ModelConfig, load_target

    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), dtype="float32", device="cpu"))
    system = throughput.OursGenerate(
        target, [[5, 6, 7]] * 5, batch_size=2, new_tokens=4, num_turns=2
    )
    turns = [system.run(turn) for turn in range(2)]
    assert system.work.num_answers == 5
    assert sum(turn.num_tokens for turn in turns) == system.work.num_tokens
    assert system.work.padding_waste == 0.0


def test_scoring_replays_every_matrix_product_of_the_model(tiny_pair_dirs):
    from distill.models import ModelConfig, load_target

    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), dtype="float32", device="cpu"))
    scoring = throughput.Scoring(target, [[1, 2, 3, 4], [5, 6]], top_k=3)
    assert scoring.num_tokens == 4
    # Seven products a layer and the head, for each of the two texts.
    assert len(scoring._products) == 2 * (4 * 7 + 1)
    assert {positions for _, positions in scoring._products} == {3, 1}
    assert scoring.products(0) == scoring.score(0) == Run(4)


# ------------------------------------------------------------------------------ gpu_check


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_its_module(name):
    script = REPOSITORY / "scripts" / name
    assert os.access(script, os.X_OK)
    assert f'bin/python" -m {SCRIPTS[name]} "$@"' in script.read_text(encoding="utf-8")


def test_gpu_check_runs_nothing_without_a_gpu():
    done = subprocess.run(
        [REPOSITORY / "scripts/gpu_check"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "VENV": sys.prefix},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "no CUDA device: nothing was run\n"), done.stderr


def test_gpu_checks_hold_on_a_cpu_too():
    assert gpu_check.check_ragged_batch(CPU, new_tokens=12).is_passed
    assert gpu_check.check_sampled_law(CPU, num_samples=600).is_passed
    training = gpu_check.check_training(CPU, num_steps=12)
    assert "tokens/s" in training.detail


def test_gpu_checks_notice_what_they_are_for(monkeypatch, capsys):
    monkeypatch.setattr(
        gpu_check, "_joint_law", lambda *_: torch.full((12, 12), 1 / 144, dtype=torch.float64)
    )
    assert not gpu_check.check_sampled_law(CPU, num_samples=600).is_passed
    monkeypatch.setattr(gpu_check, "_generated", lambda *_: [1])
    assert not gpu_check.check_greedy(CPU, new_tokens=8).is_passed
    bad = gpu_check.Check("a law", False, "p 0.000")
    monkeypatch.setattr(gpu_check, "CHECKS", (lambda _: bad,))
    assert gpu_check.main(["--device", "cpu", "--no-bench"]) == 1
    assert "FAIL  a law: p 0.000" in capsys.readouterr().out
