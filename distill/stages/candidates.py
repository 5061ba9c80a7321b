"""Candidates: what a draft of each shape would cost and could gain, before any of them is trained.

Refuses to know how often a draft will be accepted: speedups are shown for a range of rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from distill.artifacts import Artifact
from distill.errors import ConfigError
from distill.initialization import ExistingConfig, InitializationConfig, ShapeOf, started_shape
from distill.metrics import planner
from distill.metrics.planner import VerifyCost
from distill.models import LoadedModel, ModelConfig, ModelShape, has_weights_here, read_shape
from distill.stages.plan_shapes import WEIGHT_BYTES, body_parameters
from distill.stages.run_config import RunConfig
from distill.stages.speed_plan import MeasuredCosts, measured_costs

if TYPE_CHECKING:
    from rich.table import Table

_CONTEXT_TOKENS = 128
_WIDTHS = (1, 2, 3, 5, 9)
_DRAFTED = 4
_REPEATS = 5


@dataclass(frozen=True)
class Candidate:
    """A start, the shape it gives, and what the speed model says of it.

    ``draft_cost_ratio`` is measured, or, where ``draft_step_ms`` is None, the ratio of the bytes a
    step reads. ``by_alpha``: best K and speedup at each acceptance rate.
    ``break_even_acceptance_rate``: None if even a draft that is always accepted loses.
    """

    kind: str
    shape: ModelShape
    num_parameters: int
    draft_cost_ratio: float
    draft_step_ms: float | None
    break_even_acceptance_rate: float | None
    by_alpha: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CandidatePlan:
    """All candidates, the config's own first. ``note`` says why there are none or no measurement.

    Measured on random weights in the target's architecture: a step's cost does not depend on what
    the weights are. An existing model is measured itself, in its own architecture and dtype; one
    whose weights are not on this machine keeps its estimate. Where the run has been measured, its
    own draft has the cost that was found then, and the others the target's.
    """

    is_measured: bool
    note: str
    target_step_ms: float | None = None
    verify_cost_ratio: Mapping[int, float] | None = None
    conditions: Mapping[str, Any] | None = None
    candidates: Sequence[Candidate] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        content = asdict(self)
        for entry, candidate in zip(content["candidates"], self.candidates, strict=True):
            entry["shape"] = candidate.shape.model_dump()
        return content


def plan_candidates(
    config: RunConfig,
    shape_of: ShapeOf = read_shape,
    *,
    measured: Artifact | None = None,
    measure: bool = False,
) -> CandidatePlan:
    """Compare the draft's own start with those of ``candidates``.

    ``measured`` is the run's own measurement, if there is one.

    With ``measure``, and the target's weights on this machine, steps of the target and of a random
    model of each shape are timed (seconds, once the target is loaded). Nothing is downloaded.

    Raises:
        ConfigError: a start that does not fit the target.
    """
    target = shape_of(config.target)
    if target is None:
        return CandidatePlan(False, "shape of the target unknown: set target.shape")
    starts: list[InitializationConfig] = [config.distill.initialization, *config.candidates]
    shapes = [_started_shape(start, target, shape_of) for start in starts]
    if measure and has_weights_here(config.target):
        return _measured(config, starts, shapes)
    if costs := measured_costs(measured):
        return _as_measured(config, starts, shapes, target, costs)
    note = "c by the bytes a step reads, v(n) = 1"
    if measure:
        note += "; nothing is measured, since the target's weights are not on this machine"
    return CandidatePlan(
        is_measured=False,
        note=note,
        candidates=[
            _candidate(
                config,
                start,
                shape,
                _estimated_cost(config, start, shape, target),
                planner.free_verification,
                None,
            )
            for start, shape in zip(starts, shapes, strict=True)
        ],
    )


def _as_measured(
    config: RunConfig,
    starts: Sequence[InitializationConfig],
    shapes: Sequence[ModelShape],
    target: ModelShape,
    costs: MeasuredCosts,
) -> CandidatePlan:
    """The config's own draft as the run's measurement found it; the others by bytes beside it."""
    cost_ratio, verify = costs.by_batch_size[1]
    estimated = [
        _estimated_cost(config, start, shape, target)
        for start, shape in zip(starts, shapes, strict=True)
    ]
    note = "c of the config's own draft and v(n) as the measure stage found them at batch 1"
    if len(starts) > 1:
        note += "; ~: by the bytes a step reads"
    return CandidatePlan(
        is_measured=True,
        note=note,
        target_step_ms=costs.target_step_ms,
        verify_cost_ratio=verify,
        conditions=costs.conditions,
        candidates=[
            _candidate(
                config,
                start,
                shape,
                by_bytes if index else cost_ratio,
                planner.interpolate(verify),
                None if index else costs.draft_step_ms,
            )
            for index, (start, shape, by_bytes) in enumerate(
                zip(starts, shapes, estimated, strict=True)
            )
        ],
    )


def _started_shape(
    start: InitializationConfig, target: ModelShape, shape_of: ShapeOf
) -> ModelShape:
    shape = started_shape(start, target, shape_of)
    if shape is None:
        assert isinstance(start, ExistingConfig)
        raise ConfigError(
            f"the shape of the candidate {start.model.model!r} is unknown, since its config.json "
            "cannot be read; set its `shape:`"
        )
    return shape


def _estimated_cost(
    config: RunConfig, start: InitializationConfig, shape: ModelShape, target: ModelShape
) -> float:
    """c by the bytes that a step of the draft and one of the target read."""
    held = start.model if isinstance(start, ExistingConfig) else config.target.unquantized
    rows = config.distill.vocabulary_size or shape.vocab_size
    return _step_bytes(shape, rows, held) / _step_bytes(target, target.vocab_size, config.target)


def _step_bytes(shape: ModelShape, head_rows: int, held: ModelConfig) -> int:
    """Bytes of weights one step reads: everything but the embedding, of which it reads one row."""
    per_weight = 1 if held.quantize == "int8" else WEIGHT_BYTES[held.dtype]
    return (body_parameters(shape) + head_rows * shape.hidden_size) * per_weight


def _candidate(
    config: RunConfig,
    start: InitializationConfig,
    shape: ModelShape,
    draft_cost_ratio: float,
    verify_cost_ratio: VerifyCost,
    draft_step_ms: float | None,
) -> Candidate:
    from distill.metrics.planner_tables import speedups_by_alpha

    deepest = config.measure.timing.max_draft_tokens
    costs: dict[str, Any] = {
        "draft_cost_ratio": draft_cost_ratio,
        "verify_cost_ratio": verify_cost_ratio,
        "max_draft_tokens": deepest,
    }
    return Candidate(
        kind=start.kind,
        shape=shape,
        num_parameters=shape.num_parameters,
        draft_cost_ratio=draft_cost_ratio,
        draft_step_ms=draft_step_ms,
        break_even_acceptance_rate=planner.break_even_acceptance_rate(**costs),
        by_alpha=speedups_by_alpha(**costs),
    )


def _measured(
    config: RunConfig, starts: Sequence[InitializationConfig], shapes: Sequence[ModelShape]
) -> CandidatePlan:
    from distill.metrics import timing
    from distill.models import load_target
    from distill.stages.measure_batch import draft_call, target_pass
    from distill.stages.measure_runs import Contestant

    target = load_target(config.target)
    num_tokens = min(len(target.tokenizer), target.shape.vocab_size)
    subset = config.distill.vocabulary_size
    token_ids = None if subset is None else tuple(range(min(subset, num_tokens)))
    room = min(shape.max_position_embeddings for shape in (target.shape, *shapes)) // 2
    context = [index % num_tokens for index in range(min(_CONTEXT_TOKENS, room))]
    drafts = {
        index: Contestant(str(index), draft, token_ids)
        for index, (start, shape) in enumerate(zip(starts, shapes, strict=True))
        if (draft := _draft(start, shape, target)) is not None
    }
    deepest = config.measure.timing.max_draft_tokens + 1
    costs = timing.measure_step_costs(
        target_pass(target, context),
        {
            index: draft_call(target, draft, context, 1.0, _DRAFTED)
            for index, draft in drafts.items()
        },
        widths=[width for width in _WIDTHS if width < deepest] + [deepest],
        repeats=_REPEATS,
        draft_steps_per_call=_DRAFTED,
    )
    note = "c and v(n) measured at batch 1"
    if len(drafts) < len(starts):
        note += "; ~: by the bytes a step reads, since the model's weights are not on this machine"
    return CandidatePlan(
        is_measured=True,
        note=note,
        target_step_ms=costs.target_step_ms.median,
        verify_cost_ratio=costs.verify_cost_ratio,
        conditions=timing.conditions(target.device, target.dtype),
        candidates=[
            _candidate(
                config,
                start,
                shapes[index],
                costs.draft_cost_ratio[index]
                if index in drafts
                else _estimated_cost(config, start, shapes[index], target.shape),
                planner.interpolate(costs.verify_cost_ratio),
                costs.draft_step_ms[index].median if index in drafts else None,
            )
            for index, start in enumerate(starts)
        ],
    )


def _draft(
    start: InitializationConfig, shape: ModelShape, target: LoadedModel
) -> LoadedModel | None:
    """A model whose steps cost what the draft's will; None: its weights are not on this machine."""
    from distill.initialization import model_of_shape
    from distill.initialization.transplant import resize_rows
    from distill.models import load_target

    if not isinstance(start, ExistingConfig):
        return model_of_shape(target, shape, seed=0)
    if not has_weights_here(start.model):
        return None
    draft = load_target(start.model)
    draft.vocabulary = None  # as a training from it: the config alone says what it may propose
    if draft.shape.vocab_size != shape.vocab_size:
        resize_rows(draft, shape.vocab_size)
    draft.model.to(target.device)
    return draft


