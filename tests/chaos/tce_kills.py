"""Kills programs, keepers, agents, and the senders and receivers of copies at random points, and says what loads then.

``python tests/chaos/tce_kills.py --seeds 1000``: one line of JSON per kill, and a summary; exit code 1 if anything was
lost or torn. The invariant: what is loaded is exactly what one step saved, on every rank the same step, and at least as
new as the newest step that was acknowledged at a stage that survived: ``memory`` where a keeper lived on, ``replica``
where a node was lost, ``storage`` whatever died. What memory held is in storage once the keepers have ended.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from nursery import Nursery, alive, gone, kill
from tce_keepers import VARIABLES, wait_for
from tce_nodes import Node, pair

BASE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# Made before torch is imported: what it forks has none.
NURSERY_FOLDER = Path(tempfile.mkdtemp(prefix="tcek-", dir=BASE))
for name in (*VARIABLES, "XDG_RUNTIME_DIR"):
    os.environ.pop(name, None)
os.environ["TRANSOM_CHECKPOINT_MEMORY"] = "1G"
LOG = NURSERY_FOLDER / "log"
NURSERY = Nursery(NURSERY_FOLDER, LOG)

import torch  # noqa: E402
from tce_programs import BEGUN, MEMORY, NEVER, REPLICA, STORAGE, Notes, Plan, forked, loads, save_for_ever  # noqa: E402

from transomd.tce.catalogue import list_checkpoints, verify  # noqa: E402
from transomd.tce.memory.link import call  # noqa: E402

ALONE = ("program", "program", "keeper", "keeper", "both", "program then keeper", "agent")
PEERS = ("program", "sender", "receiver", "node", "node", "holders")
Told = dict[str, Any]


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A folder for one kill; nothing that listens in it may be left."""
    folder = Path(tempfile.mkdtemp(prefix="tcek-", dir=BASE))
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "r")
    try:
        (folder / "r").mkdir(mode=0o700)
        os.truncate(LOG, 0)
        yield folder
    finally:
        kill(NURSERY.living(folder))
        shutil.rmtree(folder, ignore_errors=True)


