"""What the launcher learns from a launch's logs: steps, signatures, tasks that ended badly, and standing still."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from transomd.launch.outlived import Outlived
from transomd.launch.program import SRUN_LOG, log_of_srun, tasks_a_node
from transomd.launch.sruns import SCRIPT_LOG, SRUNS_LOG, Sruns
from transomd.spec import JobSpec
from transomd.tee import srun
from transomd.tee.matcher import Matcher
from transomd.tee.progress import Progress, Stall
from transomd.tee.tail import Owner, Tailer, rank_of_name
from transomd.tee.types import Chunk, Evidence

MAX_EXITS = 200
"""Bad ends of tasks that are kept: as many as a report can carry."""
MAX_SAID = 1000
"""Words of ends that are kept: the first, and the last; a script may try again for ever."""
FIRST_EXITS = 100
"""Those that come before what the logs say."""


def _owners(spec: JobSpec, nodes: tuple[str, ...]) -> Callable[[str], Owner | None]:
    """Return who writes each log. Ranks that torchrun or a job's own script starts share one: lines may name theirs."""
    ranks, shared = len(nodes) * spec.tasks_per_node, bool(spec.script) or tasks_a_node(spec) < spec.tasks_per_node

    def owner(name: str) -> Owner | None:
        task = rank_of_name(name)
        if name in (SRUN_LOG, SRUNS_LOG):
            return Owner()
        if task is None or not shared or ranks == 1:
            return task
        alone = len(nodes) == 1 or not spec.script
        return Owner(node=nodes[task.rank] if alone and task.rank is not None and task.rank < len(nodes) else "")

    return owner


def _named(evidence: Evidence, addresses: Mapping[str, str]) -> Evidence:
    peers = tuple(addresses.get(peer.partition("%")[0], peer) for peer in evidence.peer_nodes)
    return evidence if peers == evidence.peer_nodes else replace(evidence, peer_nodes=peers)


