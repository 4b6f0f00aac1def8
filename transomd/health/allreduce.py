"""One rank of the collective check: a timed all-reduce over every node. Runs in the *user's* Python with torch.

``python - REQUEST < allreduce.py``. REQUEST is a JSON object: ``rank``, ``world``, ``address`` and ``port`` of rank 0,
``peer`` (a host name to find the network interface by), ``megabytes``, ``iterations``, ``timeout`` in seconds. NCCL is
used when every rank has a GPU, gloo when not. Prints one JSON object as its last line.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import socket
import statistics
import struct
import sys
import time
from typing import Any

SIOCGIFADDR = 0x8915


def interface_towards(host: str) -> str:
    """The network interface that packets to a host leave by; empty if that cannot be found out.

    gloo otherwise takes the address that the own host name resolves to, which on Debian is 127.0.1.1.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if address_of(probe, name) == own:
                    return name
    except OSError:
        pass
    return ""


def address_of(any_socket: socket.socket, interface: str) -> str:
    """IPv4 address of an interface; empty if it has none."""
    try:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])


def join(request: dict[str, Any], torch: Any) -> str:
    """Meet the other ranks, agree on the backend and make the process group; the backend's name."""
    dist, rank, world = torch.distributed, request["rank"], request["world"]
    patience = datetime.timedelta(seconds=request["timeout"])
    store = dist.TCPStore(request["address"], request["port"], world, rank == 0, patience)
    store.set(f"gpu/{rank}", "1" if torch.cuda.is_available() else "0")
    everywhere = all(store.get(f"gpu/{other}") == b"1" for other in range(world))
    backend = "nccl" if everywhere else "gloo"
    group_store = dist.PrefixStore("check", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=patience)
    return backend


def measure(request: dict[str, Any], torch: Any, backend: str) -> dict[str, Any]:
    """Reduce over and over; the slowest rank's median counts. Raises ArithmeticError for a wrong sum."""
    dist, rank, world = torch.distributed, request["rank"], request["world"]
    device = "cuda:0" if backend == "nccl" else "cpu"
    data = torch.empty(request["megabytes"] * (1 << 18), dtype=torch.float32, device=device)
    times = []
    for _ in range(request["iterations"] + 1):
        data.fill_(float(rank + 1))
        dist.barrier()
        times.append(timed(torch, data, backend))
        check_sum(data, world)
    slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds = float(slowest.item())
    size = data.numel() * data.element_size()
    return {"seconds": seconds, "bus_gbps": size / seconds * 2 * (world - 1) / world / 1e9 if world > 1 else None}


def timed(torch: Any, data: Any, backend: str) -> float:
    """Seconds of one all-reduce."""
    began = time.perf_counter()
    torch.distributed.all_reduce(data)
    if backend == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def check_sum(data: Any, world: int) -> None:
    """Every element must be 1 + 2 + ... + world, exactly (float32 holds it up to 5792 ranks)."""
    expected = world * (world + 1) / 2
    low, high = float(data.min()), float(data.max())
    if low != expected or high != expected:
        raise ArithmeticError(f"wrong sum: {low} to {high} instead of {expected}")


def work(request: dict[str, Any]) -> dict[str, Any]:
    """The whole check of this rank."""
    try:
        import torch
        import torch.distributed
    except ImportError as exc:
        return {"error": f"no torch in {sys.executable}: {exc}"}
    torch.set_num_threads(1)
    backend = join(request, torch)
    answer = {"backend": backend, "torch": torch.__version__}
    answer.update(measure(request, torch, backend))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return answer


def main() -> int:
    """Run the rank named in the request; 1 if it failed."""
    request = json.loads(sys.argv[1])
    interface = interface_towards(request["peer"])
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        answer = work(request)
    except Exception as exc:
        answer = {"error": f"{type(exc).__name__}: {exc}"}
    answer["interface"] = interface
    print("\n" + json.dumps(answer), flush=True)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    # No waiting for threads of a backend that hangs.
    os._exit(main())