class Programs:
    """The ranks of one job; ``kill`` ends those that are given, all of them by default."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.notes = Notes(plan.ranks)
        self.pids = [forked(partial(save_for_ever, plan, rank, self.notes), LOG) for rank in range(plan.ranks)]

    def saved(self, step: int) -> None:
        """Wait until all have saved this step."""
        ready = wait_for(lambda: min(self.notes.all(MEMORY)) >= step or not all(map(alive, self.pids)), 90)
        assert ready, f"the programs do not save: {self.notes.all(MEMORY)}"
        assert all(map(alive, self.pids)), "a program died by itself"

    def kill(self, dice: random.Random) -> None:
        """One after the other, in any order."""
        for pid in dice.sample(self.pids, len(self.pids)):
            kill([pid])
        for pid in self.pids:
            os.waitpid(pid, 0)

    def promised(self, what: int) -> int:
        """The newest step that all ranks were promised in memory or as a copy, or any in storage."""
        numbers = self.notes.all(what)
        return max(numbers) if what == STORAGE else min(numbers)


def plan_of(dice: random.Random, folder: Path, ranks: int, **more: Any) -> Plan:
    size, pause = dice.choice([50, 2000, 30000]), dice.choice([0.0, 0.0, 0.002, 0.01])
    every = dice.choice([1, 1, 3, NEVER])
    return Plan(**{"directory": folder / "c", "ranks": ranks, "size": size, "pause": pause, "every": every, **more})


def direct(dice: random.Random, folder: Path, ranks: int) -> Told:
    """Without memory ``save`` itself writes."""
    programs = Programs(plan_of(dice, folder, ranks, memory=False))
    programs.saved(dice.randrange(0, 9))
    time.sleep(dice.uniform(0, 0.03))
    programs.kill(dice)
    return judged(programs, "writer", programs.promised(STORAGE), ())


def alone(dice: random.Random, folder: Path, ranks: int) -> Told:
    """On one node, with the engine's own keeper, or an agent's."""
    victim, agents = dice.choice(ALONE), ()
    plan = plan_of(dice, folder, ranks, start=NURSERY.ensure)
    if victim == "agent":
        agents = (str(folder / "r" / "agents.sock"),) * ranks
        NURSERY.start([f"--socket={agents[0]}", "--stay"], agent=True)
        plan = plan_of(dice, folder, ranks, agents=agents)
    programs = Programs(plan)
    programs.saved(dice.randrange(0, 12))
    time.sleep(dice.uniform(0, 0.02))
    with visited(plan, agents) if dice.random() < 0.5 else contextlib.nullcontext():
        least = KILLS[victim](dice, programs, NURSERY.living(folder))
        told = judged(programs, victim, least, agents)
    return told if told["wrong"] else {**told, **stored(folder, least)}


@contextlib.contextmanager
def visited(plan: Plan, agents: tuple[str, ...]) -> Iterator[None]:
    """Somebody else talks of these ranks with the keeper, so that it holds what it has in memory, stored or not."""
    os.environ.update({"TRANSOM_AGENT": agents[0]} if agents else {})
    lines = [call(plan.directory, rank, plan.ranks, start=False) for rank in range(plan.ranks)]
    os.environ.pop("TRANSOM_AGENT", None)
    try:
        yield
    finally:
        for line in filter(None, lines):
            line.close()


def kill_program(dice: random.Random, programs: Programs, keepers: list[int]) -> int:
    programs.kill(dice)
    return programs.promised(MEMORY)


def kill_keeper(dice: random.Random, programs: Programs, keepers: list[int]) -> int:
    """The programs go on a while. What they begin to save after it died must be safe with the next keeper."""
    kill(keepers)
    assert gone(keepers)
    begun = max(programs.notes.all(BEGUN))
    if dice.random() < 0.5:
        wait_for(lambda: min(programs.notes.all(MEMORY)) > begun + 1, 2)
    time.sleep(dice.uniform(0, 0.05))
    programs.kill(dice)
    memory = programs.promised(MEMORY)
    return memory if memory > begun else programs.promised(STORAGE)


def kill_both(dice: random.Random, programs: Programs, keepers: list[int]) -> int:
    kill(keepers)
    programs.kill(dice)
    return programs.promised(STORAGE)


def kill_program_then_keeper(dice: random.Random, programs: Programs, keepers: list[int]) -> int:
    programs.kill(dice)
    time.sleep(dice.uniform(0, 0.02))
    kill(keepers)
    return programs.promised(STORAGE)


def kill_agent(dice: random.Random, programs: Programs, keepers: list[int]) -> int:
    """Its keeper goes on until everything is stored."""
    kill(NURSERY.agents())
    time.sleep(dice.uniform(0, 0.05))
    programs.kill(dice)
    return programs.promised(MEMORY)


KILLS: dict[str, Callable[[random.Random, Programs, list[int]], int]] = {
    "program": kill_program,
    "keeper": kill_keeper,
    "both": kill_both,
    "program then keeper": kill_program_then_keeper,
    "agent": kill_agent,
}


class Nursling(Node):
    """A node's keeper, from the nursery."""

    def start(self) -> None:
        argv = [f"--socket={self.socket}", "--stay", f"--token-file={self.token}", f"--port={self.port}"]
        self.pid = NURSERY.start(argv)
        self.port = self.status()["port"]

    def kill(self) -> None:
        kill([self.pid])
        assert gone([self.pid])


