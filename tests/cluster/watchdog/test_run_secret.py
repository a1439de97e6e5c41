"""How the ranks of a run come to one secret, over a real store."""

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_finetune.cluster.watchdog import run_secret
from ds_finetune.cluster.watchdog.connection import coordinator_address
from ds_finetune.cluster.watchdog.run_secret import VARIABLE, agree_on_secret, new_secret
from ds_finetune.errors import FinetuneError, RunError
from ds_finetune.system.world import World

SECONDS = 60


@dataclass
class Agreed:
    """What three ranks came to: secrets, what rank zero printed, and everything that was written to the store."""

    secrets: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, FinetuneError] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)


class _Seen:
    """A store that remembers what is written."""

    def __init__(self, store: dist.Store, stored: list[str]) -> None:
        self._store, self._stored = store, stored

    def set(self, key: str, value: str) -> None:
        self._stored.append(f"{key}={value}")
        self._store.set(key, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def _agree(folders: list[Path], *, local: int = 3, environ: dict[int, dict[str, str]] | None = None) -> Agreed:
    """One thread a rank; each has its own view of the output folder."""
    done, shared = Agreed(), dist.HashStore()

    def work(rank: int) -> None:
        world = World(rank, 3, min(rank, local - 1), local, "test", "10.0.0.1", 29_500)
        store = _Seen(shared, done.stored)
        try:
            done.secrets[rank] = agree_on_secret(
                store,  # type: ignore[arg-type]
                world,
                folder=folders[rank],
                environ=(environ or {}).get(rank, {}),
                say=done.lines.append,
            )
        except FinetuneError as error:
            done.errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return done


def _assert_secret_is_not_stored(done: Agreed) -> None:
    assert not any(done.secrets[0].decode() in text for text in done.stored)


def test_the_environment_comes_first(tmp_path: Path) -> None:
    secret = new_secret()
    done = _agree([tmp_path] * 3, local=1, environ={rank: {VARIABLE: secret} for rank in range(3)})
    assert set(done.secrets.values()) == {secret.encode()}
    _assert_secret_is_not_stored(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [(0,), (1, 2)])
def test_a_secret_that_only_some_ranks_have_is_refused(
    given: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    monkeypatch.setattr(run_secret, "_WAIT", timedelta(seconds=1))
    shared = dist.HashStore()
    shared.set("watchdog/secret", json.dumps({"kind": "environment"} if 0 in given else {"kind": "file", "name": ""}))
    environ = {VARIABLE: "x"} if 1 in given else {}
    with pytest.raises(RunError, match=rf"{VARIABLE} is (not )?set for rank 1, and (not )?set for rank 0"):
        agree_on_secret(shared, World(1, 3, 0, 1, "test"), folder=tmp_path, environ=environ, say=print)


@pytest.mark.parametrize("local", [1, 3], ids=["shared folder", "one machine"])
def test_a_private_file_serves_where_ranks_share_a_folder(
    local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_secret.tempfile, "gettempdir", lambda: str(tmp_path))
    modes = []
    read = run_secret._read
    monkeypatch.setattr(run_secret, "_read", lambda path: (modes.append(path.stat().st_mode & 0o777), read(path))[1])
    # The run folder is not there yet, and is not made.
    done = _agree([tmp_path / "runs" / "r1"] * 3, local=local)
    assert len(set(done.secrets.values())) == 1
    assert modes == [0o600, 0o600]
    assert done.lines == []
    _assert_secret_is_not_stored(done)
    assert list(tmp_path.iterdir()) == []


def test_without_a_private_channel_the_run_is_watched_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_secret, "_READ_SECONDS", 0.2)
    folders = [tmp_path / str(rank) for rank in range(3)]
    for folder in folders:
        folder.mkdir()
    done = _agree(folders, local=1)
    assert len(set(done.secrets.values())) == 1
    (line,) = done.lines
    assert line.startswith("watchdog: ranks 1, 2 cannot read a private file")
    assert "10.0.0.1:29500 can therefore end this run" in line
    assert VARIABLE in line
    assert [list(folder.iterdir()) for folder in folders] == [[], [], []]


def test_a_file_that_others_may_read_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert run_secret._write(path, b"mine")
    assert run_secret._read(path) == b"mine"
    assert not run_secret._write(path, b"again")
    path.chmod(0o640)
    assert run_secret._read(path) == b""
    link = tmp_path / "link"
    link.symlink_to(path)
    assert not run_secret._write(link, b"through")


def _world(local: int, master_addr: str) -> World:
    return World(0, 4, 0, local, "test", master_addr)


def test_only_the_chosen_address_is_listened_on() -> None:
    assert coordinator_address(_world(4, "10.0.0.1"), {}) == "127.0.0.1"
    assert coordinator_address(_world(2, "127.0.0.1"), {}) == "127.0.0.1"
    assert coordinator_address(_world(2, "10.0.0.1"), {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    # A name for the loopback is another address on other hosts, and an address of another machine cannot be listened
    # on.
    assert coordinator_address(_world(2, "localhost"), {}) == ""
    assert coordinator_address(_world(2, "192.0.2.1"), {"NCCL_SOCKET_IFNAME": "^docker0"}) == ""


def test_a_secret_is_new_each_time() -> None:
    assert new_secret() != new_secret()
    assert len(bytes.fromhex(new_secret())) == 32
    assert os.environ.get(VARIABLE) is None
