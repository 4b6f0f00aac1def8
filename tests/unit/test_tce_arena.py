"""What the memory tier is made of, without torch: slot headers, arenas, the budget, places and messages."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tce_keepers import SOON_S, keepers, own_place, wait_for
from tce_nodes import nodes

from transomd.forms import parse_size
from transomd.tce.memory import budget
from transomd.tce.memory.arena import _FAILED, Arena, mapped, rounded, staged, whole_size
from transomd.tce.memory.link import Link, connect
from transomd.tce.memory.place import Claim, agent_socket, own_socket, private_folder
from transomd.tce.memory.slots import EMPTY, STAGED, WRITING, SlotState, read_slot, write_slot
from transomd.tce.memory.wire import Line


def test_a_slot_says_what_was_written_last() -> None:
    memory = memoryview(bytearray(4096))
    assert read_slot(memory, 0) == SlotState()
    for number in range(1, 6):
        state = SlotState(STAGED, number, 10 * number, 3, 100, 200, 2**64 - 1)
        write_slot(memory, 0, state)
        assert read_slot(memory, 0) == state


def test_a_slot_whose_writing_was_cut_off_anywhere_says_what_it_said_before() -> None:
    before, after = SlotState(STAGED, 7, 70, 1, 5, 6, 7), SlotState(WRITING, 7, 71, 1)
    for turn in (0, 1):
        memory = memoryview(bytearray(4096))
        for _ in range(1 + turn):
            write_slot(memory, 0, before)
        whole = memoryview(bytearray(memory))
        write_slot(whole, 0, after)
        differing = [place for place in range(4096) if memory[place] != whole[place]]
        assert len(differing) > 10
        for cut in differing:
            torn = memoryview(bytearray(whole[:cut]) + bytearray(memory[cut:]))
            assert read_slot(torn, 0) == before
            # Whoever comes then writes over the torn copy, and loses nothing by it.
            write_slot(torn, 0, after)
            assert read_slot(torn, 0) == after


def test_an_arena_is_shared_and_cannot_be_shrunk() -> None:
    arena = Arena.create(3, rounded(10_000), "test")
    other = Arena(os.dup(arena.descriptor))
    arena.image(1)[:5] = b"hello"
    arena.set_state(1, SlotState(STAGED, 1, 4, 2))
    assert bytes(other.image(1)[:5]) == b"hello"
    assert [state.state for state in other.states()] == [EMPTY, STAGED, EMPTY]
    assert [(slot, state.step) for _, slot, state in staged([other])] == [(1, 4)]
    for size in (4096, whole_size(3, rounded(10_000)) + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(other.descriptor, size)
    arena.fill()
    other.fill()
    assert wait_for(lambda: not (arena.filling or other.filling))
    assert bytes(other.image(1)[:5]) == b"hello"
    assert os.fstat(arena.descriptor).st_blocks * 512 >= 3 * 10_000
    arena.close()
    other.close()


def test_a_save_does_not_wait_for_a_keeper_that_has_stopped_and_touches_no_page_that_cannot_be_had() -> None:
    program = Arena.create(2, 8 << 20, "test")
    began = time.monotonic()
    program.await_pages(1)
    assert time.monotonic() - began < SOON_S, "nobody brings them in"
    program._uses[_FAILED] = errno.ENOMEM
    with pytest.raises(OSError, match="Cannot allocate memory"):
        program.await_pages(1)
    keeper = Arena(os.dup(program.descriptor))
    keeper.fill()
    assert wait_for(lambda: not keeper.filling)
    program.await_pages(1)
    keeper.close()
    keeper.release(0)
    program.close()


def test_of_several_arenas_all_are_mapped_or_none_is_kept() -> None:
    whole, other = Arena.create(2, 4096, "test"), os.memfd_create("other")
    os.ftruncate(other, 1 << 16)
    given = [os.dup(whole.descriptor), other, os.dup(whole.descriptor)]
    with pytest.raises(ValueError, match="holds no arena"):
        mapped(given)
    for descriptor in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    whole.close()


def test_something_else_is_no_arena() -> None:
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, 1 << 16)
    with pytest.raises(ValueError, match="holds no arena"):
        Arena(descriptor)


def test_a_slot_in_use_is_seen_by_the_program_and_a_slot_being_written_by_the_keeper() -> None:
    program = Arena.create(2, 4096, "test")
    keeper = Arena(os.dup(program.descriptor))
    program.set_state(0, SlotState(STAGED, 1, 1, 1))
    assert not keeper.acquire(0, 2), "another save is in it"
    assert keeper.acquire(0, 1)
    assert keeper.acquire(0, 1)
    assert program.used(0)
    keeper.release(0)
    assert program.used(0), "somebody else still reads it"
    keeper.release(0)
    assert not program.used(0)
    program.set_state(0, SlotState(WRITING, 1, 2, 1))
    assert not keeper.acquire(0, 1)
    assert not program.used(0)
    keeper.settle(0, 5)
    assert program.settled(0) == 5
    program.close()
    keeper.close()


def machine(root: Path, **files: str) -> Path:
    """A file system with the kernel's words on memory: 100 GiB, of which 80 are available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {100 << 20} kB\nMemAvailable: {80 << 20} kB\n")
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_budget_is_what_was_told_else_half_of_the_job_else_half_of_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert budget.look({}, root).limit == 50 << 30
    assert budget.look({"SLURM_MEM_PER_NODE": "16384"}, root).limit == 8 << 30
    told = budget.look({"SLURM_MEM_PER_NODE": "16384", "TRANSOM_CHECKPOINT_MEMORY": "3G"}, root)
    assert (told.limit, told.source) == (3 << 30, "TRANSOM_CHECKPOINT_MEMORY")
    assert told.free == 75 << 30
    assert budget.look({"SLURM_MEM_PER_NODE": "0"}, root).limit == 50 << 30


