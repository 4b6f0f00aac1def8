"""What the hooks' reports mean for nodes: episodes of trouble, and the drains and comments proposed for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from transom_slurm.states import OWN_PREFIX
from transom_slurm.types import SlurmNode
from transom_sql.records import Intent

from transomd.health.profile import CHECKS
from transomd.health.types import CheckResult, NodeReport
from transomd.settings import Settings
from transomd.words import CheckMode, IntentKind, IntentState, Outcome

AT_ONCE = frozenset({"gpu-count", "xid", "xid-reset", "ecc", "row-remap"})
"""Checks of what does not mend itself. Any other must fail in two looks before a node is drained for it."""
FRESH_S = 900.0
"""How long a report of trouble may be old and still be acted on: a node is not drained for what was so last night."""
PROLOG_ERROR = "Prolog error"
"""The whole reason that slurmctld gives a node whose prolog failed."""
PROLOG_GRACE_S = 4.0
"""Seconds that Slurm gets to drain a node by itself after its prolog was told to fail."""
PROLOG_DRAINS_S = 30.0
"""Seconds within which slurmctld, busy, drains a node whose prolog was told to fail."""
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One check that fails on one node, from the first unfit report to the next that is fit.

    Unknown neither begins nor ends one. A drain is proposed once an episode: whoever lifts it while the trouble lasts
    has decided.
    """

    check: str
    since: float
    last: float
    count: int = 1
    evidence: str = ""
    slurm_job: int | None = None

    @property
    def confirmed(self) -> bool:
        """Whether it has been seen often enough to drain for it."""
        return self.check in AT_ONCE or self.count >= 2

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {key: value for key, value in asdict(self).items() if key != "check"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFindings:
    """What is known of one node: the newest result of every check, and the episodes that are open."""

    node: str
    at: float = 0.0
    results: Mapping[str, CheckResult] = field(default_factory=dict)
    episodes: Mapping[str, Episode] = field(default_factory=dict)


def read_episodes(data: Mapping[str, Any]) -> dict[str, Episode]:
    """Return the episodes that a node's record holds."""
    return {check: Episode(check=check, **told) for check, told in data.get("episodes", {}).items()}


def absorb(
    old: NodeFindings, report: NodeReport, slurm_job: int | None
) -> tuple[NodeFindings, tuple[CheckResult, ...], tuple[str, ...]]:
    """Add a report; return the findings, the checks that have just become unfit, and those that are fit again."""
    episodes = dict(old.episodes)
    begun, ended = [], []
    for result in report.results:
        known = episodes.get(result.check)
        if result.outcome is Outcome.UNFIT and known is None:
            episodes[result.check] = _begin(result, report.at, slurm_job)
            begun.append(result)
        elif result.outcome is Outcome.UNFIT and known is not None:
            episodes[result.check] = replace(known, count=known.count + 1, last=report.at)
        elif result.outcome is Outcome.FIT and known is not None:
            del episodes[result.check]
            ended.append(result.check)
    earlier = {check: result for check, result in old.results.items() if check in CHECKS}
    results = {**earlier, **{result.check: result for result in report.results}}
    new = NodeFindings(node=old.node, at=report.at, results=results, episodes=episodes)
    return new, tuple(begun), tuple(ended)


def _begin(result: CheckResult, at: float, slurm_job: int | None) -> Episode:
    text = " ".join((result.evidence or f"{result.value}, limit {result.limit}").split())[:160]
    return Episode(check=result.check, since=at, last=at, evidence=text, slurm_job=slurm_job)


def expected_gpus(node: SlurmNode, facts: Mapping[str, Any]) -> int | None:
    """Return how many GPUs Slurm believes that a node has; None where it does not count whole ones."""
    rows = facts.get("gpus", {}).get("rows", ())
    if any(str(row.get("mig.mode.current", "")).lower() == "enabled" for row in rows):
        return None
    return sum(int(number) for number in _GPUS.findall(node.gres)) or None


def drain_key(node: str, episode: Episode) -> str:
    """Return the key of the drain for an episode."""
    return f"drain:{node}:{episode.check}:{int(episode.since)}"


def to_drain(findings: NodeFindings, settings: Settings, now: float, cleared_at: float = 0.0) -> Episode | None:
    """Return the episode that a node is to be drained for, the oldest first; None when there is none.

    One that was not seen again since the node was put back into service (``cleared_at``) is none.
    """
    fresh = [e for e in findings.episodes.values() if abs(now - e.last) <= FRESH_S and e.last > cleared_at]
    seen = [e for e in fresh if e.confirmed]
    due = [e for e in seen if settings.health.mode(e.check) is CheckMode.DRAIN]
    return min(due, key=lambda e: (e.since, e.check), default=None)


def propose(
    findings: Iterable[NodeFindings],
    nodes: Mapping[str, SlurmNode] | None,
    settings: Settings,
    now: float,
    refusing: Mapping[str, int | None] = MappingProxyType({}),
    cleared_at: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Intent, ...]:
    """Return the drains that are due; admission decides. Nothing for a node that is out of service already.

    ``refusing`` are the nodes whose prolog waits for an answer, each with its Slurm job: where it is told to fail,
    Slurm is to drain the node by itself first.
    """
    found = []
    for one in findings:
        node, episode = (nodes or {}).get(one.node), to_drain(one, settings, now, cleared_at.get(one.node, 0.0))
        if node is not None and episode is not None and not node.status.drain:
            refused = settings.hooks.enforce and one.node in refusing
            found.append(_drain(one.node, episode, now, refused, refusing.get(one.node)))
    return tuple(found)


def _drain(node: str, episode: Episode, now: float, refusing: bool, slurm_job: int | None) -> Intent:
    args: dict[str, Any] = {
        "node": node,
        "check": episode.check,
        "reason": f"{OWN_PREFIX}{episode.check}] {episode.evidence}",
    }
    if refusing:
        job = f" job={slurm_job}" if slurm_job is not None else ""
        args["over"], args["over_since"] = PROLOG_ERROR, now
        args["reason_over"] = f"{OWN_PREFIX}{episode.check}] {PROLOG_ERROR}{job}: {episode.evidence}"
    return Intent(
        key=drain_key(node, episode),
        kind=IntentKind.DRAIN.value,
        state=IntentState.PENDING.value,
        created_at=now,
        not_before=now + PROLOG_GRACE_S if refusing else 0.0,
        args=args,
    )


def fell_to_our_prolog(node: SlurmNode, args: Mapping[str, Any]) -> bool:
    """Whether Slurm drained a node because this prolog of ours failed as it was told to; its reason does not say why.

    ``args`` are those of the drain that was recorded when the prolog was answered. Slurm's word is the same for every
    prolog of the site's: only what comes right after the answer is taken for its consequence.
    """
    since, at = args.get("over_since"), node.reason_time
    if since is None or at is None or not node.status.drain or node.reason != args.get("over"):
        return False
    # Slurm tells whole seconds.
    return int(since) <= at <= float(since) + PROLOG_DRAINS_S


def comment_of(findings: NodeFindings, settings: Settings) -> str:
    """Return what a node's Slurm comment should say; empty when nothing is wrong in a check of mode comment."""
    told = [e for e in findings.episodes.values() if settings.health.mode(e.check) is CheckMode.COMMENT]
    return "; ".join(f"{OWN_PREFIX}{e.check}] {e.evidence}" for e in sorted(told, key=lambda e: e.check))[:400]


def propose_comments(
    findings: Iterable[NodeFindings],
    nodes: Mapping[str, SlurmNode] | None,
    settings: Settings,
    pending: Sequence[Intent],
    now: float,
) -> tuple[Intent, ...]:
    """Return the comments that are not as they should be. A comment that is not transom's own is left alone."""
    busy = {str(intent.args["node"]) for intent in pending if intent.kind == IntentKind.COMMENT}
    found = []
    for one in findings:
        node, text = (nodes or {}).get(one.node), comment_of(one, settings)
        if node is None or node.comment == text or one.node in busy or comment_refusal(node):
            continue
        found.append(
            Intent(
                key=f"comment:{one.node}:{now:.3f}",
                kind=IntentKind.COMMENT.value,
                state=IntentState.PENDING.value,
                created_at=now,
                args={"node": one.node, "text": text},
            )
        )
    return tuple(found)


def comment_refusal(node: SlurmNode) -> str:
    """Say why transom must not write a node's comment, or ``""``: somebody else's text stands there."""
    foreign = node.comment and not node.comment.startswith(OWN_PREFIX)
    return f"{node.name} bears a comment of somebody else: {node.comment}" if foreign else ""
