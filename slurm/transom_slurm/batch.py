"""Submissions as text: a user's options, those transom adds, the batch script, the ``sbatch`` call. All pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transom_slurm.nodesets import HostlistError, expand, fold
from transom_slurm.options import SbatchOption, owned_options, parse_options
from transom_slurm.types import SubmitRequest

__all__ = [
    "BatchScriptError",
    "ScriptOptions",
    "check_user_options",
    "job_options",
    "owned_options",
    "parse_sbatch_script",
    "render_script",
    "sbatch_argv",
    "script_options",
]

_FIELD_OF_OPTION = {
    "nodes": "nodes",
    "job-name": "name",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time_limit",
    "gpus-per-node": "gpus_per_node",
    "ntasks-per-node": "tasks_per_node",
    "tasks-per-node": "tasks_per_node",
    "chdir": "workdir",
}
# Common in scripts written for plain sbatch, harmless to replace: the user is told, not refused.
_REPLACED = frozenset(
    ["requeue", "no-requeue", "no-kill", "exclusive", "open-mode", "comment", "signal", "output", "error", "parsable"]
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class BatchScriptError(ValueError):
    """A script's ``#SBATCH`` lines cannot be read; the message names the line."""


def check_user_options(words: Sequence[str]) -> list[str]:
    """Every fault in options that a user gave for sbatch, one sentence each; empty if all may be passed on."""
    return [fault for option in parse_options(words) if (fault := _option_fault(option))]


def _option_fault(option: SbatchOption) -> str:
    if option.fault:
        return f"{option.text}: {option.fault}"
    if option.name in (owned := owned_options()):
        return f"{option.text}: {owned[option.name]}"
    if option.name == "nice" and (option.value or "").strip().startswith("-"):
        return f"{option.text}: only an administrator may raise a job's priority"
    if option.name == "exclude":
        return _exclude_fault(option)
    return f"{option.text!r}: a control character" if re.search(r"[\x00-\x1f\x7f]", option.text) else ""


def _exclude_fault(option: SbatchOption) -> str:
    if "/" in (option.value or ""):
        return f"{option.text}: name the nodes, not a file"
    try:
        expand(option.value or "")
    except HostlistError as error:
        return f"{option.text}: {error}"
    return ""


def parse_sbatch_script(text: str) -> tuple[str, ...]:
    """The option words of a script's ``#SBATCH`` lines, read as sbatch reads them.

    Only lines before the first command count; quotes group, a backslash escapes, an unquoted ``#`` starts a comment.
    Raises BatchScriptError for an unclosed quote or a heterogeneous job.
    """
    words: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("#SBATCH"):
            words += _directive_words(line[len("#SBATCH") :], number)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return tuple(words)


def _directive_words(text: str, number: int) -> list[str]:
    try:
        words = list(_split_directive(text))
    except ValueError as error:
        raise BatchScriptError(f"line {number}: {error} in '#SBATCH{text}'") from None
    if words and words[0].lower() in ("hetjob", "packjob"):
        raise BatchScriptError(f"line {number}: heterogeneous jobs are not supported")
    return words


def _split_directive(text: str) -> Iterable[str]:
    """Split one directive; unlike a shell's, its backslash escapes inside either quote and its ``#`` needs no blank."""
    word, quote, escaped = "", "", False
    for char in text:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "\"'":
            quote = char
        elif char == "#":
            break
        elif char.isspace():
            if word:
                yield word
            word = ""
        else:
            word += char
    if quote:
        raise ValueError(f"unclosed {quote}")
    if word:
        yield word


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """A script's options sorted: ``fields`` of job.yaml, ``options`` passed on, ``replaced`` ones, and ``faults``.

    ``replaced`` and ``faults`` are sentences to show; a replaced option gives way to what transom always sets.
    """

    fields: Mapping[str, str]
    options: tuple[str, ...]
    replaced: tuple[str, ...]
    faults: tuple[str, ...]


def script_options(words: Sequence[str]) -> ScriptOptions:
    """Sort the options of a batch script, so that one written for plain sbatch can be submitted as it is."""
    fields: dict[str, str] = {}
    kept: list[str] = []
    replaced: list[str] = []
    faults: list[str] = []
    for option in parse_options(words):
        if not option.fault and option.name in _FIELD_OF_OPTION and option.value is not None:
            fields[_FIELD_OF_OPTION[option.name]] = option.value
        elif not option.fault and option.name in _REPLACED:
            replaced.append(f"{option.text}: {owned_options()[option.name]}")
        elif fault := _option_fault(option):
            faults.append(fault)
        else:
            kept.append(_as_word(option))
    return ScriptOptions(fields, tuple(kept), tuple(replaced), tuple(faults))


def _as_word(option: SbatchOption) -> str:
    return f"--{option.name}" if option.value is None else f"--{option.name}={option.value}"


def job_options(
    *,
    nodes: int,
    output: str,
    spares: int = 0,
    warn_s: int = 120,
    exclude: Iterable[str] = (),
    partition: str = "",
    account: str = "",
    qos: str = "",
    time_limit: str = "",
    gpus_per_node: int = 0,
    user_options: Sequence[str] = (),
) -> tuple[str, ...]:
    """The option words of one attempt: the user's (checked already), then transom's own, which win.

    ``output`` is a path taken literally. ``warn_s`` is how long before the time limit the launcher gets SIGTERM, in
    seconds. ``exclude`` is joined with the user's own ``--exclude``.
    """
    parsed = parse_options(user_options)
    barred = [*exclude, *(name for o in parsed if o.name == "exclude" for name in expand(o.value or ""))]
    wishes = {"partition": partition, "account": account, "qos": qos, "time": time_limit}
    return (
        *(_as_word(option) for option in parsed if option.name != "exclude"),
        *(f"--{name}={value}" for name, value in wishes.items() if value),
        *([f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        f"--nodes={nodes + spares}",
        "--exclusive",
        "--no-kill",
        "--no-requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{warn_s}",
        f"--output={output.replace('%', '%%')}",
        *([f"--exclude={fold(barred)}"] if barred else []),
    )


def sbatch_argv(request: SubmitRequest) -> tuple[str, ...]:
    """The exact ``sbatch`` call of a request; the script goes in on standard input."""
    tags = (f"--job-name={request.name}", f"--comment={request.comment}", f"--chdir={request.cwd}")
    return ("sbatch", "--parsable", *request.options, *tags)


def render_script(command: Sequence[str], *, title: str, env: Mapping[str, str] | None = None) -> str:
    """The batch script of an attempt: it becomes ``command``, with ``env`` added to the job's environment.

    Nothing before the ``exec`` has an effect, because Slurm may run it on one node although another node's prolog fails
    and the job never starts. ``exec`` lets the launcher itself get the signals meant for the batch script.
    """
    faults = [name for name in env or {} if not _ENV_NAME.fullmatch(name)]
    if faults or not command or "\n" in title:
        raise ValueError(f"not a batch script: {faults or 'no command, or a title of several lines'}")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items()]
    return "\n".join(["#!/bin/sh", f"# {title}", *exports, f"exec {shlex.join(command)}", ""])
