"""The ``transom`` command: help, sub-commands loaded when they are used, and how every error ends."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from transom_cli.telling import tell
from transomd import __version__
from transomd.errors import SpecError
from transomd.words import ExitCode

DEBUG = "TRANSOM_DEBUG"
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click raises, since 8.2, where a group of commands is called alone: its help is the answer."""

EPILOG = """\b
Examples:
  transom submit job.yaml                   hand a training job over
  transom submit job.yaml --dry-run         show what would be submitted
  transom status                            all jobs
  transom status demo                       one job, and why it stands there
  transom logs demo -f                      what its ranks print, as it comes
  transom drain 'gpu-[1-4,7]' --reason fan  take nodes out of service

\b
JOB is a job's id or its name; NODES is a host list such as gpu-[1-4,7].
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no answer, 4 not allowed, 5 not
found, 6 unhealthy, 7 unknown, 8 the job failed (docs/operate.md).

\b
The daemon: --socket, else $TRANSOM_SOCKET (a path), $TRANSOM_URL (http://
HOST:7077, from a machine with munge), your own daemon's socket, the site's.
Completion for bash: eval "$(transom completion bash)"
"""


@dataclass(frozen=True)
class Entry:
    """A sub-command as the help shows it, and the module that holds it under the same name."""

    help: str
    module: str
    section: str


ENTRIES: Mapping[str, Entry] = {
    "submit": Entry("Submit a job.", "submit", "Jobs"),
    "status": Entry("Show all jobs, or one and why it stands where it stands.", "status", "Jobs"),
    "logs": Entry("Show what a job's ranks printed.", "logs", "Jobs"),
    "events": Entry("Show what transom saw, decided and did.", "events", "Jobs"),
    "cancel": Entry("Cancel jobs.", "cancel", "Jobs"),
    "ckpt": Entry("Look into checkpoints, check, move and remove them.", "ckpt", "Jobs"),
    "history": Entry("Show what happened to a job, a node, or all.", "history", "Jobs"),
    "incident": Entry("Show one failure whole: evidence, times, what was done and why.", "incident", "Jobs"),
    "diagnose": Entry("Say from log files what failed, and whose fault it is.", "diagnose", "Jobs"),
    "nodes": Entry("Show nodes, their checks and who drained them.", "nodes", "Nodes"),
    "drain": Entry("Take nodes out of service.", "drain", "Nodes"),
    "undrain": Entry("Put nodes that transom drained back into service.", "drain", "Nodes"),
    "hooks": Entry("Install prolog, epilog and health check on nodes.", "hooks", "Nodes"),
    "check": Entry("Probe nodes now.", "check", "Nodes"),
    "doctor": Entry("Say what is wrong around transom, and what to type.", "doctor", "Running transom"),
    "pause": Entry("Stop everything that transom does by itself, at once.", "pause", "Running transom"),
    "resume-actions": Entry("Let transom act again.", "pause", "Running transom"),
    "completion": Entry("Print the completion for a shell.", "completion", "Running transom"),
    "sandbox": Entry("Run a private Slurm on this machine, to try things out.", "sandbox", "Trying out"),
}


class LazyGroup(click.Group):
    """A group that imports a sub-command only when it is called, so that help and completion are fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one sub-command; None if there is none of that name."""
        entry = ENTRIES.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"transom_cli.commands.{entry.module}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sub-commands by section, without importing any."""
        for section in dict.fromkeys(entry.section for entry in ENTRIES.values()):
            with formatter.section(section):
                formatter.write_dl([(name, entry.help) for name, entry in ENTRIES.items() if entry.section == section])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="transom", message="%(prog)s %(version)s")
@click.option("--socket", metavar="PATH|URL", default="", help="Where transomd listens.")
@click.pass_context
def cli(ctx: click.Context, socket: str) -> None:
    """Keep large training jobs training, on Slurm."""
    ctx.obj = socket


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit with one of :class:`transomd.words.ExitCode`."""
    sys.exit(run(args))


def run(args: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, with every error told on standard error."""
    try:
        code = cli.main(args, prog_name="transom", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except click.UsageError as error:
        return _tell_usage(error)
    except BrokenPipeError:
        # Whoever read the output has gone, which is their choice; nothing must be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        return _tell(error)


def _tell(error: Exception) -> int:
    """Print an error as people need it, and return its exit code."""
    hint = getattr(error, "hint", None)
    if hint is None:
        tell(f"transom: a fault in transom itself: {type(error).__name__}: {error}")
        tell(f"please report it with the output of the same command with {DEBUG}=1 before it", indent="  ")
        return ExitCode.ERROR
    tell(f"transom: {error}")
    for fault in error.faults if isinstance(error, SpecError) else ():
        tell(fault, indent="  ")
    if hint:
        tell(f"next: {hint}", indent="  ")
    return int(getattr(error, "exit_code", ExitCode.ERROR))


def _tell_usage(error: click.UsageError) -> int:
    """Print wrong usage in the form of all errors, with the usage line of the command."""
    if isinstance(error, _HELP):
        error.show()
        return ExitCode.USAGE
    path = error.ctx.command_path if error.ctx else "transom"
    said = error.format_message().rstrip(".").replace(". Did you", "; did you")
    tell(f"{path.replace(' ', ': ', 1)}: {said[:1].lower()}{said[1:]}")
    if error.ctx is not None:
        tell(" ".join(["usage:", path, *error.ctx.command.collect_usage_pieces(error.ctx)]), indent="  ")
    tell(f"next: {path} -h", indent="  ")
    return ExitCode.USAGE


if __name__ == "__main__":
    main()
