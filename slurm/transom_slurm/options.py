"""sbatch's options as data: their forms, which of them transom owns, and how a list of words is read.

Source of names and forms: ``slurm_opt.c`` of 22.05 to 26.05.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_REQUIRED = """
account acctg-freq array autocomplete batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint
container container-id container-type context core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name kill-on-invalid-dep licenses
mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist nodes
ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output partition
prefer priority profile qos reservation resources segment signal sockets-per-node switches tasks-per-node thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap
"""
_OPTIONAL = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_BARE = """
consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet reboot
spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait
"""
_SHORT = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "h": "help", "H": "hold", "i": "input",
    "J": "job-name", "k": "no-kill", "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes",
    "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "v": "verbose", "V": "version", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip
_FORMS: dict[str, str] = {
    name: form
    for form, names in (("required", _REQUIRED), ("optional", _OPTIONAL), ("bare", _BARE))
    for name in names.split()
}

_OWN_RESTARTS = "transom restarts jobs itself; two owners would run two copies"
_IN_JOB_YAML = "say it in job.yaml: "
_FOLDER = "the job's log lies in its run folder; see it with 'transom logs'"
_CALL = "transom calls sbatch and reads its answer"
_ENV = "transom hands the environment over; use 'env' in job.yaml"
_ONE_JOB = "one transom job is one plain Slurm job"
_ROOT = "the job runs as its owner"
_NODES = "transom chooses among nodes and leaves bad ones out; use --exclude, --constraint or --reservation"
_INSIDE = "the launcher runs on the node itself; start the container in 'command'"
_PYXIS = ("container-", "no-container-")
"""How the options of pyxis begin, a plugin that puts the batch script itself into a container."""

_OWNED: dict[str, str] = {
    "requeue": _OWN_RESTARTS,
    "no-requeue": _OWN_RESTARTS,
    "no-kill": "the allocation must outlive the loss of a node; transom always sets it",
    "exclusive": "whole nodes are needed to check and to blame them; transom always sets it",
    "oversubscribe": "whole nodes are needed to check and to blame them",
    "open-mode": "a log is only ever appended to",
    "comment": "it carries the tag by which transom finds the job again",
    "job-name": _IN_JOB_YAML + "name",
    "signal": "it is the launcher's warning before the time limit",
    "nodes": _IN_JOB_YAML + "nodes, spares",
    "ntasks": _IN_JOB_YAML + "nodes, tasks_per_node",
    "ntasks-per-node": _IN_JOB_YAML + "tasks_per_node",
    "tasks-per-node": _IN_JOB_YAML + "tasks_per_node",
    "nodelist": _NODES,
    "nodefile": _NODES,
    "use-min-nodes": _NODES,
    "chdir": _IN_JOB_YAML + "workdir",
    "output": _FOLDER,
    "error": _FOLDER,
    "input": "a training job reads no standard input",
    "export": _ENV,
    "export-file": _ENV,
    "get-user-env": _ENV,
    "uid": _ROOT,
    "gid": _ROOT,
    "array": _ONE_JOB,
    "het-group": _ONE_JOB,
    "clusters": _ONE_JOB,
    "cluster": _ONE_JOB,
    "external": _ONE_JOB,
    "container": _INSIDE,
    "container-id": _INSIDE,
    "wait": _CALL,
    "parsable": _CALL,
    "test-only": _CALL,
    "quiet": _CALL,
    "verbose": _CALL,
    "help": _CALL,
    "usage": _CALL,
    "version": _CALL,
    "autocomplete": _CALL,
    "wrap": _CALL,
}


def owned_options() -> Mapping[str, str]:
    """The long names of the options that transom sets or forbids, each with the reason shown to a user."""
    return dict(_OWNED)


@dataclass(frozen=True, slots=True)
class SbatchOption:
    """One option as written: its long name (the text itself if unknown), its value, and a fault if it cannot stand."""

    name: str
    value: str | None
    text: str
    fault: str = ""


def parse_options(words: Sequence[str]) -> tuple[SbatchOption, ...]:
    """Read argv words as ``getopt_long`` would: ``--a=b``, ``--a b``, ``-N2``, ``-N 2``, ``-HO``.

    What is no option gets a fault. A long name that this table does not know (a newer Slurm's) must bear its value in
    the same word; an abbreviation of a known one must be written out.
    """
    found: list[SbatchOption] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2:
            found.append(_long(word, rest))
        elif word.startswith("-") and len(word) > 1 and word != "--":
            found.extend(_short(word, rest))
        elif word == ":":
            found.append(SbatchOption(word, None, word, "heterogeneous jobs are not supported: " + _ONE_JOB))
        else:
            found.append(SbatchOption(word, None, word, "no option of sbatch"))
    return tuple(found)


def _long(word: str, rest: list[str]) -> SbatchOption:
    name, equals, value = word[2:].partition("=")
    form = _FORMS.get(name)
    if form is None:
        if name.startswith(_PYXIS):
            return SbatchOption(name, value if equals else None, word, _INSIDE)
        meant = sorted(known for known in _FORMS if known.startswith(name))
        fault = f"write the option out: {', '.join('--' + known for known in meant)}" if meant else ""
        return SbatchOption(name, value if equals else None, word, fault)
    if form == "bare":
        return SbatchOption(name, None, word, "takes no value" if equals else "")
    if equals or form == "optional":
        return SbatchOption(name, value if equals else None, word)
    return _with_next(name, word, rest)


def _with_next(name: str, word: str, rest: list[str]) -> SbatchOption:
    if not rest:
        return SbatchOption(name, None, word, "its value is missing")
    value = rest.pop(0)
    return SbatchOption(name, value, f"{word} {value}")


def _short(word: str, rest: list[str]) -> Iterable[SbatchOption]:
    for index in range(1, len(word)):
        letter = word[index]
        name = _SHORT.get(letter)
        if name is None:
            yield SbatchOption(letter, None, word, f"sbatch has no option -{letter}")
            return
        form, attached = _FORMS[name], word[index + 1 :]
        if form == "bare":
            yield SbatchOption(name, None, f"-{letter}")
        elif attached or form == "optional":
            yield SbatchOption(name, attached or None, word)
            return
        else:
            yield _with_next(name, word, rest)
            return