class LogWatch:
    """Reads every log of one launch as it grows.

    ``failing`` is the first word of srun that a task ended badly, ``left`` what says that not every task came to its
    end by itself: srun did not wait for it, Slurm told it to end, or an srun of a job's script failed. ``step`` is the
    furthest that any rank is, seen at ``step_at``; ``first_step`` and ``first_step_at`` are the first that was seen
    (Unix seconds). Standing still is measured by ``clock``, by which ``progress`` was begun: a node's time of day may
    be set forward at any moment. What slurmstepds say of other Slurm jobs than ``slurm_job_id`` is not this launch's.
    """

    def __init__(
        self,
        logs: Path,
        spec: JobSpec,
        nodes: tuple[str, ...],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
        slurm_job_id: int | None = None,
    ) -> None:
        self._tailer = Tailer(logs, _owners(spec, nodes))
        self._matcher = Matcher(nodes=nodes)
        self._progress = progress
        self._clock = clock
        self._nodes = nodes
        self._a_node = spec.tasks_per_node
        self._a_task = spec.tasks_per_node // tasks_a_node(spec)
        self._exits: dict[tuple[str, int | None, str], Evidence] = {}
        self._more_exits = 0
        self._outlived = Outlived()
        self._log_of_srun = log_of_srun(spec)
        self._slurm_job_id = slurm_job_id
        self._sruns = Sruns()
        self._said_left: list[tuple[int, str]] = []
        self._script_log_read = 0
        self.failing = ""
        self.step: int | None = None
        self.step_at: float | None = None
        self.first_step: int | None = None
        self.first_step_at: float | None = None

    @property
    def blind(self) -> str:
        """Why nothing at all could be read at the last poll; empty where anything could."""
        return self._tailer.blind

    @property
    def left(self) -> str:
        """What says so; nothing of an srun that a job's script may have ended itself, or has made up for."""
        if self._sruns.failed or self._sruns.told:
            return self._sruns.failed
        return next((line for at, line in self._said_left if not self._sruns.made_up(at)), "")

    def poll(self, now: float, final: bool = False) -> None:
        """Read what is new; with ``final`` all of it, also what has no end of line."""
        read = True
        while read:
            read = False
            for chunk in self._tailer.poll(final=final):
                self._take(chunk, now)
                read = final
        if final:
            self._matcher.finish()
        else:
            self._matcher.flush(now)
        if not self.failing:
            self._outlived.move(self._progress.steps)
        self._outlived.note(self._matcher.evidence(), now)

    def _take(self, chunk: Chunk, now: float) -> None:
        if chunk.file == SRUNS_LOG:
            self._sruns.feed(chunk.data.decode(errors="replace"))
            return
        self._matcher.feed(chunk, now)
        self._take_left(chunk)
        if chunk.file == SRUN_LOG:
            text = chunk.data.decode(errors="replace")
            self._take_exits(srun.exits(text, now, torn_down=bool(self._exits), a_task=self._a_task))
            return
        task = rank_of_name(chunk.file)
        self._progress.feed(replace(chunk, rank=task.rank if task else None), self._clock())
        if self._progress.step != self.step:
            self.step, self.step_at = self._progress.step, now
            if self.first_step is None:
                self.first_step, self.first_step_at = self._progress.first, now

    def _take_left(self, chunk: Chunk) -> None:
        """Keep the lines that say that not every task came to its end by itself, and where in a script's log."""
        at = -1
        if chunk.file == SCRIPT_LOG:
            at = 0 if chunk.fresh else self._script_log_read
            self._script_log_read = at + len(chunk.data)
        by_srun = chunk.file == self._log_of_srun and b"srun: " in chunk.data
        if not by_srun and b"slurmstepd" not in chunk.data:
            return
        for line in chunk.data.splitlines(keepends=True):
            text = line.decode(errors="replace").rstrip("\r\n")
            found = (srun.left(text) if by_srun else "") or srun.step_ended(text, self._slurm_job_id)
            if found:
                del self._said_left[MAX_SAID - 1 :]
                self._said_left.append((at, found))
            at += len(line) if at >= 0 else 0

    def _take_exits(self, found: list[Evidence]) -> None:
        """Keep the first end of each kind of each rank, as many as there is room for; a log may be flooded."""
        for one in found:
            key = (one.node, one.rank, one.signature)
            if key in self._exits:
                continue
            if len(self._exits) < MAX_EXITS:
                self._exits[key] = one
            else:
                self._more_exits += 1
        self.failing = self.failing or (found[0].text if found else "")

    def stalled(self) -> Stall | None:
        """Return how long nothing has moved, if that is too long."""
        return self._progress.stalled(self._clock())

    def evidence(self, addresses: Mapping[str, str] = MappingProxyType({})) -> list[Evidence]:
        """Return everything found so far; a rank's evidence gets the node that it ran on.

        Peers that are named by one of ``addresses`` get the name of their node.
        """
        exits = list(self._exits.values())
        more = [srun.more_exits(self._more_exits, exits[-1].at)] if self._more_exits else []
        # The reader takes so many pieces only, and bad ends must not crowd out what says why.
        said = self._outlived.told(map(self._placed, self._matcher.evidence()), self._ended_first())
        found = (*exits[:FIRST_EXITS], *more, *said, *exits[FIRST_EXITS:])
        return [_named(self._placed(e), addresses) for e in found]

    def _ended_first(self) -> dict[tuple[str, int | None], float]:
        """Return when the ranks ended that ended badly first; none where that was by a signal, as of somebody else."""
        exits = list(self._exits.values())
        own = [one for one in exits if one.signature == exits[0].signature == "EXIT"]
        return {(one.node, one.rank): one.at for one in own if one.at is not None and one.at == exits[0].at}

    def _placed(self, evidence: Evidence) -> Evidence:
        """Ranks are placed block by block, in the launch's order of nodes (srun's default)."""
        if self._a_task > 1 and evidence.source == "slurm":
            return replace(evidence, rank=None)  # srun counts tasks
        if evidence.node or evidence.rank is None:
            return evidence
        index = evidence.rank // self._a_node
        return replace(evidence, node=self._nodes[index]) if index < len(self._nodes) else evidence
