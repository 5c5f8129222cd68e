"""Ranks that do not see one folder are told so, all of them."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from easyrl.config import ConfigError
from easyrl.runtime.run_folder import prepare_output
from easyrl.runtime.shared_folder import require_shared
from tests.thread_ranks import on_ranks


def outcomes(folders):
    """What each rank, with its folder, comes to."""
    return on_ranks(len(folders), lambda ranks: require_shared(folders[ranks.ranks.rank], ranks))


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("easyrl.runtime.shared_folder.VISIBLE_S", 0.3)
    monkeypatch.setattr("easyrl.runtime.shared_folder.socket.gethostname", lambda: "train")


def test_one_folder_is_accepted_and_left_as_it_was(tmp_path):
    assert outcomes([tmp_path] * 3) == [None] * 3
    assert not list(tmp_path.iterdir())


def test_all_ranks_are_told_who_sees_another_folder(tmp_path):
    folders = [tmp_path / "shared", tmp_path / "own", tmp_path / "shared"]
    for folder in set(folders):
        folder.mkdir()
    errors = outcomes(folders)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert all("run.output_dir" in str(e) and "rank 1 on train" in str(e) for e in errors)
    assert not any("rank 2" in str(error) for error in errors)
    assert not any(list(folder.iterdir()) for folder in set(folders))


def test_a_folder_that_appears_later_is_the_same(tmp_path):
    """Over NFS a rank may see a file of another node only a while later."""
    late = tmp_path / "late"
    (tmp_path / "shared").mkdir()
    appears = threading.Timer(0.1, late.symlink_to, args=[tmp_path / "shared"])
    appears.start()
    assert outcomes([tmp_path / "shared", late]) == [None, None]


def test_a_run_is_refused_before_anything_is_written_on_the_other_node(tmp_path):
    folders = [tmp_path / "shared", tmp_path / "own"]

    def prepare(ranks):
        run = SimpleNamespace(output_dir=folders[ranks.ranks.rank])
        config = SimpleNamespace(run=run, trainer=SimpleNamespace(grace_s=1.0))
        with ExitStack() as opened:
            prepare_output(config, ranks, opened, resume=False)

    assert all(isinstance(error, ConfigError) for error in on_ranks(2, prepare))
    assert not folders[1].exists()
