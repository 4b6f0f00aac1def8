"""``transom drain`` and ``transom undrain``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click

from transom_cli.ask import client, node_names
from transom_cli.complete import complete_nodes
from transom_cli.telling import say
from transom_cli.text import hosts, plain
from transomd.errors import NotFoundError, TransomError
from transomd.words import ExitCode

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print one object: a result for each node.")


@click.command()
@click.argument("nodes", nargs=-1, required=True, shell_complete=complete_nodes)
@click.option("--reason", required=True, help="Why, for whoever finds the node drained.")
@click.option("--dry-run", is_flag=True, help="Only print the exact commands.")
@as_json_option
def drain(nodes: tuple[str, ...], reason: str, dry_run: bool, as_json: bool) -> int:
    """Take NODES out of service: what runs there goes on, nothing new is started. A node that somebody else has drained
    is left as it is.

    \b
    Examples:
      transom drain gpu-7 --reason 'fan 2 is loud'
      transom drain 'gpu-[1-4,7]' --reason 'rack move' --dry-run
    """
    body = {"nodes": node_names(nodes), "reason": reason, "dry_run": dry_run}
    return _show("drained", client().post("/v1/nodes/drain", body)["results"], dry_run, as_json)


@click.command()
@click.argument("nodes", nargs=-1, required=True, shell_complete=complete_nodes)
@click.option("--dry-run", is_flag=True, help="Only print the exact commands.")
@as_json_option
def undrain(nodes: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Put NODES back into service that were drained through transom, also from DOWN: once a lost node is repaired. What
    somebody else has drained or set DOWN is left as it is.

    \b
    Examples:
      transom undrain 'gpu-[1-4,7]'
      transom undrain gpu-7 --dry-run
    """
    body = {"nodes": node_names(nodes), "dry_run": dry_run}
    return _show("undrained", client().post("/v1/nodes/undrain", body)["results"], dry_run, as_json)


def _show(word: str, results: Sequence[Mapping[str, Any]], dry_run: bool, as_json: bool) -> int:
    """Print the results, nodes alike together.

    Raises NotFoundError where Slurm knows none of those that were not done, else TransomError where there are any.
    """
    if as_json:
        print(json.dumps({"dry_run": dry_run, "results": list(results)}, indent=2))
    else:
        _print(word, results, dry_run)
    missed = [str(result["node"]) for result in results if not result.get("done")]
    missing = [str(result["node"]) for result in results if result.get("missing")]
    if missing and (dry_run or missing == missed):
        raise NotFoundError(f"Slurm has no node {hosts(missing)}", hint="transom nodes")
    if missed and not dry_run:
        raise TransomError(
            f"{len(missed)} of {len(results)} nodes were not {word}", hint=f"transom nodes {hosts(missed)}"
        )
    return ExitCode.OK


def _print(word: str, results: Sequence[Mapping[str, Any]], dry_run: bool) -> None:
    groups: dict[tuple[bool, str], list[str]] = {}
    for result in results:
        groups.setdefault((bool(result.get("done")), str(result.get("message") or "")), []).append(str(result["node"]))
        if dry_run and result.get("command"):
            print(plain(_command(result["command"])))
    for (done, message), names in groups.items():
        say(f"{hosts(names)}: {_said(word, done, plain(message), dry_run)}")


def _said(word: str, done: bool, message: str, dry_run: bool) -> str:
    if dry_run and message:
        return message
    said = word if done else f"not {word}"
    return said if message in ("", said) else f"{said}: {message.removeprefix(said).lstrip('; ')}"


def _command(command: Any) -> str:
    return command if isinstance(command, str) else shlex.join(str(word) for word in command)
