"""Following events by long polls; a daemon that is restarted is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from transom_cli.ask import Json
from transom_cli.telling import tell
from transomd.api.client import Client
from transomd.errors import UnreachableError

WAIT_S = 20
RETRY_S = 2.0


def never() -> bool:
    """End following only by Ctrl-C."""
    return False


def follow_events(
    api: Client, *, job: int | None, node: str | None = None, after: int, until: Callable[[], bool] = never
) -> Iterator[Json]:
    """Yield each event after ``after`` as it comes, until ``until()`` holds and the events of that moment are told.

    Says once when the daemon stops answering, and once when it is back.
    """
    silent, ending = False, False
    while True:
        try:
            answer = api.get("/v1/events", job=job, node=node, after=after, wait=None if ending else WAIT_S)
            after = max(after, int(answer.get("last") or 0))
            done, ending = ending, until()
        except UnreachableError as error:
            if not silent:
                tell(f"transom: {error}; waiting for it")
            silent = True
            time.sleep(RETRY_S)
            continue
        if silent:
            tell("transom: transomd answers again")
        silent = False
        yield from answer["events"]
        if done:
            return
