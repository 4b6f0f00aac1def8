"""The matcher: prefixes, tracebacks, times, repeats, and input that means harm."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transomd.tee.clean import MAX_LINE, Printer, decode, find_time, split_prefix
from transomd.tee.matcher import MAX_DISTINCT, Matcher
from transomd.tee.tracebacks import MAX_LINES
from transomd.tee.types import Chunk, Evidence
from transomd.words import Blame, FailureClass, Role

NOW = 1_780_000_000.0
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def read(
    text: str | bytes, *, live: bool = False, nodes: tuple[str, ...] = (), rank: int | None = None
) -> list[Evidence]:
    data = text.encode() if isinstance(text, str) else text
    matcher = Matcher(live=live, nodes=nodes)
    matcher.feed(Chunk(file="x.log", data=data, fresh=True, rank=rank), NOW)
    matcher.finish()
    return matcher.evidence()


def one(text: str | bytes, **options: object) -> Evidence:
    found = read(text, **options)  # type: ignore[arg-type]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("line", "printer", "rest"),
    [
        ("[rank3]: hello", Printer(rank=3, label="[rank3]:"), "hello"),
        ("[rank3]: [rank3]: hello", Printer(rank=3, label="[rank3]: [rank3]:"), "hello"),
        (
            "[rank3]:[E214 20:11:33.1 x.cpp:1] hello",
            Printer(rank=3, label="[rank3]:"),
            "[E214 20:11:33.1 x.cpp:1] hello",
        ),
        ("[rank0]:   File x", Printer(rank=0, label="[rank0]:"), "  File x"),
        ("3: hello", Printer(rank=3, label="3:"), "hello"),
        (" 3:   File x", Printer(rank=3, label="3:"), "  File x"),
        ("n2: 7: hello", Printer(node="n2", rank=7, label="n2:7:"), "hello"),
        ("gpu-a100-07.cluster: hello", Printer(node="gpu-a100-07.cluster", label="gpu-a100-07.cluster:"), "hello"),
        ("10.0.0.2: hello", Printer(node="10.0.0.2", label="10.0.0.2:"), "hello"),
        ("[gpu187:0]: hello", Printer(node="gpu187", label="[gpu187:0]:"), "hello"),
        ("[1,3]<stderr>: hello", Printer(rank=3, label="[1,3]<stderr>:"), "hello"),
        ("(Worker rank=0 pid=12) hello", Printer(rank=0, label="(Worker rank=0 pid=12)"), "hello"),
        ("(Actor pid=1, ip=1.2.3.4) hello", Printer(node="1.2.3.4", label="(Actor pid=1, ip=1.2.3.4)"), "hello"),
        ("n01:204:377 [4] NCCL WARN x", Printer(node="n01", label="n01:204:377"), "[4] NCCL WARN x"),
        ("Mar  2 03:12:00 n2 kernel: hello", Printer(node="n2", label="n2"), "hello"),
        ("2026-03-02T03:12:00+0000 n2 kernel: hello", Printer(node="n2", label="n2"), "hello"),
        ("python3: can't open file", Printer(), "python3: can't open file"),
        ("KeyError: 'labels'", Printer(), "KeyError: 'labels'"),
        ("srun: error: n2: task 1: Killed", Printer(), "srun: error: n2: task 1: Killed"),
        ("nvidia-nvswitch0: SXid (PCI:", Printer(), "nvidia-nvswitch0: SXid (PCI:"),
    ],
)
def test_prefixes_name_the_printer(line: str, printer: Printer, rest: str) -> None:
    assert split_prefix(line) == (printer, rest)


def test_a_node_of_the_job_is_a_prefix_whatever_its_name() -> None:
    assert split_prefix("alpha: hello", {"alpha"}) == (Printer(node="alpha", label="alpha"), "hello")
    assert split_prefix("alpha: hello", {"beta"})[0] == Printer()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-03-02T03:12:00Z x", 1772421120.0),
        ("2026-03-02T05:12:00+02:00 x", 1772421120.0),
        ("2026-03-02T03:12:00.250Z x", 1772421120.25),
        ("2024-02-29 00:00:00Z", 1709164800.0),
        ("2026-13-45T99:00:00Z", None),
        ("no time", None),
    ],
)
def test_times_with_a_zone(text: str, seconds: float | None) -> None:
    assert find_time(text, now=NOW) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-02 03:12:00,000 INFO x",
        "[2026-03-02 03:12:00,000] [INFO] x",
        "2026-03-02_03:12:00 [E] x",
        "E0302 03:12:00.000000 7001 api.py:874] x",
        "[rank0]:[E302 03:12:00.000000 ProcessGroupNCCL.cpp:632] x",
        "Mar  2 03:12:00 n2 kernel: x",
        "[Mon Mar  2 03:12:00 2026] x",
    ],
)
def test_times_without_a_zone_are_local(text: str) -> None:
    assert find_time(text, now=NOW) == time.mktime((2026, 3, 2, 3, 12, 0, 0, 0, -1))


def test_a_date_without_year_lies_in_the_past() -> None:
    new_year = time.mktime((2026, 1, 1, 0, 30, 0, 0, 0, -1))
    assert find_time("Dec 31 23:59:00 n1 kernel: x", now=new_year) == time.mktime((2025, 12, 31, 23, 59, 0, 0, 0, -1))


def test_seconds_since_boot_are_no_time() -> None:
    assert find_time("[71205.118] NVRM: Xid", now=NOW) is None


def test_tracebacks_of_ranks_that_write_at_once_are_kept_apart() -> None:
    found = read(
        "[rank1]: Traceback (most recent call last):\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/u/a.py", line 1, in f\n'
        '[rank0]:   File "/home/u/b.py", line 2, in g\n'
        "[rank1]:     x()\n"
        "[rank0]:     y()\n"
        "[rank1]: KeyError: 'x'\n"
        "[rank0]: ValueError: y\n"
        "[rank1]: step 12\n"
    )
    told = {one.rank: one for one in found}
    assert told[1].text == "KeyError: 'x'\n  File \"/home/u/a.py\", line 1, in f | x()"
    assert told[0].text.startswith("ValueError: y\n")
    assert (told[1].line, told[0].line) == (1, 2)
    assert {one.signature for one in found} == {"PY-EXCEPTION"}


def test_an_exception_of_the_program() -> None:
    found = one('Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nmy.module.OddThing: what\n')
    assert (found.failure_class, found.blame, found.role) == (FailureClass.USER_CODE, Blame.PROGRAM, Role.ROOT)


@pytest.mark.parametrize(
    ("exception", "signature", "role"),
    [
        (ECC, "CUDA-ECC", Role.ROOT),
        ("OSError: [Errno 116] Stale file handle: '/x'", "PY-EIO", Role.ROOT),
        ("OSError: [Errno 5] Input/output error", "PY-EIO", Role.ROOT),
        ("RuntimeError: NCCL error: remote process exited or there was a network error", "NCCL-REMOTE", Role.VICTIM),
        ("torch.distributed.DistNetworkError: something new", "PY-DIST", Role.VICTIM),
        ("RuntimeError: [/x/gloo/transport/tcp/pair.cc:547] Something new", "GLOO", Role.VICTIM),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "PY-CONNRESET", Role.VICTIM),
        ("ConnectionResetError: Cannot write to closing transport", "PY-CONNRESET", Role.VICTIM),
        ("BrokenPipeError", "PY-CONNRESET", Role.VICTIM),
        ("asyncio.exceptions.IncompleteReadError: 0 bytes read on a total of 4 expected bytes", "PY-PEER", Role.VICTIM),
        ("TimeoutError", "PY-PEER", Role.VICTIM),
        ("_queue.Empty", "PY-PEER", Role.VICTIM),
        ("PeerLost: the connection was reset by rank 3", "PY-PEER", Role.VICTIM),
        ("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", "PY-WORKER-CRASHED", Role.ROOT),
        ("KeyboardInterrupt", "PY-INTERRUPTED", Role.VICTIM),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "CUDA-OOM", Role.ROOT),
    ],
)
def test_an_exception_is_classed_by_its_inner_text(exception: str, signature: str, role: Role) -> None:
    found = one(f'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n{exception}\n')
    assert (found.signature, found.role) == (signature, role)


RAISED = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n'


@pytest.mark.parametrize(
    "end",
    ["FileNotFoundError: ", "RingBroken: rank", "RingBroken", "KeyError: 3\n\nDuring handling of the above exception,"],
)
def test_an_exception_that_its_ranks_end_cut_off_is_no_cause(end: str) -> None:
    found = one(RAISED + end, live=True)
    assert (found.signature, found.role, found.blame) == ("PY-EXCEPTION", Role.CONTEXT, Blame.UNKNOWN)
    assert found.text.startswith(end.partition("\n")[0].strip())


def test_a_chain_whose_end_is_cut_off_is_no_cause_unless_its_beginning_is_known() -> None:
    chain = "\n\nDuring handling of the above exception, another exception occurred:\n\n" + RAISED
    assert one(f"{RAISED}KeyError: 3{chain}", live=True).role is Role.CONTEXT
    assert one(f"{RAISED}KeyError: 3{chain}OSError: no such thing\n", live=True).role is Role.ROOT
    assert one(f"{RAISED}{ECC}{chain}", live=True).signature == "CUDA-ECC"


def test_half_a_line_of_an_exception_without_its_traceback_is_no_cause() -> None:
    assert one("ValueError: bad", live=True).role is Role.CONTEXT
    assert one("ValueError: bad shape\n", live=True).role is Role.ROOT


def test_a_file_that_lacks_its_last_end_of_line_is_whole() -> None:
    assert one(RAISED + "RingBroken: rank 3").role is Role.ROOT


def test_a_traceback_that_comes_in_two_chunks_is_whole() -> None:
    matcher = Matcher()
    for part in (RAISED, "RingBroken: rank 3\n"):
        matcher.feed(Chunk(file="x.log", data=part.encode()), NOW)
    matcher.finish()
    assert [one.role for one in matcher.evidence()] == [Role.ROOT]


def test_a_chain_is_one_piece_of_evidence_and_its_known_cause_decides() -> None:
    found = one(
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n'
        f"{ECC}\n"
        "\n"
        "During handling of the above exception, another exception occurred:\n"
        "\n"
        "Traceback (most recent call last):\n"
        '  File "a.py", line 2, in g\n'
        "ValueError: could not save\n"
        "step 3\n"
    )
    assert found.signature == "CUDA-ECC"


def test_the_error_of_a_data_worker_is_found_inside() -> None:
    found = one(
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n'
        "RuntimeError: Caught KeyError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "data.py", line 9, in __getitem__\n'
        "KeyError: 'labels'\n"
    )
    assert found.text.startswith("KeyError: 'labels'\n")
    assert "data.py" in found.text


def test_a_group_of_exceptions_gives_the_innermost() -> None:
    program = """
