"""The secret of a run, with which its ranks authenticate each other. No store or command line contains it.

`ds-finetune launch` passes it to every rank in the environment. Otherwise rank zero writes it to a file that only its
user can read: in the folder for temporary files where all ranks are on one machine, else in the output folder or the
nearest folder above it that exists. If a rank cannot read that file, the ranks have no private channel: the secret is
then derived from a value in the store, and rank zero prints a warning.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ds_finetune.console.phase_line import Say
from ds_finetune.errors import RunError
from ds_finetune.system.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

VARIABLE = "DS_FINETUNE_SECRET"
"""Environment variable with the secret, the same on every rank."""
_SOURCE_KEY, _PUBLIC_KEY, _READ_KEY = "watchdog/secret", "watchdog/secret_agreed", "watchdog/secret_read"
_FILE_NAME = re.compile(r"\.ds_finetune-[0-9a-f]{32}")
_READ_SECONDS = 5.0
"""How long a file that another host wrote may take to appear."""
_WAIT = timedelta(minutes=2)
_MAX_NAMED_RANKS = 8


def new_secret() -> str:
    """A new random secret, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def agree_on_secret(store: "dist.Store", world: World, *, folder: Path, environ: Mapping[str, str], say: Say) -> bytes:
    """Return the secret of this run, the same on every rank; collective through `store`.

    `folder` is the output folder, and `say` prints a line. RunError where some ranks have the environment variable
    and others do not.
    """
    if world.rank == 0:
        return _share_secret(store, world, folder=_shared_folder(world, folder), environ=environ, say=say)
    store.wait([_SOURCE_KEY], _WAIT)
    source = json.loads(store.get(_SOURCE_KEY))
    own = environ.get(VARIABLE)
    if (source["kind"] == "environment") != bool(own):
        store.set(f"{_READ_KEY}/{world.rank}", "no")
        raise RunError(
            f"{VARIABLE} is {'set' if own else 'not set'} for rank {world.rank}, and "
            f"{'not set' if own else 'set'} for rank 0",
            hint="set it for every rank, or for none",
        )
    if own:
        return own.encode()
    secret = _read(_shared_folder(world, folder) / source["name"]) if _FILE_NAME.fullmatch(source["name"]) else b""
    store.set(f"{_READ_KEY}/{world.rank}", "yes" if secret else "no")
    store.wait([_PUBLIC_KEY], _WAIT)
    public = store.get(_PUBLIC_KEY)
    return _derived(public.decode()) if public else secret


def _share_secret(store: "dist.Store", world: World, *, folder: Path, environ: Mapping[str, str], say: Say) -> bytes:
    if own := environ.get(VARIABLE):
        store.set(_SOURCE_KEY, json.dumps({"kind": "environment"}))
        return own.encode()
    secret, path = new_secret().encode(), folder / f".ds_finetune-{secrets.token_hex(16)}"
    others = range(1, world.world_size)
    written = bool(others) and _write(path, secret)
    store.set(_SOURCE_KEY, json.dumps({"kind": "file", "name": path.name if written else ""}))
    try:
        store.wait([f"{_READ_KEY}/{rank}" for rank in others], _WAIT)
        blind = [rank for rank in others if not written or store.get(f"{_READ_KEY}/{rank}") != b"yes"]
    finally:
        if written:
            path.unlink(missing_ok=True)
    public = secrets.token_hex(16) if blind else ""
    store.set(_PUBLIC_KEY, public)
    if not blind:
        return secret
    who = ", ".join(map(str, blind[:_MAX_NAMED_RANKS])) + (", ..." if len(blind) > _MAX_NAMED_RANKS else "")
    say(
        f"watchdog: ranks {who} cannot read a private file in {folder}, and {VARIABLE} is not set. Any host that "
        "reaches the store at "
        f"{world.master_addr}:{world.master_port} can therefore end this run. Start it with `ds-finetune launch`, "
        f"set {VARIABLE} "
        "for every rank, or use an output_dir that all hosts share"
    )
    return _derived(public)


def _shared_folder(world: World, folder: Path) -> Path:
    if world.local_world_size == world.world_size:
        return Path(tempfile.gettempdir())
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _write(path: Path, secret: bytes) -> bool:
    """Write the secret to a file that no other user can read; false where that is not possible."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    with os.fdopen(file, "wb") as opened:
        is_private = _is_private(opened.fileno())
        if is_private:
            opened.write(secret)
            opened.flush()
            # Other hosts then see the content.
            with contextlib.suppress(OSError):
                os.fsync(opened.fileno())
    if not is_private:
        path.unlink(missing_ok=True)
    return is_private


def _read(path: Path) -> bytes:
    """The secret in a private file of this user; empty where none appears within some seconds."""
    until = time.monotonic() + _READ_SECONDS
    while True:
        with contextlib.suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            if not _is_private(opened.fileno()):
                return b""
            if secret := opened.read():
                return secret
        if time.monotonic() > until:
            return b""
        time.sleep(0.1)


def _is_private(file: int) -> bool:
    status = os.fstat(file)
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)


def _derived(public: str) -> bytes:
    return hashlib.sha256(f"ds_finetune store {public}".encode()).digest()
