"""The error tree.

::

    TransomError               operation, object, cause, next command
    ├── UsageError             the request is wrong; nothing was done (exit 2)
    │   └── SpecError          job.yaml is wrong: every fault with its line
    ├── UnreachableError       the other side does not answer (exit 3)
    ├── RefusedError           not allowed (exit 4)
    └── NotFoundError          no such thing (exit 5)
"""

from __future__ import annotations

from transomd.words import ExitCode


class TransomError(Exception):
    """Something went wrong that a person can act on.

    ``str(error)`` is ``operation object: cause``; ``hint`` is the next command to type, or what to change.
    """

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TransomError):
    """The request is wrong; nothing was done."""

    exit_code = ExitCode.USAGE


class SpecError(UsageError):
    """A job or settings file is wrong. ``faults`` holds each fault as ``path:line: field: what, and what is right``."""

    def __init__(self, message: str, faults: tuple[str, ...], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.faults = faults


class UnreachableError(TransomError):
    """The other side does not answer, which says nothing about what it knows."""

    exit_code = ExitCode.UNREACHABLE


class RefusedError(TransomError):
    """Not allowed."""

    exit_code = ExitCode.REFUSED


class NotFoundError(TransomError):
    """No such job, node or file."""

    exit_code = ExitCode.NOT_FOUND
