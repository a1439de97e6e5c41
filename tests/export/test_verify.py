"""A folder is verified where plain transformers gives the recorded logits from the bytes that were written.

Every kind of wrong folder is found.
"""

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ds_finetune.cli.main import main
from ds_finetune.errors import ExportError
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.safetensors_folder import FolderParts, has_same_weights, link_folder, write_folder
from ds_finetune.export.verify.logits import deviations
from ds_finetune.export.verify.record import UNVERIFIED, Digest, ExportRecord, fixed_prompts, sampled_logits
from ds_finetune.export.verify.verify import SignalInterruption, VerificationResult, read_tensor_table, verify_exports
from ds_finetune.families.table import family_of
from ds_finetune.trainer.exports import verify_run_exports
from ds_finetune.trainer.show import show_verifications
from tests.export.rewriting import rewrite
from tests.export.test_safetensors_folder import specs_of, tensors_of
from tests.json_files import change_json, read_json
from tests.model.weights.test_weights import published

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def _logits(model: PreTrainedModel, prompts: tuple[tuple[int, ...], ...]) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        yield from (model(torch.tensor([prompt])).logits[0].float() for prompt in prompts)


def _exported(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, *, shard: int = 40_000, **changes: object
) -> Path:
    """Publish a model as `folder`/base and export it to `folder`/out in `dtype`, with the logits of a plain model.

    `changes` are changes to its config.
    """
    model = published(family, folder / "base", **changes).to(dtype)
    if changes:
        model.set_experts_implementation("eager")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # In fp32, as in training.
            model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = torch.linspace(
                -0.2, 0.2, len(buffer)
            )
    vocab_size = model.config.vocab_size
    prompts = fixed_prompts(vocab_size, None)
    logits = sampled_logits(_logits(model, prompts), prompts, vocab_size)
    record = ExportRecord(
        str(folder / "base"), str(dtype).removeprefix("torch."), vocab_size, prompts, step=3, logits=logits
    )
    config = read_json(folder / "base" / "config.json")
    parts = FolderParts(
        family=family_of(family), config=config, architecture=type(model).__name__, dtype=dtype, record=record, files=()
    )
    write_folder(tensors_of(model), specs_of(model), folder / "out", parts, max_shard_bytes=shard)
    assert "not checked yet" in (folder / "out" / UNVERIFIED).read_text()
    return folder / "out"


def _change_config(folder: Path, **values: object) -> None:
    change_json(folder / "config.json", values)


def _swap_gate_and_up(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if ".experts." in name and "gate_proj" in name:
            other = name.replace("gate_proj", "up_proj")
            tensors[name], tensors[other] = tensors[other], tensors[name]


def _last_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors[EXPERT].view(torch.int32)[0, 0] ^= 1


def _drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _put_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][0, 0] = float("nan")


