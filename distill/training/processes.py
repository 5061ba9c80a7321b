"""Owns the processes of a run: which part of a step each takes, and how their gradients meet.

Refuses to know losses, data and files. One process is a run of one.

The draft is small and whole in every process, so a step needs one sum over all gradients, after
the last micro-batch: that is exact whatever number of micro-batches each process has, none
included, and it covers a head that is trained outside the draft's own forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from distill.errors import ConfigError

Item = TypeVar("Item")

# Elements summed in one call: large enough to fill a network, small beside the draft itself.
_BUCKET_ELEMENTS = 2**24


class Processes:
    """The processes of a run, as a launcher (torchrun, accelerate) started them."""

    def __init__(self, device: torch.device) -> None:
        """Join the others.

        Raises:
            ConfigError: the launcher asks for a sharded draft.
        """
        from accelerate import Accelerator

        require_whole_draft()
        self._accelerator = Accelerator(cpu=device.type == "cpu")
        self.rank: int = self._accelerator.process_index
        self.count: int = self._accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this is the process that evaluates, reports and writes."""
        return self.rank == 0

    def share(self, micro_batches: Sequence[Item]) -> Iterator[tuple[int, Item]]:
        """This process's micro-batches of a step, dealt round, with their place in the step."""
        for index in range(self.rank, len(micro_batches), self.count):
            yield index, micro_batches[index]

    def add_gradients(self, parameters: Collection[Tensor]) -> None:
        """Give every process the sum of all processes' gradients, in place.

        A gradient that no process has stays None; one that some lack counts as zero there.
        """
        if self.count == 1:
            return
        parameters = list(parameters)
        has_grad = torch.tensor([float(p.grad is not None) for p in parameters])
        num_with_grad = self._sum(has_grad.to(parameters[0].device)).tolist()
        bucket: list[Tensor] = []
        for parameter, number in zip(parameters, num_with_grad, strict=True):
            if not number:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(grad.numel() for grad in bucket) >= _BUCKET_ELEMENTS:
                self._add_bucket(bucket)
                bucket = []
        if bucket:
            self._add_bucket(bucket)

    def add(self, value: float) -> float:
        """The sum of one number over the processes."""
        if self.count == 1:
            return value
        device = self._accelerator.device
        return float(self._sum(torch.tensor(value, dtype=torch.float64, device=device)).item())

    def add_tensor(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor of one shape over the processes, on this process's device."""
        return tensor if self.count == 1 else self._sum(tensor.to(self._accelerator.device))

    def from_main(self, value: Any) -> Any:
        """What the main process holds: any value that pickles, sent to all others."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def _add_bucket(self, grads: list[Tensor]) -> None:
        summed = self._sum(torch.cat([grad.flatten() for grad in grads]))
        for grad, part in zip(grads, summed.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _sum(self, tensor: Tensor) -> Tensor:
        summed: Tensor = self._accelerator.reduce(tensor, reduction="sum")
        return summed


def require_whole_draft() -> None:
    """Refuse a launch that would share out the draft's weights.

    Raises:
        ConfigError: the launcher asks for a sharded draft.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true"):
        raise ConfigError(
            "the launcher asks for FSDP (ACCELERATE_USE_FSDP), but a draft is trained whole in "
            "every process. Launch with --multi_gpu or torchrun; a target too large for one "
            "device is best run by a server (generate.backend), which keeps it out of training."
        )


def dropout_seed(seed: int, step: int, place: int) -> int:
    """A seed for torch of one micro-batch of a run, whichever process it falls to."""
    return int(np.random.SeedSequence([seed, step, place]).generate_state(1, np.uint64)[0])


def device_of_rank(device: str) -> str:
    """The device a process takes: under a launcher, the GPU of its local rank."""
    local_rank = os.environ.get("LOCAL_RANK")
    is_any_gpu = device in ("auto", "cuda") and torch.cuda.is_available()
    return f"cuda:{local_rank}" if local_rank is not None and is_any_gpu else device
