"""The target behind HTTP servers: rows go out many at a time, checked ids come back.

Refuses to know kinds of servers, retries and sockets; hidden states do not come over HTTP.

Legend: T positions, K kept candidates.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from distill.backends.base import (
    BACKENDS,
    Completion,
    Gift,
    ModelInfo,
    Scores,
    Unanswered,
    Unscored,
    sample_seed,
)
from distill.backends.http_answers import Accepted, accept, num_known_ids
from distill.backends.http_client import Fleet, Session
from distill.backends.http_loop import Put, gather_all, iterate
from distill.backends.http_probe import Expected, Served, look_at
from distill.backends.http_retry import Pause
from distill.backends.http_wire import (
    Question,
    RowRejected,
    Scorer,
    TopK,
    TryAgain,
    check_sampling,
)
from distill.backends.settings import HttpSettings
from distill.config import Config
from distill.errors import BackendUnavailableError, ConfigError, ContextLengthError
from distill.models import ModelConfig
from distill.models.facts import ModelFacts, read_facts
from distill.sampling import SamplingConfig


class HttpBackend:
    """Servers of one target behind the backend contract.

    Opening it looks at every server. The same call asks the same questions with the same seeds;
    whether that gives the same ids is up to the servers.
    """

    def __init__(
        self,
        target: ModelConfig,
        facts: ModelFacts,
        settings: HttpSettings,
        *,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._facts = facts
        self._settings = settings
        expected = Expected(target, facts)
        self._fleet = Fleet(
            settings,
            functools.partial(look_at, expected=expected, settings=settings),
            api_key=_api_key(settings),
            pause=pause,
        )

        async def find(_: Put[None]) -> None:
            async with self._fleet.session() as session:
                await session.find_servers()

        list(iterate(find))

    @property
    def info(self) -> ModelInfo:
        """What runs there, from the target's files and the servers' own limits."""
        served = self._served()
        gives: frozenset[Gift] = frozenset()
        if all(isinstance(one.shape, Scorer) for one in served):
            gives = frozenset({"top_k_scores"})
        return ModelInfo(
            vocab_size=num_known_ids(self._facts),
            hidden_size=self._facts.shape.hidden_size,
            max_length=min(one.max_length for one in served),
            stop_token_ids=self._facts.stop_token_ids,
            revision=self._facts.revision,
            dtype="the server's own",
            device="http",
            gives=gives,
        )

    def _served(self) -> list[Served]:
        return [server.served for server in self._fleet.servers if server.served is not None]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        num_samples: int = 1,
        keep_hidden: bool = False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Completion | Unanswered]:
        """Answer every prompt; see :class:`distill.backends.base.Backend`.

        A row that a server refuses, or whose ids cannot be trusted, is rejected; one that gets no
        answer in ``max_tries`` has failed; the others go on.
        """
        assert len(seeds) == len(prompts)
        if keep_hidden:
            raise BackendUnavailableError(
                "hidden states do not come over HTTP; choose a target_store that needs none "
                "(none), or `backend: local`"
            )
        for served in self._served():
            check_sampling(served.shape, sampling)
        self._require_room([len(prompt) for prompt in prompts], "prompt", 1)
        rows = {
            (prompt_index, sample_index): Question(
                prompt=tuple(prompt),
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                seed=sample_seed(seed, sample_index),
                stop_token_ids=tuple(sorted(self._facts.stop_token_ids)),
            )
            for prompt_index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            for sample_index in range(num_samples)
        }
        for outcome in iterate(functools.partial(self._answer_all, rows)):
            if on_tokens is not None and isinstance(outcome, Completion):
                on_tokens(len(outcome.token_ids))
            yield outcome

    async def _answer_all(
        self, rows: dict[tuple[int, int], Question], put: Put[Completion | Unanswered]
    ) -> None:
        num_failed = 0  # one after the other

        async def answer(session: Session, row: tuple[int, int], question: Question) -> None:
            nonlocal num_failed
            try:
                accepted = await self._ask(session, question)
            except RowRejected as error:
                num_failed = 0
                put(Unanswered(*row, "rejected", str(error)))
            except TryAgain as error:
                num_failed += 1
                self._require_life(num_failed, error)
                tries = self._settings.max_tries
                put(Unanswered(*row, "failed", f"no answer after {tries} tries; last: {error}"))
            else:
                num_failed = 0
                put(_completion(row, accepted))

        async with self._fleet.session() as session:
            await gather_all(answer(session, row, question) for row, question in rows.items())

    async def _ask(self, session: Session, question: Question) -> Accepted:
        def make_request(served: Served) -> tuple[str, dict[str, Any]]:
            check_sampling(served.shape, question.sampling)  # a server that joined later
            # What is answered may be scored afterwards, so it ends where that still fits.
            room = served.max_length - len(question.prompt) - _num_scored_more(served)
            if room < 1:
                raise RowRejected(
                    f"the prompt has {len(question.prompt)} tokens, and the server's context is "
                    f"{served.max_length}; serve a longer one"
                )
            fitting = replace(question, max_new_tokens=min(question.max_new_tokens, room))
            return served.shape.path, served.shape.body(fitting, served.model)

        def read(served: Served, body: bytes) -> Accepted:
            return accept(
                question,
                served.shape.read(body),
                self._facts,
                allow_retokenized=self._settings.allow_retokenized,
            )

        return await session.ask(_key(question.prompt), make_request, read)

    def _require_life(self, num_failed: int, error: TryAgain) -> None:
        """End a run that nobody answers, rather than fail its rows one by one."""
        if all(server.is_unreachable for server in self._fleet.servers):
            raise self._fleet.no_server() from error
        if num_failed >= self._settings.give_up_after:
            raise BackendUnavailableError(
                f"{num_failed} rows failed one after the other (give_up_after), the last with: "
                f"{error}. Look at the server's log; then run the same command again: what was "
                "answered is kept"
            ) from error

    def _require_room(self, lengths: Sequence[int], what: str, num_new: int) -> None:
        limit = self._facts.shape.max_position_embeddings
        for index, length in enumerate(lengths):
            if length + num_new > limit:
                raise ContextLengthError(
                    f"{what} {index} has {length} tokens, the target's context is {limit}; "
                    "shorten or drop it"
                )

    def score(
        self, sequences: Sequence[Sequence[int]], *, top_k: int | None = None
    ) -> Iterator[Scores | Unscored]:
        """The K best ids at each position; see :class:`distill.backends.base.Backend`.

        A sequence that a server refuses is rejected; one that gets no scores in ``max_tries`` has
        failed; the others go on.
        """
        if top_k is None or "top_k_scores" not in self.info.gives:
            what = "whole distributions" if top_k is None else "the best ids of given text"
            raise BackendUnavailableError(
                f"{what} do not come from these servers; score with `backend: local`"
                + ("" if top_k is None else ", or serve with vllm or sglang")
            )
        self._require_room([len(sequence) for sequence in sequences], "sequence", 0)
        waiting: dict[int, Scores | Unscored] = {}
        next_index = 0
        score_all = functools.partial(self._score_all, sequences, min(top_k, self.info.vocab_size))
        for scores in iterate(score_all):
            waiting[scores.sequence_index] = scores
            while next_index in waiting:
                yield waiting.pop(next_index)
                next_index += 1

    async def _score_all(
        self, sequences: Sequence[Sequence[int]], top_k: int, put: Put[Scores | Unscored]
    ) -> None:
        num_failed = 0  # one after the other

        async def score(session: Session, index: int, sequence: Sequence[int]) -> None:
            def make_request(served: Served) -> tuple[str, dict[str, Any]]:
                scorer = served.shape
                assert isinstance(scorer, Scorer)
                if len(sequence) + scorer.num_scored_more > served.max_length:
                    raise RowRejected(
                        f"its {len(sequence)} tokens and the {scorer.num_scored_more} that the "
                        f"server generates do not fit its context of {served.max_length}; serve "
                        "a longer one"
                    )
                return served.shape.path, scorer.score_body(sequence, top_k, served.model)

            def read(served: Served, body: bytes) -> list[TopK]:
                scorer = served.shape
                assert isinstance(scorer, Scorer)
                return scorer.read_scores(body, len(sequence), top_k)

            nonlocal num_failed
            try:
                positions = await session.ask(_key(sequence), make_request, read)
            except RowRejected as error:
                num_failed = 0
                put(
                    Unscored(
                        index,
                        "rejected",
                        f"it cannot be scored: {error}. A vllm server gives at most "
                        "--max-logprobs ids a position; or score with `backend: local`",
                    )
                )
            except TryAgain as error:
                num_failed += 1
                self._require_life(num_failed, error)
                tries = self._settings.max_tries
                put(Unscored(index, "failed", f"no scores after {tries} tries; last: {error}"))
            else:
                num_failed = 0
                put(_scores(index, positions))

        async with self._fleet.session() as session:
            await gather_all(score(session, index, one) for index, one in enumerate(sequences))


def _api_key(settings: HttpSettings) -> str | None:
    if settings.api_key_env is None:
        return None
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key or not key.isascii():  # a header holds neither; the key itself is not shown
        raise ConfigError(
            f"api_key_env names {settings.api_key_env}, which is "
            f"{'not ASCII' if key else 'not set, or empty'}; export the server's key under it"
        )
    return key


def _key(token_ids: Sequence[int]) -> bytes:
    """What a prompt is, for choosing its server: its content, not its place in a list."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).digest()


