"""Measure TCE beside torch.save, torch.distributed.checkpoint and, where they are installed, other engines.

``python tests/bench/checkpoint.py --dir DIR [--gib 1.0] [--repeats 8] [--peers PYTHON]`` prints Markdown tables. The
ways take turns, each in processes of its own, in two rounds of one run; every round takes one memcpy and one write with
fsync of the same bytes along. Seconds are worth what those say beside them; ratios are worth more. Takes about 20
minutes on 2 cores, 6 times ``--gib`` of memory and 8 times of disk.

``--peers``: the python of an environment with torch, dlrover (and grpcio), torchsnapshot and nvidia-resiliency-ext.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_loops import Row, loop_rows, spared
from checkpoint_ways import PEERS, WAYS

from transomd.tce.files import make_folder

HERE = Path(__file__).resolve().parent
ROUNDS, WARM = 2, 6
ANSWER_S = 180.0
Times = dict[tuple[int, str, str], list[float]]
"""Seconds by ranks, way and what was measured."""


class Failed(Exception):
    """A way does not run here; says why."""


class Ranks:
    """The processes of one way."""

    def __init__(self, python: str, way: str, folder: Path, world: int, gib: float) -> None:
        folder.mkdir()
        self._log = folder.with_suffix(".log")
        shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        self._ranks = []
        for rank in range(world):
            command = [python, HERE / "checkpoint_rank.py", way, folder, str(rank), str(world), str(gib / world), "300"]
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe = subprocess.PIPE
            with open(self._log, "ab") as log:
                self._ranks.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=env))
        self._answers()

    def ask(self, op: str, **details: Any) -> dict[str, Any]:
        """Ask all ranks at once; of each time the slowest rank's."""
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.write(json.dumps({"op": op, **details}).encode() + b"\n")
                rank.stdin.flush()
        first, *others = self._answers()
        for other in others:
            first = {key: _slower(value, other[key]) for key, value in first.items()}
        return first

    def _answers(self) -> list[dict[str, Any]]:
        end, found = time.monotonic() + ANSWER_S, []
        for rank in self._ranks:
            assert rank.stdout is not None
            ready, _, _ = select.select([rank.stdout], [], [], max(0.0, end - time.monotonic()))
            line = rank.stdout.readline() if ready else b""
            answer = json.loads(line) if line else {"error": "no answer"}
            if "error" in answer:
                raise Failed(answer["error"])
            found.append(answer)
        return found

    def end(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


class Bench:
    """Every time that was taken, and which ways did not run."""

    def __init__(self, folder: Path, gib: float, repeats: int, peers: str) -> None:
        self.folder, self.gib, self.peers = folder, gib, peers
        self.each = -(-repeats // ROUNDS)
        self.times: Times = {}
        self.not_run: dict[str, str] = {}
        self.skipped: dict[tuple[int, str], int] = {}

    def run(self) -> None:
        for world in (1, 2):
            for number in range(ROUNDS):
                for way in WAYS:
                    self._turn(world, number, way)

    def _turn(self, world: int, number: int, way: str) -> None:
        python = self.peers if way in PEERS else sys.executable
        if not python or way in self.not_run:
            self.not_run.setdefault(way, f"was not asked for (--peers; needs {PEERS.get(way)})")
            return
        print(f"{world} ranks, round {number + 1}: {way}", file=sys.stderr, flush=True)
        folder, before = self.folder / f"{world}-{number}", set(Path("/dev/shm").glob("*ckpt_shm_*"))
        ranks = None
        try:
            ranks = Ranks(python, way, folder, world, self.gib)
            self._measure(ranks, world, way)
        except (Failed, OSError) as error:
            self.not_run[way] = f"{error} ({world} ranks, round {number + 1})"
        finally:
            if ranks is not None:
                ranks.end()
            # DLRover leaves it.
            for path in set(Path("/dev/shm").glob("*ckpt_shm_*")) - before:
                path.unlink()
            shutil.rmtree(folder, ignore_errors=True)

    def _measure(self, ranks: Ranks, world: int, way: str) -> None:
        # Warm: every buffer has been used once, and what a way does in the background at first is done.
        for _ in range(WARM):
            ranks.ask("save")
            ranks.ask("drain")
        if world == 1:
            self._note(world, way, ranks.ask("alone", times=self.each))
        for _ in range(self.each):
            begun = time.perf_counter()
            saved = ranks.ask("save")
            if saved["taken"]:
                self._note(world, way, {"stall": [saved["blocked"]]})
            self._skip(world, way, not saved["taken"])
            time.sleep(max(0.0, 1.0 - (time.perf_counter() - begun)))
        self._skip(world, way, ranks.ask("drain")["skipped"])
        if world == 1:
            loads = ranks.ask("loads", times=self.each)
            self._note(world, way, {f"load, {name}": times for name, times in loads.items()})
        ranks.ask("close")

    def _skip(self, world: int, way: str, count: int) -> None:
        self.skipped[world, way] = self.skipped.get((world, way), 0) + count

    def _note(self, world: int, way: str, found: dict[str, list[float]]) -> None:
        for name, times in found.items():
            self.times.setdefault((world, way, name), []).extend(times)

    def median(self, world: int, way: str, name: str) -> float | None:
        times = self.times.get((world, way, name))
        return statistics.median(times) if times else None

    def all_of(self, name: str) -> list[float]:
        return [seconds for (_, _, what), times in self.times.items() if what == name for seconds in times]


def ways_table(bench: Bench) -> str:
    """One row a way: seconds, and in brackets how often each goes into torch.save's or torch.load's."""
    columns = (
        (1, "blocked", "one save"),
        (1, "stall", "stall, 1 rank"),
        (2, "stall", "stall, 2 ranks"),
        (1, "durable", "durable"),
        (1, "load, memory", "load, memory"),
        (1, "load, storage", "load, storage"),
    )
    lines = [
        "| way | " + " | ".join(title for _, _, title in columns) + " | skipped |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for way in WAYS:
        if way in bench.not_run and (1, way, "blocked") not in bench.times:
            continue
        cells = [_cell(bench, world, way, name) for world, name, _ in columns]
        skipped = " + ".join(str(bench.skipped.get((world, way), 0)) for world in (1, 2))
        lines.append(f"| {way} | {' | '.join(cells)} | {skipped} |")
    return "\n".join(lines)


def _cell(bench: Bench, world: int, way: str, name: str) -> str:
    own = bench.median(world, way, name)
    if own is None:
        return ""
    base = bench.median(1, way, "load, torch.load") if name.startswith("load") else _torch(bench, world, name)
    return f"{own:.3f}" + (f" ({base / own:.1f})" if base else "")


def _torch(bench: Bench, world: int, name: str) -> float | None:
    return bench.median(world, "torch.save + fsync", name)


def musts(bench: Bench) -> list[Row]:
    """What is asked of TCE: what, is, must."""

    def ratio(over: float | None, under: float | None) -> str:
        return f"{over / under:.2f}" if over and under else "not measured"

    def tce(name: str, world: int = 1) -> float | None:
        return bench.median(world, "TCE", name)

    rows = [("speed of one save over one memcpy", ratio(tce("memcpy"), tce("blocked")), ">= 0.90")]
    for world in (1, 2):
        stall = tce("stall", world)
        for way in WAYS:
            if way != "TCE" and (told := ratio(bench.median(world, way, "stall"), stall)) != "not measured":
                must = ">= 20" if way.startswith("torch.save") else "> 1"
                rows.append((f"stall of {way} over TCE's, {world} rank{'s' * (world > 1)}", told, must))
    for way in WAYS:
        if way != "TCE" and (told := ratio(bench.median(1, way, "durable"), tce("durable"))) != "not measured":
            rows.append((f"time to durable of {way} over TCE's", told, "> 1"))
    memory, slow = tce("load, memory"), tce("load, torch.load, slow store")
    rows.append(("torch.load, hot, over load from own memory", ratio(tce("load, torch.load"), memory), ">= 5"))
    rows.append(("torch.load, store of 1 GiB/s, over load from own memory", ratio(slow, memory), ">= 20"))
    rows.append(
        ("torch.load, hot, over load from storage", ratio(tce("load, torch.load"), tce("load, storage")), ">= 3")
    )
    return rows


def report(bench: Bench, rows: list[Row]) -> str:
    """The tables, with what the machine did in this run."""
    memcpy, disk = (statistics.median(bench.all_of(name)) for name in ("memcpy", "disk"))
    head = (
        f"{bench.gib:.2f} GiB in 300 tensors (2 ranks: half each), {bench.each * ROUNDS} of each in {ROUNDS} rounds, "
        f"medians. torch {torch.__version__}, one thread, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}. One "
        f"memcpy {bench.gib / memcpy:.1f} GiB/s, one write and fsync {bench.gib / disk:.2f} GiB/s "
        f"(n {len(bench.all_of('disk'))}). Seconds; in brackets torch.save's or torch.load's over them. A stall counts "
        "the wait for the save before, where a way needs it; a skipped save counts as none."
    )
    told = "\n".join(f"| {what} | {found} | {must} |" for what, found, must in rows)
    missing = "".join(
        f"\n- {way} {'did not run: ' if way not in PEERS or bench.peers else ''}{why}"
        for way, why in bench.not_run.items()
    )
    return f"{head}\n\n{ways_table(bench)}\n{missing}\n\n| what | is | must |\n|---|---|---|\n{told}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty folder on the disk to be measured")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--peers", default="", help="the python of an environment that has the other engines")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.dir.absolute()
    make_folder(folder)
    bench = Bench(folder, options.gib, options.repeats, options.peers)
    bench.run()
    print("loops", file=sys.stderr, flush=True)
    rows = [*musts(bench), *loop_rows(folder, options.repeats, quick=options.gib < 1), *spared(folder)]
    print(report(bench, rows), flush=True)


def _slower(one: Any, other: Any) -> Any:
    """Of two ranks' answers: the longer times, taken only if both were, all that were skipped."""
    if isinstance(one, list):
        return [max(pair) for pair in zip(one, other, strict=True)]
    if isinstance(one, bool):
        return one and other
    return max(one, other)


if __name__ == "__main__":
    main()
