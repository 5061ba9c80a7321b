"""Owns scripts/bench_generate: its options, the interleaved run, the table, the scoring rate.
Refuses to know how a system answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distill import load_config
from distill.errors import ConfigError
from distill.metrics import timing
from distill.metrics.timing import Spread
from distill.models import LoadedModel, load_target
from scripts.benchmarks import measuring
from scripts.benchmarks.measuring import Sample, megabytes, number, table
from scripts.benchmarks.pairs import describe
from scripts.benchmarks.throughput import (
    OursGenerate,
    Scoring,
    TransformersGenerate,
    TransformersGenerateBatch,
    best_batch_size,
)

DESCRIPTION = """Times answering many prompts beside transformers' two ways, in one interleaved run.

By default: the target of configs/quickstart.yaml, 256 prompts of its corpus, up to 128 new tokens
at temperature 1. About 10 minutes on 2 cores."""

OURS, HF, HF_BATCH = "ours", "transformers generate", "transformers generate_batch"
MAKERS: Mapping[str, Any] = {
    OURS: OursGenerate,
    HF: TransformersGenerate,
    HF_BATCH: TransformersGenerateBatch,
}
COLUMNS = (
    "system",
    "batch",
    "new tokens",
    "answers",
    "mean length",
    "tokens/s [min, max]",
    "overall",
    "padding waste",
    "peak memory",
)
GOAL_RATIO, GOAL_SCORING = 3.0, 0.8


@dataclass(frozen=True)
class Settings:
    """One run; every number that a reader needs to repeat it."""

    new_tokens: int = 128
    generate_batch_tokens: int = 32
    turns: int = 4
    batch_sizes: tuple[int, ...] = (16, 32, 64)
    tune_tokens: int = 24
    score_texts: int = 24
    score_repeats: int = 3
    top_k: int = 64

    def budget_of(self, name: str) -> int:
        """New tokens a row: fewer where the whole would take many minutes."""
        return (
            min(self.generate_batch_tokens, self.new_tokens)
            if name == HF_BATCH
            else (self.new_tokens)
        )


def run_bench(
    target: LoadedModel, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """Everything that is measured, as JSON-able values; :func:`text` prints it."""
    tell = measuring.Narrator("bench_generate")
    ordered = sorted(prompts, key=len)
    with measuring.quiet_libraries():
        batch_sizes = {}
        for name in MAKERS:
            tell(f"the best batch size of {name}")
            batch_sizes[name] = _tuned(name, target, ordered, settings)
        systems = {
            name: MAKERS[name](
                target,
                ordered,
                batch_size=batch_sizes[name],
                new_tokens=settings.budget_of(name),
                num_turns=settings.turns,
            )
            for name in MAKERS
        }
        samples = measuring.run_rounds(
            {"": {name: system.run for name, system in systems.items()}},
            rounds=settings.turns,
            on_round=lambda turn: tell(f"turn {turn + 1} of {settings.turns}"),
        )[""]
        tell("scoring")
        scoring = _scoring(target, ordered, settings)
    rows = [
        _row(name, batch_sizes[name], settings.budget_of(name), systems[name].work, samples[name])
        for name in MAKERS
    ]
    best = max((HF, HF_BATCH), key=lambda name: _overall(samples[name]))
    return {
        "conditions": timing.conditions(target.device, target.dtype),
        "target": describe(target),
        "settings": asdict(settings),
        "num_prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in ordered],
        "rows": rows,
        "scoring": scoring,
        "ratio": {"over": best, "value": _overall(samples[OURS]) / _overall(samples[best])},
    }


def _tuned(
    name: str, target: LoadedModel, ordered: Sequence[Sequence[int]], settings: Settings
) -> int:
    """On prompts at equal steps through all lengths, with a few new tokens."""
    candidates = sorted({min(size, len(ordered)) for size in settings.batch_sizes})
    step = max(1, len(ordered) // candidates[-1])
    some = list(ordered[::step])[: candidates[-1]]
    budget = min(settings.tune_tokens, settings.budget_of(name))
    if name == HF_BATCH:
        budget = max(1, budget // 3)

    def make(batch_size: int, asked: Sequence[Sequence[int]] = some) -> Any:
        system = MAKERS[name](target, asked, batch_size=batch_size, new_tokens=budget, num_turns=1)
        return system.run

    make(candidates[0], some[:2])(0)  # warm-up
    return best_batch_size(make, candidates, time.perf_counter)


def _overall(samples: Sequence[Sample]) -> float:
    """Tokens of all turns over their seconds."""
    return sum(s.run.num_tokens for s in samples) / sum(s.seconds for s in samples)


def _row(
    name: str, batch_size: int, budget: int, work: Any, samples: Sequence[Sample]
) -> dict[str, Any]:
    return {
        "system": name,
        "batch_size": batch_size,
        "new_tokens": budget,
        "num_answers": work.num_answers,
        "mean_length": work.num_tokens / work.num_answers,
        "tokens_per_s": measuring.throughput(samples).to_dict(),
        "overall_tokens_per_s": _overall(samples),
        "padding_waste": work.padding_waste,
        "peak_bytes": work.peak_bytes,
        "seconds": [sample.seconds for sample in samples],
        "num_tokens": [sample.run.num_tokens for sample in samples],
    }


def _scoring(
    target: LoadedModel, ordered: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """Scores of prompt-and-answer sized texts, interleaved with their matrix products alone."""
    step = max(1, len(ordered) // settings.score_texts)
    vocabulary = target.shape.vocab_size
    limit = target.shape.max_position_embeddings
    texts = [
        # What the answer says does not matter to the clock: the prompt again stands in for it.
        (list(prompt) * (2 + settings.new_tokens // len(prompt)))[
            : min(limit, len(prompt) + settings.new_tokens)
        ]
        for prompt in ordered[::step][: settings.score_texts]
    ]
    scoring = Scoring(target, texts, top_k=min(settings.top_k, vocabulary))
    scoring.products(0)
    samples = measuring.run_rounds(
        {"": {"score": scoring.score, "products": scoring.products}},
        rounds=settings.score_repeats,
    )[""]
    return {
        "num_texts": len(texts),
        "num_tokens": scoring.num_tokens,
        "top_k": settings.top_k,
        "tokens_per_s": measuring.throughput(samples["score"]).to_dict(),
        "products_tokens_per_s": measuring.throughput(samples["products"]).to_dict(),
        "share": measuring.paired_ratio(samples["score"], samples["products"]).median,
    }


def goals(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal with the number that is to meet it."""
    values = (
        (f"ours / {report['ratio']['over']}", report["ratio"]["value"], GOAL_RATIO),
        ("scoring / its matrix products alone", report["scoring"]["share"], GOAL_SCORING),
    )
    return [
        {"goal": name, "value": value, "bound": bound, "is_met": value >= bound}
        for name, value, bound in values
    ]


