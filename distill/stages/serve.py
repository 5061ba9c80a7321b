"""Serve: the target and its distilled draft behind an OpenAI-compatible endpoint.

Refuses to know HTTP: distill.server does, and is imported only when something is served.
"""

from __future__ import annotations

import copy
import functools
import ipaddress
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.config import Config, setting
from distill.draft_tokens import resolve_num_draft_tokens
from distill.drafters.base import Drafter
from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.errors import ConfigError, ServerError
from distill.export import public_reference
from distill.lineage import check_lineage, check_same_quantization, fingerprints_of
from distill.models import (
    LoadedModel,
    ModelConfig,
    load_draft,
    load_target,
    model_revision,
)
from distill.runtime.decode import DecodeEngine
from distill.runtime.draft_length import AdaptiveDraftLength
from distill.stages.serve_drafting import (
    adaptive_draft_length,
    drafting_revisions,
    settings_of,
)
from distill.vocab import PairReport, check_loaded_pair

if TYPE_CHECKING:
    from distill.server.running import RunningServer

logger = logging.getLogger(__name__)

CODE_VERSION = 2
API_KEY_VARIABLE = "DISTILL_API_KEY"

_SCHEMA_VERSION = 2
_PAYLOAD = "serving.json"


class ServeConfig(Config):
    """How the pair is served.

    The API key comes from the environment (DISTILL_API_KEY), so that no config or manifest holds
    it; without one, everybody who reaches the port may ask.
    """

    target: ModelConfig
    model_id: str | None = setting(None, description="What clients call it; null: the target.")
    num_draft_tokens: int | None = setting(
        None, ge=0, description="Per target call; null: the measured best, else 4; 0: no draft."
    )
    draft_length: Literal["fixed", "adaptive"] = setting(
        "fixed",
        description="adaptive: chosen for every request and round from its own acceptance and the "
        "measured costs; num_draft_tokens is the most then, null: as deep as was measured.",
    )
    drafter: Literal["causal_lm", "early_exit"] = setting(
        "causal_lm",
        description="early_exit: the target's own first layers draft; no artifact is read.",
    )
    num_layers: int | None = setting(
        None, ge=1, description="Layers of the target that draft, for early_exit only."
    )
    max_length: int | None = setting(
        None, ge=2, description="Prompt and answer tokens; null: the target's context."
    )
    max_batch_size: int = setting(8, ge=1, in_fingerprint=False)
    max_waiting: int = setting(
        64, ge=1, in_fingerprint=False, description="Requests queued beyond the batch; then 429."
    )
    host: str = setting("127.0.0.1", in_fingerprint=False)
    port: int = setting(8000, ge=0, le=65535, in_fingerprint=False, description="0: a free one.")

    @model_validator(mode="after")
    def _check_drafter(self) -> ServeConfig:
        is_early_exit = self.drafter == "early_exit"
        if is_early_exit != (self.num_layers is not None):
            raise ConfigError(
                f"drafter is {self.drafter!r} and num_layers {self.num_layers}: "
                "early_exit needs the number of layers that draft, the other drafters have none."
            )
        if is_early_exit and self.draft_length == "adaptive":
            raise ConfigError(
                "drafter is 'early_exit' and draft_length 'adaptive', which takes its costs from a "
                "measurement of the distilled draft, and early_exit reads no artifact. Set "
                "draft_length to 'fixed', with a num_draft_tokens."
            )
        return self

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stages whose artifacts are read."""
        return () if self.drafter == "early_exit" else ("distill", "measure")


def serve_key(
    config: ServeConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of the serving record; `inputs`: "distill" and "measure", or their fingerprints.

    As in `export_key`, the number of draft tokens that is served is in it, and what an adaptive
    one follows from. Raises ConfigError where that was not measured.
    """
    used = inputs if config.inputs else {}
    revisions = {"target": model_revision(config.target)} | drafting_revisions(
        config.draft_length,
        config.num_draft_tokens,
        used.get("measure"),
        max_batch_size=config.max_batch_size,
    )
    fingerprints = fingerprints_of(used)
    return store.key("serve", CODE_VERSION, config, inputs=fingerprints, revisions=revisions)