def candidate_table(plan: CandidatePlan) -> Table:
    """The candidates as a table for the terminal: a row a shape, a speedup for each alpha."""
    from rich.table import Table

    table = Table(title="draft shapes, the config's own first", title_justify="left")
    alphas = [row["alpha"] for row in plan.candidates[0].by_alpha] if plan.candidates else []
    table.add_column("start", no_wrap=True)
    table.add_column("layers x width, MLP, heads", no_wrap=True)
    for name in ("weights", "c", "alpha >"):
        table.add_column(name, justify="right", no_wrap=True)
    for alpha in alphas:
        table.add_column(f"{alpha:g}", justify="right")
    for candidate in plan.candidates:
        shape, rate = candidate.shape, candidate.break_even_acceptance_rate
        table.add_row(
            candidate.kind,
            f"{shape.num_hidden_layers} x {shape.hidden_size}, {shape.intermediate_size}, "
            f"{shape.num_attention_heads}/{shape.num_key_value_heads}",
            f"{candidate.num_parameters / 1e6:.1f} M",
            f"{'~' if candidate.draft_step_ms is None else ''}{candidate.draft_cost_ratio:.3f}",
            "never" if rate is None else f"{rate:.2f}",
            *(
                f"{row['predicted_speedup']:.2f} @{row['num_draft_tokens']}"
                for row in candidate.by_alpha
            ),
        )
    table.caption = (
        "alpha >: acceptance rate from which drafting pays; then the speedup at each rate, @ the "
        f"best K. {plan.note}"
        if plan.candidates
        else f"none: {plan.note}"
    )
    return table
