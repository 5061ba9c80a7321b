"""From what a server said to token ids that may be trained on, or to the reason why not.

Refuses to know sockets and kinds of servers. A wrong id in a corpus is never seen again and teaches
the draft what the target did not say; so whatever a server tells is checked against the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill.backends.base import FinishReason
from distill.backends.http_wire import Answer, Question, RowRejected, TryAgain
from distill.models.facts import ModelFacts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Accepted:
    """An answer that passed every check."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


def accept(
    question: Question, answer: Answer, facts: ModelFacts, *, allow_retokenized: bool
) -> Accepted:
    """The ids of an answer, as the local backend would give them: up to the first stop token.

    Raises:
        RowRejected: the ids are not the target's, or the server's own numbers contradict them.
        TryAgain: the server broke the answer off.
    """
    _check_prompt(question, answer)
    if answer.finish not in ("stop", "length"):
        raise TryAgain(f"the server ended the answer with {answer.finish!r}")
    if answer.token_ids is not None:
        token_ids = _counted(answer.token_ids, answer)
    elif allow_retokenized:
        token_ids = _retokenized(question, answer, facts.tokenizer)
    else:
        raise RowRejected(
            "the server gave text and no token ids; use a server that gives them, or set "
            "allow_retokenized: true"
        )
    _check_vocabulary(token_ids, num_known_ids(facts))
    token_ids, reason = _ended(token_ids, question, answer, facts)
    if not token_ids:
        raise RowRejected("the server's answer is empty")
    return Accepted(token_ids, reason)


def num_known_ids(facts: ModelFacts) -> int:
    """The ids that are tokens: padded rows of the output head are not."""
    return min(facts.shape.vocab_size, len(facts.tokenizer))


def _check_prompt(question: Question, answer: Answer) -> None:
    sent = len(question.prompt)
    if answer.prompt_token_ids is not None and answer.prompt_token_ids != question.prompt:
        raise RowRejected(
            f"the server read another prompt ({len(answer.prompt_token_ids)} tokens) than was "
            f"sent ({sent}); it must take token ids as they are, without adding or cutting any"
        )
    if answer.num_prompt_tokens not in (None, sent):
        raise RowRejected(
            f"the server counts {answer.num_prompt_tokens} tokens in a prompt of {sent}; it must "
            "take token ids as they are, without adding or cutting any"
        )


def _counted(token_ids: tuple[int, ...], answer: Answer) -> tuple[int, ...]:
    """``token_ids``, if as many came as the server says it generated."""
    told, came = answer.num_new_tokens, len(token_ids)
    # A server may count the stop token and not send it.
    is_stop_left_out = answer.finish == "stop" and told == came + 1
    if told is not None and told != came and not is_stop_left_out:
        raise RowRejected(f"{came} token ids came, the server counts {told}")
    return token_ids


def _retokenized(
    question: Question, answer: Answer, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The ids of a text, if prompt and text in ids say the same and break at the same place."""
    prompt = list(question.prompt)
    whole = _decode(tokenizer, prompt) + answer.text
    token_ids = list(tokenizer(whole, add_special_tokens=False)["input_ids"])
    if _decode(tokenizer, token_ids) != whole or token_ids[: len(prompt)] != prompt:
        raise RowRejected("prompt and answer, tokenized again, are not the text that came")
    found = tuple(token_ids[len(prompt) :])
    told = answer.num_new_tokens
    if told is not None and told - len(found) not in ((0, 1) if answer.finish == "stop" else (0,)):
        raise RowRejected(
            f"the answer is {len(found)} tokens when tokenized again, the server counts {told}"
        )
    return found


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _check_vocabulary(token_ids: Sequence[int], num_ids: int) -> None:
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < num_ids:
            raise RowRejected(
                f"token {position} of the answer is {token_id}; the target's ids are 0 to "
                f"{num_ids - 1}"
            )


def _ended(
    token_ids: tuple[int, ...], question: Question, answer: Answer, facts: ModelFacts
) -> tuple[tuple[int, ...], FinishReason]:
    """Cut where the target ends. What follows depends on what stands before, never the reverse:

    the part of a longer answer up to the first stop token, or to the budget, is what would have
    been drawn if the server had stopped there.
    """
    stops = facts.stop_token_ids
    if answer.finish == "stop" and not stops.intersection(token_ids):
        token_ids = (*token_ids, _left_out_stop(answer, facts))
    for position, token_id in enumerate(token_ids[: question.max_new_tokens]):
        if token_id in stops:
            return token_ids[: position + 1], "stop"
    return token_ids[: question.max_new_tokens], "length"


def _left_out_stop(answer: Answer, facts: ModelFacts) -> int:
    """The stop token that ended an answer and is not among its ids."""
    stops, named, ids = facts.stop_token_ids, answer.stop_token_id, answer.token_ids
    if named is not None and named in stops:
        return named
    # Where as many came as were counted, the token that ended the answer is among them.
    is_left_out = ids is None or answer.num_new_tokens in (None, len(ids) + 1)
    if named is None and is_left_out:
        if len(stops) == 1:
            return next(iter(stops))
        raise RowRejected(
            f"the server stopped and does not say at which of the target's stop tokens, "
            f"{sorted(stops)}; use a server that gives token ids, with the stop token among them"
        )
    if named is None and ids and not is_left_out:
        named = ids[-1]
    raise RowRejected(
        f"the server stopped at a token ({'not named' if named is None else named}) that is none "
        f"of the target's stop tokens, {sorted(stops)}"
    )
