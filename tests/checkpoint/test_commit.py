"""Files of a checkpoint: complete or absent, summed, and one of several kept."""

import errno
import itertools
import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaleConfig, LossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from safetensors import safe_open

from ds_finetune.checkpoint import commit as commit_module
from ds_finetune.checkpoint.commit import (
    CommitJob,
    Manifest,
    RemoveJob,
    ReserveJob,
    StopWaiting,
    WriteJob,
    commit,
    complete_steps,
    mark_part_written,
    part_name,
    partial_name,
    remove_checkpoint,
    step_name,
    unfinished_folders,
    write_checksummed,
)
from ds_finetune.checkpoint.folder import CheckpointFolder
from ds_finetune.checkpoint.part_storage import (
    Chunk,
    PartFile,
    PartReader,
    flat_range_chunks,
    overlap,
    portion_of_slice,
    read_state_groups,
    serialise_part,
)
from ds_finetune.checkpoint.part_writers import WriterProcess, write_part
from ds_finetune.checkpoint.restore import random_state, restore_random_state
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.saver import superseded_checkpoints
from ds_finetune.checkpoint.tools import (
    describe_checkpoint,
    find_checkpoint,
    gather_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.state.state import Slice, StateGroup, loss_scale, restore_loss_scale, scaler_of
from ds_finetune.errors import CheckpointError
from ds_finetune.export.readers.sources import open_checkpoint, read_checkpoint
from tests.checkpoint.groups import group_of, reading


def test_boxes_are_the_flat_range_in_order() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))
        total = math.prod(shape)
        start = rng.randint(0, total)
        numel = rng.randint(0, total - start)
        boxes = list(flat_range_chunks(shape, start, numel))
        places = torch.arange(total).view(shape)
        found = [
            int(places[index])
            for box in boxes
            for index in itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
        ]
        assert found == list(range(start, start + numel))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_overlap() -> None:
    assert overlap(Chunk((0, 2), (3, 3)), Chunk((2, 0), (4, 4))) == Chunk((2, 2), (1, 2))
    assert overlap(Chunk((0,), (3,)), Chunk((3,), (1,))) is None


def manifest(step: int, *, parts: int = 1, eval_loss: float | None = None, token: str = "a") -> Manifest:
    return Manifest(step, parts, tuple(range(parts)), "host", token, eval_loss, {})


def complete(folder: Path, step: int, *, eval_loss: float | None = None) -> Path:
    """A complete checkpoint of one part."""
    partial = folder / partial_name(step, "a")
    partial.mkdir(parents=True)
    part = partial / part_name(0, 1)
    mark_part_written(part, write_checksummed(part, [bytes(8), f"part of {step}".encode()]))
    return commit(CommitJob(partial, manifest(step, eval_loss=eval_loss), {"state.json": "{}"}, {}), lambda: False)


def test_nothing_is_complete_before_every_part_is(tmp_path: Path) -> None:
    partial = tmp_path / partial_name(7, "a")
    partial.mkdir()
    part = partial / part_name(0, 2)
    mark_part_written(part, write_checksummed(part, [b"one"]))
    asked = []
    with pytest.raises(TimeoutError, match="1 of 2 parts were not written"):
        commit(CommitJob(partial, manifest(7, parts=2), {}, {}), lambda: len(asked) < 3 and not asked.append(1))
    assert complete_steps(tmp_path) == []
    assert unfinished_folders(tmp_path) == [partial]
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        Manifest.read(partial)


def test_a_checkpoint_of_the_same_step_is_replaced_whole(tmp_path: Path) -> None:
    complete(tmp_path, 3)
    old = (tmp_path / step_name(3)).stat().st_ino
    (tmp_path / step_name(3) / "old").touch()
    folder = complete(tmp_path, 3)
    assert folder.stat().st_ino != old
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", part_name(0, 1), "state.json"]
    assert [path.name for path in tmp_path.iterdir()] == [step_name(3)]


def test_what_is_kept(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, float("nan")), (4, None), (5, None)):
        complete(tmp_path, step, eval_loss=loss)
    assert [path.name for path in superseded_checkpoints(tmp_path, keep=2, keep_best=True)] == [
        step_name(1),
        step_name(3),
    ]
    assert [path.name for path in superseded_checkpoints(tmp_path, keep=1, keep_best=False)] == [
        step_name(step) for step in (1, 2, 3, 4)
    ]
    remove_checkpoint(tmp_path / step_name(1))
    assert complete_steps(tmp_path) == [2, 3, 4, 5]
    assert unfinished_folders(tmp_path) == []


