"""What a power failure leaves of a run: each complete checkpoint, the files it only links to, and the run's settings."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_finetune.checkpoint.commit import (
    CommitJob,
    Manifest,
    commit,
    damage_of,
    mark_part_written,
    part_name,
    partial_name,
    step_name,
    write_checksummed,
)
from ds_finetune.config.schema import RunConfig
from ds_finetune.trainer.run_dir import prepare_run_folder
from tests.planning import planned_run

SETTINGS = ("config.yaml", "plan.json", "deepspeed.json")


def save(run: Path) -> Path:
    """Begin a run in `run` and save one checkpoint, which links to files as the trainer writes them."""
    config = RunConfig.model_validate({"model": "m", "data": {"train": "a.jsonl"}, "output_dir": str(run)})
    prepare_run_folder(planned_run(config))
    base = {name: run / "base" / name for name in ("config.json", "tokenizer.json")}
    for number, path in enumerate(base.values(), start=1):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * 1000 * number)
    partial = run / "checkpoints" / partial_name(1, "a")
    partial.mkdir(parents=True)
    part = partial / part_name(0, 1)
    mark_part_written(part, write_checksummed(part, [bytes(5000)]))
    linked = {f"base/{name}": path for name, path in base.items()}
    return commit(
        CommitJob(partial, Manifest(1, 1, (0,), "host", "a", None, {}), {"state.json": "{}"}, linked), lambda: False
    )


def test_content_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each rename to a final name, every file that is renamed, or lies in the renamed folder, has been synced."""
    synced: dict[int, int] = {}
    unsynced: dict[str, list[str]] = {}
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record_sync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_mtime_ns

    def record_rename(source: Path, target: Path) -> None:
        files = [path for path in (source, *source.rglob("*")) if path.is_file()]
        found = [path.name for path in files if synced.get(path.stat().st_ino) != path.stat().st_mtime_ns]
        unsynced[target.name] = found

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", lambda a, b: (record_rename(Path(a), Path(b)), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (record_rename(Path(a), Path(b)), replace(a, b)))
    folder = save(tmp_path / "run")
    assert unsynced[step_name(1)] == []
    assert not any(unsynced.get(name, ["written in place"]) for name in SETTINGS), unsynced
    names_of = {path.stat().st_ino for path in (folder, folder / "base", folder.parent, tmp_path / "run")}
    assert names_of <= synced.keys()


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """`image` mounted at `folder`; skips the test where this process may not mount."""
    folder.mkdir()
    done = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs root and mkfs.ext4, to mount")
def test_a_snapshot_of_the_disk_has_the_checkpoint(tmp_path: Path) -> None:
    """The image is copied while it is mounted, as the disk is when the power fails: what is in memory only is lost."""
    image, snapshot = tmp_path / "disk.img", tmp_path / "snapshot.img"
    with image.open("wb") as file:
        file.truncate(32 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(image, tmp_path / "disk") as disk:
        save(disk / "run")
        shutil.copyfile(image, snapshot)
    with mounted(snapshot, tmp_path / "after") as after:
        folder = after / "run" / "checkpoints" / step_name(1)
        manifest = Manifest.read(folder)
        assert damage_of(folder, manifest, manifest.files) == []
        assert [name for name in SETTINGS if not (after / "run" / name).stat().st_size] == []
