"""Export to and import from DCP, safetensors and torch.save, with each library's own reader and writer as the judge."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_server import transom
from hypothesis import given, settings
from hypothesis import strategies as st
from transom_cli.commands.ckpt_move import folded
from transom_cli.main import run

from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.errors import CheckpointError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict  # noqa: E402

from transomd.tce import CheckpointEngine  # noqa: E402
from transomd.tce.dcp import TransomStorageWriter  # noqa: E402
from transomd.tce.dcp.facts import DamagedError  # noqa: E402
from transomd.tce.portable import FORMATS, bring_in, export, gather  # noqa: E402
from transomd.tce.portable.nest import nested  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(seed: int) -> dict[str, Any]:
    """A program's state with tied tensors, an empty one, rare types and values that are no tensors."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    tied = torch.rand(3)
    return {
        "model": {**model.state_dict(), "tied": tied, "tied.too": tied, "none": torch.zeros(0, 2)},
        "optimizer": optimizer.state_dict(),
        "rare": [torch.rand(5).to(torch.bfloat16), torch.rand(4).to(torch.float8_e5m2)],
        "loop": {"step": seed, "name": "ä", "pair": (1, 2.5), "raw": b"\0\1", "none": None},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        raw = [tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor for tensor in (one, other)]
        return bool(one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw))
    return bool(one == other)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a checkpoint of ``state_of(7)``."""
    engine = CheckpointEngine(tmp_path / "ck", rank=0, world_size=1, epoch=1, replicated=True, memory=False)
    engine.save(7, state_of(7)).wait("storage")
    engine.close()
    return list_checkpoints(tmp_path / "ck")[0].path


def evil(place: Path) -> Any:
    """An object that makes a folder when it is unpickled."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(place),)

    return Evil()


# ------------------------------------------------------------------------------------------------------------- export


def test_torch_loads_what_is_exported_to_it(folder: Path, tmp_path: Path) -> None:
    assert export(gather(folder).state, tmp_path / "out.pt", "torch") == []
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), state_of(7))


def test_dcps_own_reader_loads_what_is_exported_to_it(folder: Path, tmp_path: Path) -> None:
    assert export(gather(folder).state, tmp_path / "out", "dcp") == []
    target = state_of(1)
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    expected = state_of(7)
    assert same({k: v for k, v in target.items() if k != "loop"}, {k: v for k, v in expected.items() if k != "loop"})
    assert (target["loop"]["step"], target["loop"]["raw"]) == (7, b"\0\1")


