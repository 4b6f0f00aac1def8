"""The small shell scripts of a sandbox, as text: enter the hub, enter a node, and words that do so by themselves."""

from __future__ import annotations

from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.layout import command

TAG = "TRANSOM_SANDBOX_PROCESS"
"""In the environment of what a sandbox started, with the path of its slurm.conf: ``down`` ends exactly these."""
HUB_WORDS = (
    *("squeue", "sinfo", "scontrol", "sbatch", "srun", "salloc", "scancel", "sacct", "sacctmgr", "sdiag", "sprio"),
    *("sbcast", "sattach", "sstat", "strigger", "munge", "unmunge", "transomd"),
)
_EXIT_DOWN = 125


def _prelude(spec: ClusterSpec, fallback_bin: str) -> str:
    at = spec.layout
    return f"""#!/bin/sh
# Written by `transom sandbox up`.
conf={at.conf}
p=":$PATH:"
while :; do case "$p" in *":{at.bin}:"*) p="${{p%%":{at.bin}:"*}}:${{p#*":{at.bin}:"}}" ;; *) break ;; esac; done
p="${{p#:}}"
PATH="${{p%:}}:{fallback_bin}:/usr/sbin:/sbin"
SLURM_CONF=$conf
{TAG}=$conf
export PATH SLURM_CONF {TAG}
die() {{ echo "transom sandbox: $1" >&2; exit {_EXIT_DOWN}; }}
alive() {{ grep -qszxF "{TAG}=$conf" "/proc/$1/environ"; }}
"""


def hub_script(spec: ClusterSpec, fallback_bin: str) -> str:
    """``hub CMD...``: run a command where slurmctld runs; exit 125 when the sandbox is down."""
    text = _prelude(spec, fallback_bin)
    if not spec.namespaces:
        return text + f'PATH="{spec.layout.lib}/simulated:$PATH"\nexec "$@"\n'
    return text + (
        '[ "$(id -u)" = 0 ] || die "entering the namespaces of this sandbox needs root"\n'
        f"pid=$(cat {spec.layout.hub.pid} 2>/dev/null)\n"
        f'[ -n "$pid" ] && alive "$pid" || die "nothing is up in {spec.root}; next: {command(spec.root, "up")}"\n'
        'exec nsenter -t "$pid" -m -u -n --wdns="$(pwd -P)" -- "$@"\n'
    )


def node_script(spec: ClusterSpec, fallback_bin: str) -> str:
    """``node NAME CMD...``: run a command on a node; it dies with its caller, and with the node's power."""
    text = _prelude(spec, fallback_bin) + (
        f'name=$1; shift; dir={spec.root}/nodes/$name\n[ -d "$dir" ] || die "there is no node $name"\n'
    )
    if not spec.namespaces:
        return text + 'export SLURMD_NODENAME="$name" PATH="$dir/bin:$PATH"\nexec "$@"\n'
    return text + (
        '[ "$(id -u)" = 0 ] || die "entering the namespaces of this sandbox needs root"\n'
        'pid=$(cat "$dir/init.pid" 2>/dev/null)\n'
        f'[ -n "$pid" ] && alive "$pid" || die "node $name has no power; next: {command(spec.root, "heal $name")}"\n'
        'exec nsenter -t "$pid" -m -u -i -n -p --wdns="$(pwd -P)" -- setpriv --pdeathsig KILL -- "$@"\n'
    )


def wrapper(spec: ClusterSpec, word: str) -> str:
    """A command of the same name that runs in the hub."""
    return f'#!/bin/sh\nexec {spec.layout.lib}/hub {word} "$@"\n'


def transom_wrapper(spec: ClusterSpec, fallback_bin: str) -> str:
    """``transom`` in the hub, but ``transom sandbox`` where the caller is, since ``down`` ends what is in the hub."""
    sandbox = f'case "$1" in sandbox) exec {fallback_bin}/transom "$@" ;; esac\n'
    return f'#!/bin/sh\n{sandbox}exec {spec.layout.lib}/hub transom "$@"\n'


def simulated_wrapper(python: str, script: str, state: str) -> str:
    """A command that answers from a node's state file."""
    label = "# Simulated by transom sandbox: not NVIDIA's and not the kernel's."
    return f'#!/bin/sh\n{label}\nexec {python} -I -S {script} {state} "$@"\n'


def dispatcher(spec: ClusterSpec, word: str) -> str:
    """The simulated command of the node that a job is on, for loopback nodes, where a job's PATH is its submitter's."""
    own = f"{spec.root}/nodes/$SLURMD_NODENAME/bin/{word}"
    check = f'[ -x "{own}" ] || {{ echo "{word}: not on a node of the sandbox" >&2; exit 127; }}'
    return f'#!/bin/sh\n{check}\nexec "{own}" "$@"\n'
