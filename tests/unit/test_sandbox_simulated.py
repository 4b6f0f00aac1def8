"""The simulated nvidia-smi and dmesg, run as the nodes run them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from transom_slurm.sandbox import gpus
from transom_slurm.sandbox.errors import SandboxError
from transom_slurm.sandbox.layout import NodeLayout


@pytest.fixture
def own(tmp_path: Path) -> NodeLayout:
    layout = NodeLayout(tmp_path / "n2")
    layout.root.mkdir()
    gpus.boot(layout, "n2", 8)
    return layout


def _run(script: str, state: Path, *argv: str) -> tuple[int, str]:
    path = str(files("transom_slurm.sandbox.simulated") / script)
    done = subprocess.run(
        [sys.executable, "-I", "-S", path, str(state), *argv], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def _smi(own: NodeLayout, *argv: str) -> tuple[int, str]:
    return _run("nvidia_smi.py", own.gpus, *argv)


ASKED = (
    "index,uuid,name,pci.bus_id,serial,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,"
    "ecc.errors.uncorrected.aggregate.total,remapped_rows.pending,remapped_rows.failure,clocks_throttle_reasons.active,"
    "clocks_event_reasons.active,pcie.link.width.current,pcie.link.width.max,pcie.link.gen.current,temperature.gpu,"
    "power.draw,utilization.gpu"
)


def test_it_says_that_it_is_simulated(own: NodeLayout) -> None:
    assert "SIMULATED" in _smi(own)[1]
    code, listed = _smi(own, "-L")
    assert code == 0
    assert re.fullmatch(
        r"GPU 0: NVIDIA H100 \(simulated by transom sandbox\) \(UUID: GPU-[0-9a-f-]{36}\)", listed.split("\n")[0]
    )
    assert len(listed.splitlines()) == 8


def test_all_fields_that_monitoring_asks_for(own: NodeLayout) -> None:
    code, text = _smi(own, f"--query-gpu={ASKED}", "--format=csv,noheader,nounits")
    assert code == 0
    assert len(text.splitlines()) == 8
    assert all(len(line.split(", ")) == len(ASKED.split(",")) for line in text.splitlines())
    assert text.splitlines()[1].split(", ")[3:9] == [
        "00000000:3B:00.0",
        "1650000000201",
        "550.90.07",
        "81559",
        "0",
        "0",
    ]


def test_units_and_headings(own: NodeLayout) -> None:
    assert _smi(own, "--query-gpu=memory.total,power.draw", "--format=csv", "-i", "3")[1].splitlines() == [
        "memory.total [MiB], power.draw [W]",
        "81559 MiB, 71.20 W",
    ]


@pytest.mark.parametrize("query", ["--query-gpu=index,nonsense", "--query-compute-apps=nonsense"])
def test_an_unknown_field_fails_as_the_real_one_does(own: NodeLayout, query: str) -> None:
    code, text = _smi(own, query, "--format=csv,noheader")
    assert code == 2
    assert 'Field "nonsense" is not a valid field to query.' in text


def test_an_unknown_option_and_a_missing_format_fail(own: NodeLayout) -> None:
    assert _smi(own, "--nonsense")[0] == 1
    assert _smi(own, "--query-gpu=index")[0] == 2
    assert _smi(own, "-i", "42", "-L") == (6, "No devices were found\n")


def test_processes_on_a_gpu(own: NodeLayout) -> None:
    query = ("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv,noheader,nounits")
    assert _smi(own, *query) == (0, "")
    gpus.add_process(own, 2, 4711, 1024)
    assert _smi(own, *query)[1].strip() == f"4711, 1024, {gpus.fresh('n2', 2)['uuid']}"


def test_a_lost_gpu_is_gone_until_the_next_boot(own: NodeLayout) -> None:
    gpus.xid(own, "n2", 79, 1)
    indices = _smi(own, "--query-gpu=index", "--format=csv,noheader")[1].split()
    assert indices == ["0", "2", "3", "4", "5", "6", "7"]
    assert gpus.first_present(own) == 0
    gpus.boot(own, "n2", 8)
    assert gpus.shown(own) == 8


def test_when_all_are_lost(own: NodeLayout) -> None:
    for index in range(8):
        gpus.update(own, index, {"lost": True})
    assert _smi(own, "-L") == (6, "No devices were found\n")
    with pytest.raises(SandboxError, match="none is left"):
        gpus.first_present(own)


def test_a_field_that_does_not_exist_cannot_be_set(own: NodeLayout) -> None:
    with pytest.raises(SandboxError, match=r"no such field: ecc\.nonsense"):
        gpus.update(own, 0, {"ecc.nonsense": 1})
    with pytest.raises(SandboxError, match="it has 8"):
        gpus.update(own, 8, {"lost": True})


def test_kern_log_is_in_syslogs_form(own: NodeLayout) -> None:
    gpus.xid(own, "n2", 48, 1)
    line = own.kern_log.read_text().splitlines()[-1]
    form = r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d n2 kernel: \[ *\d+\.\d{6}\] NVRM: Xid \(PCI:0000:3b:00\): 48, .*DBE.*"
    assert re.fullmatch(form, line)


@pytest.mark.parametrize(
    ("argv", "form"),
    [
        ((), r"\[ *\d+\.\d{6}\] NVRM.*"),
        (("-T",), r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] NVRM.*"),
        (("--time-format=iso",), r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}[+-]\d\d:\d\d NVRM.*"),
        (("-k", "--time-format", "iso"), r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}[+-]\d\d:\d\d NVRM.*"),
        (("-t",), r"NVRM.*"),
    ],
)
def test_dmesg_prints_the_same_lines_in_its_own_forms(own: NodeLayout, argv: tuple[str, ...], form: str) -> None:
    gpus.xid(own, "n2", 79, 0)
    code, text = _run("dmesg.py", own.kern_log, *argv)
    assert code == 0
    assert re.fullmatch(form, text.splitlines()[-1])


def test_dmesg_refuses_what_it_does_not_know(own: NodeLayout) -> None:
    assert _run("dmesg.py", own.kern_log, "--follow") == (1, "dmesg: unrecognized option '--follow'\n")