def serve(
    config: ServeConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact | None],
    block: bool = True,
    on_ready: Callable[[RunningServer], None] | None = None,
) -> RunningServer:
    """Serve the pair until interrupted, or, with `block=False`, from threads until `close`.

    `inputs`: "distill" and, for the best number of draft tokens, "measure"; an early_exit drafter
    reads neither. `on_ready` gets the server once its port is open. The answers are the target's
    own, token for token at temperature 0 and in distribution above: the draft changes their speed
    only.

    Raises:
        ArtifactError: an input was made with another target, or "measure" with another draft, or
            with the target's weights held in another way.
        ConfigError: the API key of the environment is unusable, the draft length is adaptive and
            nothing was timed, or the target has fewer layers than are to draft.
        PairMismatchError: the draft doesn't belong to the target.
        ServerError: no draft was given, the port is taken, or the `serve` extra isn't installed.
    """
    try:
        from distill.server.app import create_app
        from distill.server.prompts import ServedPair
        from distill.server.running import RunningServer
        from distill.server.scheduler import Scheduler
    except ImportError as error:
        raise ServerError(
            f"Serving needs packages that aren't installed ({error}). "
            "Install them with: pip install 'distill[serve]'"
        ) from error
    api_key = _api_key(config.host)
    given = _expected(config, inputs)
    draft_length = _draft_length(config, given)
    target = load_target(config.target)
    make_drafter, report = _drafting(config, given, target)
    pair = ServedPair(
        model_id=config.model_id or _short_name(config.target),
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
        vocabulary_size=report.num_shared_tokens,
        max_length=_max_length(config, target),
        num_draft_tokens=_num_draft_tokens(config, given, draft_length),
    )
    artifact = _record(config, store, given, pair, report, draft_length)
    decoder = copy.deepcopy(target.tokenizer)  # a tokenizer isn't made for two threads
    scheduler = Scheduler(
        _engine_maker(config, pair, target, make_drafter, draft_length, decoder),
        decoder,
        max_batch_size=config.max_batch_size,
        max_waiting=config.max_waiting,
    )
    app = create_app(pair, scheduler, api_key=api_key)
    server = RunningServer(app, scheduler, host=config.host, port=config.port, artifact=artifact)
    logger.info(
        "serving %s at %s with %d draft tokens per target call (%s)",
        pair.model_id,
        server.base_url,
        pair.num_draft_tokens,
        config.draft_length,
    )
    if on_ready is not None:
        on_ready(server)
    if block:
        server.run()
    else:
        server.start()
    return server


def _expected(config: ServeConfig, inputs: Mapping[str, Artifact | None]) -> dict[str, Artifact]:
    """The artifacts that are used, of the right stages and made for this target."""
    if not config.inputs:
        return {}
    given = {name: artifact.expect(name) for name, artifact in inputs.items() if artifact}
    if "distill" not in given:
        raise ServerError(
            f"Serving needs a 'distill' artifact; got: {', '.join(given) or 'none'}. "
            "Run the distill stage first."
        )
    revision = model_revision(config.target)
    check_lineage(given, reference=config.target.model, revision=revision)
    if "measure" in given:  # how often a draft stands and what a pass costs both depend on it
        quantize = config.target.quantize
        check_same_quantization(given["measure"], name="measure", quantize=quantize)
    return given


def _draft_length(config: ServeConfig, given: Mapping[str, Artifact]) -> AdaptiveDraftLength | None:
    if config.draft_length == "fixed":
        return None
    return adaptive_draft_length(
        given.get("measure"), config.num_draft_tokens, max_batch_size=config.max_batch_size
    )


def _num_draft_tokens(
    config: ServeConfig, given: Mapping[str, Artifact], draft_length: AdaptiveDraftLength | None
) -> int:
    """The most drafted per target call."""
    if draft_length is not None:
        return draft_length.max_draft_tokens
    return resolve_num_draft_tokens(config.num_draft_tokens, given.get("measure"))


