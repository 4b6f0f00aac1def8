"""SSH to nodes, against a real sshd on loopback."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import socket
import time
from pathlib import Path

import pytest
from health_sshd import Sshd, keygen

from transomd.health import ssh
from transomd.health.session import command_line
from transomd.health.ssh import SshPool
from transomd.health.sshfailure import SshFailure

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="logs in as root and runs commands as other users")

USER = "nobody"
SERVER = "awk '{print $4}' /proc/$PPID/stat"
"""Prints the pid of the sshd that serves this session: the parent of ``timeout``."""


async def alive(pid: int, deadline: float = 60.0) -> bool:
    """Whether a process is still there after as long as ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        await asyncio.sleep(0.02)
    return True


async def read_pid(path: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text().strip()):
            return int(text)
        await asyncio.sleep(0.02)
    raise AssertionError(f"nothing was written to {path}")


async def test_status_and_both_streams(pool: SshPool) -> None:
    result = await pool.run("n1", ["sh", "-c", "cat; echo err >&2; exit 3"], stdin="in\n", timeout=60)
    assert (result.rc, result.stdout, result.stderr) == (3, "in\n", "err\n")
    assert result.sent <= result.ended
    assert not result.truncated


async def test_signal_is_128_plus_its_number(pool: SshPool) -> None:
    result = await pool.run("n1", ["sh", "-c", "kill -TERM $$"], timeout=60)
    assert result.rc == 128 + signal.SIGTERM


