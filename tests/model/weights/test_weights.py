"""Weights are loaded completely, streamed into fragments, or initialised the same for any layout."""

import json
import math
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_finetune.errors import ExportError, ModelError
from ds_finetune.export.readers.sources import open_source
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.model.build.hub_folder import bin_conversion
from ds_finetune.model.build.skeleton import Fragment, build_skeleton, in_memory, read_hf_config
from ds_finetune.model.build.tiny_config import Size, tiny_config
from ds_finetune.model.weights.load import initialise_weights, load_weights
from ds_finetune.model.weights.names import published_names
from tests.model.model_types import config_of
from tests.model.tiny import CONFIGS

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


def published(family: str, folder: Path, **changes: object) -> PreTrainedModel:
    """A tiny model of a family saved as transformers publishes it, with a router bias that is not zero."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **CONFIGS[family] | changes)).float().eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    model.save_pretrained(folder)
    return model


def skeleton(folder: Path, dtype: torch.dtype = torch.float32, *, attention: str = "sdpa") -> PreTrainedModel:
    return build_skeleton(read_hf_config(str(folder)), attention=attention, dtype=dtype, device="cpu")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v3")
    published("deepseek_v3", folder)
    return folder


@pytest.fixture
def copy(deepseek: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(deepseek, tmp_path / "copy"))


@pytest.mark.parametrize("family", CONFIGS)
def test_loaded_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    wanted = published(family, tmp_path)
    # Attention with sinks by document rounds in other places.
    model = skeleton(tmp_path, attention="eager" if family_of(family).has_sinks else "sdpa")
    if family_of(family).fused_experts:
        # Experts of CPUs do, too.
        model.set_experts_implementation("grouped_mm")
    report = load_weights(model, tmp_path, family=family_of(family))
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model.eval()(ids).logits, wanted(ids).logits)
    stored = load_file(tmp_path / "model.safetensors")
    assert report.num_tensors == sum(3 if ".query_key_value." in key else 1 for key in stored)


@pytest.mark.parametrize("kind", ["gpt_neox", "granitemoe", "aria_text"])
@pytest.mark.parametrize("is_original", [True, False])
def test_generic_types_are_read_by_both_names_and_published_as_transformers_saves_them(
    kind: str, is_original: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = tiny_config(config_of(kind), Size(4, 2, 64))
    wanted, model = (AutoModelForCausalLM.from_config(config).float() for _ in range(2))
    wanted.save_pretrained(tmp_path, save_original_format=is_original)
    load_weights(model, tmp_path, family=family_of(kind))
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in model.state_dict().items())
    wanted.save_pretrained(tmp_path / "original")
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.named_parameters()}
    names = published_names(shapes, family_of(kind))
    assert set(names) == load_file(tmp_path / "original" / "model.safetensors").keys()
    assert set(names) != shapes.keys()


def test_buffers_of_the_router_stay_fp32_in_bf16(deepseek: Path) -> None:
    model = skeleton(deepseek, torch.bfloat16)
    load_weights(model, deepseek, family=family_of("deepseek_v3"))
    dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}
    assert dtypes["e_score_correction_bias"] == dtypes["inv_freq"] == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[0].item() == pytest.approx(-0.2)


DOTS = CONFIGS["llama"] | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ERNIE = CONFIGS["llama"] | {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}


@pytest.mark.parametrize(("kind", "tree"), [("dots1", DOTS), ("ernie4_5_moe", ERNIE)])
def test_router_biases_of_generic_types_stay_fp32_and_untrained(
    kind: str, tree: dict[str, object], tmp_path: Path
) -> None:
    """In published weights they differ by less than bf16 can tell apart; ERNIE's is a parameter, which DeepSpeed
    would cast.
    """
    config = AutoConfig.for_model(kind, **tree)
    torch.manual_seed(3)
    wanted = AutoModelForCausalLM.from_config(config)
    for name, tensor in wanted.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(5 + torch.arange(tensor.numel()).view_as(tensor) * 1e-3)
    wanted.save_pretrained(tmp_path, save_original_format=False)
    model = skeleton(tmp_path, torch.bfloat16)
    load_weights(model, tmp_path, family=family_of(kind))
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert biases
    for name, bias in biases.items():
        assert bias.dtype == torch.float32
        assert torch.equal(bias, wanted.state_dict()[name])
        assert len(bias.unique()) == bias.numel()
    assert not any(name.endswith("e_score_correction_bias") for name, _ in model.named_parameters())
    assert "e_score_correction_bias" in model._keep_in_fp32_modules_strict
    assert model.state_dict().keys() == wanted.state_dict().keys()
    assert model.eval()(torch.arange(3, 20)[None]).logits.isfinite().all()


def test_experts_one_by_one_of_a_type_without_a_row_are_not_the_checkpoints_fault(tmp_path: Path) -> None:
    config = AutoConfig.for_model("dots1", **DOTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hub")
    with pytest.raises(
        ModelError, match=r"/hub has a tensor for each expert .* is not supported for model_type `dots1`"
    ) as caught:
        load_weights(skeleton(tmp_path / "hub"), tmp_path / "hub", family=family_of("dots1"))
    assert "mlp.experts.0.down_proj.weight" in caught.value.message
    joined = ", ".join(kind for kind, row in FAMILIES.items() if row.fused_experts)
    assert joined in caught.value.message
    assert "save_original_format=False" in caught.value.hint
    # What the hint says works.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hub").eval()
    plain.save_pretrained(tmp_path / "fused", save_original_format=False)
    model = skeleton(tmp_path / "fused")
    load_weights(model, tmp_path / "fused", family=family_of("dots1"))
    ids = torch.arange(3, 20)[None]
    assert torch.allclose(model.eval()(ids).logits, plain(ids).logits, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_fragments_together_hold_the_tensor(deepseek: Path, ranks: int) -> None:
    """Each rank loads and draws only its flat slice, as ZeRO-3 lays it out, with padding past the end."""
    family = family_of("deepseek_v3")
    whole, initialised = skeleton(deepseek), skeleton(deepseek)
    load_weights(whole, deepseek, family=family)
    initialise_weights(initialised, seed=5)
    for wanted, fill in (
        (whole, lambda m, w: load_weights(m, deepseek, family=family, where=w)),
        (initialised, lambda m, w: initialise_weights(m, seed=5, where=w)),
    ):
        parts: dict[str, list[torch.Tensor]] = {}
        for rank in range(ranks):
            model = skeleton(deepseek)
            names = {id(p): name for name, p in model.named_parameters()}
            held: dict[int, torch.Tensor] = {}

            def where(param: torch.Tensor, held: dict[int, torch.Tensor] = held, rank: int = rank) -> Fragment:
                size = math.ceil(param.numel() / ranks)
                return in_memory(
                    held.setdefault(id(param), torch.zeros(size)), start=rank * size, shape=tuple(param.shape)
                )

            fill(model, where)
            for key, flat in held.items():
                parts.setdefault(names[key], []).append(flat)
        for name, param in wanted.named_parameters():
            assert torch.equal(torch.cat(parts[name])[: param.numel()].view_as(param), param), name


def test_fresh_weights_follow_the_models_rule_and_the_seed(deepseek: Path) -> None:
    one, again, other = (skeleton(deepseek) for _ in range(3))
    for model, seed in ((one, 1), (again, 1), (other, 2)):
        initialise_weights(model, seed=seed)
    for (name, a), b, c in zip(one.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if "norm" in name:
            assert torch.equal(a, torch.ones_like(a))
        else:
            assert not torch.equal(a, c)
            assert a.std().item() == pytest.approx(CONFIGS["deepseek_v3"]["initializer_range"], rel=0.15)


def _rewrite(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"1 missing: {EXPERT}"),
        (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "1 unexpected: model.extra.weight"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(95, 32)}),
            "1 of another shape: lm_head.weight: model (96, 32), checkpoint (95, 32)",
        ),
        (lambda t: t[EXPERT].__setitem__((2, 3), float("nan")), f"tensor `{EXPERT}` of"),
        (lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}), "1 FP8 weights without `_scale_inv`"),
    ],
    ids=["missing", "unexpected", "shape", "nan", "fp8"],
)
def test_a_tensor_that_does_not_fit_stops_the_run(copy: Path, change: object, message: str) -> None:
    _rewrite(copy, change)
    with pytest.raises(ModelError) as caught:
        load_weights(skeleton(copy), copy, family=family_of("deepseek_v3"))
    assert message in caught.value.message


def _fuse(tensors: dict[str, torch.Tensor]) -> None:
    """Put the experts of layer 1 into one tensor per projection, as Qwen3.5 publishes them."""
    layer = "model.layers.1.mlp.experts"
    number = len([key for key in tensors if key.startswith(f"{layer}.") and key.endswith(".up_proj.weight")])
    gate, up, down = (
        torch.stack([tensors.pop(f"{layer}.{expert}.{part}_proj.weight") for expert in range(number)])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{layer}.gate_up_proj": torch.cat([gate, up], dim=1), f"{layer}.down_proj": down}


def test_experts_in_one_tensor_are_read_by_expert(copy: Path) -> None:
    one_by_one, fused = skeleton(copy), skeleton(copy)
    load_weights(one_by_one, copy, family=family_of("deepseek_v3"))
    _rewrite(copy, _fuse)
    load_weights(fused, copy, family=family_of("deepseek_v3"))
    assert all(map(torch.equal, fused.state_dict().values(), one_by_one.state_dict().values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({EXPERT: t[DOWN][0].clone()}), "has the same weights in two tensors"),
        (lambda t: t.update({DOWN: t[DOWN].flatten(1)}), "missing: "),
        (lambda t: t.update({DOWN: t[DOWN][:0]}), "missing: "),
        (lambda t: t.update({GATE_UP: t[GATE_UP][:, 1:].contiguous()}), "missing: "),
    ],
    ids=["twice", "two dimensions", "empty", "odd"],
)
def test_fused_experts_that_do_not_fit_stop_the_run(copy: Path, change: object, message: str) -> None:
    _rewrite(copy, _fuse)
    _rewrite(copy, change)
    with pytest.raises(ModelError) as caught:
        load_weights(skeleton(copy), copy, family=family_of("deepseek_v3"))
    assert message in caught.value.message


def test_a_tied_head_in_the_folder_is_the_embedding_or_refused(tmp_path: Path) -> None:
    published("qwen2", tmp_path)
    _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_weights(skeleton(tmp_path), tmp_path, family=family_of("qwen2")).skipped == ("lm_head.weight",)
    _rewrite(tmp_path, lambda t: t["lm_head.weight"][95].add_(1))
    with pytest.raises(
        ModelError, match=r"`lm_head.weight` differs from `model.embed_tokens.weight`, but config.json ties both"
    ):
        load_weights(skeleton(tmp_path), tmp_path, family=family_of("qwen2"))


def test_multi_token_prediction_layers_are_declared_and_reported(copy: Path) -> None:
    _rewrite(copy, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}))
    report = load_weights(skeleton(copy), copy, family=family_of("deepseek_v3"))
    assert report.skipped == ("model.layers.3.eh_proj.weight",)


def test_the_hint_for_pickled_weights_converts_them(tmp_path: Path) -> None:
    """The command is run as it is printed, for a folder with a tied head and a name that a shell would split."""
    folder = tmp_path / "it's a model"
    wanted = published("qwen2", folder, tie_word_embeddings=True).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(wanted, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="has no safetensors weights") as caught:
        load_weights(skeleton(folder), folder, family=family_of("qwen2"))
    with pytest.raises(ExportError, match=r"is no folder that can be exported; it holds config\.json") as also:
        open_source(folder)
    assert also.value.hint == caught.value.hint
    said, _, command = caught.value.hint.partition(": ")
    words = shlex.split(command)
    assert (said, words[:2]) == ("convert its pytorch_model.bin", ["python", "-c"])
    assert words[2].startswith("from transformers import Qwen2ForCausalLM as M; ")
    exec(words[2], {})
    model = skeleton(folder)
    load_weights(model, folder, family=family_of("qwen2"))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("named", ["os.system", "'; import os; '", 7, ["x"], None])
def test_a_command_to_copy_holds_no_text_of_config_json(named: object, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [named]}))
    assert "from transformers import AutoModelForCausalLM as M; " in bin_conversion(tmp_path)


def test_folders_that_are_no_model(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no safetensors weights") as caught:
        load_weights(skeleton(copy), copy, family=family_of("deepseek_v3"))
    assert "model.weights: random" in caught.value.hint
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match=r"names 1 files that are not there: model-1\.safetensors"):
        load_weights(skeleton(copy), copy, family=family_of("deepseek_v3"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_hf_config(str(tmp_path))
    with pytest.raises(ModelError, match="is not a folder"):
        read_hf_config("./none")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama", "hidden_act": 3}', "'hidden_act' expected str, got int"),
        (
            '{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}',
            "not a multiple of the number of attention heads",
        ),
        ("{", "not a valid JSON file"),
        ("null", "not iterable"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_config_that_transformers_cannot_read_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be read") as caught:
        read_hf_config(str(tmp_path))
    assert said in caught.value.message


def test_logits_changed_behind_the_head_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "final_logit_softcapping": 30.0}))
    with pytest.raises(ModelError, match=r"`final_logit_softcapping` = 30\.0 changes the logits"):
        read_hf_config(str(tmp_path))