def peers(dice: random.Random, folder: Path, ranks: int) -> Told:
    """Three nodes: each rank's node copies to another one; a third takes the rank of a node that is lost."""
    for node_name in ("n1", "n2", "n3"):
        (folder / f"{node_name}.token").write_text(secrets.token_hex(16) if node_name == "n1" else "")
        (folder / f"{node_name}.token").write_text((folder / "n1.token").read_text())
    n1, n2, n3 = (Nursling(folder, f"n{number}") for number in (1, 2, 3))
    pair([n1, n2, n3], {"n1": "n2", "n2": "n1"} if ranks > 1 else {"n1": "n2"})
    homes = (n1, n2)[:ranks]
    plan = plan_of(dice, folder, ranks, agents=tuple(str(n.socket) for n in homes), copied=ranks > 1)
    programs = Programs(plan)
    programs.saved(dice.randrange(1, 8))
    time.sleep(dice.uniform(0, 0.04))
    victim = dice.choice(PEERS)
    lost = {"sender": [n1], "node": [n1], "receiver": [n2], "holders": [n1, n2]}.get(victim, [])
    for node in lost:
        node.kill()
    programs.kill(dice)
    left = [node for node in (n1, n2, n3) if node not in lost]
    if dice.random() < 0.3 and lost:
        lost[0].start()
        left.append(lost[0])
    pair(left, {}, epoch=2)
    least = least_of_peers(programs, victim, ranks)
    homes = tuple(home if home in left else n3 for home in homes)
    told = judged(programs, f"peers: {victim}", least, tuple(str(home.socket) for home in homes))
    for node in left:
        node.kill()
    return told


def least_of_peers(programs: Programs, victim: str, ranks: int) -> int:
    storage, replica = programs.promised(STORAGE), max(programs.promised(REPLICA), programs.promised(STORAGE))
    if victim == "holders":
        return storage
    if victim == "program" or (victim == "receiver" and ranks == 1):
        return max(programs.promised(MEMORY), storage)
    return replica


def judged(programs: Programs, victim: str, least: int, agents: tuple[str, ...]) -> Told:
    found = loads(programs.plan, 2, agents, LOG)
    steps = [one["step"] for one in found]
    wrong = "; ".join(f"rank {rank}: {one['wrong']}" for rank, one in enumerate(found) if one["wrong"])
    if not wrong and len(set(steps)) != 1:
        wrong = "the ranks load different steps"
    if not wrong and steps[0] < least:
        wrong = "what was promised was not loaded"
    if not wrong and steps[0] > max(programs.notes.all(BEGUN)):
        wrong = "a step was loaded that was never saved"
    sources = sorted({one["source"] for one in found})
    return {"victim": victim, "ranks": programs.plan.ranks, "promised": least, "loaded": steps, "from": sources} | {
        "wrong": wrong
    }


def stored(folder: Path, least: int) -> Told:
    """What memory held is in storage once the keepers have ended, and all of storage is good."""
    if not gone(NURSERY.living(folder)):
        return {"wrong": "the keeper does not end"}
    complete = [c for c in list_checkpoints(folder / "c") if c.complete]
    bad = [problem for c in complete for problem in verify(c.path)]
    newest = max((c.step for c in complete), default=-1)
    lost = [f"storage has step {newest} where {least} was promised"] if newest < least else []
    return {"wrong": "; ".join([*bad, *lost])}


def one(seed: int, kind: str) -> Told:
    """One kill; what was promised, what was loaded from where, and what is wrong with it ('': nothing)."""
    dice = random.Random(seed)
    chosen = kind if kind != "any" else dice.choices(["alone", "peers", "direct"], [70, 20, 10])[0]
    ranks = dice.choice([1, 1, 1, 2])
    began = time.monotonic()
    with place() as folder:
        (folder / "c").mkdir()
        told = {"alone": alone, "peers": peers, "direct": direct}[chosen](dice, folder, ranks)
    return {"seed": seed, **told, "seconds": round(time.monotonic() - began, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=["any", "alone", "peers", "direct"], default="any")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long, whatever is left")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, wrong, victims = time.monotonic(), 0, collections.Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        if time.monotonic() - begun > options.seconds:
            break
        told = one(seed, options.kind)
        wrong += bool(told["wrong"])
        victims[told["victim"]] += 1
        print(json.dumps(told), flush=True)
        if told["wrong"]:
            print(LOG.read_text(), file=sys.stderr)
    took = round(time.monotonic() - begun)
    summary = {"kills": victims.total(), "wrong": wrong, "seconds": took, "victims": dict(sorted(victims.items()))}
    print(json.dumps(summary), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        code = main()
    finally:
        NURSERY.close()
        shutil.rmtree(NURSERY_FOLDER, ignore_errors=True)
    sys.exit(code)
