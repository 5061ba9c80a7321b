"""Serve: the target and its distilled draft behind an OpenAI-compatible endpoint.

Refuses to know HTTP: distill.server does, and is imported only when something is served.
"""

from __future__ import annotations

import copy
import ipaddress
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.config import Config, setting
from distill.draft_tokens import depth_revision, resolve_num_draft_tokens
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import ConfigError, ServerError
from distill.export import public_reference
from distill.lineage import check_lineage, fingerprints_of
from distill.models import (
    LoadedModel,
    ModelConfig,
    load_draft,
    load_target,
    model_revision,
)
from distill.runtime.decode import DecodeEngine
from distill.training.vocabulary import read_vocabulary
from distill.vocab import PairReport, check_loaded_pair

if TYPE_CHECKING:
    from distill.server.running import RunningServer

logger = logging.getLogger(__name__)

CODE_VERSION = 1
API_KEY_VARIABLE = "DISTILL_API_KEY"

_SCHEMA_VERSION = 1
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
    max_length: int | None = setting(
        None, ge=2, description="Prompt and answer tokens; null: the target's context."
    )
    max_batch_size: int = setting(8, ge=1, in_fingerprint=False)
    max_waiting: int = setting(
        64, ge=1, in_fingerprint=False, description="Requests queued beyond the batch; then 429."
    )
    host: str = setting("127.0.0.1", in_fingerprint=False)
    port: int = setting(8000, ge=0, le=65535, in_fingerprint=False, description="0: a free one.")


def serve_key(
    config: ServeConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The key of the serving record; `inputs`: "distill" and "measure", or their fingerprints.

    As in `export_key`, the number of draft tokens that is served is in it.
    """
    revisions = {
        "target": model_revision(config.target),
        "num_draft_tokens": depth_revision(config.num_draft_tokens, inputs.get("measure")),
    }
    fingerprints = fingerprints_of(inputs)
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

    `inputs`: "distill" and, for the best number of draft tokens, "measure". `on_ready` gets the
    server once its port is open. The answers are the target's own, token for token at temperature
    0 and in distribution above: the draft changes their speed only.

    Raises:
        ArtifactError: an input was made with another target, or "measure" with another draft.
        ConfigError: the API key of the environment is unusable.
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
    given = _expected(inputs)
    revision = model_revision(config.target)
    check_lineage(given, reference=config.target.model, revision=revision)
    target = load_target(config.target)
    draft = load_draft(given["distill"], dtype=config.target.dtype, device=str(target.device))
    report = check_loaded_pair(target, draft)
    pair = ServedPair(
        model_id=config.model_id or _short_name(config.target),
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
        vocabulary_size=report.num_shared_tokens,
        max_length=_max_length(config, target),
        num_draft_tokens=resolve_num_draft_tokens(config.num_draft_tokens, given.get("measure")),
    )
    artifact = _record(config, store, given, pair, report)
    decoder = copy.deepcopy(target.tokenizer)  # a tokenizer isn't made for two threads
    scheduler = Scheduler(
        _engine_maker(config, pair, target, draft, given["distill"], decoder),
        decoder,
        max_batch_size=config.max_batch_size,
        max_waiting=config.max_waiting,
    )
    app = create_app(pair, scheduler, api_key=api_key)
    server = RunningServer(app, scheduler, host=config.host, port=config.port, artifact=artifact)
    logger.info(
        "serving %s at %s with %d draft tokens per target call",
        pair.model_id,
        server.base_url,
        pair.num_draft_tokens,
    )
    if on_ready is not None:
        on_ready(server)
    if block:
        server.run()
    else:
        server.start()
    return server


def _expected(inputs: Mapping[str, Artifact | None]) -> dict[str, Artifact]:
    given = {name: artifact.expect(name) for name, artifact in inputs.items() if artifact}
    if "distill" not in given:
        raise ServerError(
            f"Serving needs a 'distill' artifact; got: {', '.join(given) or 'none'}. "
            "Run the distill stage first."
        )
    return given


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
    draft: LoadedModel,
    distill: Artifact,
    decoder: Any,
) -> Callable[[], DecodeEngine]:
    vocabulary = read_vocabulary(distill)
    token_ids = None if vocabulary is None else vocabulary.token_ids

    def make() -> DecodeEngine:
        drafter = None
        if pair.num_draft_tokens:
            drafter = CausalLMDrafter(draft.model, vocabulary_token_ids=token_ids)
        return DecodeEngine(
            target.model,
            drafter,
            num_draft_tokens=pair.num_draft_tokens,
            max_batch_size=config.max_batch_size,
            max_length=pair.max_length,
            tokenizer=decoder,
        )

    return make


def _record(
    config: ServeConfig,
    store: ArtifactStore,
    inputs: Mapping[str, Artifact],
    pair: Any,
    report: PairReport,
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
        "num_draft_tokens": pair.num_draft_tokens,
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
