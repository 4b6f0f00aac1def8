"""What people are told when SSH to a node fails, by what went wrong."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import asyncssh
import pytest

from transomd.health.sshfailure import failure_of, host_key_failure


@pytest.mark.parametrize(
    ("exc", "kind", "words"),
    [
        (asyncssh.PermissionDenied("no more methods"), "auth", "the node refused the login"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/k"), "auth", "cannot use /k: No such file"),
        (PermissionError(errno.EACCES, "Permission denied", "/k"), "auth", "cannot use /k: Permission denied"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "refused", "no sshd listens there"),
        (asyncio.TimeoutError(), "unreachable", "no answer after 2.5 s"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), "unreachable", "Connection timed out"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "unreachable", "No route to host"),
        (asyncssh.ConnectionLost("gone"), "unreachable", "gone"),
        (asyncssh.ChannelOpenError(2, "too many"), "other", "opens no session: too many"),
        (ValueError("odd"), "other", "ValueError: odd"),
    ],
)
def test_what_an_exception_means(exc: Exception, kind: str, words: str) -> None:
    failure = failure_of("n1", exc, 2.5)
    assert (failure.node, failure.kind) == ("n1", kind)
    assert str(failure).startswith("ssh n1: ")
    assert words in str(failure)


def test_a_changed_host_key_and_an_unknown_one_need_different_answers() -> None:
    file = Path("/etc/known")
    changed, unknown = (host_key_failure("n1", "not trusted", file, known) for known in (True, False))
    assert {changed.kind, unknown.kind} == {"host-key"}
    assert changed.hint.startswith("if the node was installed anew: ssh-keygen -R n1 -f /etc/known;")
    assert unknown.hint.startswith("ssh-keyscan n1 >> /etc/known, then compare")
