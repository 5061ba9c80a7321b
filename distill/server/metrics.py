"""The numbers behind GET /metrics, in Prometheus text, under the names vLLM gives them.

Refuses to know requests, HTTP and how anything is counted: it reads the scheduler's snapshot.

The names are vLLM's on purpose, so that dashboards and load generators made for it read a pair
served here; a position's counter is accepted at that position, unconditionally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distill.server.scheduler import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REASONS = {
    "stop": ("stop",),
    "length": ("length",),
    "abort": ("cancelled",),
    "error": ("error", "refused"),
}


class ServerMetrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, model_id: str, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SnapshotCollector(model_id, snapshot))
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from request to last token."
        ).labels(model_id)
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from request to first token."
        ).labels(model_id)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_whole_answer(self, seconds: float) -> None:
        self._latency.observe(seconds)

    def render(self) -> bytes:
        """The text of GET /metrics."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            name, text, ["model_name"], registry=self._registry, buckets=_LATENCY_BUCKETS_S
        )


class _SnapshotCollector(Collector):
    def __init__(self, model_id: str, snapshot: Callable[[], Snapshot]) -> None:
        self._model_id = model_id
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield self._gauge("num_requests_running", "Requests being decoded.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", now.num_waiting)
        yield self._counter("prompt_tokens", "Prompt tokens read.", now.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens emitted.", now.num_generated_tokens)
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for name, reasons in _REASONS.items():
            count = sum(now.num_ended.get(reason, 0) for reason in reasons)
            ended.add_metric([self._model_id, name], count)
        yield ended
        stats = now.stats
        yield self._counter("spec_decode_num_drafts", "Rounds with a draft.", stats.num_rounds)
        yield self._counter(
            "spec_decode_num_draft_tokens", "Draft tokens proposed.", stats.num_proposed
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted
        )
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(stats.accepted_by_position):
            by_position.add_metric([self._model_id, str(position)], count)
        yield by_position

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_id], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_id], value)
        return family