def test_a_checkpoint_half_taken_away_never_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = complete(tmp_path, 3)

    def killed(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commit_module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoint(folder)
    assert complete_steps(tmp_path) == []
    assert [path.name for path in unfinished_folders(tmp_path)] == [f"{step_name(3)}.removing"]


def place(folder: Path, rank: int, ranks: tuple[int, ...], world: int) -> CheckpointFolder:
    folder.mkdir(parents=True, exist_ok=True)
    return CheckpointFolder(folder, ranks, rank, world, "token")


def written(folder: Path, groups: list[StateGroup]) -> list[Path]:
    """Parts of several writers, by their number."""
    paths = []
    for rank, group in enumerate(groups):
        paths.append(folder / part_name(rank, len(groups)))
        write_part(paths[-1], serialise_part([group], {"rank": rank}, portion=(rank, len(groups)))[1])
    return paths


def test_a_part_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    numbers = torch.arange(24.0)
    (path,) = written(tmp_path, [group_of({"weight/w": (numbers[3:20], (4, 6), 3)})])
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["weight/w@0,3", "weight/w@1,0", "weight/w@3,0"]
        assert torch.equal(file.get_tensor("weight/w@1,0"), numbers[6:18].view(2, 6))
    with pytest.raises(CheckpointError, match=r"is not a part of a checkpoint"):
        PartFile(_cut(path))


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-8])
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_cut_is_read_by_any_other(dtype: torch.dtype, tmp_path: Path) -> None:
    shape, total = (5, 3, 4), 60
    whole = torch.arange(total).to(dtype)
    groups = [group_of({"m/w": (whole[a:b], shape, a)}) for a, b in itertools.pairwise((0, 17, 17, 40, 60))]
    reader = PartReader(written(tmp_path, groups))
    for a, b in ((0, 60), (1, 2), (16, 41), (60, 60)):
        found = torch.zeros(b - a, dtype=dtype)
        read_state_groups([group_of({"m/w": (found, shape, a)})], reader, absent="")
        assert torch.equal(found, whole[a:b])


def test_slices_of_tensor_parallel_ranks_are_boxes_of_the_whole(tmp_path: Path) -> None:
    """Two ranks hold half the columns each, cut flat in turn by ZeRO; read whole, and by rows."""
    whole = torch.arange(48.0).view(6, 8)
    groups = []
    for column in (0, 4):
        local = whole[:, column : column + 4].contiguous().view(-1)
        for a, b in ((0, 13), (13, 24)):
            part = Slice("weight/w", (6, 8), a, b - a, torch.float32, origin=(0, column), local_shape=(6, 4))
            groups.append(reading({part: local[a:b]}))
    reader = PartReader(written(tmp_path, groups))
    found = torch.zeros(48)
    read_state_groups([group_of({"weight/w": (found, (6, 8), 0)})], reader, absent="")
    assert torch.equal(found.view(6, 8), whole)
    rows = torch.zeros(16)
    part = Slice("weight/w", (6, 8), 0, 16, torch.float32, origin=(2, 0), local_shape=(2, 8))
    read_state_groups([reading({part: rows})], reader, absent="")
    assert torch.equal(rows.view(2, 8), whole[2:4])


def test_what_all_ranks_hold_is_shared_out(tmp_path: Path) -> None:
    part = Slice("weight/w", (7,), 0, 7, torch.float32, is_replicated=True)
    shares = [portion_of_slice(part, index, 3) for index in range(3)]
    assert [(piece.start, piece.numel) for piece in shares] == [(0, 2), (2, 2), (4, 3)]
    numbers = torch.arange(7.0)
    paths = written(tmp_path, [reading({part: numbers})] * 3)
    assert [sum(item.chunk.numel for item in PartFile(path).stored) for path in paths] == [2, 2, 3]