@pytest.mark.parametrize("user", [None, USER])
async def test_words_never_meet_a_shell(pool: SshPool, tmp_path: Path, user: str | None) -> None:
    touch = f"touch {tmp_path}/injected"
    words = [
        f"$({touch})",
        f"`{touch}`",
        f"; {touch}",
        f"' ; {touch}; '",
        f"\n{touch}\n",
        '"',
        "*",
        "$HOME",
        "-n",
        "é\u2028",
    ]
    result = await pool.run("n1", ["printf", "%s|", *words], timeout=60, user=user)
    assert result.stdout == "".join(f"{word}|" for word in words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("user", ["", "-x", "root", "a\0b"])
def test_users_that_are_refused_before_anything_is_sent(user: str) -> None:
    with pytest.raises(ValueError, match="not a user"):
        command_line(["true"], 1, user)


async def test_user_cannot_inject_or_be_root_by_number(pool: SshPool, tmp_path: Path) -> None:
    evil = f"nobody; touch {tmp_path}/injected"
    assert (await pool.run("n1", ["true"], timeout=60, user=evil)).rc == 126
    zero = await pool.run("n1", ["id", "-u"], timeout=60, user="0")
    assert (zero.rc, zero.stdout) == (126, "")
    assert not list(tmp_path.iterdir())


async def test_as_user_keeps_nothing_of_root(pool: SshPool) -> None:
    script = "grep -E '^(Uid|Gid|Groups|Cap(Inh|Prm|Eff|Amb)):' /proc/self/status; pwd; env; test -w /root || echo no"
    result = await pool.run("n1", ["sh", "-c", script], timeout=60, user=USER)
    entry = pwd.getpwnam(USER)
    lines = result.stdout.splitlines()
    status = {line.split(":")[0]: line.split(":")[1].split() for line in lines[:7]}
    assert status["Uid"] == [str(entry.pw_uid)] * 4
    assert status["Gid"] == [str(entry.pw_gid)] * 4
    assert set(status["Groups"]) == {str(g) for g in os.getgrouplist(USER, entry.pw_gid)}
    assert all(int(status[cap][0], 16) == 0 for cap in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
    assert lines[7] == "/"
    environment = {line.split("=")[0] for line in lines[8:] if "=" in line}
    assert environment <= {"PATH", "LANG", "USER", "LOGNAME", "HOME", "SHELL", "PWD", "SHLVL", "_", "OLDPWD"}
    assert lines[-1] == "no"


async def test_output_is_bounded(sshd: Sshd) -> None:
    async with SshPool(sshd.settings(output_limit=1000)) as pool:
        result = await pool.run("n1", ["sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x; echo done >&2"], timeout=60)
    assert result.truncated
    assert result.stdout == "x" * 1000
    assert result.stderr == "done\n"


@pytest.mark.parametrize("user", [None, USER])
async def test_deadline_kills_the_whole_group_on_the_node(pool: SshPool, shared: Path, user: str | None) -> None:
    script = f"trap '' TERM HUP; sleep 300 & echo $! > {shared}/child; echo $$ > {shared}/self; wait"
    began = time.monotonic()
    with pytest.raises(SshFailure) as caught:
        await pool.run("n1", ["sh", "-c", script], timeout=2, user=user)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - began < 20
    for name in ("child", "self"):
        assert not await alive(await read_pid(shared / name))
    assert (await pool.run("n1", ["true"], timeout=60)).rc == 0


async def test_giving_up_kills_the_command(pool: SshPool, tmp_path: Path) -> None:
    running = asyncio.create_task(
        pool.run("n1", ["sh", "-c", f"echo $$ > {tmp_path}/self; exec sleep 300"], timeout=300)
    )
    pid = await read_pid(tmp_path / "self")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not await alive(pid)


SLOW_WORDS = """ForceCommand exec bash -c 'eval "$SSH_ORIGINAL_COMMAND" 2> >(sleep 0.5; cat >&2)'\n"""


async def test_giving_up_kills_a_command_whose_first_words_are_still_on_their_way(tmp_path: Path) -> None:
    node = Sshd(tmp_path)
    node.extra = SLOW_WORDS
    with node:
        async with SshPool(node.settings()) as pool:
            script = f"echo $$ > {tmp_path}/self; exec sleep 300"
            running = asyncio.create_task(pool.run("n1", ["sh", "-c", script], timeout=300))
            pid = await read_pid(tmp_path / "self")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not await alive(pid)


async def test_what_keeps_the_output_open_is_killed(pool: SshPool, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(SshFailure) as caught:
        await pool.run("n1", ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/left"], timeout=2)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - began < 20
    assert not await alive(await read_pid(tmp_path / "left"))


async def test_one_connection_serves_many_commands(pool: SshPool) -> None:
    results = await asyncio.gather(
        *(pool.run("n1", ["sh", "-c", "echo $SSH_CONNECTION"], timeout=60) for _ in range(12))
    )
    assert len({result.stdout for result in results}) == 1


async def test_a_dead_connection_is_replaced(sshd: Sshd, pool: SshPool) -> None:
    first = await pool.run("n1", ["sh", "-c", SERVER], timeout=60)
    os.kill(int(first.stdout), signal.SIGKILL)
    second = await pool.run("n1", ["sh", "-c", SERVER], timeout=60)
    assert second.rc == 0
    assert second.stdout != first.stdout


async def test_connection_lost_under_a_command(pool: SshPool) -> None:
    with pytest.raises(SshFailure) as caught:
        await pool.run("n1", ["sh", "-c", f"kill -KILL $({SERVER}); exec sleep 60"], timeout=60)
    assert caught.value.kind == "unreachable"


async def test_fan_out_is_bounded(sshd: Sshd, tmp_path: Path) -> None:
    async with SshPool(sshd.settings(fan_out=2)) as pool:
        script = f"touch {tmp_path}/$$; sleep 0.1; ls {tmp_path} | wc -l; rm {tmp_path}/$$"
        results = await asyncio.gather(*(pool.run("n1", ["sh", "-c", script], timeout=60) for _ in range(8)))
    assert max(int(result.stdout) for result in results) <= 2


async def test_together_keeps_no_slot(sshd: Sshd, tmp_path: Path) -> None:
    meet = f"touch {tmp_path}/$1; until [ -e {tmp_path}/$2 ]; do sleep 0.02; done"
    async with SshPool(sshd.settings(fan_out=1)) as pool:
        both = (
            pool.run("n1", ["sh", "-c", meet, "sh", *names], timeout=60, together=True)
            for names in (("a", "b"), ("b", "a"))
        )
        assert [result.rc for result in await asyncio.gather(*both)] == [0, 0]


async def test_connections_are_kept_up_to_a_number(tmp_path: Path) -> None:
    with Sshd(tmp_path, nodes=3) as three:
        async with SshPool(three.settings(keep=1)) as pool:
            await asyncio.gather(*(pool.run(name, ["sleep", "0.2"], timeout=60) for name in three.names))
            assert pool.connections == 1
            assert (await pool.run("n3", ["true"], timeout=60)).rc == 0


async def test_unknown_host_key(sshd: Sshd, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    async with SshPool(sshd.settings(known_hosts=empty)) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
    assert caught.value.kind == "host-key"
    assert f"not in {empty}" in str(caught.value)
    assert "ssh-keyscan" in caught.value.hint
    assert str(empty) in caught.value.hint


async def test_changed_host_key(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    key = (tmp_path / "other.pub").read_text().strip()
    changed = tmp_path / "known_hosts"
    changed.write_text(f"[{sshd.addresses['n1']}]:{sshd.ports['n1']} {key}\n")
    async with SshPool(sshd.settings(known_hosts=changed)) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
    assert caught.value.kind == "host-key"
    assert f"not the one in {changed}" in str(caught.value)
    assert "ssh-keygen -R" in caught.value.hint


async def test_missing_known_hosts(sshd: Sshd, tmp_path: Path) -> None:
    async with SshPool(sshd.settings(known_hosts=tmp_path / "none")) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
    assert caught.value.kind == "host-key"


async def test_a_configuration_cannot_turn_checking_off(sshd: Sshd, tmp_path: Path) -> None:
    config, empty = tmp_path / "config", tmp_path / "known_hosts"
    empty.write_text("")
    config.write_text(sshd.config.read_text() + "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n")
    async with SshPool(sshd.settings(known_hosts=empty, config=config)) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
    assert caught.value.kind == "host-key"


async def test_wrong_key_is_auth(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    async with SshPool(sshd.settings(client_keys=(tmp_path / "other",))) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
    assert caught.value.kind == "auth"


@pytest.mark.parametrize("content", [None, "no key at all"])
async def test_a_client_key_that_cannot_be_used(sshd: Sshd, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "key").write_text(content)
    async with SshPool(sshd.settings(client_keys=(tmp_path / "key",))) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
    assert caught.value.kind in ("auth", "other")


async def test_a_session_that_is_refused_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshd counts a session until it has seen its end."""
    monkeypatch.setattr(ssh, "_SESSION_S", 60.0)
    node = Sshd(tmp_path)
    node.extra = "MaxSessions 2\n"
    with node:
        async with SshPool(node.settings()) as pool:
            results = await asyncio.gather(*(pool.run("n1", ["sleep", "0.3"], timeout=60) for _ in range(4)))
    assert [result.rc for result in results] == [0] * 4


async def test_no_more_sessions_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_SESSION_S", 0.3)
    node = Sshd(tmp_path)
    node.extra = "MaxSessions 2\n"
    with node:
        async with SshPool(node.settings()) as pool:
            wanted = (pool.run("n1", ["sleep", "2"], timeout=60) for _ in range(4))
            results = await asyncio.gather(*wanted, return_exceptions=True)
    assert sum(not isinstance(result, Exception) for result in results) == 2
    refused = [result for result in results if isinstance(result, SshFailure)]
    assert [failure.kind for failure in refused] == ["other", "other"]
    assert "opens no session" in str(refused[0])


async def test_commands_at_once_after_the_connection_died(pool: SshPool) -> None:
    server = await pool.run("n1", ["sh", "-c", SERVER], timeout=60)
    os.kill(int(server.stdout), signal.SIGKILL)
    results = await asyncio.gather(*(pool.run("n1", ["sleep", "0.2"], timeout=60) for _ in range(6)))
    assert [result.rc for result in results] == [0] * 6


async def test_refused_and_back_again(tmp_path: Path) -> None:
    node = Sshd(tmp_path)
    async with SshPool(node.settings()) as pool:
        with pytest.raises(SshFailure) as caught:
            await pool.run("n1", ["true"], timeout=60)
        assert caught.value.kind == "refused"
        with node:
            assert (await pool.run("n1", ["true"], timeout=60)).rc == 0


async def test_silence_and_unknown_names_are_unreachable(sshd: Sshd, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        config = tmp_path / "config"
        config.write_text(f"Host silent\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        async with SshPool(sshd.settings(config=config, connect_timeout=0.5)) as pool:
            for name, words in (("silent", "no answer after 0.5 s"), ("no-such-node.invalid", "")):
                with pytest.raises(SshFailure) as caught:
                    await pool.run(name, ["true"], timeout=60)
                assert caught.value.kind == "unreachable"
                assert words in str(caught.value)
                assert caught.value.hint == f"ssh {name} true"
