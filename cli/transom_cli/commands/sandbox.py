"""``transom sandbox``: a private, real Slurm on this machine."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
from transom_slurm.sandbox import Sandbox, SandboxError, faults
from transom_slurm.sandbox.errors import SandboxMissing, SandboxRefused, SandboxUsage
from transom_slurm.sandbox.layout import command, default_directory
from transom_slurm.sandbox.watch import NodeReport

from transom_cli.complete import complete_faults
from transom_cli.text import width, wrapped
from transomd.errors import NotFoundError, RefusedError, TransomError, UsageError

NEXT = """\
next, so that squeue, srun, transom ... in this shell mean the sandbox:
  eval "$({env})"
then transom's daemon, and a job (transom submit -h shows the shortest):
  transomd > transomd.log 2>&1 &
  transom submit job.yaml"""
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _kinds(*, hub: bool) -> str:
    """The kinds of faults of a node, or of the hub, a line each."""
    words = {
        k.name + (f":{k.argument}" if k.needs_argument else ""): k.help for k in faults.KINDS.values() if k.hub is hub
    }
    return "\n".join(f"  {word:<15} {text}" for word, text in words.items())


def _clear_errors(function: _Command) -> _Command:
    """Turn the sandbox's errors into the command line's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except SandboxMissing as error:
            raise NotFoundError(str(error), hint=error.hint) from error
        except SandboxUsage as error:
            raise UsageError(str(error), hint=error.hint) from error
        except SandboxRefused as error:
            raise RefusedError(str(error), hint=error.hint) from error
        except SandboxError as error:
            raise TransomError(str(error), hint=error.hint) from error

    return call  # type: ignore[return-value]


_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    envvar="TRANSOM_SANDBOX",
    help=f"The sandbox's directory; also $TRANSOM_SANDBOX.  [default: {default_directory()}]",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def sandbox() -> None:
    """A private, real Slurm on this machine, to try transom and to break nodes.

    As root every node has namespaces of its own, so that power loss and a cut cable are real. Otherwise the daemons run
    on loopback addresses. GPUs are simulated. Everything is in one directory; `down` leaves nothing.

    \b
    Examples:
      transom sandbox up --nodes 5
      eval "$(transom sandbox env)"     # squeue, transom ... mean the sandbox
      transomd > transomd.log 2>&1 &    # the daemon, which nobody else starts
      transom submit job.yaml
      transom sandbox fail n2 power
      transom sandbox down
    """


@sandbox.command()
@click.option("--nodes", default=4, show_default=True, metavar="N", help="How many nodes, named n1 to nN.")
@click.option("--gpus", default=8, show_default=True, metavar="N", help="Simulated GPUs a node.")
@click.option("--slurmd-timeout", default=18, show_default=True, metavar="S", help="SlurmdTimeout, seconds.")
@click.option("--message-timeout", default=5, show_default=True, metavar="S", help="MessageTimeout, seconds.")
@click.option("--mode", type=click.Choice(["netns", "loopback"]), help="Instead of the better one that is possible.")
@_as_json
@_directory
@_clear_errors
def up(
    nodes: int,
    gpus: int,
    slurmd_timeout: int,
    message_timeout: int,
    mode: str | None,
    as_json: bool,
    directory: Path | None,
) -> None:
    """Start a sandbox; ready when this returns, about a second later.

    \b
    Examples:
      transom sandbox up
      transom sandbox up --nodes 16 --dir /tmp/big
      transom sandbox up --slurmd-timeout 9 --message-timeout 2
    With the latter Slurm notices a dead node in half the time. The one should be
    three times the other and 3 more, or healthy nodes may be taken for lost, too.
    """
    signal.signal(signal.SIGTERM, _raise_exit)
    began = time.monotonic()
    found = Sandbox.up(
        nodes,
        directory,
        gpus=gpus,
        slurmd_timeout=slurmd_timeout,
        message_timeout=message_timeout,
        mode=mode or "",
    )
    if as_json:
        _print({**_about(found, found.status()), "env": found.env()})
        return
    _say(f"up in {time.monotonic() - began:.1f} s: {_summary(found)}")
    click.echo(NEXT.format(env=command(found.directory, "env")))


def _say(text: str) -> None:
    click.echo("\n".join(wrapped(text, width(), indent="", whole=True)))


def _print(answer: Mapping[str, Any]) -> None:
    click.echo(json.dumps(answer, indent=2))


def _about(found: Sandbox, reports: Sequence[NodeReport]) -> dict[str, Any]:
    return {
        "directory": str(found.directory),
        "mode": found.spec.mode,
        "slurm_version": "{}.{:02d}".format(*found.spec.slurm_version),
        "slurm_answers": any(report.slurm for report in reports),
        "nodes": [asdict(report) for report in reports],
    }


def _raise_exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _summary(found: Sandbox) -> str:
    year, month = found.spec.slurm_version
    how = "a namespace each" if found.spec.namespaces else "on loopback addresses: no power loss, no cable"
    count = f"{len(found.nodes)} nodes n1-n{len(found.nodes)}" if len(found.nodes) > 1 else "1 node n1"
    return f"{count} ({how}), Slurm {year}.{month:02d}, {found.spec.gpus} simulated GPUs a node, in {found.directory}"


