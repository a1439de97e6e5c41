"""`ds-finetune plan`: what it prints, on which machines, and what it refuses."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ds_finetune.cli.main import main
from ds_finetune.console import tables
from ds_finetune.console.phase_line import CLEAR_LINE
from ds_finetune.plan.search.forecast import UNCONFIRMED

V3 = "configs/deepseek-ai--DeepSeek-V3"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def run_file(tmp_path: Path, shared_data: Path, traces: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {shared_data / V3}\ndata: {{train: missing.jsonl, cache_dir: {traces}}}\ndeepspeed: zero3\nparallel: {{ep: 32}}\n"
        "train: {for: 1 steps, global_batch_size: 512, max_seq_len: 4096}\noutput_dir: o\n"
    )
    return str(file)


def test_a_plan_needs_no_data_and_torch_only_once(run_file: str) -> None:
    assert main(["plan", run_file, "--gpus", "512", "--gpu", "h100-80g"]) == 0
    code = (
        "import sys, ds_finetune.cli.main as cli; code = cli.main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'deepspeed'} & sys.modules.keys(); assert not heavy, heavy; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "plan", run_file, "--gpus", "512", "--gpu", "h100-80g"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.startswith("fits 512 x h100-80g, with ")
    places = [shown.index(text) for text in ("\nmemory of a rank\n", "moments", "dp 512 x ep 32, ZeRO-3", "671.026 B")]
    assert places == sorted(places)


def test_programs_read_a_plan_as_json(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", run_file, "--gpus", "512", "--gpu", "h100-80g", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["dp"], tree["zero_stage"], tree["parallel"]["ep"], tree["fits"]) == (512, 3, 32, True)
    assert {"weights", "moments"} <= {row["name"] for row in tree["memory"]["rows"]}
    assert main(["plan", run_file, "--gpus", "512", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None


def test_auto_stands_for_the_largest_micro_batch_that_fits(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, gpu = ["plan", run_file, "--gpus", "512", "--json", "train.global_batch_size=8192"], ["--gpu", "h100-80g"]
    command.append("train.activation_checkpointing=full")
    trees = {}
    for size in ("auto", 1, 2, 4, 8, 16):
        assert main([*command, *gpu, f"train.micro_batch_size={size}"]) == 0
        trees[size] = json.loads(capsys.readouterr().out)
    largest = max(size for size, tree in trees.items() if isinstance(size, int) and tree["fits"])
    assert 1 < largest < 16
    assert trees["auto"]["micro_batch_size"] == largest
    assert trees["auto"]["memory"] == trees[largest]["memory"]
    assert trees["auto"]["decisions"]["micro batch"].startswith(f"{largest} (auto: the largest that leaves 7% ")
    assert main([*command, "train.micro_batch_size=auto"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["micro_batch_size"] == 1
    assert "is known with --gpu NAME" in tree["decisions"]["micro batch"]


def test_recomputation_is_decided_by_the_memory(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", run_file, "--gpus", "512", "--json"]
    found = {}
    for gpu in ("h200-141g", "h100-80g", ""):
        assert main([*command, *(["--gpu", gpu] if gpu else [])]) == 0
        found[gpu] = json.loads(capsys.readouterr().out)
    texts = {gpu: tree["decisions"]["recomputation"] for gpu, tree in found.items()}
    assert texts["h200-141g"].startswith("selective (auto: it takes ")
    assert texts["h100-80g"].startswith("full (auto: selective would take ")
    assert texts[""] == "full (auto: the memory of the GPU is not known; selective where it fits)"
    rows = {gpu: {row["name"]: row["num_bytes"] for row in tree["memory"]["rows"]} for gpu, tree in found.items()}
    kept = {gpu: sizes["kept by layers"] for gpu, sizes in rows.items()}
    assert kept["h200-141g"] > 2 * kept["h100-80g"] == 2 * kept[""]
    assert found["h200-141g"]["fits"]


def test_recomputation_that_is_given_is_named(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", run_file, "--gpus", "512", "--json", "train.activation_checkpointing=none"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"]["recomputation"] == "none"


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_terminal_breaks_keys_only_at_dots(
    columns: int, run_file: str, shared_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [f"model.path={shared_data / 'configs' / 'Qwen--Qwen3-0.6B'}", "parallel.ep=1", "train.global_batch_size=2"]
    plan = ["plan", run_file, "--gpus", "2", "--gpu", "l4-24g", "deepspeed=zero3", *small]
    assert main([*plan, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    keys = {row["option"] for row in tree["memory"]["rows"] if row["num_bytes"]} - {""}
    assert any(len(key) > 60 for key in keys)
    terminal = io.StringIO()
    out = Console(file=terminal, force_terminal=True, width=columns, highlight=False, soft_wrap=True, color_system=None)
    monkeypatch.setattr(tables, "OUT", out)
    assert main(plan) == 0
    shown = terminal.getvalue().replace(CLEAR_LINE, "")
    assert shown.replace("\n", " ").startswith("fits 2 x l4-24g, with ")
    for key in keys:
        assert re.search(re.escape(key).replace(r"\.", r"\.\s*"), shown), key
    # A line is longer only where a single part of a key or path is.
    part = max(len(word) for word in re.split(r"[\s./]", shown))
    assert max(map(len, shown.splitlines())) <= max(columns, 25 + part)


def test_memory_of_a_gpu_takes_the_place_of_its_name(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for options in ("--gpu h100-80g", "--gpu-memory 80GiB", "--gpu-memory 40GiB"):
        assert main(["plan", run_file, "--gpus", "512", *options.split(), "--json"]) == 0
        found[options] = json.loads(capsys.readouterr().out)
    named, given, small = found.values()
    assert named["memory"] == given["memory"]
    assert named["decisions"]["GPU"] == "h100-80g: 80.0 GiB, 989 TFLOP/s in bf16 at most"
    assert "GPU" not in given["decisions"]
    excess = small["memory"]["device_bytes"] / 2**30 - 0.93 * 40
    assert small["verdict"].startswith(f"does not fit 512 x GPU of 40.0 GiB: {excess:.1f} GiB too much on a rank, ")
    assert given["verdict"].startswith(f"fits 512 x GPU of 80.0 GiB, with {0.93 * 40 - excess:.1f} GiB to spare")


def test_what_does_not_fit_is_said_once_with_what_stays_free(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", run_file, "--gpus", "8", "--gpu", "cpu", "parallel.ep=8"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("does not fit 8 CPU ranks: ")
    [line] = [line for line in shown.splitlines() if line.startswith("does not fit")]
    assert line.count(" GiB of ") == 1
    assert "in its share of the host's memory (7% stay free)" in line


def test_no_figure_of_a_gpu_is_shown_as_confirmed(
    run_file: str, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", run_file, "--gpus", "512", "--gpu", "h100-80g"]
    search = ["--search", "--gpus", "8", f"model.path={shared_data / 'configs' / 'Qwen--Qwen3-0.6B'}", "parallel.ep=1"]
    for options in ([], search, ["--gpus", "8", "parallel.ep=8"]):
        assert main([*command, *options]) == 0
        assert UNCONFIRMED in capsys.readouterr().out
        assert main([*command, *options, "--json"]) == 0
        assert UNCONFIRMED in json.loads(capsys.readouterr().out)["notes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 512 --gpu h100", "GPU `h100` is not in the table"),
        ("--gpus 12 --gpu h100-80g", "12 GPUs do not fill nodes of 8"),
        ("--gpus 12 --nodes 5 --gpu h100-80g", "12 GPUs do not fill 5 nodes"),
        ("--gpus 512 --gpu v100-32g", "train.precision auto: v100-32g does not compute matrix products in bf16"),
        ("--gpus 512 --host-memory much", "--host-memory `much` is not a size with a unit"),
        ("--gpus 512 --gpu h100-80g parallel.tp=3", "parallel tp 3 = 3"),
        ("--gpus 512 --gpu h100-80g train.max_seq_len=1000000", "is more than the 163840 positions"),
        ("--gpus 512 --gpu h100-80g model=nowhere", "model `nowhere` is not a folder"),
        ("--gpus 8 --gpu-memory much", "--gpu-memory `much` is not a size with a unit"),
        ("--gpus 8 --gpu cpu --tensors", "the options --tensors and --gpu cpu cannot be combined"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    run_file: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", run_file, *options.split()]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "hint: " in printed


def test_a_slice_that_no_nvme_buffer_holds_is_refused(
    run_file: str, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedding has 151,936 x 4,096 elements, of which a rank of four holds a quarter, as `train` finds."""
    model = [f"model={shared_data / 'configs' / 'Qwen--Qwen3-8B'}", "parallel.ep=1"]
    nvme = "{zero_optimization: {stage: 3, offload_param: {device: nvme, nvme_path: /nvme}}}"
    options = [f"deepspeed={nvme}", "--gpu", "h100-80g"]
    assert main(["plan", run_file, *model, *options, "--gpus", "4"]) == 2
    assert "a rank's shard of `model.embed_tokens.weight`, 155,582,464" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", run_file, *model, *options, "--gpus", "8"]) == 0