MODELS = (
    "deepseek_v3",
    "kimi_k2",
    "sarvam_mla",
    "sarvam_moe",
    "exaone",
    "glm4_moe",
    "deepseek_v2",
    "qwen2",
    "llama",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VerificationResult]:
    """The result for every folder below. Plain transformers loads them in two processes, since one folder fails."""
    root = tmp_path_factory.mktemp("verify")
    folders: dict[str, Path] = {}
    for name in MODELS:
        folders[name] = _exported(name, root / name)
    folders["bf16"] = _exported("deepseek_v3", root / "bf16", torch.bfloat16)
    folders["an odd width"] = _exported("deepseek_v3", root / "odd", torch.bfloat16, moe_intermediate_size=44)
    whole = _exported("deepseek_v3", root / "whole", shard=10**9)
    rounded = _exported("qwen3", root / "rounded", torch.bfloat16, shard=10**9)

    def spoilt(name: str, source: Path) -> Path:
        folders[name] = Path(shutil.copytree(source, root / name.replace(" ", "-")))
        return folders[name]

    _change_config(spoilt("another rope", whole), rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    _change_config(
        spoilt("another rope in bf16", rounded), rope_parameters={"rope_theta": 100.0, "rope_type": "default"}
    )
    rewrite(spoilt("gate for up", whole), _swap_gate_and_up)
    rewrite(spoilt("a bit", whole), _last_bit, hide=False)
    with (spoilt("cut short", whole) / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    rewrite(spoilt("a tensor less", whole), _drop_norm)
    rewrite(spoilt("NaN", whole), _put_nan)
    return dict(zip(folders, verify_exports(list(folders.values())), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        *MODELS,
        "bf16",
        "an odd width",
    ],
)
def test_a_right_folder_is_verified(results: dict[str, VerificationResult], name: str) -> None:
    result = results[name]
    assert result.is_verified, result
    assert not (result.folder / UNVERIFIED).exists()
    assert "each with the bytes that were written" in result.lines[0]
    assert "without ds_finetune" in result.lines[-1]
    is_odd = "with eager experts, since torch's grouped product refuses this model (" in result.lines[-1]
    assert is_odd == (name == "an odd width")
    assert (
        "are BF16 here and F32 in the base" if name in ("bf16", "an odd width") else "names, shapes and dtypes of all"
    ) in " ".join(result.lines)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("another rope", "of the largest at nine tenths of the positions"),
        ("another rope in bf16", "of the largest at nine tenths of the positions"),
        ("gate for up", "of the largest at nine tenths of the positions"),
        ("a bit", f"1 tensors hold other bytes than were written: {EXPERT}"),
        ("cut short", "plain transformers does not load it"),
        ("a tensor less", "plain transformers misses 1 tensors: model.norm.weight"),
        ("NaN", "logits are not finite"),
    ],
)
def test_a_wrong_folder_is_found_and_marked(results: dict[str, VerificationResult], name: str, text: str) -> None:
    result = results[name]
    assert not result.is_verified
    assert text in (result.folder / UNVERIFIED).read_text(), result
    assert any("hold other bytes" in problem for problem in result.problems) == (name in ("a bit", "cut short"))


NORM, FIRST, LAST = (
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.2.input_layernorm.weight",
)
BASES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "the same": (lambda t: None, ("names, shapes and dtypes of all {count} tensors are those of the base",)),
    "more": (
        lambda t: t.update({f"x.{number:02}": torch.zeros(2) for number in range(11)}),
        ("11 tensors of the base are not here: " + ", ".join(f"x.{number:02}" for number in range(10)) + " ...",),
    ),
    "fewer": (lambda t: t.pop(NORM), (f"1 tensors are not in the base: {NORM}",)),
    "another shape": (
        lambda t: t.update({NORM: torch.zeros(31)}),
        (f"1 tensors have another shape than in the base: {NORM} (32,) for (31,)",),
    ),
    "another dtype": (
        lambda t: t.update({FIRST: t[FIRST].bfloat16(), LAST: t[LAST].bfloat16(), NORM: t[NORM].half()}),
        (
            f"2 tensors are F32 here and BF16 in the base: {FIRST}, {LAST}",
            f"1 tensors are F32 here and F16 in the base: {NORM}",
        ),
    ),
    "all at once": (
        lambda t: (
            t.pop(FIRST),
            t.update({"x": torch.zeros(1), NORM: torch.zeros(32, dtype=torch.float64), LAST: torch.zeros(2, 3)}),
        ),
        (
            "1 tensors of the base are not here: x",
            f"1 tensors are not in the base: {FIRST}",
            f"1 tensors have another shape than in the base: {LAST} (32,) for (2, 3)",
            f"1 tensors are F32 here and F64 in the base: {NORM}",
        ),
    ),
    "no weights": (
        lambda t: t.clear(),
        ("names are not compared with the base's: `{base}` has no safetensors weights here",),
    ),
}
"""What is changed in the base of an export, and every line that the check then says of names, shapes and dtypes."""


def test_each_difference_from_the_base_is_listed(tmp_path: Path) -> None:
    whole = _exported("deepseek_v3", tmp_path / "whole")
    count = len(read_tensor_table(whole))
    outs = {}
    for name, (change, _) in BASES.items():
        base, outs[name] = tmp_path / f"{name} base", Path(shutil.copytree(whole, tmp_path / name))
        base.mkdir()
        tensors = load_file(tmp_path / "whole" / "base" / "model.safetensors")
        change(tensors)
        if tensors:
            save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        replace(ExportRecord.read(whole), base=str(base)).write(outs[name])
    for (name, (_, wanted)), result in zip(BASES.items(), verify_exports(list(outs.values())), strict=True):
        assert result.is_verified, result
        first, *said, _ = result.lines
        assert first == f"{count} tensors on the disk, each with the bytes that were written"
        assert said == [line.format(count=count, base=tmp_path / f"{name} base") for line in wanted]