def test_control_groups_bound_what_is_free(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__job__step__memory"
    root = machine(
        tmp_path,
        proc__self__cgroup="0::/job/step\n",
        **{
            f"{group}.max": str(10 << 30),
            f"{group}.current": str(6 << 30),
            f"{group}.stat": f"anon 5\ninactive_file {1 << 30}\n",
            "sys__fs__cgroup__job__memory.max": "max",
        },
    )
    found = budget.look({}, root)
    assert (found.free, found.freeness, found.limit) == (5 << 30, "control group", 5 << 30)


def test_control_groups_of_version_1_bound_it_too(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__memory__slurm__memory"
    root = machine(
        tmp_path,
        proc__self__cgroup="5:cpu:/x\n7:memory:/slurm\n",
        **{f"{group}.limit_in_bytes": str(4 << 30), f"{group}.usage_in_bytes": str(1 << 30)},
    )
    assert budget.look({}, root).free == 3 << 30


def test_a_refusal_has_all_the_numbers() -> None:
    found = budget.Budget(10 << 30, "half of the memory", 4 << 30, "MemAvailable less a reserve")
    assert found.refusal(4 << 30, 6 << 30) == ""
    told = found.refusal(5 << 30, 3 << 30)
    assert told == (
        "needs 5.0 GiB; in use 3.0 GiB; limit 10.0 GiB (half of the memory); free 4.0 GiB (MemAvailable less a reserve)"
    )
    assert found.refusal(3 << 30, 8 << 30)


def test_sizes_as_people_write_them() -> None:
    sizes = [parse_size(text) for text in ("1000", "8G", "1.5 MiB", "64kb", "x", "", "-3")]
    assert sizes == [1000, 8 << 30, 3 << 19, 64 << 10, None, None, None]
    assert [budget.switched_off({"TRANSOM_CHECKPOINT_MEMORY": text}) for text in ("off", "0", "", "8G")] == [
        True,
        True,
        False,
        False,
    ]


def test_one_keeper_at_a_place_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    private_folder(folder)
    for name in ("old.sock", "old.lock"):
        (folder / name).write_text("")
    claim = Claim(folder / "new.sock")
    assert sorted(path.name for path in folder.iterdir()) == ["new.lock"]
    with pytest.raises(BlockingIOError):
        Claim(folder / "new.sock")
    claim.listen().close()
    claim.give_up()
    assert not folder.exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    for name in ("open", "link"):
        with pytest.raises(PermissionError, match="not this user's alone"):
            Claim(tmp_path / name / "k.sock")


def test_where_keepers_listen() -> None:
    assert agent_socket({}) is None
    told = agent_socket({"TRANSOM_AGENT": "/tmp/x/7-%n.sock", "SLURMD_NODENAME": "n3"})
    assert told == Path("/tmp/x/7-n3.sock")
    places = {own_socket(Path(name), {"XDG_RUNTIME_DIR": "/run/user/1"}) for name in ("/a", "/a/", "/b/../a", "/b")}
    assert len(places) == 2


def test_messages_and_descriptors_arrive_in_order_whatever_the_buffers_hold() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    here, there = (Line(end) for end in ends)
    pipes = [os.pipe() for _ in range(5)]
    for number, (reading, _) in enumerate(pipes):
        here.queue({"n": number, "fill": "x" * 300_000}, [reading])
    got = []
    while len(got) < len(pipes):
        here.flush()
        got += there.receive()
    assert [message["n"] for message in got] == list(range(5))
    for number, (reading, writing) in enumerate(pipes):
        os.write(writing, bytes([number]))
        assert os.read(there.descriptors[number], 1) == bytes([number])
        os.close(reading)
        os.close(writing)
    here.close()
    with pytest.raises(ConnectionError):
        there.receive()
    there.close()


def test_the_keeper_imports_no_torch() -> None:
    code = (
        "import sys, transomd.tce.keeper, transomd.launch.keeping\n"
        "heavy = ('torch', 'numpy', 'asyncssh', 'sqlalchemy', 'pydantic', 'pickle')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def gives_way(pid: int) -> bool:
    """Whether a keeper leaves the processors to this process, also where the kernel shares them out by sessions."""
    group = Path(f"/proc/{pid}/autogroup")
    group_gives_way = not group.exists() or int(group.read_text().split()[-1]) >= 10
    return group_gives_way and os.getsid(pid) == pid and os.getpriority(os.PRIO_PROCESS, pid) >= 10


def test_the_keeper_of_an_agent_gives_way_to_the_program_too() -> None:
    with own_place(killed=True) as directory, nodes(directory.parent, 1) as (node,):
        assert gives_way(node.process.pid)


def test_a_keeper_tells_what_it_holds_refuses_nonsense_and_ends_when_nobody_is_there() -> None:
    with own_place() as directory:
        link = connect(directory, start=True)
        assert link is not None
        second = connect(directory, start=True)
        assert second is not None
        second.close()
        (pid,) = keepers(directory.parent)
        told, _ = link.ask("status")
        assert told["pid"] == pid
        assert told["ranks"] == []
        assert gives_way(pid)
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on when the keeper hung up
            link.ask("arena", bytes=1, epoch=1, token="", keep=1)
        link.close()


def test_an_answer_that_is_overdue_ends_the_line() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    link = Link(Line(here))
    with pytest.raises(TimeoutError, match="the keeper does not answer 'arena'"):
        link.ask("arena", timeout_s=0.01)
    assert json.loads(there.recv(1000))["op"] == "arena"
    assert there.recv(1) == b""
    for again in (link.listen, lambda: link.ask("arena"), lambda: link.tell("staged")):
        with pytest.raises(OSError, match="Bad file descriptor"):
            again()
    there.close()


def test_another_user_is_not_let_in() -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with own_place() as directory:
        link = connect(directory, start=True)
        assert link is not None
        path = own_socket(directory)
        path.parent.chmod(0o755)
        directory.parent.chmod(0o755)
        (directory.parent / "r").chmod(0o755)
        path.chmod(0o777)
        code = (
            "import json, os, socket, sys\n"
            "os.setuid(65534)\n"
            "sock = socket.socket(socket.AF_UNIX)\n"
            "sock.connect(sys.argv[1])\n"
            'sock.sendall(b\'{"op": "status", "id": 1}\\n\')\n'
            "print(json.dumps(sock.recv(100).decode()))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        answer = json.loads(done.stdout) if done.returncode == 0 else ""
        assert answer == "", done.stdout
        assert done.returncode == 0 or "ConnectionResetError" in done.stderr or "BrokenPipeError" in done.stderr
        link.close()


def test_where_there_is_no_folder_for_it_a_keeper_does_not_try_for_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Claim(tmp_path / "gone" / "transom-0" / "k.sock")
