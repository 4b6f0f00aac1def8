"""``transom check``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from transom_cli.ask import node_names
from transom_cli.complete import complete_nodes
from transom_cli.progress import working
from transom_cli.text import clip, hosts, paint, plain, width, wrapped
from transomd.api.client import Client
from transomd.words import ExitCode, Outcome

Json = Mapping[str, Any]
PATIENCE_S = 60.0
NODE_S = 1.0
"""How much longer the answer may take for each node: they are looked at some at a time."""
_STYLES = {Outcome.FIT: "completed", Outcome.UNFIT: "failed", Outcome.UNKNOWN: "recovering"}


@click.command()
@click.argument("nodes", nargs=-1, required=True, shell_complete=complete_nodes)
@click.option("--check", "checks", multiple=True, metavar="NAME", help="Only this check; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")
def check(nodes: tuple[str, ...], checks: tuple[str, ...], as_json: bool) -> int:
    """Probe NODES now, through the daemon (administrators), whatever runs on them. Nothing is drained for it.

    Exit code: 0 if all are fit, 6 if one is unfit, 7 if none is unfit but something could not be found out.

    \b
    Examples:
      transom check 'gpu-[1-4,7]'
      transom check gpu-7 --check xid --check ecc
    """
    names = node_names(nodes)
    address = click.get_current_context().find_root().obj or ""
    api = Client(address, timeout_s=PATIENCE_S + NODE_S * len(names))
    with working(f"checking {len(names)} node{'s' if len(names) > 1 else ''}"):
        results = api.post("/v1/nodes/check", {"nodes": names, "checks": list(checks)})["results"]
    if as_json:
        print(json.dumps({"results": results}, indent=2))
    else:
        for line, outcome in check_lines(results, width()):
            print(paint(line, _STYLES.get(Outcome(outcome), "") if outcome else ""))
    return check_code(results)


def check_code(results: Sequence[Json]) -> ExitCode:
    """UNHEALTHY when a node is unfit, else UNKNOWN when one could not be looked at whole, else OK."""
    outcomes = {str(result.get("outcome")) for result in results}
    if Outcome.UNFIT in outcomes:
        return ExitCode.UNHEALTHY
    return ExitCode.OK if outcomes == {str(Outcome.FIT)} else ExitCode.UNKNOWN


def check_lines(results: Sequence[Json], columns: int) -> Iterator[tuple[str, str]]:
    """Yield a line for all nodes that are fit, then each other node with every check that is not, and its evidence."""
    fit = [result["node"] for result in results if result.get("outcome") == Outcome.FIT]
    if fit:
        count = max(len(result.get("checks") or ()) for result in results if result.get("outcome") == Outcome.FIT)
        yield clip(f"{hosts(fit)}: fit ({count} check{'s' if count != 1 else ''})", columns), str(Outcome.FIT)
    for result in results:
        if result.get("outcome") != Outcome.FIT:
            yield from _node(result, columns)


def _node(result: Json, columns: int) -> Iterator[tuple[str, str]]:
    outcome = str(result.get("outcome"))
    yield f"{plain(result.get('node'))}: {plain(outcome)}", outcome
    for line in wrapped(str(result["error"]), columns) if result.get("error") else ():
        yield line, ""
    for check in result.get("checks") or ():
        if check.get("outcome") != Outcome.FIT:
            limit = f", limit {check['limit']}" if check.get("limit") else ""
            text = f"{check.get('check')}: {check.get('outcome')}, {check.get('value') or 'no value'}{limit}"
            for line in (*wrapped(text, columns, indent="  - "), *_evidence(check, columns)):
                yield line, ""


def _evidence(check: Json, columns: int) -> list[str]:
    return wrapped(str(check["evidence"]), columns, indent="    ") if check.get("evidence") else []