def _drafting(
    config: ServeConfig, given: Mapping[str, Artifact], target: LoadedModel
) -> tuple[Callable[[], Drafter], PairReport]:
    """What makes the drafter of an engine, and what the pair gate saw of its vocabulary."""
    if config.num_layers is not None:
        # The target drafts for itself: the gate looks at its tokenizer and padded rows alone.
        make = functools.partial(EarlyExitDrafter, num_layers=config.num_layers)
        return make, check_loaded_pair(target, target)
    distill = given["distill"]
    draft = load_draft(distill, dtype=config.target.dtype, device=str(target.device))
    report = check_loaded_pair(target, draft)
    return functools.partial(CausalLMDrafter.of, draft), report


def _max_length(config: ServeConfig, target: LoadedModel) -> int:
    own = target.shape.max_position_embeddings
    if config.max_length is not None and config.max_length > own:
        raise ConfigError(
            f"serve.max_length is {config.max_length}, but {config.target.model} reaches {own} "
            f"tokens; set it to {own} or less, or to null."
        )
    return config.max_length or own


def _api_key(host: str) -> str | None:
    """The key that clients must send, from the environment; None: everybody may ask."""
    given = os.environ.get(API_KEY_VARIABLE)
    if given is None:
        if not _is_loopback(host):
            logger.warning(
                "serving on %s without an API key: everybody who reaches the port may ask. "
                "Set %s, or serve on 127.0.0.1.",
                host,
                API_KEY_VARIABLE,
            )
        return None
    key = given.strip()
    if not key or not key.isascii():  # a header holds neither; the key itself is not shown
        raise ConfigError(
            f"{API_KEY_VARIABLE} is {'not ASCII' if key else 'empty'}, so no client could send it. "
            "Set it to ASCII characters, or unset it to serve without a key."
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _short_name(target: ModelConfig) -> str:
    """A name to type: "SmolLM2.Q4_1" of "pypi:package==1.0#SmolLM2.Q4_1.gguf"."""
    reference = public_reference(target).rpartition("#")[2].partition("@")[0]
    return reference.removesuffix(".gguf")


def _engine_maker(
    config: ServeConfig,
    pair: Any,
    target: LoadedModel,
    make_drafter: Callable[[], Drafter],
    draft_length: AdaptiveDraftLength | None,
    decoder: Any,
) -> Callable[[], DecodeEngine]:
    def make() -> DecodeEngine:
        return DecodeEngine(
            target.model,
            make_drafter() if pair.num_draft_tokens else None,
            num_draft_tokens=pair.num_draft_tokens,
            max_batch_size=config.max_batch_size,
            max_length=pair.max_length,
            tokenizer=decoder,
            draft_length=draft_length,
        )

    return make


def _record(
    config: ServeConfig,
    store: ArtifactStore,
    inputs: Mapping[str, Artifact],
    pair: Any,
    report: PairReport,
    draft_length: AdaptiveDraftLength | None,
) -> Artifact:
    """The artifact that says which pair is served, by fingerprints."""
    key = serve_key(config, store, inputs=inputs)
    content = {
        "schema_version": _SCHEMA_VERSION,
        "model_id": pair.model_id,
        "target": {
            "model": public_reference(config.target),
            "revision": key.parts["revisions"]["target"],
        },
        "inputs": fingerprints_of(inputs),
        "drafter": {"name": config.drafter, "num_layers": config.num_layers},
        "num_draft_tokens": pair.num_draft_tokens,
        "adaptive": None if draft_length is None else settings_of(draft_length),
        "max_length": pair.max_length,
        "stop_token_ids": sorted(pair.stop_token_ids),
        "vocabulary_sha256": report.vocabulary_sha256,
        "notes": list(report.notes),
    }

    def build(directory: Path) -> dict[str, Any]:
        text = json.dumps(content, indent=2, sort_keys=True)
        (directory / _PAYLOAD).write_text(text + "\n", encoding="utf-8")
        return {}

    return store.get_or_build(key, build)
