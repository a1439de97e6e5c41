"""Exports of checkpoints that DeepSpeed wrote on two ranks, at every ZeRO stage, equal what DeepSpeed's script makes."""

import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ds_finetune.cli import main as cli
from ds_finetune.errors import ExportError, ModelError
from ds_finetune.export.readers.deepspeed_native import SplitTensor, read_deepspeed_checkpoint
from ds_finetune.families.table import family_of
from ds_finetune.model.weights.names import hub_pieces
from ds_finetune.model.weights.safetensors_file import Scratch, StoredTensor, TensorFile
from tests.export.readers.cells import CELLS, Cell, fresh
from tests.running import start, torchrun

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BY_NAME = {cell.name: cell for cell in CELLS}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of each cell, all from one launch."""
    folder = tmp_path_factory.mktemp("native")
    done = start(torchrun(str(Path(__file__).with_name("deepspeed_worker.py")), str(folder)))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    """A stage-3 checkpoint to damage."""
    return Path(shutil.copytree(written / "qwen2-stage3-bf16-frozen", tmp_path / "copy"))


def test_no_elements_are_an_empty_tensor(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(8))
    stored = StoredTensor(TensorFile(file), torch.bfloat16, (4,), 0)
    for tensor in (SplitTensor((0, 3), [[stored]], 4, 0), SplitTensor((4,), [[stored]], 0, 4)):
        empty = tensor.read(0, 0, into=Scratch())
        assert (tuple(empty.shape), empty.dtype) == ((0,), torch.bfloat16)


def step_of(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


def truth_of(folder: Path, cell: Cell, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """DeepSpeed's own state dict in `dtype`, with tied names and buffers.

    Frozen parameters, which it does not have at stage 1, are those of the model before training.
    """
    truth = torch.load(folder / "truth.pt", weights_only=True)
    began = {
        name: param.detach().to(torch.bfloat16 if cell.bf16 else torch.float32)
        for name, param in fresh(cell.family).named_parameters()
    }
    frozen = {name: param for name, param in began.items() if cell.frozen and name.startswith("model.layers.0.")}
    assert all(torch.equal(truth[name], param) for name, param in frozen.items() if name in truth)
    cast = {
        name: tensor if "e_score_correction_bias" in name else tensor.to(dtype)
        for name, tensor in (truth | frozen).items()
    }
    return {
        p.key: t[p.index] for name, t in cast.items() for p in hub_pieces(name, tuple(t.shape), family_of(cell.family))
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BY_NAME)
def test_the_export_is_what_deepspeed_makes_of_it(name: str, dtype: str, written: Path, tmp_path: Path) -> None:
    cell, out = BY_NAME[name], tmp_path / "out"
    source = written / name if dtype == "bf16" else step_of(written / name)
    assert cli.main(["export", "--no-verify", str(source), str(out), "--dtype", dtype, "--max-shard-size", "20KB"]) == 0
    found = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
    truth = truth_of(written / name, cell, DTYPES[dtype])
    if cell.family == "qwen2":
        assert torch.equal(truth["lm_head.weight"], truth.pop("model.embed_tokens.weight"))
        truth["model.embed_tokens.weight"] = truth.pop("lm_head.weight")
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in truth.items())
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"]
    assert model.dtype == DTYPES[dtype]


def test_a_folder_of_the_hugging_face_trainer(written: Path, tmp_path: Path) -> None:
    """At ZeRO 2 the Trainer also saves the weights it computes with, which are the masters in bf16."""
    folder, out = written / "trainer" / "checkpoint-2", tmp_path / "out"
    assert cli.main(["export", "--no-verify", str(folder), str(out)]) == 0
    theirs, found = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[key], tensor.to(found[key].dtype)) for key, tensor in theirs.items())
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert (out / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()


@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_any_range_of_any_tensor_can_be_read(numel: int, written: Path) -> None:
    name = "deepseek_v3-stage3-bf16"
    source, truth = (
        read_deepspeed_checkpoint(written / name),
        torch.load(written / name / "truth.pt", weights_only=True),
    )
    assert source.fp32_names == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    for key, tensor in truth.items():
        assert source.shapes[key] == tuple(tensor.shape)
        for start_ in range(0, tensor.numel(), max(1, tensor.numel() // 5)):
            wanted = tensor.reshape(-1)[start_ : start_ + numel]
            assert torch.equal(source.read(key, start_, len(wanted)).float(), wanted)


def test_a_wrappers_prefix_is_left_out(copy: Path) -> None:
    plain = read_deepspeed_checkpoint(copy).shapes
    for file in step_of(copy).glob("*_model_states.pt"):
        states = torch.load(file, weights_only=False)
        for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            states[key] = {f"module.lm.{name}": value for name, value in states[key].items()}
        states["param_shapes"] = [
            {f"module.lm.{name}": shape for name, shape in group.items()} for group in states["param_shapes"]
        ]
        states["shared_params"] = {}
        torch.save(states, file)
    assert read_deepspeed_checkpoint(copy).shapes == {
        name: shape for name, shape in plain.items() if name != "lm_head.weight"
    }


def test_a_missing_rank_is_named(copy: Path) -> None:
    (step_of(copy) / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(
        ExportError, match=r"holds 1 of 2 optim state files; missing: zero_pp_rank_1_mp_rank_00_optim_states\.pt"
    ):
        read_deepspeed_checkpoint(copy)
    (step_of(copy) / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(
        ExportError, match=r"holds 1 of 2 model state files; missing: zero_pp_rank_0_mp_rank_00_model_states\.pt"
    ):
        read_deepspeed_checkpoint(copy)


def test_weights_without_the_masters_are_refused(copy: Path) -> None:
    for file in step_of(copy).glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(ExportError, match=r"holds no \*_optim_states\.pt file"):
        read_deepspeed_checkpoint(copy)


def test_latest_that_names_a_missing_folder(copy: Path) -> None:
    (copy / "latest").write_text("global_step9")
    with pytest.raises(ExportError, match="latest names the folder `global_step9`, which does not exist"):
        read_deepspeed_checkpoint(copy)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallelism"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallelism"),
        ("layer_03-model_states.pt", "pipeline parallelism"),
        ("layer_1_expert_0_mp_rank_00_model_states.pt", "expert parallelism"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert parallelism"),
        ("offloaded_tensors", "offloaded to NVMe"),
        ("zero", "universal checkpoint"),
    ],
)
def test_other_layouts_are_refused_with_a_hint(name: str, meaning: str, copy: Path) -> None:
    (step_of(copy) / name).touch()
    with pytest.raises(ExportError, match=meaning) as caught:
        read_deepspeed_checkpoint(copy)
    assert f"`{name}`" in caught.value.message
    assert "save_16bit_model" in caught.value.hint


class Malicious:
    """Its pickle asks for a command to be run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("pattern", ["*_model_states.pt", "*_optim_states.pt"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(pattern: str, copy: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    victim = sorted(step_of(copy).glob(pattern))[1]
    states = torch.load(victim, weights_only=False)
    torch.save(states | {"extra": Malicious(mark)}, victim)
    with pytest.raises(ExportError, match=r"holds objects of 1 unknown classes: (posix|nt)\.system") as caught:
        read_deepspeed_checkpoint(copy)
    assert str(victim) in caught.value.message
    assert not mark.exists()
    torch.load(victim, weights_only=False)
    assert mark.exists()


def test_deepspeed_is_not_needed(copy: Path, tmp_path: Path) -> None:
    """Its classes in the pickles are replaced by inert ones; DeepSpeed is not imported, as a plain unpickling would."""
    code = "import sys; sys.modules['deepspeed'] = None; from ds_finetune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = start([sys.executable, "-c", code, "export", "--no-verify", str(copy), str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {tmp_path / 'out'}: 38 tensors, ")


def test_damaged_files_are_named(copy: Path) -> None:
    victim = next(step_of(copy).glob("*rank_1*_optim_states.pt"))
    whole = victim.read_bytes()
    for torn in (whole[: len(whole) // 2], b"", pickle.dumps({"a": 1})):
        victim.write_bytes(torn)
        with pytest.raises(ExportError, match=rf"{victim.name} cannot be read"):
            read_deepspeed_checkpoint(copy)
    torch.save([1], victim)
    with pytest.raises(ExportError, match=rf"{victim.name} holds a list, not a dictionary"):
        read_deepspeed_checkpoint(copy)
    torch.save({"a": 1}, victim)
    with pytest.raises(ExportError, match=rf"{victim.name} has no optimizer_state_dict; it has a"):
        read_deepspeed_checkpoint(copy)


@pytest.mark.parametrize(
    ("mine", "others", "said"),
    [
        (
            "qwen2-stage3-bf16-frozen",
            "deepseek_v3-stage3-bf16",
            r"optimizer states in .* have \d+ elements, the model states need \d+ \(state file 0\)",
        ),
        (
            "qwen2-stage2-bf16-frozen",
            "deepseek_v3-stage2-bf16",
            r"optimizer states in .* have 32 parameters, the model states need 15",
        ),
        (
            "deepseek_v3-stage1-bf16",
            "deepseek_v3-stage1-fp32-frozen",
            r"optimizer states in .* have \d+ parameters, the model states need \d+",
        ),
    ],
)
def test_files_of_different_saves_are_noticed(mine: str, others: str, said: str, written: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(written / mine, tmp_path / "mixed")
    for file in step_of(mixed).glob("*_optim_states.pt"):
        file.unlink()
    for file in step_of(written / others).glob("*_optim_states.pt"):
        shutil.copy(file, step_of(mixed))
    with pytest.raises(ExportError, match=said):
        read_deepspeed_checkpoint(mixed)


def test_a_file_that_was_cut_after_it_was_opened(copy: Path) -> None:
    source = read_deepspeed_checkpoint(copy)
    for file in step_of(copy).glob("*_optim_states.pt"):
        os.truncate(file, 200)
    with pytest.raises(ModelError, match=r"ends at byte \d+, \d+ bytes early"):
        source.read("model.norm.weight", 0, 32)


@pytest.fixture
def environ() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_without_a_config_base_is_required(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert cli.main(["export", "--no-verify", str(copy), str(tmp_path / "out")]) == 2
    assert "error: no config.json in" in (said := capsys.readouterr().err)
    assert "--base" in said
    assert cli.main(["export", "--no-verify", str(copy), str(tmp_path / "out"), "--base", str(tmp_path)]) == 0
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_what_the_command_refuses(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert cli.main(["export", *arguments]) == 2
        return capsys.readouterr().err

    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    assert f"`{empty}` is no folder that can be exported; it holds nothing" in said(str(empty), str(out))
    assert "is not a folder" in said(str(tmp_path / "none"), str(out))
    assert "--max-shard-size `5 apples` is not a size with a unit" in said(
        str(copy), str(out), "--max-shard-size", "5 apples"
    )
    assert f"`{copy}` is not empty: config.json" in said(str(copy), str(copy))
    assert f"--base `{empty}` has no config.json" in said(str(copy), str(out), "--base", str(empty))
    assert not out.exists()
    assert not out.with_name("out.ds_finetune-partial").exists()
