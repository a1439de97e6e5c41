"""ONNX Runtime computes what plain transformers does, at any shape and routing; models without a right graph are
refused.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ds_finetune.cli import main as cli
from ds_finetune.errors import ExportError, ModelError, OutputError, VerificationError
from ds_finetune.export import formats
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.onnx import folder as onnx_folder
from ds_finetune.export.output_folder import RECORD
from tests.export.cells import types_of
from tests.model.tiny import CONFIGS
from tests.running import start, tiny_task, torchrun

onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="the onnx extra is not installed: pip install 'ds_finetune[onnx]'"
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": CONFIGS["llama"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3": CONFIGS["qwen3"] | {"head_dim": 12},
    "qwen3_moe": CONFIGS["qwen3_moe"] | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    "mixtral": CONFIGS["mixtral"],
    "olmoe": CONFIGS["olmoe"],
    "deepseek_v2": CONFIGS["deepseek_v2"]
    | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "q_lora_rank": 24},
    "glm4_moe_lite": CONFIGS["glm4_moe_lite"],
    "glm4_moe": CONFIGS["glm4_moe"],
    "deepseek_v3": CONFIGS["deepseek_v3"] | {"routed_scaling_factor": 2.5},
    "kimi_k2": CONFIGS["kimi_k2"],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-biases-llama3": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32},
    },
    "llama-tied-linear": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    },
    "qwen2-untied-yarn": {"tie_word_embeddings": False, "rope_parameters": YARN},
    "qwen3-tied": {"tie_word_embeddings": True, "attention_bias": True},
    "deepseek_v2-lite-greedy-yarn": {
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_parameters": YARN,
    },
    "deepseek_v3-yarn-biases": {"rope_parameters": YARN, "attention_bias": True},
    "deepseek_v3-halves": {
        "rope_interleave": False,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "num_experts_per_tok": 4,
    },
    "glm4_moe-air-quarter": {
        "use_qk_norm": False,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "deepseek_v3-no-shared": {"n_shared_experts": 0},
    "deepseek_v3-dense": {"first_k_dense_replace": 3},
}


def fresh(name: str, **changed: Any) -> PreTrainedModel:
    """The tiny model of a family or variant; no weight that training could change is zero or one."""
    family = name.split("-")[0]
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(FAMILIES[family] | VARIANTS.get(name, {}) | changed))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.dim() == 1):
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer in (b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")):
            buffer.copy_(torch.linspace(0.02, -0.02, len(buffer)))
    return model


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


class Runtime:
    """ONNX Runtime without the program's own class."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / "onnx/model.onnx"), providers=["CPUExecutionProvider"])
        self.inputs = {entry.name: entry for entry in self.session.get_inputs()}
        self.outputs = [entry.name for entry in self.session.get_outputs()]

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, past: dict[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()} | (
            past or {}
        )
        return dict(zip(self.outputs, self.session.run(None, feeds), strict=True))

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        half = np.float16 if self.inputs["past_key_values.0.key"].type == "tensor(float16)" else np.float32
        shapes = {name: entry.shape for name, entry in self.inputs.items() if name.startswith("past")}
        return {name: np.zeros((rows, shape[1], 0, shape[3]), dtype=half) for name, shape in shapes.items()}

    def greedy(self, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        past, new = self.empty(len(ids)), ids
        for _ in range(count):
            out = self(new, mask, past)
            past = {name.replace("present", "past_key_values"): kept for name, kept in out.items() if name != "logits"}
            new = torch.from_numpy(out["logits"][:, -1:].argmax(-1))
            ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        return ids


def rows(*pads: int, length: int, seed: int = 0, vocab: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[0] * count + [1] * (length - count) for count in pads])
    return torch.randint(0, vocab, mask.shape, generator=generator) * mask, mask


def plain(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache | None = None
) -> np.ndarray:
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=cache is not None
        )
    return out.logits.numpy()


def near(found: np.ndarray, wanted: np.ndarray, mask: torch.Tensor, tolerance: float) -> None:
    at = mask.numpy().astype(bool)
    assert np.abs(found.astype(np.float32) - wanted)[at].max() <= tolerance * np.abs(wanted[at]).max()


