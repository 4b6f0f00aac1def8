"""What a check found on a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transomd.words import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check on one node: the value found, the limit it was held against, and the evidence as people read it."""

    check: str
    outcome: Outcome
    value: str = ""
    limit: str = ""
    evidence: str = ""
    signature: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Every check on one node. ``reached`` is whether the probe answered at all; ``error`` says why not."""

    node: str
    at: float
    reached: bool
    results: tuple[CheckResult, ...] = ()
    error: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """UNFIT if any check is, else UNKNOWN if any is or the node was not reached, else FIT."""
        found = {result.outcome for result in self.results}
        if Outcome.UNFIT in found:
            return Outcome.UNFIT
        if not self.reached or not found or Outcome.UNKNOWN in found:
            return Outcome.UNKNOWN
        return Outcome.FIT

    @property
    def unfit(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.outcome is Outcome.UNFIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveReport:
    """What the whole-group all-reduce did. A failure names nobody: ``outcome`` UNKNOWN is then the most it can say.

    ``bus_gbps`` is the bus bandwidth in GB/s as nccl-tests define it (algorithm bandwidth times 2(n-1)/n).
    """

    outcome: Outcome
    nodes: tuple[str, ...]
    at: float
    seconds: float
    backend: str = ""
    bus_gbps: float | None = None
    error: str = ""
    output: str = ""
