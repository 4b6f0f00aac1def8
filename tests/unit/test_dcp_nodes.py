"""DCP's ranks on several nodes: shards come from the memory of whichever has them, whoever loads, and to storage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tce_keepers import own_place, stop, wait_for
from tce_nodes import Node, nodes, on, pair

from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import step_folder

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from dcp_ranks import ROWS, whole  # noqa: E402

from transomd.tce.dcp import TransomStorageWriter, commit, load_newest, shares, tiers  # noqa: E402
from transomd.tce.dcp.carried import Task, bring, tasks  # noqa: E402
from transomd.tce.portable import gather  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PROGRAM = Path(__file__).with_name("dcp_ranks.py")


@pytest.fixture
def place() -> Iterator[Path]:
    with own_place() as folder:
        folder.mkdir()
        yield folder


def ranks(what: str, count: int, place: Path, there: Sequence[Node]) -> None:
    """Run so many ranks, dealt out to the nodes in their order."""
    words = [sys.executable, str(PROGRAM), what, str(count), str(place)]
    environ = {**os.environ, "NODES": " ".join(str(node.socket) for node in there)}
    environ["DOOMED"] = str(there[0].process.pid) if there else ""
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]


def stored(directory: Path) -> set[tuple[int, int, int]]:
    """Step, epoch and ranks of what is complete, all of it whole."""
    found = [item for item in list_checkpoints(directory) if item.complete]
    assert [verify(item.path) for item in found] == [[]] * len(found)
    return {(item.step, item.epoch, item.ranks) for item in found}


def is_what_was_saved(directory: Path) -> None:
    """Whether the newest in storage holds, of each tensor, what ``save_copied`` saved on any number of ranks."""
    found = gather(next(item.path for item in list_checkpoints(directory) if item.complete)).state
    for rows in ROWS:
        assert torch.equal(found[f"rows{rows}"], whole(rows, rows))
        assert torch.equal(found[f"columns{rows}"], whole(rows, rows))
    assert torch.equal(found["square"], whole(5, 3))
    assert (found["step"], found["nested"]["list"][1]) == (1, "word")


# ------------------------------------------------------------------------- what memory alone had is stored


@pytest.mark.parametrize("count", [2, 1])
def test_a_step_of_a_lost_node_comes_to_storage_before_the_start_that_loaded_it_saves(place: Path, count: int) -> None:
    """That start dies at once, and with it every node that had the step in memory."""
    with nodes(place.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2", "n2": "n1"})
        ranks("save_copied", 2, place, [n1, n2])
        n1.kill()
        pair([n2, n3], {"n2": "n3", "n3": "n2"}, epoch=2)
        ranks("load_copied", count, place, [n2, n3])
        assert wait_for(lambda: (1, 2, 2) in stored(place / "held")), [node.status() for node in (n2, n3)]
        n2.kill()
        n3.kill()
    is_what_was_saved(place / "held")


def test_it_comes_to_storage_while_the_start_that_loaded_it_saves_on_with_more_ranks(place: Path) -> None:
    with nodes(place.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2", "n2": "n1"})
        ranks("save_copied", 2, place, [n1, n2])
        n1.kill()
        pair([n2, n3], {"n2": "n3", "n3": "n2"}, epoch=2)
        ranks("load_and_go_on", 3, place, [n2, n3])
        assert wait_for(lambda: (2, 2, 3) in stored(place / "held")), [node.status() for node in (n2, n3)]
    is_what_was_saved(place / "held")


@pytest.mark.parametrize(
    ("held", "count", "dealt"),
    [
        ([{0, 1}, {0, 1}, {2, 3}, {2, 3}], 4, [(0,), (1,), (2,), (3,)]),  # all nodes are there
        ([{1}, {0, 1, 2}, {0, 1, 2}], 3, [(), (0, 1), (2,)]),  # a share comes from where it is
        ([{0, 1, 2, 3}], 4, [(0, 1, 2, 3)]),  # fewer ranks
        ([{0, 1}, {0, 1}, {0, 1}, {0, 1}], 2, [(0,), (1,), (), ()]),  # more of them
        ([set(), set()], 3, [(0, 2), (1,)]),  # nobody knows
    ],
)
def test_each_share_is_seen_to_once(held: list[set[int]], count: int, dealt: list[tuple[int, ...]]) -> None:
    assert [task.shares for task in tasks(2, held, count)] == dealt


def test_only_the_steps_of_the_interval_are_copied(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_DIR", str(place))
    monkeypatch.setenv("TRANSOM_CHECKPOINT_REPLICA_EVERY", "2")
    with nodes(place.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        writer = TransomStorageWriter.from_env(epoch=1, storage_every=1000)
        for step in (1, 2, 3, 4):
            dcp.save({"w": torch.arange(10.0)}, storage_writer=writer, checkpoint_id=str(step))
            assert writer.handle is not None
            if step % 2:
                with pytest.raises(CheckpointError, match="another one gets the steps that 2 divides"):
                    writer.handle.wait("replica")
            else:
                writer.handle.wait("replica", timeout=60)
        assert n2.copies() == [4, 2]
        tiers.close(place, 0, leave=True)
    with pytest.raises(CheckpointError, match="replica_every is 'auto'"):
        TransomStorageWriter(place, replica_every="auto")  # type: ignore[arg-type]


class Lost:
    """Shares of which nobody has a good one any more."""

    def share(self, rank: int) -> object:
        raise OSError("memory has no good one")


@pytest.mark.parametrize(("ranks_", "left_out"), [(1, False), (2, True)])
def test_all_ranks_leave_out_a_save_of_the_loaded_step_or_none_does(
    place: Path, ranks_: int, left_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What one rank could not bring, another has: its share and that of another save would be mixed."""
    carried = bring(place / step_folder(7, 1), 2, cast(Any, Lost()), Task(2, 0, (0,), ranks_))
    assert "rank 0's share is not brought to storage: memory has no good one" in caplog.text
    assert carried == place / step_folder(7, 2)
    assert (carried in commit.CARRIED) is left_out


