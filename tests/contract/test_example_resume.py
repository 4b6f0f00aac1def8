"""The example, killed in the middle and started again: the loss of every step is that of the run nobody disturbed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train.py"
LINE = re.compile(r"step (\d+) loss \d+\.\d{4} loss_hex (-?0x1\.[0-9a-f]+p[+-]\d+) time \d+\.\d\ds")
STEPS = 13
ARGUMENTS = ["--steps", str(STEPS), "--checkpoint-every", "4"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def launch(folder: Path, count: int, epoch: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the program on ``count`` ranks as transom does; whatever still runs at the end is killed."""
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"TRANSOM_CHECKPOINT_DIR": str(folder), "TRANSOM_EPOCH": str(epoch), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TRAIN), *ARGUMENTS],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def losses(lines: list[str]) -> dict[int, str]:
    """The loss of each step, to the bit."""
    found = (LINE.fullmatch(line.strip()) for line in lines)
    return {int(match[1]): match[2] for match in found if match}


def whole_run(folder: Path, count: int, epoch: int) -> tuple[dict[int, str], str]:
    """Run to the end; the losses, and what rank 0 said first."""
    with launch(folder, count, epoch) as ranks:
        output, _ = ranks[0].communicate(timeout=90)
        codes = [rank.wait(timeout=30) for rank in ranks]
    assert codes == [0] * count, output
    begun = re.search(r"^(starting from step 0|resumed from step \d+)$", output, re.MULTILINE)
    assert begun, output
    return losses(output.splitlines()), begun[0]


def killed_run(folder: Path, count: int, epoch: int, at_step: int) -> dict[int, str]:
    """Kill the last rank when a step is seen, then all others; the losses so far."""
    lines = []
    with launch(folder, count, epoch) as ranks:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            lines.append(line)
            if line.startswith(f"step {at_step} "):
                ranks[-1].kill()
                break
    return losses(lines)


def assert_equal_to_the_bit(undisturbed: dict[int, str], before: dict[int, str], after: dict[int, str]) -> None:
    assert list(undisturbed) == list(range(1, STEPS + 1))
    assert list(after) == list(range(9, STEPS + 1))
    assert {**before, **after} == undisturbed
    assert before[10] == after[10]
    assert len(set(undisturbed.values())) == STEPS


def test_two_ranks(tmp_path: Path) -> None:
    undisturbed, begun = whole_run(tmp_path / "a", 2, epoch=1)
    assert begun == "starting from step 0"
    before = killed_run(tmp_path / "b", 2, epoch=1, at_step=10)
    after, begun = whole_run(tmp_path / "b", 2, epoch=2)
    assert begun == "resumed from step 8"
    assert_equal_to_the_bit(undisturbed, before, after)


def test_four_ranks(tmp_path: Path) -> None:
    """With more than two ranks the order in which gradients are added matters."""
    command = [sys.executable, str(TRAIN.parents[2] / "tests/contract/example_fork_worker.py"), str(tmp_path)]
    done = subprocess.run([*command, *ARGUMENTS], capture_output=True, text=True, timeout=150)
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("whole", "killed", "resumed")}
    assert done.returncode == 0, (done.stderr, logs)
    assert "resumed from step 8\n" in logs["resumed"]
    assert_equal_to_the_bit(*(losses(logs[name].splitlines()) for name in ("whole", "killed", "resumed")))
