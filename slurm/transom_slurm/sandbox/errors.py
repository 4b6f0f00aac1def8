"""What can go wrong with a sandbox."""

from __future__ import annotations


class SandboxError(Exception):
    """A sandbox could not do what was asked. ``hint`` is the next command to type, or what to change."""

    def __init__(self, operation: str, cause: str, *, hint: str = "") -> None:
        super().__init__(f"{operation}: {cause}")
        self.operation = operation
        self.cause = cause
        self.hint = hint


class SandboxMissing(SandboxError):
    """No such sandbox, node or program of the user."""


class SandboxRefused(SandboxError):
    """Not with these rights."""


class SandboxUsage(SandboxError):
    """The request is wrong; nothing was done."""