def test_what_two_nodes_both_hold_is_taken_from_one(tmp_path: Path) -> None:
    """One node cut it among two ranks, the other gave it to its only one."""
    part, numbers = Slice("buffer/b", (9,), 0, 9, torch.float32, is_replicated=True), torch.arange(9.0)
    paths = []
    for rank, (node, portion) in enumerate(((0, (0, 2)), (0, (1, 2)), (2, (0, 1)))):
        paths.append(tmp_path / part_name(rank, 3))
        write_part(
            paths[-1], serialise_part([reading({part: numbers})], {"rank": rank, "home": node}, portion=portion)[1]
        )
    for some in (paths, paths[2:], paths[:2]):
        found = torch.zeros(9)
        read_state_groups([reading({part: found})], PartReader(some), absent="")
        assert torch.equal(found, numbers)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    reader = PartReader(written(tmp_path, [group_of({"weight/w": (torch.zeros(6), (3, 4), 0)})]))
    with pytest.raises(
        CheckpointError, match=r"6 elements of `weight/w` are in missing parts of the checkpoint: part-x"
    ):
        read_state_groups([group_of({"weight/w": (torch.zeros(12), (3, 4), 0)})], reader, absent="part-x")
    with pytest.raises(
        CheckpointError, match=r"`weight/w` has shape \(4, 3\) in this run, and the checkpoint has shape \(3, 4\)"
    ):
        read_state_groups([group_of({"weight/w": (torch.zeros(6), (4, 3), 0)})], reader, absent="")
    with pytest.raises(
        CheckpointError, match=r"`weight/v` has shape \(6,\) in this run, and the checkpoint has nothing"
    ):
        read_state_groups([group_of({"weight/v": (torch.zeros(6), (6,), 0)})], reader, absent="")


def test_nodes_keep_their_parts_and_gather_makes_them_whole(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    for rank, node in enumerate(("a", "b")):
        group = group_of({"weight/w": (whole[rank * 6 : rank * 6 + 6], (3, 4), rank * 6)})
        home = place(tmp_path / node / "checkpoints", rank, (rank,), 2)
        write_part(_aside(home, rank), serialise_part([group], {"rank": rank, "host": node}, portion=home.portion)[1])
        texts = {"state.json": _state().text()}
        commit(CommitJob(_aside(home, rank).parent, _of_node(rank, node), texts, {}), lambda: False)
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(CheckpointError, match=r"part-00001-of-00002\.safetensors of 2 ranks are in none of"):
        gather_checkpoint([a], tmp_path / "whole")
    assert "2 parts of step 5" in gather_checkpoint([a, b], tmp_path / "whole")
    assert "3 files" in verify_checkpoint(tmp_path / "whole", workers=2)
    found = torch.zeros(12)
    reader = PartReader(tmp_path / "whole" / part_name(rank, 2) for rank in range(2))
    read_state_groups([group_of({"weight/w": (found, (3, 4), 0)})], reader, absent="")
    assert torch.equal(found, whole)
    with pytest.raises(CheckpointError, match="exists already"):
        gather_checkpoint([a, b], tmp_path / "whole")
    assert "1 of 2 parts" in dict(list_checkpoints(a))[step_name(5)]
    assert dict(describe_checkpoint(b))["optimizer"] == "5 steps taken, 0 skipped"
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)


def _aside(home: CheckpointFolder, rank: int) -> Path:
    partial = home.path / partial_name(5, home.token)
    partial.mkdir(exist_ok=True)
    return partial / part_name(rank, 2)


def _of_node(rank: int, host: str) -> Manifest:
    return Manifest(5, 2, (rank,), host, "token", None, {})


