"""The checkpoint folder as the launcher sees it."""

from __future__ import annotations

from pathlib import Path

from transomd.launch.folder import CheckpointFolder


async def test_a_folder_behind_a_link_is_known_by_the_name_that_keepers_call_it(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "ck").symlink_to("store")
    folder = CheckpointFolder(str(tmp_path / "ck"))
    await folder.look_for_epochs()
    assert folder.real == str((tmp_path / "store").resolve())