@sandbox.command(short_help="End the sandbox and all that runs in it.")
@_as_json
@_directory
@_clear_errors
def down(as_json: bool, directory: Path | None) -> None:
    """End the sandbox and all that runs in it, without a trace; also after a crash of `up`."""
    root = directory or default_directory()
    ended = Sandbox.clear(root)
    if as_json:
        _print({"directory": str(root), "ended": ended})
    else:
        click.echo(f"ended: {root}" if ended else f"nothing is up in {root}")


@sandbox.command()
@_as_json
@_directory
@_clear_errors
def status(as_json: bool, directory: Path | None) -> None:
    """Show the sandbox and each node, as seen from outside and by Slurm."""
    found = Sandbox.attach(directory)
    reports = found.status()
    if as_json:
        _print(_about(found, reports))
        return
    _say(_summary(found))
    click.echo(f"{'NODE':<6} {'ADDRESS':<13} {'POWER':<6} {'LINK':<5} {'SLURMD':<7} {'GPUS':<5} SLURM")
    for report in reports:
        click.echo(_row(report, found.spec.gpus))


def _row(report: NodeReport, gpus: int) -> str:
    power, link, slurmd = ("yes" if value else "NO" for value in (report.power, report.link, report.slurmd))
    shown = f"{report.gpus}/{gpus}"
    slurm = report.slurm or "no answer"
    return f"{report.name:<6} {report.address:<13} {power:<6} {link:<5} {slurmd:<7} {shown:<5} {slurm}"


@sandbox.command(short_help="Print the shell lines that lead into the sandbox.")
@_directory
@_clear_errors
def env(directory: Path | None) -> None:
    """Print shell lines after which Slurm's commands, transom and transomd mean the sandbox.

    \b
    Example:
      eval "$(transom sandbox env)"
    """
    for name, value in Sandbox.attach(directory).env().items():
        click.echo(f"export {name}={shlex.quote(value)}")


@sandbox.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.option("--node", metavar="NODE", help="Run on this node instead of the hub.")
@_directory
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_clear_errors
def exec_(node: str | None, directory: Path | None, command: tuple[str, ...]) -> None:
    """Run a command in the hub, where slurmctld runs, or on a node.

    \b
    Examples:
      transom sandbox exec -- squeue
      transom sandbox exec --node n2 -- nvidia-smi -L
    """
    found = Sandbox.attach(directory)
    argv = found.node_argv(node, command) if node else found.hub_argv(command)
    os.execv(argv[0], argv)


@sandbox.command(
    short_help="Break something on a node, or in the hub.",
    epilog="\b\nKinds:\n"
    + _kinds(hub=False)
    + "\n\n\b\nKinds for NODE `hub`, where slurmctld and transomd run:\n"
    + _kinds(hub=True)
    + "\n\n\b\nExamples:\n  transom sandbox fail n2 power\n  transom sandbox fail 'n[3-4]' xid:79"
    + "\n  transom sandbox fail hub ctld-stop",
)
@click.argument("nodes", metavar="NODE")
@click.argument("kind", shell_complete=complete_faults)
@_as_json
@_directory
@_clear_errors
def fail(nodes: str, kind: str, as_json: bool, directory: Path | None) -> None:
    """Inject a fault of KIND into NODE (a hostlist, as n2 or n[2-3]; or hub)."""
    found = Sandbox.attach(directory)
    _each(_expand(found, nodes), lambda node: found.fail(node, kind), as_json)


@sandbox.command(short_help="Undo the faults of a node, or of the hub.")
@click.argument("nodes", metavar="NODE")
@_as_json
@_directory
@_clear_errors
def heal(nodes: str, as_json: bool, directory: Path | None) -> None:
    """Undo the faults of NODE (a hostlist, as n2 or n[2-3]; or hub).

    Power comes back, the cable is mended, slurmd runs, stopped processes go on; GPUs and kernel log are as after a
    reboot. A node that was drained stays drained.
    """
    found = Sandbox.attach(directory)
    wrong = "nothing was wrong with it"
    _each(_expand(found, nodes), lambda node: ", ".join(found.heal(node)) or wrong, as_json)


def _each(nodes: Iterable[str], act: Callable[[str], str], as_json: bool) -> None:
    """Do something to nodes, one by one, and say what; also where one of them fails, of those before it."""
    results: list[dict[str, str]] = []
    try:
        for node in nodes:
            results.append({"node": node, "message": act(node)})
            if not as_json:
                _say(f"{node}: {results[-1]['message']}")
    finally:
        if as_json:
            _print({"results": results})


def _expand(found: Sandbox, text: str) -> tuple[str, ...]:
    """The nodes of a hostlist; all of them exist, or nothing is done."""
    from transom_slurm.nodesets import expand  # ClusterShell takes its time

    try:
        names = tuple(expand(text))
    except ValueError as error:
        raise UsageError(f"read the nodes {text}: {error}", hint="write n2, n[2-4] or n1,n3") from error
    unknown = sorted(set(names) - {*found.nodes, "hub"})
    if unknown:
        raise NotFoundError(
            f"there is no node {', '.join(unknown)}; there are n1 to n{len(found.nodes)}",
            hint=command(found.directory, "status"),
        )
    return names