try:
    raise ValueError('no tokens')
except ValueError as error:
    raise ExceptionGroup('unhandled', [error])
"""
    code = "import sys, traceback\ntry:\n    exec(sys.argv[1])\nexcept BaseException:\n    traceback.print_exc()"
    told = subprocess.run([sys.executable, "-c", code, program], capture_output=True, check=True).stderr
    if sys.version_info < (3, 11):
        pytest.skip("this Python has no exception groups")
    found = one(told + b"step 12\n")
    assert (found.signature, found.text.partition("\n")[0]) == ("PY-EXCEPTION", "ValueError: no tokens")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python has no exception groups")
def test_a_group_of_exceptions_that_nothing_was_raised_before_is_read() -> None:
    program = "import asyncio\nasync def job():\n    raise ValueError('no tokens')\nasync def main():\n"
    program += "    async with asyncio.TaskGroup() as group:\n        group.create_task(job())\nasyncio.run(main())\n"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).stderr
    assert told.startswith(b"  + Exception Group Traceback")
    found = one(told)
    assert (found.signature, found.text.partition("\n")[0]) == ("PY-EXCEPTION", "ValueError: no tokens")


@pytest.mark.parametrize(
    ("inner", "signature"), [("KeyError: 'labels'", "PY-EXCEPTION"), ("BrokenPipeError: [Errno 32]", "PY-CONNRESET")]
)
def test_what_torchs_spawn_tells_of_another_process_is_that_ones(inner: str, signature: str) -> None:
    outer = f"{RAISED}torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
    told = f"{outer}-- Process 1 terminated with the following error:\n{RAISED}{inner}\n\n"
    found = one(told, live=True)
    assert (found.signature, found.text.partition("\n")[0]) == (signature, inner)
    assert one(outer + "-- Process 1 terminated with", live=True).role is Role.CONTEXT


def test_tracebacks_of_two_processes_one_below_the_other_are_two() -> None:
    matcher = Matcher()
    victim = f"{RAISED}BrokenPipeError: [Errno 32] Broken pipe\n"
    matcher.feed(Chunk(file="x.log", data=f"{RAISED}KeyError: 3\n{victim}{RAISED}KeyError: 4\n".encode()), NOW)
    matcher.finish()
    found = {one.signature: (one.role, one.count) for one in matcher.evidence()}
    assert found == {"PY-EXCEPTION": (Role.ROOT, 2), "PY-CONNRESET": (Role.VICTIM, 1)}


def test_what_a_worker_of_a_data_loader_raised_is_of_the_same_traceback() -> None:
    outer = "KeyError: Caught KeyError in DataLoader worker process 0."
    found = one(f"{RAISED}{outer}\nOriginal {RAISED}KeyError: 'labels'\n", live=True)
    assert found.text.partition("\n")[0] == "KeyError: 'labels'"


def test_a_traceback_without_end_is_given_up() -> None:
    text = "Traceback (most recent call last):\n" + "  more\n" * (MAX_LINES + 10) + f"{ECC}\n"
    assert one(text).signature == "CUDA-ECC"


def test_a_traceback_that_is_still_being_written_waits_for_its_end() -> None:
    matcher = Matcher()
    assert matcher.feed(Chunk(file="x", data=b'Traceback (most recent call last):\n  File "a", line 1\n'), NOW) == []
    assert matcher.flush(NOW + 0.5) == []
    assert matcher.feed(Chunk(file="x", data=b"KeyError: 'x'\n"), NOW + 0.6) == []
    assert [one.signature for one in matcher.flush(NOW + 2)] == ["PY-EXCEPTION"]
    assert matcher.flush(NOW + 3) == []


def test_the_last_part_of_a_progress_bar_and_what_stands_behind_it() -> None:
    bar = "".join(f"{n}%|###   | {n}/100\r" for n in range(100))
    assert one(bar + ECC + "\n").signature == "CUDA-ECC"


def test_colours_and_frames_do_not_hide_a_line() -> None:
    assert one(f"\x1b[31m{ECC}\x1b[0m\n").text == ECC
    assert one(f"│ {ECC}   │\n").text == ECC


def test_what_a_terminal_would_act_on_is_gone() -> None:
    hostile = b"\x1b]0;title\x07CUDA error: \x1b[2Juncorrectable ECC error encountered\x9b5m\x08\xe2\x80\xae"
    text = one(hostile + b"\n").text
    assert "uncorrectable ECC error encountered" in text
    assert text.isprintable()


def test_repeats_are_counted_not_told_again() -> None:
    found = one("srun: error: n2: task 5: Killed\n" * 50)
    assert (found.count, found.line, found.node, found.rank) == (50, 1, "n2", 5)


def test_the_number_of_different_findings_is_bounded() -> None:
    text = "".join(f"srun: error: n{n}: task {n}: Killed\n" for n in range(MAX_DISTINCT + 100))
    matcher = Matcher()
    matcher.feed(Chunk(file="x", data=text.encode()), NOW)
    assert len(matcher.evidence()) == MAX_DISTINCT
    assert matcher.dropped == 100


def test_a_line_names_the_peer_and_the_printer() -> None:
    found = one(
        "n3: n3:981:1203 [2] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n1<57557>\n"
    )
    assert (found.node, found.peer_nodes, found.role) == ("n3", ("n1",), Role.VICTIM)


def test_a_file_of_one_rank_names_the_rank() -> None:
    assert one(ECC + "\n", rank=7).rank == 7


def test_time_of_old_logs_comes_from_above_and_of_live_ones_from_the_clock() -> None:
    text = f"2026-03-02T03:12:00Z step 1\nnothing\n{ECC}\n"
    assert one(text).at == 1772421120.0
    assert one(text, live=True).at == NOW


def test_a_live_stamp_of_another_time_zone_is_not_believed() -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW - 10))
    other_zone = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW - 3600))
    assert one(f"{stamp} {ECC}\n", live=True).at == NOW - 10
    assert one(f"{other_zone} {ECC}\n", live=True).at == NOW


def test_line_numbers_go_on_from_chunk_to_chunk_and_start_again_with_a_new_file() -> None:
    matcher = Matcher()
    matcher.feed(Chunk(file="x", data=b"a\nb\n", fresh=True), NOW)
    assert [one.line for one in matcher.feed(Chunk(file="x", data=f"c\n{ECC}\n".encode()), NOW)] == [4]
    again = matcher.feed(Chunk(file="x", data=b"srun: error: Node failure on n7\n", fresh=True), NOW)
    assert [one.line for one in again] == [1]


HOSTILE = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            b"Traceback (most recent call last):",
            b"KeyError: 'x'",
            b'  File "a.py", line 1, in f',
            b"[rank1]: NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
            b"srun: error: n2: task 5: Killed",
            b"3: Traceback (most recent call last):",
            b"CUDA error: \r\r\r an illegal memory access",
            b"\x1b[31m" * 50,
            b"\xff\xfe\x00",
            b"loss: nan",
        ]
    ),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(HOSTILE, max_size=30), st.randoms())
def test_any_bytes_give_the_same_evidence_however_they_are_cut_into_chunks(
    lines: list[bytes], chance: random.Random
) -> None:
    lines = [line.replace(b"\n", b"") + b"\n" for line in lines]
    whole = Matcher()
    whole.feed(Chunk(file="x", data=b"".join(lines), fresh=True), NOW)
    whole.finish()
    pieces = Matcher()
    while lines:
        count = chance.randint(1, len(lines))
        pieces.feed(Chunk(file="x", data=b"".join(lines[:count])), NOW)
        lines = lines[count:]
    pieces.finish()
    assert pieces.evidence() == whole.evidence()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=6000))
def test_decoding_never_fails_and_gives_text_that_is_safe(raw: bytes) -> None:
    text = decode(raw)
    assert len(text) <= 4 * MAX_LINE
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text)
    split_prefix(text)
    find_time(text, now=NOW)


@pytest.mark.parametrize(
    "piece",
    [
        b"NCCL WARN Call to ",
        b"LustreError: ",
        b"CUDA error: an illegal",
        b"mlx5_core ",
        b"Traceback (most recent call last):",
        b"[rank1]: ",
        b"loss" + b" " * 500,
        b"[Errno 5]",
        b"Assertion `",
        b"UCX  ERROR ",
        b"*** STEP ",
        b"\x1b[",
        b"\x1b]" + b"a" * 300,
        b"\r",
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["one-line", "many-lines"])
def test_malice_costs_what_its_length_costs(piece: bytes, end: bytes) -> None:
    data = (piece * 20 + end) * (300_000 // len(piece * 20 + end))
    start = time.process_time()
    read(data)
    assert time.process_time() - start < 5
