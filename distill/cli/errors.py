"""A user's mistake is one message and an exit code; a bug of ours keeps its traceback.

Refuses to know any command: it wraps them.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from distill.cli.output import is_first_process
from distill.errors import DistillError, GateFailedError

P = ParamSpec("P")
R = TypeVar("R")

_CHOOSE_ANOTHER = "Choose another path (--artifacts, --output), or move what is there away."
_ALLOW_WRITING = "Allow writing there, or choose another path (--artifacts, --output)."
_NO_SUCH_PLACE = "Nothing can be written there; choose another path (--artifacts, --output)."
_FREE_SPACE = "Free some space, or choose a path on another disk (--artifacts, --output)."
# What the machine refuses and a user can put right, and how; any other OSError is a bug of ours.
_WAY_OUT: Mapping[int | None, str] = {
    errno.EACCES: _ALLOW_WRITING,
    errno.EPERM: _ALLOW_WRITING,
    errno.EROFS: _ALLOW_WRITING,
    errno.ENOTDIR: _CHOOSE_ANOTHER,
    errno.EEXIST: _CHOOSE_ANOTHER,
    errno.EISDIR: _CHOOSE_ANOTHER,
    errno.ENAMETOOLONG: _NO_SUCH_PLACE,
    errno.ELOOP: _NO_SUCH_PLACE,
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
}


def reports_user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Exit 2 with one message for what a user can put right; anything else stays a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except DistillError as error:
            # every process has judged the same draft; one says so
            if is_first_process() or not isinstance(error, GateFailedError):
                fault = "error: " if error.exit_code else ""
                typer.echo(f"distill: {fault}{error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            way_out = _way_out(error, kwargs)
            if way_out is None:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            typer.echo(f"distill: error: {where}{error.strerror}. {way_out}", err=True)
            raise typer.Exit(DistillError.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("distill: interrupted; run the same command again to go on.", err=True)
            raise typer.Exit(130) from None

    return wrapped


def _way_out(error: OSError, arguments: Mapping[str, object]) -> str | None:
    """What to do about it, or None: a bug of ours.

    A file that is not there is a user's mistake only where the command line named the place: a
    path that cannot be made, below or above one that was given.
    """
    if error.errno != errno.ENOENT:
        return _WAY_OUT.get(error.errno)
    if not isinstance(error.filename, str):
        return None
    found = Path(error.filename).absolute()
    given = [value.absolute() for value in arguments.values() if isinstance(value, Path)]
    is_given = any(found.is_relative_to(path) or path.is_relative_to(found) for path in given)
    return _NO_SUCH_PLACE if is_given else None
