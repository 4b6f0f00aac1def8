"""What a sandbox is made of, and its configuration files as text. Nothing here has an effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transom_slurm.sandbox.layout import Layout

NETNS = "netns"
LOOPBACK = "loopback"
HUB = "hub"
HUB_ADDRESS = "10.77.0.254"
MAX_NODES = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node: where its daemons listen."""

    name: str
    address: str
    slurmd_port: int
    ssh_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """One sandbox, as asked for. Timeouts are in seconds; ``extra`` are further lines of slurm.conf."""

    root: Path
    mode: str
    slurm_version: tuple[int, int]
    user: str
    hostname: str
    controller_port: int
    nodes: tuple[NodeSpec, ...]
    gpus: int = 8
    cpus: int = 16
    memory_mb: int = 64000
    slurmd_timeout: int = 18
    message_timeout: int = 5
    extra: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """Where its files are."""
        return Layout(self.root)

    @property
    def namespaces(self) -> bool:
        """Whether each node has namespaces of its own."""
        return self.mode == NETNS

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its nodes, in order."""
        return tuple(node.name for node in self.nodes)

    @property
    def controller_address(self) -> str:
        """Where slurmctld listens."""
        return HUB_ADDRESS if self.namespaces else "127.0.0.1"


def netns_nodes(count: int) -> tuple[NodeSpec, ...]:
    """The nodes of a sandbox whose nodes have networks of their own, so that ports are the usual ones."""
    return tuple(
        NodeSpec(name=f"n{i}", address=f"10.77.0.{i}", slurmd_port=6818, ssh_port=22) for i in range(1, count + 1)
    )


def loopback_nodes(ports: Iterable[int], count: int) -> tuple[NodeSpec, ...]:
    """The nodes of a sandbox on loopback addresses; takes two free ports a node."""
    free = iter(ports)
    return tuple(
        NodeSpec(name=f"n{i}", address=f"127.77.0.{i}", slurmd_port=next(free), ssh_port=next(free))
        for i in range(1, count + 1)
    )


def slurm_conf(spec: ClusterSpec) -> str:
    """slurm.conf. What differs between versions: ``switch/none`` and ``accounting_storage/none`` ended with 23.11."""
    at = spec.layout
    old = spec.slurm_version < (23, 11)
    host = HUB if spec.namespaces else spec.hostname
    lines = [
        "ClusterName=sandbox",
        f"SlurmctldHost={host}({spec.controller_address})",
        f"SlurmctldPort={spec.controller_port}",
        f"SlurmUser={spec.user}",
        f"SlurmdUser={spec.user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        *([] if spec.namespaces else [f"AuthInfo=socket={at.run}/munge.socket"]),
        f"StateSaveLocation={at.root}/state",
        f"SlurmdSpoolDir={at.root}/nodes/%n/spool",
        f"SlurmctldPidFile={at.run}/slurmctld.pid",
        f"SlurmdPidFile={at.root}/nodes/%n/slurmd.pid",
        f"SlurmctldLogFile={at.logs}/slurmctld.log",
        f"SlurmdLogFile={at.logs}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        *(["SwitchType=switch/none", "AccountingStorageType=accounting_storage/none"] if old else []),
        "MpiDefault=none",
        "MailProg=/bin/true",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
        "SlurmdParameters=config_overrides",
        "PropagateResourceLimits=NONE",
        "ReturnToService=1",
        f"SlurmdTimeout={spec.slurmd_timeout}",
        f"MessageTimeout={spec.message_timeout}",
        "KillWait=5",
        "MinJobAge=300",
        *(["GresTypes=gpu"] if spec.gpus else []),
        *spec.extra,
        *(_node_line(spec, node) for node in spec.nodes),
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


def _node_line(spec: ClusterSpec, node: NodeSpec) -> str:
    host = node.name if spec.namespaces else spec.hostname
    gres = f" Gres=gpu:{spec.gpus}" if spec.gpus else ""
    return (
        f"NodeName={node.name} NodeHostname={host} NodeAddr={node.address} Port={node.slurmd_port}"
        f" CPUs={spec.cpus} RealMemory={spec.memory_mb}{gres} State=UNKNOWN"
    )


def gres_conf(spec: ClusterSpec) -> str:
    """gres.conf: device files, because Slurm sets CUDA_VISIBLE_DEVICES from them."""
    if not spec.gpus:
        return ""
    devices = "0" if spec.gpus == 1 else f"[0-{spec.gpus - 1}]"
    return f"AutoDetect=off\nName=gpu File={spec.root}/dev/nvidia{devices}\n"


def cgroup_conf(spec: ClusterSpec) -> str:
    """cgroup.conf, which has to exist; without it Slurm looks for systemd."""
    plugin = "disabled" if spec.slurm_version >= (23, 11) else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def hosts(spec: ClusterSpec) -> str:
    """/etc/hosts inside the namespaces."""
    own = [f"{HUB_ADDRESS} {HUB}", *(f"{node.address} {node.name}" for node in spec.nodes)]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost", *own]) + "\n"


def shadow(users: Iterable[str]) -> str:
    """/etc/shadow inside the nodes: no password for anybody, and nobody locked, so that keys work without PAM."""
    return "".join(f"{user}:*:19000:0:99999:7:::\n" for user in users)


def sshd_config(spec: ClusterSpec, node: NodeSpec) -> str:
    """The configuration of one node's sshd: keys only."""
    at, own = spec.layout, spec.layout.node(node.name)
    # A home of its own: bash reads its start-up file in every login, and nobody knows what the host's makes it run.
    setenv = f"SLURM_CONF={at.conf} HOME={own.root}/home"
    if not spec.namespaces:
        setenv += (
            f" SLURMD_NODENAME={node.name} PATH={own.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        )
    return "\n".join(
        [
            f"Port {node.ssh_port}",
            f"ListenAddress {node.address}",
            f"HostKey {own.host_key}",
            f"PidFile {own.root}/sshd.pid",
            f"AuthorizedKeysFile {at.etc}/authorized_keys",
            "AuthenticationMethods publickey",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "UsePAM no",
            "StrictModes no",
            "UseDNS no",
            "PrintMotd no",
            "MaxStartups 200",
            "MaxSessions 200",
            "Subsystem sftp internal-sftp",
            f"SetEnv {setenv}",
            "",
        ]
    )


def ssh_config(spec: ClusterSpec) -> str:
    """A client configuration by which ``ssh -F`` reaches every node by name."""
    at = spec.layout
    blocks = [
        f"Host {node.name}\n  HostName {node.address}\n  Port {node.ssh_port}\n  HostKeyAlias {node.name}\n"
        for node in spec.nodes
    ]
    common = [
        "Host *",
        f"  IdentityFile {at.etc}/id_ed25519",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {at.etc}/known_hosts",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  BatchMode yes",
        "  ConnectTimeout 5",
        "  LogLevel ERROR",
    ]
    return "".join(blocks) + "\n".join(common) + "\n"


def known_hosts(spec: ClusterSpec, keys: Mapping[str, str]) -> str:
    """known_hosts; ``keys`` maps a node's name to its public host key."""
    lines = []
    for node in spec.nodes:
        kind, key = keys[node.name].split()[:2]
        where = node.address if node.ssh_port == 22 else f"[{node.address}]:{node.ssh_port}"
        lines.append(f"{node.name},{where} {kind} {key}\n")
    return "".join(lines)
