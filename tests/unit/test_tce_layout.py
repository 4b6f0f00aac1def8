"""Taking a state apart and putting it together: what comes back is equal, and what could not come back is refused."""

from __future__ import annotations

import collections
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from transomd.tce.errors import CheckpointError
from transomd.tce.layout import path_text, put_together, take_apart
from transomd.tce.payload import TensorReader, plan, read_layout, write_payload

DTYPES = sorted(
    (
        value
        for name in dir(torch)
        if isinstance(value := getattr(torch, name), torch.dtype)
        and not str(value).startswith(("torch.q", "torch.bits"))
        and str(value) not in {f"torch.{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
    ),
    key=str,
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**2039, 2**2039 - 1)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text() | st.integers() | st.none() | st.tuples(st.integers(), st.text()), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def through_files(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a program that reads the two files gets."""
    part = write_payload(folder, plan("rank-00000", (0,), take_apart(state)))
    layout = read_layout(folder, part)
    return put_together(layout, list(state), TensorReader(folder, part).read)


def same(left: Any, right: Any) -> bool:
    """Equal in value and type, all the way down; tensors and arrays bit for bit."""
    if isinstance(left, torch.Tensor):
        bits = left.dtype == right.dtype and left.shape == right.shape
        return bits and left.contiguous().view(-1).view(torch.uint8).equal(
            right.contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(left, (np.ndarray, np.generic)):
        return type(left) is type(right) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_equal(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("plain")
    assert same(through_files({"value": value}, folder), {"value": value})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_and_form_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * size,), dtype=torch.uint8)
    matrix = bits.view(dtype).reshape(2, 3)
    state = {"t": [matrix, matrix.t(), matrix[:, 1], matrix[:0], matrix[0, 0]]}
    assert same(through_files(state, tmp_path), state)


def test_safetensors_reads_the_file_by_itself(tmp_path: Path) -> None:
    state = {
        "a": {"w": torch.randn(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)},
        "c": torch.ones(2, dtype=torch.complex64),
    }
    through_files(state, tmp_path)
    with safe_open(tmp_path / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"a.w", "a.b", "c"}
        assert same(file.get_tensor("a.w"), state["a"]["w"])
        assert same(file.get_tensor("a.b"), state["a"]["b"])
        assert file.get_tensor("c").view(torch.complex64).equal(state["c"])


def test_the_rest_is_readable_with_torch_alone(tmp_path: Path) -> None:
    state = {"lr": 0.1, "pair": (1, {2: "x"}), "w": torch.ones(2), "nested": {3: [torch.zeros(1), None]}}
    through_files(state, tmp_path)
    document = torch.load(tmp_path / "rank-00000.pt", weights_only=True)
    assert document["state"] == {"lr": 0.1, "pair": (1, {2: "x"}), "w": None, "nested": {3: [None, None]}}
    assert document["tensors"] == {("w",): "w", ("nested", 3, 0): "nested.3.0"}


def test_random_states_of_python_numpy_and_torch_come_back(tmp_path: Path) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(5).bit_generator.state,
        "torch": torch.get_rng_state(),
        "scalar": np.float32(2.5),
        "zero_dim": np.array(7, dtype=np.uint64),
        "view": np.arange(12.0).reshape(3, 4)[::-1, ::2],
    }
    back = through_files(state, tmp_path)
    assert same(back, state)
    np.random.set_state(back["numpy"])
    random.setstate(back["python"])


def test_tied_and_overlapping_tensors_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    state = {"tied": [base, base], "overlapping": [base[:6], base[4:]], "expanded": torch.ones(1).expand(5)}
    layout = take_apart(state)
    assert len(layout.values) == 4
    assert same(through_files(state, tmp_path), state)


def test_names_that_read_alike_stay_apart(tmp_path: Path) -> None:
    state = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.full((1,), 2.0),
        "n": {1: base_of(3), "1": base_of(4)},
    }
    assert same(through_files(state, tmp_path), state)


def base_of(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def test_objects_are_asked_for_their_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    back = through_files({"model": model, "optimizer": optimizer}, tmp_path)
    assert same(back["optimizer"], optimizer.state_dict())
    assert same(dict(back["model"]), dict(model.state_dict()))
    assert back["model"]._metadata == model.state_dict()._metadata


def cyclic() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


class Special(torch.Tensor):
    pass


Named = collections.namedtuple("Named", "x")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"f": lambda: 1}, "state['k']['f']"),
        ([1, OnlySaves()], "state['k'][1]"),
        (Named(1), "state['k']"),
        ({"deep": [cyclic()]}, "state['k']['deep'][0][0]"),
        (2**2040, "state['k']"),
        ({frozenset(): 1}, "state['k'][frozenset()]"),
        ({2**3000: 1}, "state['k']"),
        ({b"": 1}, "state['k'][b'']"),
        (torch.ones(2).as_subclass(Special), "state['k']"),
        (torch.ones(2).to_sparse(), "state['k']"),
        (torch.ones(2, device="meta"), "state['k']"),
        (np.array(["text"]), "state['k']"),
        (np.array([1], dtype=">i4"), "state['k']"),
        (np.ma.masked_array([1, 2], [0, 1]), "state['k']"),
        (np.array([object()]), "state['k']"),
        (torch.nn.Linear, "state['k']"),
        (range(3), "state['k']"),
        (io.StringIO(), "state['k']"),
        (frozenset({1}), "state['k']"),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
def test_what_could_not_be_loaded_again_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        take_apart({"good": 1, "k": value})
    assert str(caught.value).startswith(f"{path} (")
    assert caught.value.hint


def test_a_freed_tensor_is_refused_and_not_read() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="freed"):
        take_apart({"t": tensor})


@pytest.mark.parametrize("state", [[1], {1: 2}, None], ids=str)
def test_a_state_is_a_dict_with_names(state: Any) -> None:
    with pytest.raises(CheckpointError, match="must be a dict"):
        take_apart(state)


def test_a_shared_value_that_is_no_cycle_is_fine() -> None:
    shared = [1]
    assert take_apart({"a": shared, "b": [shared, shared]}).tree == {"a": [1], "b": [[1], [1]]}


def test_paths_read_as_people_write_them() -> None:
    assert path_text(("a", 0, (1, "x"))) == "state['a'][0][(1, 'x')]"
