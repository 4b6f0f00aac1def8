"""Without a cluster the cluster tests skip loudly, or fail where a cluster has to be."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture
def require_cluster(request: pytest.FixtureRequest) -> Callable[[], None]:
    for plugin in request.config.pluginmanager.get_plugins():
        if str(getattr(plugin, "__file__", "")).endswith("tests/conftest.py"):
            found: Callable[[], None] = plugin.require_cluster
            return found
    raise AssertionError("tests/conftest.py is not loaded")


@pytest.fixture(autouse=True)
def _ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("TRANSOM_REQUIRE_CLUSTER", raising=False)


def test_it_skips_and_says_why(require_cluster: Callable[[], None]) -> None:
    with pytest.raises(pytest.skip.Exception, match="NO REAL SLURM"):
        require_cluster()


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TRANSOM_REQUIRE_CLUSTER", "1")])
def test_it_fails_where_it_is_required(
    require_cluster: Callable[[], None], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(pytest.fail.Exception, match="NO REAL SLURM"):
        require_cluster()