def test_safetensors_loads_what_is_exported_to_it_and_the_rest_is_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    lacking = export(gather(folder).state, out, "safetensors")
    assert "state['loop']['name']" in lacking
    found, state = load_file(out), state_of(7)
    assert {name.removeprefix("model."): t for name, t in found.items() if name.startswith("model.")}.keys() == (
        state["model"].keys()
    )
    assert all(same(found[f"model.{name}"], tensor) for name, tensor in state["model"].items())
    assert same(found["optimizer.state.0.exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    with safe_open(out, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert out.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_what_a_file_lacks_is_told_by_its_first_two_keys() -> None:
    group = [f"state['optimizer']['param_groups'][0]['params'][{n}]" for n in range(40)]
    told = folded(["state['loop']['name']", *group, "state['rate']"])
    assert told == ["state['loop']['name']", "state['optimizer']['param_groups'] (40 values)", "state['rate']"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_checkpoint_that_dcp_wrote_through_transom_is_exported_whole(tmp_path: Path) -> None:
    dcp.save(state_of(7), storage_writer=TransomStorageWriter(tmp_path / "ck", memory=False), checkpoint_id="7")
    state = gather(list_checkpoints(tmp_path / "ck")[0].path).state
    assert same(state["model"], state_of(7)["model"])
    assert (state["rare"][0].dtype, state["loop"]["name"]) == (torch.bfloat16, "ä")


def test_whose_keys_are_taken_where_each_rank_had_its_own(tmp_path: Path) -> None:
    for rank in (1, 0):
        engine = CheckpointEngine(tmp_path, rank=rank, world_size=2, epoch=1, replicated=("model",), memory=False)
        engine.save(3, {"model": {"w": torch.ones(2)}, "seed": 10 + rank})
        engine.close()
    folder = list_checkpoints(tmp_path)[0].path
    assert (gather(folder).state["seed"], gather(folder).of_one_rank) == (10, ("seed",))
    assert gather(folder, rank=1).state["seed"] == 11
    with pytest.raises(CheckpointError, match="there is no rank 2, of 2 that saved it"):
        gather(folder, rank=2)


def test_numpy_arrays_are_exported_as_tensors(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    engine = CheckpointEngine(tmp_path / "ck", rank=0, world_size=1, epoch=1, memory=False)
    engine.save(1, {"a": numpy.arange(3), "scalar": numpy.float32(2.5), "empty": b""}).wait("storage")
    export(gather(list_checkpoints(tmp_path / "ck")[0].path).state, tmp_path / "out.pt", "torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (found["a"].tolist(), found["scalar"].item(), found["empty"].tolist()) == ([0, 1, 2], 2.5, [])


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_what_is_there_is_not_written_over_and_a_failure_leaves_nothing(folder: Path, to: str, tmp_path: Path) -> None:
    out = tmp_path / "there"
    out.mkdir()
    with pytest.raises(CheckpointError, match="is there already"):
        export(gather(folder).state, out, to)
    assert list(out.iterdir()) == []
    out.rmdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exporting to"):
        export(gather(folder).state, tmp_path / "file" / "out", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "file"]


def test_a_damaged_checkpoint_is_not_exported(folder: Path) -> None:
    data = folder / "replica-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(DamagedError, match=r"replica-00000.safetensors: tensor .* is damaged"):
        gather(folder)
    content[-1] ^= 1
    data.write_bytes(content)
    rest = folder / "replica-00000.pt"
    for change in (
        lambda: rest.write_bytes(rest.read_bytes()[:-1] + b"x"),
        rest.unlink,
        (folder / "rank-00000.json").unlink,
    ):
        change()
        with pytest.raises(DamagedError):
            gather(folder)


def test_the_command_tells_damage_by_its_exit_code(folder: Path, tmp_path: Path) -> None:
    data = folder / "replica-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    done = with_torch("export", str(folder.parent), "newest", "--to", "torch", str(tmp_path / "out.pt"))
    assert (done.returncode, "is damaged" in done.stderr, done.stdout) == (6, True, "")
    assert not (tmp_path / "out.pt").exists()


# ------------------------------------------------------------------------------------------------------------- import


def test_a_dcp_directory_is_imported_to_the_bit(tmp_path: Path) -> None:
    dcp.save(state_of(7), storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    folder = bring_in(tmp_path / "dcp", tmp_path / "ck", step=400)
    (found,) = list_checkpoints(tmp_path / "ck")
    assert (found.path, found.step, found.complete, verify(folder)) == (folder, 400, True, [])
    target = {"model": state_of(1)["model"], "rare": state_of(1)["rare"]}
    assert CheckpointEngine(tmp_path / "ck", rank=1, world_size=3, epoch=1, memory=False).load(target) == 400
    assert same(target, {key: state_of(7)[key] for key in target})


def test_a_torch_file_is_imported_to_the_bit(tmp_path: Path) -> None:
    torch.save(state_of(7), tmp_path / "in.pt")
    bring_in(tmp_path / "in.pt", tmp_path / "ck")
    target: dict[str, Any] = {}
    assert CheckpointEngine(tmp_path / "ck", rank=0, world_size=1, epoch=1, memory=False).load(target) == 0
    assert same(target, state_of(7))


def test_a_safetensors_file_is_imported_under_a_key(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "in.safetensors")
    bring_in(tmp_path / "in.safetensors", tmp_path / "ck", key="model")
    other = torch.nn.Linear(3, 2)
    CheckpointEngine(tmp_path / "ck", rank=0, world_size=1, epoch=1, memory=False).load({"model": other})
    assert same(other.state_dict(), model.state_dict())


def test_what_transom_exports_it_imports_again(folder: Path, tmp_path: Path) -> None:
    state = gather(folder).state
    for to in ("dcp", "torch"):
        export(state, tmp_path / f"out-{to}", to)
        again = gather(bring_in(tmp_path / f"out-{to}", tmp_path / f"ck-{to}")).state
        assert same(again["model"], state["model"])
        assert same(again["rare"], state["rare"])


def test_an_import_never_fences_a_program(folder: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="it holds checkpoints already"):
        bring_in(tmp_path / "in.pt", folder.parent)
    started = tmp_path / "started"
    CheckpointEngine(started, rank=0, world_size=1, epoch=1, memory=False)
    with pytest.raises(CheckpointError, match="it holds checkpoints already"):
        bring_in(tmp_path / "in.pt", started)


BRING = importlib.import_module("transomd.tce.portable.bring")


def test_an_import_that_was_killed_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "in.pt")
    monkeypatch.setattr(BRING, "verify", lambda folder: os.kill(os.getpid(), signal.SIGKILL))
    pid = os.fork()
    if not pid:
        bring_in(tmp_path / "in.pt", tmp_path / "ck")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert [name[:8] for name in os.listdir(tmp_path / "ck")] == [".import."]
    assert list_checkpoints(tmp_path / "ck") == []
    monkeypatch.undo()
    assert verify(bring_in(tmp_path / "in.pt", tmp_path / "ck")) == []


@pytest.mark.parametrize("fails", [True, False])
def test_an_import_does_nothing_to_that_of_another_one_into_the_same_directory(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("slow", "fast"):
        torch.save({"w": torch.full((100,), float(len(name))), "from": name}, tmp_path / f"{name}.pt")
    begun = []

    def hold(folder: Path) -> list[str]:
        """While the slow one looks at what it has written, the fast one does all that it has to do."""
        begun.append(folder)
        if len(begun) == 1:
            bring_in(tmp_path / "fast.pt", tmp_path / "ck")
            return ["w: is damaged"] if fails else verify(folder)
        return verify(folder)

    monkeypatch.setattr(BRING, "verify", hold)
    with pytest.raises(CheckpointError, match="w: is damaged" if fails else "it holds checkpoints already"):
        bring_in(tmp_path / "slow.pt", tmp_path / "ck")
    (found,) = list_checkpoints(tmp_path / "ck")
    assert (found.complete, verify(found.path), gather(found.path).state["from"]) == (True, [], "fast")
    assert os.listdir(tmp_path / "ck") == [found.path.name]


def test_of_imports_into_one_directory_at_the_same_time_one_succeeds(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "in.pt")
    together = threading.Barrier(6)

    def run(_: int) -> str:
        together.wait()
        try:
            return str(bring_in(tmp_path / "in.pt", tmp_path / "ck"))
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(run, range(6)))
    (found,) = list_checkpoints(tmp_path / "ck")
    assert (found.complete, verify(found.path)) == (True, [])
    assert answers.count(str(found.path)) == 1
    assert sum("it holds checkpoints already" in answer for answer in answers) == 5, answers
    assert os.listdir(tmp_path / "ck") == [found.path.name]


def test_what_is_no_state_needs_a_key(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="holds a Tensor, not a dict"):
        bring_in(tmp_path / "in.pt", tmp_path / "ck")
    assert gather(bring_in(tmp_path / "in.pt", tmp_path / "ck", key="w")).state["w"].tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------- nothing is run from a file


def refused(source: Path, tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        bring_in(source, tmp_path / "ck")
    assert not (tmp_path / "was-here").exists()
    assert not (tmp_path / "ck").exists()
    return str(caught.value)


def test_no_torch_file_is_trusted(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": evil(tmp_path / "was-here")}, tmp_path / "in.pt")
    said = refused(tmp_path / "in.pt", tmp_path)
    assert "nothing is unpickled that could run code" in said
    assert "mkdir" in said


def test_no_value_of_a_dcp_directory_is_trusted(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "x": evil(tmp_path / "was-here")}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    assert "x: nothing is unpickled that could run code" in refused(tmp_path / "dcp", tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda place: pickle.dumps(evil(place)), "mkdir, which DCP's metadata has no need of"),
        (lambda place: b"cos\nsystem\n(S'touch x'\ntR.", "it names os.system"),
        (lambda place: b"cbuiltins\neval\n(S'1'\ntR.", "it names builtins.eval"),
        (lambda place: b"ctorch\nload\n(S'x'\ntR.", "it names torch.load"),
        (lambda place: b"Px\n.", "refers to something outside"),
        (lambda place: pickle.dumps({"state_dict_metadata": {}}), "a Metadata was expected"),
        (lambda place: b"", "is not read"),
        (lambda place: b"\x80\x05}.", "a Metadata was expected"),
    ],
)
def test_no_metadata_of_a_dcp_directory_are_trusted(content: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(content(tmp_path / "was-here"))
    assert said in refused(tmp_path / "dcp", tmp_path)


def test_metadata_that_are_cut_off_anywhere_are_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "n": [1, 2]}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    path = tmp_path / "dcp/.metadata"
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refused(tmp_path / "dcp", tmp_path)


def test_metadata_may_name_no_file_elsewhere(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../dcp/{info.relative_path}"
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    assert "is not the name of a file beside it" in refused(tmp_path / "dcp", tmp_path)


def test_a_dcp_file_that_is_cut_off_is_told(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 9)
    assert "is cut off" in refused(tmp_path / "dcp", tmp_path)


@pytest.mark.parametrize("name", ["in.safetensors", "in.pt"])
def test_a_file_of_something_else_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"something else entirely")
    assert name in refused(tmp_path / name, tmp_path)
    assert "No such file" in refused(tmp_path / f"no-{name}", tmp_path)


# --------------------------------------------------------------------------------- what refuses, or is interrupted


@pytest.mark.parametrize("to", FORMATS)
def test_what_the_disk_refuses_is_told_in_its_own_words_and_nothing_is_left(to: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            export({"w": torch.ones(1 << 20)}, tmp_path / "out/x", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"exporting to {tmp_path}/out/x: ")
    assert "Traceback" not in str(caught.value)
    assert caught.value.hint
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    small = os.statvfs_result([*real[:4], 3, *real[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    told = rf"No space left on device: needs 4194304 bytes, {3 * real.f_frsize} bytes free"
    with pytest.raises(CheckpointError, match=told):
        export({"w": torch.ones(1 << 20)}, tmp_path / "x", to)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_that_is_interrupted_leaves_nothing(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupted)
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export({"w": torch.ones(4)}, tmp_path / "x", to)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_import_that_is_interrupted_leaves_nothing(
    error: type[BaseException], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> Any:
        assert list_checkpoints(path.parent)[0].complete
        raise error

    source = tmp_path / "model.safetensors"
    export(gather(folder).state["model"], source, "safetensors")
    monkeypatch.setattr(BRING, "verify", interrupted)
    before = set(os.listdir(tmp_path))
    with pytest.raises(error):
        bring_in(source, tmp_path / "new/start", key="model")
    assert set(os.listdir(tmp_path)) == before


def test_an_import_into_a_folder_that_was_there_leaves_it_there(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "in.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            bring_in(tmp_path / "in.safetensors", tmp_path / "start")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(path.is_dir() for path in (tmp_path / "start").iterdir())


# --------------------------------------------------------------------------------------------------------- the command


def with_torch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``transom ckpt``, with time to load torch on a busy machine."""
    command = [sys.executable, "-m", "transom_cli.main", "ckpt", *words]
    environment = {**os.environ, "COLUMNS": "80", **env}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_command_exports_and_imports(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    where = str(folder.parent)
    done = with_torch("export", where, "newest", "--key", "model", "--to", "safetensors", str(out))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"step 7 of epoch 1 is in {out}\n", "")
    done = with_torch("import", str(out), str(tmp_path / "new"), "--key", "model", "--step", "7")
    assert done.returncode == 0, done.stderr
    state = gather(list_checkpoints(tmp_path / "new")[0].path).state
    assert same(state, {"model": state_of(7)["model"]})


def test_programs_are_told_what_was_moved(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, words = str(tmp_path / "out.safetensors"), ["ckpt", "export", str(folder.parent), "7", "--to", "safetensors"]
    assert run([*words, out, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["epoch"], told["path"], told["format"]) == (7, 1, out, "safetensors")
    assert "state['loop']['name']" in told["left_out"]
    assert run(["ckpt", "import", out, str(tmp_path / "new"), "--step", "9", "--json"]) == 0
    (made,) = list_checkpoints(tmp_path / "new")
    assert json.loads(capsys.readouterr().out) == {"step": 9, "path": str(made.path)}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["export", "CK", "9", "--to", "torch", "o"], 5, "no checkpoint of step 9 is there"),
        (["export", "CK", "7", "--to", "zip", "o"], 2, "'zip' is not one of"),
        (["export", "CK", "7", "--to", "torch", "--key", "modul", "o"], 5, "the state holds loop, model, optimizer"),
        (["export", "CK", "7", "--to", "torch", "CK"], 1, "is there already, and is not written over"),
        (["import", "gone.pt", "CK"], 5, "there is no such file"),
    ],
)
def test_what_the_command_is_asked_in_vain(folder: Path, words: list[str], code: int, said: str) -> None:
    done = with_torch(*(str(folder.parent) if word == "CK" else word for word in words))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize("name", ["export", "import"])
def test_their_help_has_examples(name: str) -> None:
    done = transom("ckpt", name, "-h")
    assert f"Examples:\n    transom ckpt {name}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_where_the_import_came_from_may_go(tmp_path: Path) -> None:
    """What was imported holds no reference to its source."""
    (tmp_path / "src").mkdir()
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(5)}, buffer)
    (tmp_path / "src/in.pt").write_bytes(buffer.getvalue())
    folder = bring_in(tmp_path / "src/in.pt", tmp_path / "ck")
    shutil.rmtree(tmp_path / "src")
    assert gather(folder).state["w"].tolist() == [0, 1, 2, 3, 4]


def test_without_torch_the_command_says_where_to_run_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "no").mkdir()
    (tmp_path / "no/torch.py").write_text("raise ImportError('there is no torch here')\n")
    words = ["export", str(folder.parent), "7", "--to", "torch", str(tmp_path / "out.pt")]
    done = with_torch(*words, PYTHONPATH=str(tmp_path / "no"))
    assert done.returncode == 1
    assert "loading torch: there is no torch here" in done.stderr
    assert "next: run this where the training program runs" in done.stderr


# --------------------------------------------------------------------------------------------- flat names, nested state

LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none())
KEYS = st.text("ab.1", min_size=1, max_size=3)
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(STATES)
def test_a_state_is_nested_again_as_dcp_flattened_it(state: dict[str, Any]) -> None:
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:  # two names that DCP cannot tell apart
        return
    assert nested(flat, paths) == unflatten_state_dict(flat, paths) == state