def test_what_was_loaded_in_one_directory_says_nothing_of_another(place: Path) -> None:
    one, other = place / "one", place / "other"
    state = {"w": torch.arange(1000.0)}
    with nodes(place.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        dcp.save(state, storage_writer=TransomStorageWriter(other, epoch=1, memory=False), checkpoint_id="2")
        writer = TransomStorageWriter(one, epoch=1, storage_every=1000)
        dcp.save(state, storage_writer=writer, checkpoint_id="7")
        assert writer.handle is not None
        writer.handle.wait("replica", timeout=60)
        n1.kill()
        tiers._tiers.pop((one, 0)).memory.release()
        pair([n2], {}, epoch=2)
        on(n2)
        assert load_newest(dict(state), other, epoch=2) == 2
        assert load_newest(dict(state), one, epoch=2) == 7
        assert one / step_folder(7, 2) in commit.CARRIED
        writer = TransomStorageWriter(other, epoch=2, keep=1, storage_every=3)
        for step in (3, 6, 7):
            dcp.save(state, storage_writer=writer, checkpoint_id=str(step))
            if step != 7:
                assert writer.handle is not None
                writer.handle.wait("storage", timeout=60)
        # What it was resumed from stays, and step 7 is nothing special here.
        assert {(step, epoch) for step, epoch, _ in stored(other)} == {(2, 1), (6, 2)}
        assert tiers._tiers[other, 0].memory.ledger.resumed == -1
        assert not (other / step_folder(7, 2)).exists()
        for directory in (one, other):
            tiers.close(directory, 0, leave=True)


# ------------------------------------------------------------------------- shards in the memory of other nodes


@pytest.fixture(scope="module")
def apart() -> Iterator[tuple[Path, list[Node]]]:
    """Four ranks have saved on two nodes; neither has copies of the other's shards, and storage has nothing."""
    with own_place() as folder, nodes(folder.parent, 2) as found:
        folder.mkdir()
        pair(found, {})
        ranks("save", 4, folder, found)
        forget_storage(folder / "memory")
        pair(found, {}, epoch=2)
        yield folder, found


def forget_storage(directory: Path) -> None:
    """Wait until what was staged is stored, as the program is gone, and remove it."""
    assert wait_for(lambda: (2, 1, 4) in stored(directory))
    for folder in directory.glob("step-*"):
        shutil.rmtree(folder)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 3, 8])
def test_shards_that_only_another_node_has_are_fetched(apart: tuple[Path, list[Node]], count: int) -> None:
    ranks("load_across", count, apart[0], apart[1])


def test_shards_of_a_lost_node_are_fetched_from_its_partner(place: Path) -> None:
    with nodes(place.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2", "n2": "n1"})
        ranks("save", 4, place, [n1, n2])
        assert wait_for(lambda: {2} <= {*n2.copies(0)} & {*n2.copies(1)}), n2.status()
        forget_storage(place / "memory")
        n1.kill()
        pair([n2, n3], {}, epoch=2)
        ranks("load_across", 3, place, [n3, n2])


def test_ranks_of_one_node_may_fetch_the_same_share_at_the_same_time(place: Path) -> None:
    """The keeper takes in one copy of a rank at a time: whoever comes second gets what the first one fetched."""
    with nodes(place.parent, 2) as (n1, n2):
        pair([n1, n2], {})
        on(n1)
        state = {"w": torch.rand(12_000_000)}
        dcp.save(state, storage_writer=TransomStorageWriter(place, epoch=1, storage_every=1000), checkpoint_id="1")
        pair([n1, n2], {}, epoch=2)
        on(n2)
        found: list[bytes | None] = []
        stop(n1.process.pid)
        threads = [threading.Thread(target=fetched, args=(place, found)) for _ in range(4)]
        for thread in threads:
            thread.start()
        os.kill(n1.process.pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
        assert found == [state["w"].numpy().tobytes()] * 4
        on(n1)
        tiers.close(place, 10.0, leave=True)


def fetched(place: Path, found: list[bytes | None]) -> None:
    source = shares.Shares(place, 1, 1, 1)
    content = source.find("rank-00000.safetensors", "w")
    found.append(None if content is None else bytes(content))
    del content
    source.release()
