"""Writes docs/signatures.md out of the catalogue: ``python -m transomd.tee.document > docs/signatures.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transomd.tee.catalogue import Catalogue, Signature, load

_INTRO = """\
# Failure signatures

Made from `transomd/tee/signatures.toml` by `python -m transomd.tee.document`; do not edit it here.

What TEE looks for in the logs of ranks, launchers, Slurm and the kernel, and what it takes a line to mean. A line of a
*victim* never blames who printed it; at most it names a peer. *Context* decides nothing. Where the blame is *unknown*,
the line alone does not tell the node from the program: the job starts again in place, and if the same comes back on the
same node, that node is left out; if it comes back elsewhere, it is the program's.

What a user's job prints can leave a node out for that job, but can never drain it: *drain* below is what is done once
Slurm or the probe confirms it.

How one verdict comes from many lines is written in `transomd/tee/verdict.py`. Besides these lines there are:

| signature | from | meaning |
|---|---|---|
| PY-EXCEPTION | a traceback whose last line no signature knows | the program's exception, with its last frames |
| HEARTBEAT-LOST | the launcher | the agent of a node is silent: host, that node, exclude |
| AGENTS-LOST | the launcher | so is that of its own node: the agents ended, and nobody is blamed |
| SLURM-NODE-DOWN | slurmctld | DOWN or not responding: host, that node, drain |
| SLURM-PROLOG | slurmctld | a prolog failed on the node: host, that node, exclude |
| SLURM-TIMEOUT, -PREEMPTED, -CANCELLED, -OUT-OF-MEMORY, ... | slurmctld | how Slurm ended the job |
| PROBE-... | the probe | a check that is unfit: that node, drain |
| NO-PROGRESS | the launcher | the job stands still |
| PROCESS-STOPPED, -TRACED, -UNINTERRUPTIBLE | the launcher | by two looks, a rank's process that cannot run |
| RANK-BEHIND | fusion | the rank that the others wait for |
| EXIT, EXIT-SIGKILL, EXIT-SIGNAL | the launcher | how a rank ended, where no log says why |
"""


def page(catalogue: Catalogue) -> str:
    """Return the whole page."""
    return "\n".join([_INTRO, *_lines(catalogue.signatures), "", *_xids(catalogue)]) + "\n"


def _lines(signatures: Sequence[Signature]) -> Iterator[str]:
    yield "## Lines"
    for source, title in (("log", "ranks and launchers"), ("slurm", "Slurm"), ("kernel", "kernel and host")):
        yield f"\n### Printed by {title}\n"
        yield "| signature | class | blame | role | action | example | note |"
        yield "|---|---|---|---|---|---|---|"
        yield from (_row(one) for one in signatures if one.source == source)


def _row(one: Signature) -> str:
    words = (one.failure_class, one.blame, one.role, one.action)
    return f"| {one.id} | {' | '.join(map(str, words))} | `{_cell(one.examples[0])}` | {_text(one.note)} |"


def _xids(catalogue: Catalogue) -> Iterator[str]:
    yield "## Xids of the NVIDIA driver"
    yield "\nThe bucket is what NVIDIA's catalogue (copy of 2025-10) says; the rest is what TEE makes of it. 144 to 150"
    yield "count only if the line says Fatal. A number that is not listed decides nothing.\n"
    yield "| Xid | meaning | bucket | class | blame | role | action |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[tuple[str, ...], list[int]] = {}
    for code, one in sorted(catalogue.xids.items()):
        key = tuple(map(str, (one.note, one.bucket, one.failure_class, one.blame, one.role, one.action)))
        groups.setdefault(key, []).append(code)
    for key, codes in groups.items():
        yield f"| {', '.join(map(str, codes))} | {' | '.join(_text(word) for word in key)} |"


def _cell(text: str) -> str:
    short = text.strip().replace("`", "'")
    return _text(short if len(short) <= 110 else short[:107] + "...")


def _text(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(load()), end="")
