"""How the command client reads what commands answered: what real controllers refused, and scripted answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transom_slurm.commands import UNAVAILABLE, CommandClient, Deadlines
from transom_slurm.errors import (
    SlurmDenied,
    SlurmError,
    SlurmRejected,
    SlurmUnavailable,
    SlurmUnreadable,
    SubmitAmbiguous,
)
from transom_slurm.runner import CommandNotStarted, CommandOverflow, CommandTimeout, Completed
from transom_slurm.types import SubmitRequest, UserIdentity

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
REQUEST = SubmitRequest("#!/bin/sh\n", ("--nodes=2",), "transom-7-1", "transom:7:1", "/tmp")
Verb = Callable[[CommandClient], Awaitable[Any]]
VERBS: dict[str, Verb] = {
    "jobs": lambda c: c.jobs(),
    "nodes": lambda c: c.nodes(),
    "finished": lambda c: c.finished([1], 0),
    "find": lambda c: c.find("x"),
    "submit": lambda c: c.submit(REQUEST),
    "cancel": lambda c: c.cancel(1),
    "drain": lambda c: c.drain("n1", "transom[x] y"),
    "resume": lambda c: c.resume("n1"),
    "update_job": lambda c: c.update_job(1, {"comment": "x"}),
    "config": lambda c: c.config(),
    "topology": lambda c: c.topology(),
    "reservations": lambda c: c.reservations(),
    "steps": lambda c: c.steps(1),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


class Script:
    """A runner that answers from a script and remembers what it was asked."""

    def __init__(self, *answers: tuple[int, str, str] | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[dict[str, Any]] = []

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str],
        timeout: float,
        cwd: str | None = None,
        user: UserIdentity | None = None,
    ) -> Completed:
        self.calls.append({"argv": tuple(argv), "stdin": stdin, "env": env, "timeout": timeout, "user": user})
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return Completed(tuple(argv), *answer, 0.0)


def _client(*answers: tuple[int, str, str] | Exception, **settings: Any) -> tuple[CommandClient, Script]:
    script = Script(*answers)
    return CommandClient(script, env={"PATH": "/bin", "SLURM_CONF": "/c"}, **settings), script


def _recorded() -> list[Any]:
    cases = []
    for version in ("22.05.8", "24.11.5"):
        for fault in json.loads((GOLDEN / version / "faults.json").read_text()):
            if "--json" in fault["argv"]:
                continue  # recorded to show why it is not used: 22.05 exits 0 without a controller
            name = f"{version} {' '.join(fault['argv'])[:60]} -> {fault['rc']}"
            cases.append(pytest.param(fault, id=name))
    return cases


def _verb_of(argv: Sequence[str]) -> Verb | None:
    if argv[0] == "scontrol":
        return VERBS["nodes"] if "show" in argv else VERBS["drain" if argv[2].startswith("node") else "update_job"]
    return VERBS.get({"sbatch": "submit", "squeue": "jobs", "scancel": "cancel", "sacct": "finished"}[argv[0]])


def _expected(fault: Mapping[str, Any]) -> type[SlurmError] | None:
    said = fault["stderr"].lower()
    if "unable to contact" in said or "connection refused" in said or "invalid job format" in said:
        return SubmitAmbiguous if fault["argv"][0] == "sbatch" else SlurmUnavailable
    if "invalid user id" in said or "permission denied" in said or "only permitted by root" in said:
        return SlurmDenied
    return SlurmRejected if fault["rc"] else None


@pytest.mark.parametrize("fault", _recorded())
async def test_what_real_controllers_refused(fault: Mapping[str, Any]) -> None:
    verb, expected = _verb_of(fault["argv"]), _expected(fault)
    assert verb
    client, _ = _client((fault["rc"], fault["stdout"], fault["stderr"]))
    if expected is None:
        await verb(client)
        return
    with pytest.raises(SlurmError) as caught:
        await verb(client)
    assert type(caught.value) is expected
    assert caught.value.cause


@every_verb
@pytest.mark.parametrize("piece", UNAVAILABLE)
async def test_every_sign_of_an_outage_is_unknown(verb: Verb, piece: str) -> None:
    client, _ = _client((1, "", f"x: error: {piece.title()}\n"))
    with pytest.raises(SlurmUnavailable):
        await verb(client)


@every_verb
@pytest.mark.parametrize(
    "error", [CommandTimeout(["x"], "late"), CommandOverflow(["x"], "much"), CommandNotStarted(["x"], "no")]
)
async def test_a_command_that_does_not_end_proves_nothing(verb: Verb, error: Exception) -> None:
    client, _ = _client(error)
    with pytest.raises(SlurmError) as caught:
        await verb(client)
    never_began = isinstance(error, CommandNotStarted) and verb is VERBS["submit"]
    assert type(caught.value) is (
        SlurmRejected if never_began else SubmitAmbiguous if verb is VERBS["submit"] else SlurmUnavailable
    )


@every_verb
async def test_a_command_killed_by_a_signal_proves_nothing(verb: Verb) -> None:
    client, _ = _client((-13, "", ""))
    with pytest.raises(SlurmUnavailable, match="killed by SIGPIPE"):
        await verb(client)


async def test_what_a_command_said_before_a_signal_killed_it_is_told_too() -> None:
    client, _ = _client((-15, "", "squeue: something\n"))
    with pytest.raises(SlurmUnavailable, match="killed by SIGTERM; it had said: squeue: something"):
        await client.jobs()


@pytest.mark.parametrize("verb", ["jobs", "nodes", "find", "steps"])
async def test_an_error_with_exit_code_0_is_no_empty_list(verb: str) -> None:
    client, _ = _client((0, "", "squeue: error: something went wrong\n"))
    with pytest.raises(SlurmUnavailable, match="something went wrong"):
        await VERBS[verb](client)


async def test_a_noisy_but_whole_answer_stands() -> None:
    nodes = (GOLDEN / "24.11.5" / "nodes.txt").read_text()
    client, _ = _client((0, nodes, "scontrol: error: s_p_parse_file: unknown key Foo\n"))
    assert len(await client.nodes()) == 4


async def test_a_site_may_add_its_own_signs_of_an_outage() -> None:
    client, _ = _client((1, "", "proxy: Upstream Is Asleep\n"), unavailable=["upstream is asleep"])
    with pytest.raises(SlurmUnavailable):
        await client.drain("n1", "transom[x] y")


async def test_no_accounting_is_an_empty_answer_and_no_topology_too() -> None:
    client, _ = _client((1, "", "Slurm accounting storage is disabled\n"))
    assert await client.finished([1], 0) == {}
    client, _ = _client((0, "", "scontrol: error: No topology information available\n"))
    assert await client.topology() == {}


async def test_nothing_to_ask_asks_nothing() -> None:
    client, script = _client((1, "", "never asked"))
    assert await client.finished([], 0) == {}
    assert script.calls == []


async def test_the_exact_calls() -> None:
    client, script = _client((0, "", ""))
    for verb in ("cancel", "drain", "resume", "update_job", "reservations"):
        await VERBS[verb](client)
    with pytest.raises(SlurmUnreadable, match="no node at all"):
        await client.nodes()
    assert [call["argv"] for call in script.calls] == [
        ("scancel", "1"),
        ("scontrol", "update", "nodename=n1", "state=drain", "reason=transom[x] y"),
        ("scontrol", "-o", "-a", "show", "node", "n1"),
        ("scontrol", "update", "nodename=n1", "state=undrain"),
        ("scontrol", "update", "jobid=1", "comment=x"),
        ("scontrol", "-o", "show", "reservations"),
        ("scontrol", "-o", "-a", "show", "nodes"),
    ]
    assert all(call["env"] == {"PATH": "/bin", "SLURM_CONF": "/c"} for call in script.calls)


OURS = "transom[xid] x [root@1795984100]"


def _shown(state: str, reason: str) -> tuple[int, str, str]:
    """One node as 24.11 showed it."""
    lines = (GOLDEN / "24.11.5" / "nodes.txt").read_text().splitlines()
    line = next(line for line in lines if line.startswith("NodeName=n1 ") and "Reason=" not in line)
    line = re.sub(r" State=\S+", f" State={state}", line)
    return 0, f"{line.rstrip()} {f'Reason={reason}' if reason else ''}\n", ""


@pytest.mark.parametrize(
    ("before", "after", "cleared"),
    [
        (("IDLE+DRAIN", OURS), ("IDLE", OURS), True),
        (("IDLE+DRAIN", OURS), ("IDLE", ""), False),
        (("IDLE+DRAIN", OURS), ("IDLE", "RMA 4711 [alice@1795984101]"), False),
        (("IDLE+DRAIN", OURS), ("IDLE", OURS.replace("4100", "4101")), False),
        (("IDLE+DRAIN", OURS), ("IDLE+DRAIN", OURS), False),
        (("DOWN+DRAIN", OURS), ("DOWN", OURS), False),
    ],
)
async def test_a_reason_that_slurm_leaves_is_taken_out_if_it_is_the_one_that_was_lifted(
    before: tuple[str, str], after: tuple[str, str], cleared: bool
) -> None:
    client, script = _client(_shown(*before), (0, "", ""), _shown(*after), (0, "", ""))
    await client.resume("n1")
    written = [call["argv"][3:] for call in script.calls if "update" in call["argv"]]
    assert written == [("state=undrain",), *([("reason=",)] if cleared else [])]


async def test_a_node_is_resumed_though_it_cannot_be_looked_at_again() -> None:
    client, script = _client(_shown("IDLE+DRAIN", OURS), (0, "", ""), CommandTimeout(["scontrol"], "late"))
    await client.resume("n1")
    assert len(script.calls) == 3


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "bell\a"])
async def test_a_reason_is_one_line(reason: str) -> None:
    client, script = _client((0, "", ""))
    with pytest.raises(SlurmRejected, match="one line"):
        await client.drain("n1", reason)
    assert script.calls == []


@pytest.mark.parametrize("stdout", ["42\n", "42;cluster\n"])
async def test_submit_gives_the_job_id_and_hands_over_user_script_and_environment(stdout: str) -> None:
    alice = UserIdentity(1000, 1000, (1000,), "alice", "/home/alice")
    request = SubmitRequest(
        "#!/bin/sh\n", (), "n", "c", "/tmp", user=alice, env={"A": "b", "SLURM_JOB_ID": "9", "SBATCH_QOS": "x"}
    )
    client, script = _client((0, stdout, ""), deadlines=Deadlines(submit=7))
    assert await client.submit(request) == 42
    call = script.calls[0]
    assert (call["stdin"], call["user"], call["timeout"]) == ("#!/bin/sh\n", alice, 7)
    assert call["env"] == {
        "PATH": "/bin", "SLURM_CONF": "/c", "HOME": "/home/alice", "USER": "alice", "LOGNAME": "alice", "A": "b",
    }  # fmt: skip


@pytest.mark.parametrize("answer", [(0, "", ""), (0, "sbatch: hello\n", ""), (-15, "", "")])
async def test_a_submission_without_a_clear_answer_is_ambiguous(answer: tuple[int, str, str]) -> None:
    client, _ = _client(answer)
    with pytest.raises(SubmitAmbiguous) as caught:
        await client.submit(REQUEST)
    assert caught.value.hint == "squeue -a -t all --name=transom-7-1"


async def test_few_commands_run_at_once() -> None:
    running, most = 0, 0

    async def slow(argv: Sequence[str], **_: object) -> Completed:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        running -= 1
        return Completed(tuple(argv), 0, "", "", 0.0)

    client = CommandClient(slow, env={}, at_once=3)
    await asyncio.gather(*(client.cancel(i) for i in range(12)))
    assert most == 3


async def test_submissions_that_hang_keep_nobody_from_looking() -> None:
    """As with a job_submit plugin that waits for a dead server: the loop must go on for all other jobs."""
    for_ever = asyncio.Event()

    async def runner(argv: Sequence[str], **_: Any) -> Completed:
        if argv[0] == "sbatch":
            await for_ever.wait()
        return Completed(tuple(argv), 0, "", "", 0.0)

    client = CommandClient(runner, env={}, at_once=2)
    submissions = [asyncio.create_task(client.submit(REQUEST)) for _ in range(5)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(client.jobs(), 30) == {}
    for task in submissions:
        task.cancel()
    await asyncio.gather(*submissions, return_exceptions=True)
