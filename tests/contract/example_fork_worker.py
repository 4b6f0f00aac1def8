"""Runs the example on four ranks three times: undisturbed, killed in the middle, and again. For test_example_resume.py.

One process imports torch and forks the twelve that train, as an import takes seconds. What rank 0 prints goes into
whole.log, killed.log and resumed.log in the folder given.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch._inductor.config  # noqa: F401  DDP imports it, which takes a second

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

import train  # noqa: E402

RANKS = 4


def launch(root: Path, log: str, checkpoints: str, epoch: int, arguments: list[str]) -> list[int]:
    """Start the ranks as transom does; their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TRANSOM_EPOCH=str(epoch))
    os.environ["TRANSOM_CHECKPOINT_DIR"] = str(root / checkpoints)
    sys.argv = ["train.py", *arguments]
    return [forked(rank, root / (log if rank == 0 else f"{log}.{rank}")) for rank in range(RANKS)]


def forked(rank: int, log: Path) -> int:
    """Start one rank."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        train.main()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def end(ranks: list[int]) -> list[int]:
    """Wait for all ranks; their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]


def kill_at(log: Path, text: str, ranks: list[int]) -> None:
    """Kill the last rank when rank 0 has printed ``text``, then the others."""
    deadline = time.monotonic() + 60
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)
    for rank in reversed(ranks):
        os.kill(rank, signal.SIGKILL)


def main() -> None:
    root, arguments = Path(sys.argv[1]), sys.argv[2:]
    whole = end(launch(root, "whole.log", "a", 1, arguments))
    ranks = launch(root, "killed.log", "b", 1, arguments)
    kill_at(root / "killed.log", "step 10 ", ranks)
    end(ranks)
    again = end(launch(root, "resumed.log", "b", 2, arguments))
    sys.exit(int(whole != [0] * RANKS or again != [0] * RANKS))


main()
