"""Who holds whose copy is told to every agent, also to one that answers late or has been started anew."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from transomd.launch import keeping, pairing
from transomd.launch.agent import Agent
from transomd.launch.hub import AgentGone, Hub
from transomd.launch.pairing import Pairing
from transomd.launch.rundir import RunDir


class Agents:
    """Stands for the hub and the agents behind it; a node without a port does not answer. ``without``: a keeper."""

    def __init__(self, **ports: int | None) -> None:
        self.ports = ports
        self.deaf: set[str] = set()
        self.without: set[str] = set()
        self.told: dict[str, dict[str, Any]] = {}
        self.tellings = 0

    async def ask_all(self, nodes: Iterable[str], what: str, timeout_s: float) -> dict[str, Any]:
        assert what == "keeper"
        gone = AgentGone("no answer")
        return {n: self._told(n, port) if (port := self.ports[n]) else gone for n in nodes}

    def _told(self, node: str, port: int) -> dict[str, Any]:
        return {"port": port, "ranks": [], "domain": "", "there": node not in self.without}

    async def ask(self, node: str, what: str, timeout_s: float, **arguments: Any) -> None:
        assert what == "peers"
        if node in self.deaf:
            raise AgentGone(node)
        self.told[node] = arguments
        self.tellings += 1


def pairing_of(agents: Agents, *launch: str) -> Pairing:
    return Pairing(cast(Hub, agents), 4, launch, lambda: list(agents.ports))


async def test_every_node_is_told_its_partner_and_all_keepers() -> None:
    agents = Agents(n1=1, n2=2, n3=3)
    await pairing_of(agents, "n1", "n2").form()
    assert {node: told["partner"] for node, told in agents.told.items()} == {"n1": "n2", "n2": "n1", "n3": None}
    assert agents.told["n3"]["keepers"] == {"n1": ["n1", 1, []], "n2": ["n2", 2, []], "n3": ["n3", 3, []]}
    assert {told["epoch"] for told in agents.told.values()} == {4}


async def test_a_node_that_answers_late_gets_its_part() -> None:
    agents = Agents(n1=1, n2=None)
    pairs = pairing_of(agents, "n1", "n2")
    await pairs.form()
    assert agents.told["n1"]["partner"] is None
    agents.ports["n2"] = 2
    await pairs.form()
    assert (agents.told["n1"]["partner"], agents.told["n2"]["partner"]) == ("n2", "n1")


async def test_nothing_is_told_twice_and_a_silent_node_keeps_its_part() -> None:
    agents = Agents(n1=1, n2=2)
    pairs = pairing_of(agents, "n1", "n2")
    await pairs.form()
    agents.ports["n2"] = None
    await pairs.form()
    assert agents.tellings == 2


async def test_a_keeper_that_moved_is_told_to_all() -> None:
    agents = Agents(n1=1, n2=2)
    pairs = pairing_of(agents, "n1", "n2")
    await pairs.form()
    agents.ports["n2"] = 7
    await pairs.form()
    assert agents.told["n1"]["keepers"]["n2"] == ["n2", 7, []]


async def test_who_was_not_reached_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "AGAIN_S", 0.0)
    agents = Agents(n1=1, n2=2)
    agents.deaf = {"n1"}
    pairs = pairing_of(agents, "n1", "n2")
    await pairs.start()
    assert set(agents.told) == {"n2"}
    agents.deaf = set()
    while "n1" not in agents.told:
        await asyncio.sleep(0)
    assert agents.tellings == 2
    pairs.stop()


async def test_a_node_that_has_no_keeper_for_long_has_no_part_until_it_has_one() -> None:
    agents = Agents(n1=1, n2=2, n3=3)
    pairs = pairing_of(agents, "n1", "n2", "n3")
    await pairs.form()
    assert agents.told["n1"]["partner"] == "n2"
    agents.without = {"n2"}
    for _ in range(pairing.AWAY_ROUNDS - 1):
        await pairs.form()
    agents.ports["n2"] = None  # unknown is neither here nor there
    await pairs.form()
    assert (agents.tellings, agents.told["n1"]["partner"]) == (3, "n2")
    agents.ports["n2"] = 2
    await pairs.form()
    assert {node: told["partner"] for node, told in agents.told.items()} == {"n1": "n3", "n2": None, "n3": "n1"}
    agents.without = set()
    await pairs.form()
    assert {node: told["partner"] for node, told in agents.told.items()} == {"n1": "n2", "n2": "n3", "n3": "n1"}


async def test_an_agent_says_that_no_keeper_is_there_only_where_none_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "STATUS_S", 0.1)
    run_dir = RunDir(tmp_path)
    run_dir.write_json(tmp_path / "spec.json", {"checkpoint": {}})
    agent = Agent(run_dir, 1, "n1", 0.1)
    agent._keeping.path = tmp_path / "keeper.sock"
    found = [await agent._do({"what": "keeper"})]
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(agent._keeping.path))
        mute.listen()
        found.append(await agent._do({"what": "keeper"}))
    found.append(await agent._do({"what": "keeper"}))
    assert [told["there"] for told in found] == [False, True, False]
    assert {told["port"] for told in found} == {agent._keeping.port}
