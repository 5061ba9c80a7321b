"""Owns the contest of scripts/bench_runtime: which systems run, at which K, on which prompts.
Refuses to know how a system decodes, and to print.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.runtime.draft_length import AdaptiveDraftLength, SpeedModel
from distill.runtime.stats import DecodeStats
from scripts.benchmarks import measuring, ours, rivals
from scripts.benchmarks.measuring import PeakMemory, Run, Sample, System
from scripts.benchmarks.ours import Costs, Ours, Pair
from scripts.benchmarks.pairs import made_up_pair

PLAIN, FIXED, ADAPTIVE = "ours plain", "ours speculative", "ours adaptive"
LOOKUP = "ours prompt lookup"
INT8_PLAIN, INT8_FIXED = "ours int8 plain", "ours int8 speculative"
HF_PLAIN, HF_DEFAULT, HF_TUNED = (
    "transformers plain",
    "transformers assisted",
    "transformers assisted tuned",
)
LLAMA_CPP = "llama.cpp plain"
BASELINE = {
    FIXED: PLAIN,
    ADAPTIVE: PLAIN,
    LOOKUP: PLAIN,
    INT8_FIXED: INT8_PLAIN,
    HF_DEFAULT: HF_PLAIN,
    HF_TUNED: HF_PLAIN,
}
"""What each speedup is over: the same engine without speculation."""

_WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """One run; every number that a reader needs to repeat it."""

    batch_sizes: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 128
    rounds: int = 3
    max_draft_tokens: int = 8
    cost_repeats: int = 11
    pilot_tokens: int = 48
    assistant_tokens: tuple[int, ...] = (1, 2, 3, 4, 6)
    sweep_tokens: int = 32
    use_prompt_lookup: bool = False


@dataclass(frozen=True)
class Entry:
    """One system of one cell, with what predicts it where that is known."""

    run: System
    label: str  # its K
    costs: Costs | None = None


Cell = tuple[int, float]
"""A batch size and a temperature."""


class Contest:
    """Builds and runs every system over one pair."""

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        *,
        int8_pair: Pair | None = None,
        llama_cpp: rivals.LlamaCpp | None = None,
    ) -> None:
        self.pair, self.prompts, self.settings = pair, prompts, settings
        self.int8_pair, self.llama_cpp = int8_pair, llama_cpp
        self.max_length = max(map(len, prompts)) + settings.new_tokens
        self.costs: dict[str, dict[int, dict[float, Costs]]] = {}
        self.assistant_tokens: dict[float, int] = {}
        head = pair.draft.model.get_output_embeddings()
        ids = pair.vocabulary_token_ids
        self._assistant_head = None if ids is None else rivals.SubsetHead(head, ids)

    def prompts_of(self, turn: int, number: int) -> list[Sequence[int]]:
        """The prompts of a round: every system of a cell gets the same ones."""
        first = turn * number
        return [self.prompts[(first + i) % len(self.prompts)] for i in range(number)]

    def engine(self, pair: Pair, batch_size: int, num_draft_tokens: int, **settings: Any) -> Ours:
        """One of our engines; no drafter where nothing is to be drafted."""
        return Ours(
            pair.target,
            pair.make_drafter() if num_draft_tokens else None,
            num_draft_tokens=num_draft_tokens,
            max_batch_size=batch_size,
            max_length=self.max_length,
            **settings,
        )

    # -------------------------------------------------------------------------- systems

    def cells(self) -> dict[Cell, dict[str, Entry]]:
        """Measure costs and acceptance, choose every K, and make all systems."""
        for name, pair in self._pairs():
            self.costs[name] = {
                batch: ours.measure_costs(
                    pair,
                    self.prompts_of(0, batch),
                    self.settings.temperatures,
                    new_tokens=self.settings.new_tokens,
                    max_draft_tokens=self.settings.max_draft_tokens,
                    repeats=self.settings.cost_repeats,
                )
                for batch in self.settings.batch_sizes
            }
        made: dict[Cell, dict[str, Entry]] = {}
        for temperature in self.settings.temperatures:
            self.assistant_tokens[temperature] = self._sweep(temperature)
            pilots = {name: self.pilot(pair, temperature) for name, pair in self._pairs()}
            for batch in self.settings.batch_sizes:
                cell = self._ours(batch, temperature, pilots) | self._theirs(batch, temperature)
                made[batch, temperature] = cell
        return dict(sorted(made.items()))

    def _pairs(self) -> Iterator[tuple[str, Pair]]:
        yield "own", self.pair
        if self.int8_pair is not None:
            yield "int8", self.int8_pair

    def pilot(self, pair: Pair, temperature: float) -> DecodeStats:
        """A few answers at a middling depth, for the acceptance that K is planned from."""
        number = max(self.settings.batch_sizes)
        depth = min(ours.COST_DRAFT_TOKENS, self.settings.max_draft_tokens)
        run = self.engine(pair, number, depth).run(
            self.prompts_of(0, number),
            temperature=temperature,
            new_tokens=min(self.settings.pilot_tokens, self.settings.new_tokens),
            seed=99,
        )
        assert run.stats is not None
        return run.stats

    def _depth(self, stats: DecodeStats, costs: Costs) -> int:
        # "Do not draft" is a legal plan, and needs evidence too: then one draft is timed.
        limit = self.settings.max_draft_tokens
        return max(1, ours.best_depth(stats, costs, max_draft_tokens=limit).num_draft_tokens)

    def _ours(
        self, batch: int, temperature: float, pilots: Mapping[str, DecodeStats]
    ) -> dict[str, Entry]:
        costs = self.costs["own"][batch][temperature]
        depth = self._depth(pilots["own"], costs)
        limit = self.settings.max_draft_tokens
        adaptive = AdaptiveDraftLength(
            SpeedModel(costs.draft_cost_ratio, costs.verify_cost_ratio),
            limit,
            prior_acceptance_rate=pilots["own"].acceptance_rate or 0.0,
        )
        engines: dict[str, tuple[Ours, str, Costs | None]] = {
            PLAIN: (self.engine(self.pair, batch, 0), "0", None),
            FIXED: (self.engine(self.pair, batch, depth), str(depth), costs),
            ADAPTIVE: (
                self.engine(self.pair, batch, limit, draft_length=adaptive),
                f"0-{limit}",
                costs,
            ),
        }
        if self.settings.use_prompt_lookup:
            engines[LOOKUP] = (
                Ours(
                    self.pair.target,
                    PromptLookupDrafter(),
                    num_draft_tokens=limit,
                    max_batch_size=batch,
                    max_length=self.max_length,
                ),
                str(limit),
                replace(costs, draft_cost_ratio=0.0),
            )
        if self.int8_pair is not None:
            costs = self.costs["int8"][batch][temperature]
            depth = self._depth(pilots["int8"], costs)
            engines[INT8_PLAIN] = (self.engine(self.int8_pair, batch, 0), "0", None)
            engines[INT8_FIXED] = (
                self.engine(self.int8_pair, batch, depth),
                str(depth),
                costs,
            )
        return {
            name: Entry(functools.partial(self._run_ours, engine, batch, temperature), label, known)
            for name, (engine, label, known) in engines.items()
        }

    def _run_ours(self, engine: Ours, batch: int, temperature: float, turn: int) -> Run:
        return engine.run(
            self.prompts_of(turn, batch),
            temperature=temperature,
            new_tokens=self.settings.new_tokens,
            seed=turn,
        )

    def _theirs(self, batch: int, temperature: float) -> dict[str, Entry]:
        best = self.assistant_tokens[temperature]
        run_assisted = functools.partial(self._run_assisted, temperature)
        entries = {
            HF_PLAIN: Entry(functools.partial(self._run_plain, batch, temperature), "0"),
            HF_DEFAULT: Entry(
                functools.partial(run_assisted, rivals.DEFAULT_ASSISTANT, None), "20"
            ),
            HF_TUNED: Entry(
                functools.partial(run_assisted, rivals.tuned_assistant(best), self._assistant_head),
                str(best),
            ),
        }
        if self.llama_cpp is not None and batch == 1:
            entries[LLAMA_CPP] = Entry(functools.partial(self._run_llama_cpp, temperature), "0")
        return entries

    def _run_plain(self, batch: int, temperature: float, turn: int) -> Run:
        return rivals.generate_plain(
            self.pair.target.model,
            self.prompts_of(turn, batch),
            temperature=temperature,
            new_tokens=self.settings.new_tokens,
            seed=turn,
        )

    def _run_assisted(
        self, temperature: float, assistant: dict[str, Any], head: Any, turn: int
    ) -> Run:
        # It takes no batch, so at any batch size it answers one prompt after the other, and one a
        # round says how fast that is.
        return rivals.generate_assisted(
            self.pair.target.model,
            self.pair.draft.model,
            self.prompts_of(turn, 1),
            temperature=temperature,
            new_tokens=self.settings.new_tokens,
            seed=turn,
            assistant=assistant,
            head=head,
        )

    def _run_llama_cpp(self, temperature: float, turn: int) -> Run:
        assert self.llama_cpp is not None
        return self.llama_cpp.run(
            self.prompts_of(turn, 1)[0],
            temperature=temperature,
            new_tokens=self.settings.new_tokens,
        )

    def _sweep(self, temperature: float) -> int:
        def run(num_draft_tokens: int) -> Run:
            return rivals.generate_assisted(
                self.pair.target.model,
                self.pair.draft.model,
                self.prompts_of(0, 2),
                temperature=temperature,
                new_tokens=min(self.settings.sweep_tokens, self.settings.new_tokens),
                seed=7,
                assistant=rivals.tuned_assistant(num_draft_tokens),
                head=self._assistant_head,
            )

        return rivals.best_assistant_tokens(run, self.settings.assistant_tokens)

    # -------------------------------------------------------------------------- the run

    def time(
        self,
        cells: Mapping[Cell, Mapping[str, Entry]],
        *,
        on_round: Callable[[int], None] | None = None,
    ) -> dict[Cell, dict[str, list[Sample]]]:
        """Warm every system up, then run the rounds."""
        whole = self.settings
        self.settings = replace(whole, new_tokens=min(_WARMUP_TOKENS, whole.new_tokens))
        for systems in cells.values():
            for entry in systems.values():
                entry.run(0)
        self.settings = whole
        return measuring.run_rounds(
            {cell: {name: e.run for name, e in systems.items()} for cell, systems in cells.items()},
            rounds=whole.rounds,
            on_round=on_round,
        )

    def profile(self) -> dict[float, ours.RoundShares]:
        """Where a round of our speculative decoding spends its time, at the first batch size."""
        batch = self.settings.batch_sizes[0]
        shares = {}
        for temperature in self.settings.temperatures:
            depth = min(ours.COST_DRAFT_TOKENS, self.settings.max_draft_tokens)
            engine = self.engine(self.pair, batch, depth)
            asked = ours.requests(
                self.prompts_of(0, batch),
                temperature=temperature,
                new_tokens=self.settings.new_tokens,
                seed=0,
            )
            shares[temperature] = ours.profile_rounds(engine, asked)
        return shares


@dataclass(frozen=True)
class Memory:
    """Bytes our speculative decoding held, above an empty process, and what it may hold."""

    peak_bytes: int | None
    allowed_bytes: int
    weight_bytes: int
    batch_size: int
    num_draft_tokens: int


def empty_process_bytes(device: torch.device, dtype: torch.dtype) -> int | None:
    """Memory held with every library loaded and warm, and no model worth counting."""
    pair = made_up_pair(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=64,
        device=device,
        dtype=dtype,
    )
    engine = Ours(
        pair.target, pair.make_drafter(), num_draft_tokens=2, max_batch_size=2, max_length=16
    )
    engine.run([[1, 2], [3]], temperature=1.0, new_tokens=8, seed=0)
    return measuring.held_bytes(device)


def measure_memory(contest: Contest, empty_bytes: int | None) -> Memory:
    """Peak of one batch at the largest size; run it before anything else leaves memory behind."""
    batch, pair = max(contest.settings.batch_sizes), contest.pair
    depth = min(ours.COST_DRAFT_TOKENS, contest.settings.max_draft_tokens)
    with PeakMemory(pair.target.device) as peak:
        contest.engine(pair, batch, depth).run(
            contest.prompts_of(0, batch),
            temperature=max(contest.settings.temperatures),
            new_tokens=contest.settings.new_tokens,
            seed=0,
        )
    known = peak.peak_bytes is not None and empty_bytes is not None
    return Memory(
        peak_bytes=peak.peak_bytes - empty_bytes if known else None,  # type: ignore[operator]
        allowed_bytes=ours.allowed_bytes(
            pair,
            num_rows=batch,
            num_tokens=contest.max_length + depth + 1,
            num_draft_tokens=depth,
        ),
        weight_bytes=ours.weight_bytes(pair.target.model, pair.draft.model),
        batch_size=batch,
        num_draft_tokens=depth,
    )