def _num_scored_more(served: Served) -> int:
    return served.shape.num_scored_more if isinstance(served.shape, Scorer) else 0


def _completion(row: tuple[int, int], accepted: Accepted) -> Completion:
    return Completion(
        prompt_index=row[0],
        sample_index=row[1],
        token_ids=accepted.token_ids,
        finish_reason=accepted.finish_reason,
    )


def _scores(index: int, positions: Sequence[TopK]) -> Scores:
    log_probs_TK = torch.tensor([one.log_probs for one in positions], dtype=torch.float32)
    # The server does not tell the others' mass; float64 keeps a small remainder's digits.
    tail_mass_T = (1.0 - log_probs_TK.double().exp().sum(-1)).clamp_min(0.0).float()
    return Scores(
        index, torch.tensor([one.token_ids for one in positions]), log_probs_TK, tail_mass_T
    )


@BACKENDS.register("http")
def make_http(
    config: ModelConfig, *, max_batch_size: int, settings: Config | None = None
) -> HttpBackend:
    """Reach the servers. They batch by themselves: ``concurrency``, not ``max_batch_size``,
    bounds what is sent to each.
    """
    if not isinstance(settings, HttpSettings):
        raise ConfigError(
            "the http backend has to be told where its servers are; write "
            "`backend: {kind: http, base_urls: [http://host:port]}`"
        )
    return HttpBackend(config, read_facts(config), settings)