@pytest.mark.parametrize("name", [*types_of("export/onnx/test_onnx.py"), *VARIANTS])
def test_equals_transformers_whole_and_cached(name: str, tmp_path: Path) -> None:
    """Logits at three shapes, the cache itself, and greedy decoding of padded rows, against plain transformers."""
    model = fresh(name)
    onnx_folder.write(saved(tmp_path / "hub", model), tmp_path / "out", ExportOptions(dtype="fp32"))
    runtime = Runtime(tmp_path / "out")
    for pads, length in (((0,), 1), ((3, 0, 6, 0), 14), ((0, 0), 57)):
        ids, mask = rows(*pads, length=length, seed=length)
        cache = DynamicCache(config=model.config)
        wanted = plain(model, ids, mask, cache)
        out = runtime(ids, mask, runtime.empty(len(pads)))
        near(out["logits"], wanted, mask, 1e-5)
        for number, layer in enumerate(cache.layers):
            for part, kept in (("key", layer.keys), ("value", layer.values)):
                at = mask[:, None, :, None].bool().expand(kept.shape).numpy()
                np.testing.assert_allclose(out[f"present.{number}.{part}"][at], kept.numpy()[at], atol=2e-5)
    ids, mask = rows(0, 5, length=9)
    wanted = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(runtime.greedy(ids, mask, 16), wanted)