def _state(**config: object) -> RunState:
    engine = {"steps": 5, "steps_of": {}, "loss_scale": {}}
    tree = {"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "x"} | config
    dumped = RunConfig.model_validate(tree).model_dump(mode="json", by_alias=True)
    return RunState(
        5, 0, 100, (0, 3), engine, {"best": {"best_loss": math.inf}}, {"train/loss": 1.0}, "rows", dumped, {}, {}
    )


def test_the_state_comes_back(tmp_path: Path) -> None:
    state = _state()
    (tmp_path / "state.json").write_text(state.text())
    assert RunState.read(tmp_path) == state


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    """By whatever reads its manifest: resume, export from a checkpoint, and the tools."""
    complete(tmp_path / "checkpoints", 3).rename(tmp_path / "checkpoints" / step_name(7))
    renamed = tmp_path / "checkpoints" / step_name(7)
    with pytest.raises(CheckpointError, match="its name says step 7, but it is the checkpoint of step 3") as caught:
        verify_checkpoint(renamed, workers=1)
    assert "rename the folder to step-000003" in caught.value.hint
    assert "its name says step 7, but it is the checkpoint of step 3" in dict(list_checkpoints(tmp_path))[step_name(7)]
    for read in (
        describe_checkpoint,
        read_checkpoint,
        lambda path: gather_checkpoint([path], tmp_path / "out"),
        open_checkpoint,
    ):
        with pytest.raises(CheckpointError, match="its name says step 7, but it is the checkpoint of step 3"):
            dict(read(renamed, None) if read is open_checkpoint else read(renamed))
    renamed.rename(tmp_path / "checkpoints" / "kept-by-hand")
    assert "2 files" in verify_checkpoint(tmp_path / "checkpoints" / "kept-by-hand", workers=1)


def test_random_states_come_back() -> None:
    kept = json.loads(json.dumps(random_state()))
    first = (torch.rand(3).tolist(), float(np.random.rand()), random.random())
    restore_random_state(kept)
    assert (torch.rand(3).tolist(), float(np.random.rand()), random.random()) == first


def test_a_writer_that_dies_is_reported_and_started_again() -> None:
    process = WriterProcess()
    process.start()
    process.send(WriteJob(Path("/proc/no/such/place"), 1, None))
    found: list[str] = []
    while process.is_busy:
        found += process.errors()
    assert any("Error" in error for error in found)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    process.send(ReserveJob(1))
    assert process.errors() == ["the writer process ended with code -9"]
    process.send(RemoveJob([]))
    while process.is_busy:
        assert process.errors() == []
    process.close()


def test_a_commit_is_told_not_to_wait_for_a_rank_that_failed(tmp_path: Path) -> None:
    """StopWaiting is not a job: there is one answer, and the process is free again."""
    process = WriterProcess()
    process.start()
    process.copy(3, [torch.tensor([1, 2, 3], dtype=torch.uint8)])
    partial = tmp_path / partial_name(4, "a-1")
    partial.mkdir()
    commit_job = CommitJob(partial, Manifest(4, 2, (0, 1), "h", "a-1", None, {}), {}, {})
    process.send(WriteJob(partial / part_name(0, 2), 3, commit_job))
    time.sleep(0.3)
    assert process.errors() == []
    assert process.is_busy
    process.send(StopWaiting())
    found: list[str] = []
    until = time.monotonic() + 60
    while process.is_busy:
        found += process.errors()
        assert time.monotonic() < until
    assert found == ["TimeoutError: 1 of 2 parts were not written"]
    process.send(StopWaiting())
    process.send(RemoveJob([partial]))
    while process.is_busy:
        assert process.errors() == []
        assert time.monotonic() < until
    assert not partial.exists()
    process.close()


def test_only_our_own_leftovers_are_taken_away(tmp_path: Path) -> None:
    ours = ["step-000200.partial-18a-1f", "step-000200.replaced-18a-1f", "step-000200.removing", ".rehearsal-18a-1f"]
    theirs = ["step-000200.good", "best-0.5", ".snapshot", "step-000300.unusable-1", "step-000400"]
    for name in ours + theirs:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in unfinished_folders(tmp_path)) == sorted(ours)
    aside = commit_module.rename_unusable(tmp_path / "step-000400")
    assert aside.name == "step-000400.unusable-1"
    assert complete_steps(tmp_path) == []


def test_gathering_again_leaves_other_checkpoints_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    commit_module.link_or_copy(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").write_text("two")
    with pytest.raises(FileExistsError):
        commit_module.link_or_copy(tmp_path / "c", tmp_path / "b")
    assert (tmp_path / "a").read_text() == "one"


@pytest.mark.parametrize("wrapper", [FP16_Optimizer, FP16_UnfusedOptimizer])
def test_the_loss_scale_is_found_where_each_wrapper_keeps_it(wrapper: type) -> None:
    """DeepSpeed runs fp16 on GPUs alone; the places are its own classes'."""
    for found in (_stage_0(wrapper, 128.0), _with_scaler(128.0)):
        kept = loss_scale(scaler_of(found))
        assert kept["cur_scale"] == 128.0
        other = _stage_0(wrapper, 4.0) if isinstance(found, wrapper) else _with_scaler(4.0)
        restore_loss_scale(scaler_of(other), kept | {"cur_iter": 7})
        assert (scaler_of(other).cur_scale, scaler_of(other).cur_iter) == (128.0, 7)
    static = SimpleNamespace(loss_scaler=LossScaler(scale=8.0))
    assert loss_scale(scaler_of(static)) == {}
    restore_loss_scale(scaler_of(static), {"cur_scale": 128.0})
    assert static.loss_scaler.cur_scale == 8.0


def _stage_0(wrapper: type, scale: float) -> object:
    found = object.__new__(wrapper)
    arguments = {"init_scale": scale, "scale_window": 10, "min_scale": 1}
    found.loss_scale_config = LossScaleConfig(torch.float16, True, 1.0, arguments)
    return found


def _with_scaler(scale: float) -> SimpleNamespace:
    return SimpleNamespace(loss_scaler=DynamicLossScaler(scale, 10, 1, 2, False))


def test_a_full_disk_while_linking_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("x")

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(commit_module.os, "link", no_links)
    commit_module.link_or_copy(tmp_path / "a", tmp_path / "deep" / "b")
    assert (tmp_path / "deep" / "b").read_text() == "x"
