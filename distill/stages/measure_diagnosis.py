"""Owns putting a diagnosis together: the columns of the first draft, with the tokens as text.

Refuses to know how shares are computed (``metrics.diagnosis``) and how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.metrics import diagnosis
from distill.metrics.acceptance import PRIMARY_RULE
from distill.metrics.chain import typical_rounds
from distill.metrics.diagnosis import ScoredText
from distill.models import LoadedModel
from distill.runtime.verify import acceptance_probability
from distill.sampling import SamplingConfig, logits_to_probs
from distill.stages.measure_audit import Answers
from distill.stages.measure_forced import completion_logits, draft_logits
from distill.stages.measure_runs import Contestant, HeldOutPrompt
from distill.stages.measure_units import Bench, Scored, acceptance_column

_SCALES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
_SCAN_POSITIONS = 256
_NUM_EXAMPLES = 3
_EXAMPLE_TOKENS = 160
_LEAST_TEMPERATURE = 1e-3


def diagnose_draft(
    bench: Bench,
    prompts: Sequence[HeldOutPrompt],
    temperatures: Sequence[float],
    answers: Answers,
    scored: Scored,
) -> list[dict[str, Any]]:
    """One diagnosis of the first draft per temperature; empty for a draft that only copies."""
    target, draft = bench.target, bench.contestants[0]
    if draft.is_lookup:
        return []
    rows = []
    for temperature in temperatures:
        texts = [
            ScoredText(
                p.prompt_id,
                p.task,
                p.token_ids,
                answers[temperature, p.prompt_id],
                scored[temperature, p.prompt_id]["target"]["entropy"],
                scored[temperature, p.prompt_id]["drafts"][draft.name]["columns"],
            )
            for p in prompts
        ]
        found = diagnosis.diagnose(texts, stop_token_ids=target.stop_token_ids)

        def scan(temperature: float = temperature) -> Any:
            return scan_draft_temperatures(target, draft, prompts, answers, temperature)

        scanned = bench.units.get(f"scan-t{temperature!r}", scan) if temperature > 0.0 else []
        sentences = diagnosis.findings(found, draft=draft.name, temperature=temperature)
        if scanned:
            sentence = diagnosis.temperature_finding(scanned, temperature)
            sentences += [sentence] if sentence else []
        sums = [scored[temperature, p.prompt_id]["target"]["top_k_mass"] for p in prompts]
        num_positions = sum(len(answers[temperature, p.prompt_id]) for p in prompts)
        rows.append(
            {
                "draft": draft.name,
                "temperature": temperature,
                "findings": [*sentences, *_template_findings(target, draft)],
                **_with_text(found, target),
                "top_k_ceiling": diagnosis.top_k_ceilings(sums, num_positions),
                "by_draft_temperature": scanned,
            }
        )
    return rows


def scan_draft_temperatures(
    target: LoadedModel,
    draft: Contestant,
    prompts: Sequence[HeldOutPrompt],
    answers: Answers,
    temperature: float,
) -> list[dict[str, float]]:
    """alpha of a draft that is sampled at other temperatures than the target is.

    On a few positions: the question is whether the draft is too flat or too sharp, not how much.
    """
    texts = []
    num_positions = 0
    for prompt in prompts:
        answer = answers[temperature, prompt.prompt_id]
        if answer and num_positions < _SCAN_POSITIONS:
            texts.append((prompt.token_ids, answer[: _SCAN_POSITIONS - num_positions]))
            num_positions += len(texts[-1][1])
    target_TV = completion_logits(target, texts) if texts else []
    drafted = draft_logits(target, draft, texts, target_TV) if texts else []
    sums = dict.fromkeys(_SCALES, 0.0)
    total = 0
    for logits_TV, one in zip(target_TV, drafted, strict=True):
        p_NV = logits_to_probs(logits_TV[one.positions_N], SamplingConfig(temperature=temperature))
        total += len(p_NV)
        for scale in _SCALES:
            warmth = max(_LEAST_TEMPERATURE, scale * temperature)
            q_NV = logits_to_probs(one.logits_NV, SamplingConfig(temperature=warmth))
            alpha_N = acceptance_probability(p_NV[:, : q_NV.shape[-1]], q_NV, PRIMARY_RULE)
            sums[scale] += float(alpha_N.double().sum())
    if not total:
        return []
    return [
        {
            "draft_temperature": temperature if scale == 1.0 else scale * temperature,
            "analytic_acceptance_rate": sums[scale] / total,
        }
        for scale in _SCALES
    ]


def examples(
    bench: Bench,
    prompts: Sequence[HeldOutPrompt],
    temperatures: Sequence[float],
    answers: Answers,
    scored: Scored,
) -> list[dict[str, Any]]:
    """A few answers, token by token, with what became of each; at the lowest temperature."""
    target, draft = bench.target, bench.contestants[0]
    if draft.is_lookup:
        return []
    temperature = min(temperatures)
    number = min(_NUM_EXAMPLES, len(prompts))
    found = []
    for place in [(2 * i + 1) * len(prompts) // (2 * number) for i in range(number)]:
        prompt = prompts[place]
        token_ids = answers[temperature, prompt.prompt_id][:_EXAMPLE_TOKENS]
        rates = acceptance_column(
            scored[temperature, prompt.prompt_id],
            draft.name,
            len(answers[temperature, prompt.prompt_id]),
        )[:_EXAMPLE_TOKENS]
        status = typical_rounds(rates, bench.num_draft_tokens)
        found.append(
            {
                "prompt_id": prompt.prompt_id,
                "task": prompt.task,
                "draft": draft.name,
                "temperature": temperature,
                "pieces": [
                    {"text": _text(target, [token]), "status": one, "acceptance": rate}
                    for token, one, rate in zip(token_ids, status, rates, strict=True)
                ],
            }
        )
    return found


def _with_text(found: dict[str, Any], target: LoadedModel) -> dict[str, Any]:
    if not found["num_positions"]:
        return found
    lost = [row | {"text": _text(target, [row["name"]])} for row in found["lost_tokens"]]
    rejected = [
        row
        | {
            "text": _text(target, [row["name"]]),
            "context": _text(target, row["context_token_ids"]),
            "target_text": _text(target, [row["target_token"]]),
        }
        for row in found["rejected_tokens"]
    ]
    return found | {"lost_tokens": lost, "rejected_tokens": rejected}


def _template_findings(target: LoadedModel, draft: Contestant) -> list[str]:
    """A draft that reads other text around a turn than the target was taught another language."""
    if draft.model is None:
        return []
    theirs, ours = target.tokenizer, draft.model.tokenizer
    found = []
    if theirs.chat_template != ours.chat_template:
        found.append(
            "the draft's chat template is not the target's: it has seen other text around a turn. "
            "Train it on the target's answers, or copy the target's template before training"
        )
    for name in ("bos", "eos", "pad"):
        a, b = getattr(theirs, f"{name}_token_id"), getattr(ours, f"{name}_token_id")
        if a != b:
            found.append(f"the {name} token is id {a} in the target and id {b} in the draft")
    return found


def _text(target: LoadedModel, token_ids: Sequence[int]) -> str:
    text: str = target.tokenizer.decode(list(token_ids), skip_special_tokens=False)
    return text