def test_sampled_logits_reach_every_row_of_the_head() -> None:
    prompts = ((1, 2, 3), (4,), tuple(range(300)))
    record = ExportRecord("", "float32", 1100, prompts, logits=np.zeros(0, np.float32))
    assert record.stride == 3
    logits = [torch.arange(1100.0).expand(len(prompt), 1100) for prompt in prompts]
    found = sampled_logits(logits, prompts, 1100)
    assert len(found) == sum(record.lengths())
    assert {*found.tolist()} == {*range(1100)}


def test_texts_without_a_token_are_no_prompts() -> None:
    """A tokenizer of Latin letters makes no tokens of two of the eight texts; a run must not fail at its end for that."""
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(ascii_lowercase)}, []))
    prompts = fixed_prompts(26, PreTrainedTokenizerFast(tokenizer_object=core))
    assert len(prompts) == 8 + 6
    assert all(0 < len(prompt) <= 32 for prompt in prompts)


def test_deviation_is_root_mean_square_over_the_largest() -> None:
    wanted = np.array([1, 2, -4, 0, 0], np.float32)
    found = wanted + np.array([0.3, 0.4, 0, 0, 1], np.float32)
    assert deviations(found, wanted, [2, 1, 2]) == pytest.approx([np.sqrt(0.25 / 2) / 4, 0, np.sqrt(0.5) / 4], rel=1e-6)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    digests = {"a": Digest.of([(4, 1), (4, 2), (3, 5)]), "b": Digest.of([(9, 7)])}
    assert digests["a"].lengths() == [4, 4, 3]
    record = ExportRecord(
        "base", "bfloat16", 3, ((1, 2), (0,)), step=7, logits=np.linspace(0, 1, 9, dtype=np.float32), digests=digests
    )
    record.write(tmp_path)
    again = ExportRecord.read(tmp_path)
    assert np.array_equal(again.logits, record.logits)
    assert replace(again, logits=None) == replace(record, logits=None)
    (tmp_path / RECORD).write_text('{"format": 99}')
    with pytest.raises(ExportError, match="its format is 99, not 1"):
        ExportRecord.read(tmp_path)


def test_a_folder_too_large_for_the_memory_is_skipped(tmp_path: Path) -> None:
    out = _exported("llama", tmp_path)
    (result,) = verify_exports([out], available_bytes=1000)
    assert not result.problems
    assert "loading it takes" in (out / UNVERIFIED).read_text()


def test_folders_that_share_their_weights_are_verified_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As at the end of a run whose last step is its best."""
    last = tmp_path / "run" / "export"
    last.parent.mkdir()
    best = _exported("llama", tmp_path / "made").rename(tmp_path / "run" / "export-best")
    assert link_folder(best, last)
    assert has_same_weights(best, last)
    weights = sorted(best.glob("*.safetensors"))
    assert [file.stat().st_nlink for file in weights] == [2] * len(weights)
    assert sorted(file.name for file in best.iterdir()) == sorted(file.name for file in last.iterdir())
    AutoModelForCausalLM.from_pretrained(last)
    with SignalInterruption(signal.SIGINT) as interruption:
        mine, its = verify_run_exports(last.parent, (last,), interruption)
    assert (mine.folder, its.folder) == (last, best)
    assert mine.is_verified
    assert its.is_verified
    assert its.lines == mine.lines
    show_verifications([mine, its])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"verified: {last}, {best}"
    assert rest == [f"  {'; '.join(mine.lines)}"]
    assert not list((tmp_path / "run").glob(f"*/{UNVERIFIED}"))


def test_a_folder_that_cannot_be_linked_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.safetensors").mkdir()
    assert not link_folder(tmp_path / "source", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_exit_code_1_for_a_wrong_folder_and_2_for_a_missing_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = _exported("llama", tmp_path)
    torch.manual_seed(0)
    for file in out.glob("model*.safetensors*"):
        file.unlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(out)
    _change_config(out, rms_norm_eps=0.5)
    assert main(["export", "--check", str(out)]) == 1
    assert "is not what was exported" in capsys.readouterr().err
    assert main(["export", "--check", str(tmp_path / "base")]) == 2
    assert main(["export", str(out)]) == 2
