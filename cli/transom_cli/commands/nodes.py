"""``transom nodes``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from transom_cli.ask import client, node_names
from transom_cli.complete import complete_nodes
from transom_cli.text import ago, clip, hosts, plain, table, width, wrapped
from transomd.errors import NotFoundError
from transomd.words import ExitCode, Outcome

Json = Mapping[str, Any]
HEADER = ("NODES", "STATE", "OWNER", "CHECKS", "REASON")
LIMITS = (28, 16, 12, 18, 0)


@click.command()
@click.argument("nodes", nargs=-1, shell_complete=complete_nodes)
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")
def nodes(nodes: tuple[str, ...], as_json: bool) -> int:
    """Show nodes: their state in Slurm, who drained them and why, and what the checks found. Nodes alike are shown
    together; for NODES that are named, every check that is not fit is shown with its evidence.

    \b
    Examples:
      transom nodes
      transom nodes 'gpu-[1-4,7]'
    """
    answer = client().get("/v1/nodes")
    found = answer["nodes"]
    if nodes:
        wanted = node_names(nodes)
        found = [node for node in found if node.get("name") in set(wanted)]
        missing = set(wanted) - {node["name"] for node in found}
        if missing and (answer.get("slurm") or {}).get("ok", True):
            raise NotFoundError(f"Slurm has no node {hosts(missing)}", hint="transom nodes")
    if as_json:
        print(json.dumps({**answer, "nodes": found}, indent=2))
        return ExitCode.OK
    lines = [clip(line, width()) for line in _warning(answer.get("slurm") or {}, time.time())]
    lines += node_table(found, columns=width()) if found else ["no nodes are known yet"]
    lines += [line for node in found if nodes for line in _details(node, time.time(), width())]
    print("\n".join(lines))
    return ExitCode.OK


def node_table(found: Sequence[Json], *, columns: int) -> list[str]:
    """Return one line for all nodes that are alike, under a header, within ``columns``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for node in found:
        like = (_state(node), _text(node, "owner") or "-", checks_text(node), _text(node, "reason") or "-")
        groups.setdefault(like, []).append(_text(node, "name"))
    return table(HEADER, [(hosts(names), *like) for like, names in groups.items()], LIMITS, columns)


def _text(node: Json, key: str) -> str:
    return str(node.get(key) or "")


def _state(node: Json) -> str:
    """Return the state, marked where it is not known whether it is still so."""
    return f"was {_text(node, 'state')}" if node.get("stale") else _text(node, "state")


def checks_text(node: Json) -> str:
    """Return the checks of a node in a word or two: those that are not fit, by name."""
    checks = node.get("checks") or ()
    for outcome in (Outcome.UNFIT, Outcome.UNKNOWN):
        names = [str(check.get("check")) for check in checks if check.get("outcome") == outcome]
        if names:
            return f"{outcome}: {','.join(names)}"
    return str(Outcome.FIT) if checks else "-"


def _details(node: Json, now: float, columns: int) -> Iterator[str]:
    yield ""
    jobs = node.get("jobs") or ()
    busy = f", jobs {','.join(str(job) for job in jobs)}" if jobs else ""
    yield f"{plain(node.get('name'))}: {plain(_state(node))}{busy}, checked {ago(node.get('checked_at'), now)}"
    if node.get("reason"):
        since = ago(node.get("reason_time"), now)
        yield from wrapped(f"{node['reason']} ({node.get('reason_user') or 'unknown'}, {since})", columns)
    for check in node.get("checks") or ():
        if check.get("outcome") != Outcome.FIT:
            limit = f", limit {check['limit']}" if check.get("limit") else ""
            text = f"{check.get('check')}: {check.get('outcome')}, {check.get('value') or 'no value'}{limit}"
            yield from wrapped(text, columns, indent="  - ")
            yield from wrapped(str(check.get("evidence") or ""), columns, indent="    ")


def _warning(slurm: Json, now: float) -> list[str]:
    if slurm.get("ok", True):
        return []
    cause = plain(slurm.get("error") or "no cause given")
    if not slurm.get("at"):
        return [f"Slurm has not answered since transomd was started: {cause}"]
    return [f"Slurm does not answer; this was so {ago(slurm['at'], now)}, and is unknown now: {cause}"]
