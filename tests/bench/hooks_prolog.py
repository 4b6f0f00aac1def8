"""What the prolog adds to a job on a node with 8 (simulated) GPUs: ``python tests/bench/hooks_prolog.py [JOBS]``.

It runs the jobs on a sandbox, half of them with the prolog and half without, in turn, and prints the prolog's own
time (kept by a wrapper that Slurm starts) and what ``srun true`` takes with and without.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from hooksite import HookSite
from transom_slurm.sandbox import Sandbox

WRAPPER = """\
#!/usr/bin/python3 -IS
import os, subprocess, time
if os.path.exists("{folder}/off"):
    os._exit(0)
began = time.monotonic()
code = subprocess.call(["{folder}/prolog"])
with open("{folder}/times", "a") as file:
    file.write("%.6f\\n" % (time.monotonic() - began))
os._exit(code)
"""


def main(jobs: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="hooks-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        wrapper = folder / "wrapper"
        wrapper.write_text(WRAPPER.format(folder=folder))
        wrapper.chmod(0o755)
        sandbox = Sandbox.up(1, folder / "sb", extra=(f"Prolog={wrapper}", "PrologFlags=Alloc"))
        try:
            with HookSite(sandbox, folder).daemon():
                took = run(sandbox, folder, jobs)
        finally:
            sandbox.down()
        own = sorted(float(line) for line in (folder / "times").read_text().split())
        print(f"prolog, {len(own)} jobs:   {told(own)}")
        for label, values in took.items():
            print(f"srun true, {label}: {told(sorted(values))}")


def run(sandbox: Sandbox, folder: Path, jobs: int) -> dict[str, list[float]]:
    """Seconds of each ``srun true``, with the prolog and without, in turn."""
    took: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(jobs):
        for label, values in took.items():
            (folder / "off").touch() if label == "without" else (folder / "off").unlink(missing_ok=True)
            began = time.monotonic()
            sandbox.run(["srun", "--gpus=8", "true"])
            values.append(time.monotonic() - began)
    return took


def told(values: list[float]) -> str:
    """Median, p99 and the longest, in milliseconds; ``values`` are sorted."""
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    return f"median {statistics.median(values) * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, longest {values[-1] * 1e3:.0f} ms"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