def test_a_refused_layout_is_not_traced(run_file: str, shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = [f"model={shared_data / 'configs' / 'Qwen--Qwen3-8B'}", "parallel.ep=1", "parallel.tp=3"]
    batch = ["train.global_batch_size=2", "train.max_seq_len=64"]
    assert main(["plan", run_file, *model, *batch, "deepspeed=zero1", "--gpus", "6", "--gpu", "h100-80g"]) == 2
    printed = capsys.readouterr().err
    assert "parallel.tp 3 does not divide the 32 attention heads" in printed
    assert "computing" not in printed


def test_a_model_outside_the_table(run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its layers have other names: transformer.h.N, of 12 x 64**2 + 13 x 64 parameters."""
    tree = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 6, "vocab_size": 512, "n_positions": 4096}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    options = [f"model={tmp_path}", "parallel.ep=1", "--gpus", "8", "--gpu", "h100-80g", "--json"]
    assert main(["plan", run_file, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    number = 6 * (12 * 64**2 + 13 * 64) + (512 + 4096 + 2) * 64
    assert found["decisions"]["parameters"] == f"{number / 1e6:.3f} M"
    sizes = {row["name"]: row["num_bytes"] for row in found["memory"]["rows"]}
    assert sizes["weights"] == pytest.approx(2 * number / 8, rel=0.01)
    assert min(sizes["kept by layers"], sizes["one layer in backward"]) > 0
