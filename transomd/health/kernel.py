"""Judge kernel messages: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transomd.health.types import CheckResult
from transomd.health.xid import Bucket, lookup
from transomd.words import Outcome

Event = Mapping[str, Any]

_DRIVER = {
    "RmInitAdapter": "NVRM-RMINIT",
    "fallen off the bus": "NVRM-BUS",
    "NV_ERR_RESET_REQUIRED": "NVRM-RESET-REQUIRED",
}
"""Driver messages without an Xid that mean that a GPU is gone, and their signatures."""

RING_BUFFER = "dmesg"
"""The one source that only the kernel writes. Any user can write to a log, in the kernel's name, through syslog."""


def fatal(facts: Mapping[str, Any], cleared_at: float) -> CheckResult:
    """No fatal Xid, fatal SXid or driver message since boot, within the window, and since cleared."""
    return _judge("xid", facts, cleared_at, _fatal_signature)


def reset(facts: Mapping[str, Any], cleared_at: float) -> CheckResult:
    """No Xid after which the GPU has to be reset."""
    return _judge("xid-reset", facts, cleared_at, _reset_signature)


def _judge(check: str, facts: Mapping[str, Any], cleared_at: float, sign: Callable[[Event], str]) -> CheckResult:
    if "error" in facts:
        return CheckResult(check=check, outcome=Outcome.UNKNOWN, evidence=str(facts["error"]))
    events = [event for event in facts["events"] if event["last"] > cleared_at]
    bad = [(event, sign(event)) for event in events if sign(event)]
    if not bad:
        return CheckResult(check=check, outcome=Outcome.FIT, value=_seen(events), limit="none")
    sure = [pair for pair in bad if RING_BUFFER in pair[0].get("sources", ())]
    first, signature = min(sure or bad, key=lambda pair: float(pair[0]["first"]))
    return CheckResult(
        check=check,
        outcome=Outcome.UNFIT if sure else Outcome.UNKNOWN,
        value=_seen([event for event, _ in bad]),
        limit="none",
        evidence=str(first["text"]),
        signature=signature,
    )


def _seen(events: Sequence[Event]) -> str:
    """For example ``Xid 79, Xid 45 (x16)``; ``none`` when there is nothing of NVIDIA's."""
    words = []
    for event in events:
        if event["kind"] in ("xid", "sxid", "nvrm"):
            name = {"xid": f"Xid {event['code']}", "sxid": f"SXid {event['code']}"}.get(event["kind"], "driver message")
            words.append(name + (f" (x{event['count']})" if event["count"] > 1 else ""))
    return ", ".join(dict.fromkeys(words)) or "none"


def _fatal_signature(event: Event) -> str:
    if event["kind"] == "xid" and lookup(event["code"], event["severity"]).bucket is Bucket.FATAL:
        return _xid_name(event["code"])
    if event["kind"] == "sxid" and event["severity"] == "fatal":
        return "SXID-FATAL"
    if event["kind"] == "nvrm":
        return next((name for words, name in _DRIVER.items() if words in event["text"]), "")
    return ""


def _reset_signature(event: Event) -> str:
    if event["kind"] == "xid" and lookup(event["code"], event["severity"]).bucket is Bucket.RESET:
        return _xid_name(event["code"])
    return ""


def _xid_name(code: int) -> str:
    return f"XID-{code}"