def test_several_tokens_at_once_with_a_cache(tmp_path: Path) -> None:
    model = fresh("deepseek_v3")
    onnx_folder.write(saved(tmp_path / "hub", model), tmp_path / "out", ExportOptions(dtype="fp32"))
    runtime = Runtime(tmp_path / "out")
    ids, mask = rows(0, 4, length=20)
    wanted, past, end = plain(model, ids, mask), runtime.empty(2), 0
    for size in (5, 1, 7, 6, 1):
        out = runtime(ids[:, end : end + size], mask[:, : end + size], past)
        past = {key.replace("present", "past_key_values"): kept for key, kept in out.items() if key != "logits"}
        near(out["logits"], wanted[:, end : end + size], mask[:, end : end + size], 1e-5)
        end += size


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_experts_follow_the_data(family: str, tmp_path: Path) -> None:
    """Every expert is chosen by some input and not by others; in one row all tokens choose the same experts."""
    model = fresh(family, num_hidden_layers=2)
    onnx_folder.write(saved(tmp_path / "hub", model), tmp_path / "out", ExportOptions(dtype="fp32"))
    runtime, seen = Runtime(tmp_path / "out"), []
    model.model.layers[1].mlp.gate.register_forward_hook(
        lambda _m, _i, out: seen.append(frozenset(out[2].flatten().tolist()))
    )
    for token in range(24):
        ids, mask = torch.full((1, 6), token), torch.ones(1, 6, dtype=torch.int64)
        near(runtime(ids, mask, runtime.empty(1))["logits"], plain(model, ids, mask), mask, 1e-5)
    assert frozenset().union(*seen) == set(range(8))
    assert len(set(seen)) > 4
    assert min(map(len, seen)) == 2


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v2", "deepseek_v3"])
def test_half_precision_is_near(family: str, tmp_path: Path) -> None:
    """Every position of a dense model; with experts, all but those where a near tie of the router fell differently."""
    model = fresh(family)
    onnx_folder.write(saved(tmp_path / "hub", model), tmp_path / "out", ExportOptions(dtype="fp16"))
    result = json.loads((tmp_path / "out" / RECORD).read_text())
    assert result["largest"] > 1e-5
    assert result["beyond"] <= (0 if family == "qwen2" else 3)
    assert result["new_tokens_differing"] == 0
    runtime = Runtime(tmp_path / "out")
    ids, mask = rows(0, 2, length=11)
    out = runtime(ids, mask, runtime.empty(2))
    assert {kept.dtype for kept in out.values()} == {np.dtype(np.float16)}
    wanted = plain(model, ids, mask)
    far = (
        np.abs(out["logits"].astype(np.float32) - wanted).max(-1)[mask.numpy().astype(bool)]
        > 2e-2 * np.abs(wanted).max()
    )
    assert far.sum() <= (0 if family == "qwen2" else 2)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_without_a_cache_by_the_command(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fresh(family)
    source = saved(tmp_path / "hub", model)
    (source / "tokenizer_config.json").write_text('{"x": "\\u00e9"}')
    assert cli.main(["export", str(source), str(tmp_path / "out"), "--format", "onnx", "--no-cache"]) == 0
    assert "verified: ONNX Runtime on the CPU against transformers: 99 positions" in " ".join(
        capsys.readouterr().out.split()
    )
    runtime = Runtime(tmp_path / "out")
    assert list(runtime.inputs) == ["input_ids", "attention_mask", "position_ids"]
    assert runtime.outputs == ["logits"]
    ids, mask = rows(2, 0, 0, length=23)
    near(runtime(ids, mask)["logits"], plain(model, ids, mask), mask, 1e-5)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not list(tmp_path.glob("*.unverified"))


def test_weights_beside_the_graph_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits come out whether weights are in the graph or in the file beside it."""
    source = saved(tmp_path / "hub", fresh("deepseek_v3"))
    export = partial(onnx_folder.write, source, options=ExportOptions(dtype="fp32"))
    export(tmp_path / "inside")
    monkeypatch.setattr(onnx_folder, "INLINE_BYTES", 4096)
    export(tmp_path / "beside")
    assert not (tmp_path / "inside" / "onnx/model.onnx_data").exists()
    weights = onnx.load(tmp_path / "beside" / "onnx/model.onnx", load_external_data=False).graph.initializer
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in weights if tensor.external_data]
    assert {place["location"] for place in places} == {"model.onnx_data"}
    assert all(int(place["offset"]) % 4096 == 0 for place in places)
    assert (tmp_path / "beside" / "onnx/model.onnx").stat().st_size < (
        tmp_path / "inside" / "onnx/model.onnx"
    ).stat().st_size - 100_000
    ids, mask = rows(0, length=12)
    both = [Runtime(tmp_path / name) for name in ("inside", "beside")]
    inside, beside = (runtime(ids, mask, runtime.empty(1))["logits"] for runtime in both)
    np.testing.assert_array_equal(inside, beside)


def test_one_wrong_expert_is_found(tmp_path: Path) -> None:
    """The verification can fail: one expert of eight differs between the graph and the folder it is compared with."""
    from ds_finetune.export.onnx.comparison import compare, make_reference

    model = fresh("deepseek_v3")
    onnx_folder.write(saved(tmp_path / "hub", model), tmp_path / "out", ExportOptions(dtype="fp32"))
    with torch.no_grad():
        model.model.layers[2].mlp.experts.down_proj[6].mul_(1.01)
    assert compare(tmp_path / "out", make_reference(tmp_path / "hub")).failures == ()
    result = compare(tmp_path / "out", make_reference(saved(tmp_path / "other", model)))
    assert 0 < result.beyond < result.positions
    assert f"{result.beyond} of {result.positions} positions" in result.failures[0]


def test_a_mismatch_ends_with_one_and_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_finetune.export.onnx import comparison as onnx_comparison

    monkeypatch.setitem(onnx_comparison.TOLERANCES, np.dtype(np.float32), 1e-12)
    source = saved(tmp_path / "hub", fresh("llama"))
    assert (
        cli.main(["export", str(source), str(tmp_path / "out"), "--format", "onnx"]) == VerificationError.exit_code == 1
    )
    assert "ONNX Runtime differs from transformers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    found = json.loads((tmp_path / "out.unverified" / "UNVERIFIED").read_text())
    assert found["failures"]
    assert not (tmp_path / "out.unverified" / "verification.json").exists()


def _edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _remove_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _scale(folder: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _store_in_fp8(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    key = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    rows, columns = tensors[key].shape
    tensors |= {
        key: tensors[key].to(torch.float8_e4m3fn),
        f"{key}_scale_inv": torch.ones(-(-rows // 128), -(-columns // 128)),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "another type": (partial(_edit, model_type="granite"), "models of type `granite` cannot be exported to ONNX"),
    "dynamic rope": (
        partial(_edit, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type `dynamic`",
    ),
    "activation": (partial(_edit, hidden_act="gelu"), "hidden_act `gelu`"),
    "sliding": (
        partial(_edit, use_sliding_window=True, layer_types=["full_attention", "sliding_attention", "full_attention"]),
        r"layers \[1\]",
    ),
    "sliding everywhere": (
        partial(_edit, model_type="mixtral", sliding_window=4),
        "only full attention, .* sliding_window 4",
    ),
    "clipped": (partial(_edit, model_type="olmoe", clip_qkv=8.0), "clip_qkv 8.0"),
    "fp8": (
        partial(_edit, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        r"is quantised \(fp8\)",
    ),
    "fp8 tensors": (_store_in_fp8, "has FP8 tensors, but no quantization_config in config.json"),
    "a tensor missing": (_remove_a_tensor, "1 missing: model.layers.1.self_attn.o_proj.weight"),
    "truncated": (_truncate, "model.safetensors is not a complete safetensors file"),
    "beyond fp16": (partial(_scale, factor=1e6), "`model.norm.weight` holds NaN or infinity as float16"),
    "not a number": (partial(_scale, factor=float("nan")), "`model.norm.weight` holds NaN or infinity in the source"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_nothing(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    source = saved(tmp_path / "hub", fresh("qwen2", tie_word_embeddings=False))
    change(source)
    with pytest.raises((ExportError, ModelError), match=message):
        onnx_folder.write(source, tmp_path / "out", ExportOptions(dtype="fp16"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hub"]


def test_arguments_that_are_not_valid_for_onnx_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(tmp_path / "hub"), str(tmp_path / "out")
    assert cli.main(["export", source, out, "--format", "onnx"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    Path(source).mkdir()
    for arguments, message in (
        (["--format", "onnx", "--max-shard-size", "1GB"], "--max-shard-size 1GB is not valid with --format onnx"),
        (["--no-cache"], "--no-cache is not valid with --format safetensors"),
        (["--format", "onnx", "--dtype", "bf16"], "--format onnx does not support --dtype bf16"),
    ):
        assert cli.main(["export", source, out, *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    saved(Path(source), fresh("llama"))
    assert cli.main(["export", source, out, "--format", "onnx", "--base", source]) == 2
    assert "is not valid with the Hugging Face folder" in " ".join(capsys.readouterr().err.split())
    Path(out).mkdir()
    (Path(out) / "kept").touch()
    with pytest.raises(OutputError, match="is not empty: kept"):
        onnx_folder.write(Path(source), Path(out), ExportOptions(dtype="fp32"))
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else name)
    assert cli.main(["export", source, str(tmp_path / "new"), "--format", "onnx"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the ONNX export needs onnxruntime hint: pip install 'ds_finetune[onnx]'" in said


@pytest.mark.slow
def test_from_a_run(tmp_path: Path) -> None:
    """The checkpoint of a run, in one command, equals the run's own export."""
    run_file = tiny_task(tmp_path)
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stderr
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "onnx"]) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name.startswith("out")) == ["out"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32).eval()
    ids, mask = rows(0, 3, length=12)
    runtime = Runtime(tmp_path / "out")
    near(runtime(ids, mask, runtime.empty(2))["logits"], plain(model, ids, mask), mask, 1e-2)


@pytest.mark.slow
def test_more_than_a_protobuf_holds(tmp_path: Path) -> None:
    """2.2 GiB of fp32 weights, which no single message can hold."""
    model = fresh(
        "llama",
        vocab_size=100_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    source = saved(tmp_path / "hub", model.to(torch.bfloat16))
    del model
    onnx_folder.write(source, tmp_path / "out", ExportOptions(dtype="fp32"))
    assert (tmp_path / "out" / "onnx/model.onnx_data").stat().st_size > 2**31
    assert json.loads((tmp_path / "out" / RECORD).read_text())["largest"] < 1e-4
