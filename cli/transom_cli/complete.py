"""What the shell is told when a word is completed: from the daemon within 0.3 s, or nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType

import click

PATIENCE_S = 0.3
MANY = 200
"""Words that are offered at most."""


class _TooLate(Exception):
    """The daemon took too long."""


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer ids and names of the user's jobs; names only once something is typed that is no number."""
    from transomd.api.client import Client

    jobs = _in_time(lambda: Client(_address(ctx), timeout_s=PATIENCE_S).get("/v1/jobs")["jobs"])
    words = [str(job["id"]) for job in jobs] + [str(job["name"]) for job in jobs]
    return _fitting(words, incomplete)


def complete_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer names of nodes."""
    from transomd.api.client import Client

    nodes = _in_time(lambda: Client(_address(ctx), timeout_s=PATIENCE_S).get("/v1/nodes")["nodes"])
    return _fitting((str(node["name"]) for node in nodes), incomplete)


def complete_jobs_and_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer jobs, then nodes."""
    return [*complete_jobs(ctx, param, incomplete), *complete_nodes(ctx, param, incomplete)][:MANY]


def complete_faults(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Offer the kinds of fault that the sandbox can inject."""
    from transom_slurm.sandbox import faults

    return _fitting(sorted(faults.KINDS), incomplete)


def _address(ctx: click.Context) -> str:
    return str(ctx.find_root().params.get("socket") or "")


def _fitting(words: Iterable[str], incomplete: str) -> list[str]:
    fitting = (word for word in dict.fromkeys(words) if word.startswith(incomplete) and word.isprintable())
    return [word for word in fitting if not set(word) & set(" \t'\"`$\\;&|<>()*?!")][:MANY]


def _in_time(ask: Callable[[], list[dict[str, object]]]) -> list[dict[str, object]]:
    """Return the answer, or nothing when it is an error or late. For a process that only completes."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _TooLate

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        return ask()
    except Exception:
        return []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
