"""Owns who tells the draft about the target: the store's files, the target itself, a reference.

Refuses to know how a draft is trained and what is in a file.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from distill.artifacts import Artifact
from distill.errors import ConfigError
from distill.losses import Head, HiddenLoss
from distill.models import DraftVocabulary, LoadedModel, ModelConfig, load_target
from distill.target_store.config import StoreKind, knowledge_of
from distill.target_store.files import kind_in
from distill.training.config import TrainingConfig
from distill.training.data import TargetFiles, TargetSource
from distill.training.live_target import LiveTarget
from distill.vocab import check_pair

logger = logging.getLogger(__name__)


def check_losses(config: TrainingConfig, generated: Artifact) -> None:
    """Refuse losses that cannot be taken from what generate kept, before anything is loaded.

    TRL runs the target itself and reads no store, so there every store will do.

    Raises:
        ConfigError: a loss cannot; the message names those that could.
    """
    if config.engine == "trl":
        return
    kind = kind_in(generated)
    source = f"{generated.path} (target_store: {kind})"
    config.check_for_knowledge(knowledge_of(kind), source=source)


def needs_target(config: TrainingConfig, kind: StoreKind) -> bool:
    """Whether something runs the target while the draft trains, so that it has to be kept.

    The real decode does, in the first process of a run, and TRL; and where no hidden states were
    kept, whoever knows the target in full on the held-out rows. Else its output head is enough.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    is_decoded = config.decode_every is not None and is_first
    return is_decoded or config.engine == "trl" or kind != "final_hidden"


def check_heads(config: TrainingConfig, draft_head: Head, target_head: Head) -> None:
    """Refuse to compare hidden states that are read by different heads.

    A loss on hidden states pulls the draft's towards the target's, which mean the target's logits
    to the target's head only. Heads of another width are refused by the loop.

    Raises:
        ConfigError: the draft's head is another, and stays so.
    """
    import torch

    phases = [phase.name for phase in config.phases if isinstance(phase.make_loss(), HiddenLoss)]
    ours_VD = draft_head.weight_VD.detach()
    theirs_VD = target_head.weight_VD.detach()
    if not phases or ours_VD.shape != theirs_VD.shape:
        return
    dtype = getattr(torch, config.compute_dtype)  # of the product, where the two have to agree
    differing_V = (ours_VD.to(dtype) != theirs_VD.to(ours_VD.device, dtype)).any(dim=-1)
    if not differing_V.any():
        return
    difference = (
        f"the loss {phases[0]} compares hidden states, and the draft reads its own by another head "
        f"than the target's ({int(differing_V.sum())} of {len(differing_V)} rows differ)"
    )
    if config.trains_head:
        logger.warning("%s: a later phase has to train it", difference)
        return
    raise ConfigError(
        f"{difference}, so equal states would give other tokens. Use a loss on logits, such as "
        f"forward_kl, or a draft that has the target's head (kind: pruned, or scratch with "
        f"embeddings: copied), or train the head in a later phase (train_embeddings: head)"
    )


def open_sources(
    generated: Artifact, target: LoadedModel, target_head: Head, vocabulary: DraftVocabulary | None
) -> tuple[TargetSource, TargetSource]:
    """Return who knows the target on the training rows, and in full on the held-out ones.

    Held-out acceptance is exact whatever the store: where hidden states were not kept, the target
    is run on those few rows.
    """
    kind = kind_in(generated)
    if kind == "final_hidden":
        files = TargetFiles(generated)
        return files, files
    needs_logsumexp = vocabulary is not None
    live = LiveTarget(target.model, target_head=target_head, needs_logsumexp=needs_logsumexp)
    logger.info(
        "the target is run on the held-out rows%s: its hidden states were not kept",
        " and on every training batch" if kind == "none" else "",
    )
    return live if kind == "none" else TargetFiles(generated), live


def load_reference(config: ModelConfig | None, target: LoadedModel) -> Any:
    """Return the model tokens are selected by, or None where the config names none.

    Raises:
        ModelNotFoundError: the reference leads nowhere.
        PairMismatchError: it does not read token ids as the target does.
    """
    if config is None:
        return None
    reference = load_target(config)
    check_pair(
        target.tokenizer,
        target.shape,
        reference.tokenizer,
        reference.shape,
        takes_target_tokenizer=True,
    )
    return reference.model.to(target.device)
