"""Why a command could not be run on a node, told so that a person can act on it. Pure."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import asyncssh

from transomd.errors import TransomError

FailureKind = Literal["refused", "unreachable", "timeout", "host-key", "auth", "other"]


class SshFailure(TransomError):
    """A command could not be run on a node, or did not end in time. Says nothing about the node's health."""

    def __init__(self, node: str, kind: FailureKind, cause: str, *, hint: str = "") -> None:
        super().__init__(f"ssh {node}: {cause}", hint=hint)
        self.node = node
        self.kind: FailureKind = kind


def failure_of(node: str, exc: BaseException, connect_timeout: float) -> SshFailure:
    """What an exception of asyncssh or of the system means, and what to do about it; ``connect_timeout`` in seconds."""
    if isinstance(exc, asyncssh.PermissionDenied):
        return SshFailure(node, "auth", f"the node refused the login: {exc}", hint=f"ssh -v {node} true")
    if isinstance(exc, FileNotFoundError | PermissionError):
        return SshFailure(node, "auth", f"cannot use {exc.filename}: {exc.strerror}")
    hint = f"ssh {node} true"
    if isinstance(exc, ConnectionRefusedError):
        return SshFailure(node, "refused", "connection refused: no sshd listens there", hint=hint)
    if isinstance(exc, asyncio.TimeoutError) and not getattr(exc, "errno", None):
        return SshFailure(node, "unreachable", f"no answer after {connect_timeout:g} s", hint=hint)
    if isinstance(exc, asyncssh.ChannelOpenError):
        return SshFailure(node, "other", f"the node opens no session: {exc}", hint=hint)
    if isinstance(exc, OSError | asyncssh.ConnectionLost):
        return SshFailure(node, "unreachable", str(exc) or type(exc).__name__, hint=hint)
    return SshFailure(node, "other", f"{type(exc).__name__}: {exc}", hint=hint)


def host_key_failure(node: str, cause: str, file: Path, known: bool) -> SshFailure:
    """A host key that is not the ``known`` one of ``file``, or that is in there not at all: two different answers."""
    if known:
        hint = f"if the node was installed anew: ssh-keygen -R {node} -f {file}; ssh-keyscan {node} >> {file}"
        return SshFailure(node, "host-key", f"its host key is not the one in {file}: {cause}", hint=hint)
    hint = f"ssh-keyscan {node} >> {file}, then compare the fingerprint with the node's own"
    return SshFailure(node, "host-key", f"its host key is not in {file}: {cause}", hint=hint)