def text(report: Mapping[str, Any]) -> str:
    """The whole report for a terminal."""
    conditions, settings, scoring = report["conditions"], report["settings"], report["scoring"]
    lengths = report["prompt_tokens"]
    rows = [_table_row(row) for row in report["rows"]]
    results = [
        [g["goal"], number(g["value"]), number(g["bound"]), "met" if g["is_met"] else "NOT met"]
        for g in goals(report)
    ]
    return "\n".join(
        [
            f"target  {report['target']}",
            f"on      {conditions['device_name']}, {conditions['num_threads']} threads, torch "
            f"{conditions['torch']}, load {number(conditions['load_average'])}",
            f"run     {report['num_prompts']} prompts of {lengths[0]} to {lengths[-1]} tokens in "
            f"{settings['turns']} interleaved turns, temperature 1, texts end where they end",
            "",
            table(COLUMNS, rows),
            "",
            table(("goal", "value", "bound", "result"), results),
            "",
            f"scoring, top {scoring['top_k']}: {scoring['tokens_per_s']['median']:.0f} tokens/s of "
            f"{scoring['num_texts']} texts; their matrix products alone "
            f"{scoring['products_tokens_per_s']['median']:.0f} tokens/s",
            "overall: all tokens over all seconds; the spread is over the turns, which go from "
            "short prompts to long ones",
            "padding waste: positions the target ran on that no answer needed. peak memory: the "
            "most one turn added, weights not counted",
            f"batch: the best of {', '.join(map(str, settings['batch_sizes']))} for each system; "
            f"generate_batch has {settings['generate_batch_tokens']} new tokens a row at most, to "
            "finish in minutes",
        ]
    )


def _table_row(row: Mapping[str, Any]) -> list[str]:
    waste = row["padding_waste"]
    return [
        row["system"],
        str(row["batch_size"]),
        str(row["new_tokens"]),
        str(row["num_answers"]),
        number(row["mean_length"], 1),
        measuring.with_range(Spread(**row["tokens_per_s"])),
        number(row["overall_tokens_per_s"], 1),
        "-" if waste is None else f"{100 * waste:.1f}%",
        megabytes(row["peak_bytes"]),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench_generate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, default=Path("configs/quickstart.yaml"), help="names the target")
    add("--prompts", type=Path, metavar="JSONL", help="default: the config's corpus")
    add("--num-prompts", type=measuring.positive, default=256)
    add("--batch-sizes", type=measuring.positive, nargs="+", default=default.batch_sizes)
    for name in (
        "new_tokens",
        "generate_batch_tokens",
        "turns",
        "tune_tokens",
        "score_texts",
        "score_repeats",
        "top_k",
    ):
        flag = "--" + name.replace("_", "-")
        add(flag, type=measuring.positive, default=getattr(default, name))
    add("--device", default="auto")
    add("--threads", type=measuring.positive, default=measuring.default_threads())
    add("--json", type=Path, metavar="OUT", help="write every number there")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Load the target and its prompts, then measure."""
    config = load_config(options.config)
    path: Path | None = options.prompts or config.generate.corpus.path
    if path is None:
        raise ConfigError(f"{options.config} reads no file of prompts; give one with --prompts")
    measuring.pin_threads(options.threads)
    target = load_target(config.target.model_copy(update={"device": options.device}))
    prompts = measuring.read_prompts(path, target.tokenizer, number=options.num_prompts)
    settings = Settings(
        new_tokens=options.new_tokens,
        generate_batch_tokens=options.generate_batch_tokens,
        turns=options.turns,
        batch_sizes=tuple(options.batch_sizes),
        tune_tokens=options.tune_tokens,
        score_texts=options.score_texts,
        score_repeats=options.score_repeats,
        top_k=options.top_k,
    )
    return run_bench(target, prompts, settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 2 for a mistake that the message explains."""
    options = parse(arguments)
    return measuring.publish("bench_generate", lambda: run(options), text, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
