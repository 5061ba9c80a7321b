"""Forked children of a test: they start where this process is, and are never waited for in vain.

A child has only the thread that forked it. A pool of OpenMP threads that the parent once used is
gone, and the first parallel product of the child would wait for it for ever; so a child computes on
one thread, and a test that compares numbers with it asks for the fixture `one_thread`.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

import torch

TIMEOUT_S = 120


def start_forked(body: Callable[[], object]) -> int:
    """The process id of a child that runs `body`: exit code 0 if it returns, 1 if it raises."""
    with warnings.catch_warnings():
        # Python warns of a fork beside threads from 3.12 on: see the head of this file
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(TIMEOUT_S)  # SIGALRM ends a child that hangs, and shows as that signal
        torch.set_num_threads(1)
        body()
        code = 0
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """What the child ended with: its exit code, or the negative of the signal that killed it."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run_forked(body: Callable[[], object]) -> int:
    """The exit code of a child that runs `body`, or the negative of the signal that killed it."""
    return exit_code(start_forked(body))


def kill_self() -> None:
    """Die as by `kill -9`: no handler, no cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)
