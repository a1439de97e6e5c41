"""Runs that train DeepSeek-V4: resume, exports by the published names, adapters, what the plan says, and refusals."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import FinetuneError, ModelError
from ds_finetune.export.base_folder import hub_source
from ds_finetune.export.model_config import served_config
from ds_finetune.families.layer_rules import RATES
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.experts import spread_ids
from ds_finetune.model.weights.names import hub_pieces, renamed
from ds_finetune.plan.context import plan_context
from ds_finetune.plan.mesh import Mesh
from ds_finetune.reference.selftest.cells import TINY_MODELS
from ds_finetune.trainer.resolve import plan_model
from tests.checking import check, settings_of
from tests.export.cells import types_of
from tests.json_files import change_json
from tests.parity.mtp_cells import write_mtp_model
from tests.running import metrics, resume_on_two_ranks, tiny_task

V4 = family_of("deepseek_v4")
LEARNING = {"lr": 1e-2, "warmup": "0%", "min_lr_ratio": 1.0, "weight_decay": 0.1}
PREDICTION = "mtp.0.norm.weight"


def _run_file(
    folder: Path, *, is_published: bool = True, sizes: Mapping[str, int] | None = None, **sections: Any
) -> Path:
    """A model in bf16 values, by its published names and with a part of a prediction layer, or as transformers saves."""
    run_file = tiny_task(
        folder,
        **{
            "optim": LEARNING,
            "model": {"weights": "load"},
            "train": {"for": "4 steps"},
            "eval": {"every": "2 steps"},
            "data": {"packing": True},
        }
        | sections,
    )
    model = folder / "model"
    torch.manual_seed(31)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"] | {"vocab_size": vocabulary} | dict(sizes or {}))
    )
    spread_ids(lm, lm.config.n_routed_experts)
    lm.float().save_pretrained(model)
    if is_published:
        tensors = {
            piece.key: tensor[piece.index].clone()
            for name, tensor in lm.state_dict().items()
            for piece in hub_pieces(name, tuple(tensor.shape), V4)
        }
        save_file(tensors | {PREDICTION: torch.ones(lm.config.hidden_size)}, model / "model.safetensors")
    return run_file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was resumed after two of its four steps, on two tensor parallel ranks with ZeRO-3."""
    folder = tmp_path_factory.mktemp("run")
    resume_on_two_ranks(_run_file(folder), "parallel.tp=2", printed=folder / "printed.txt")
    return folder


def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    """Which begins with a folder that transformers saved, by its own names."""
    train(read_config(_run_file(tmp_path, is_published=False, export={"at_end": False})))
    wanted, found = metrics(tmp_path), metrics(finished)
    for name in ("train/loss", "train/grad_norm", "router/entropy"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in wanted], rel=1e-4), name
    assert found[-1]["eval/loss"] == pytest.approx(wanted[-1]["eval/loss"], rel=1e-4)


@pytest.mark.parametrize("model_type", types_of("trainer/test_deepseek_v4.py"))
def test_the_export_has_the_published_names(model_type: str, finished: Path) -> None:
    """The run has verified it in plain transformers; what is not trained is as it was."""
    before, after = (load_file(finished / name / "model.safetensors") for name in ("model", "run/export"))
    assert json.loads((finished / "run/export/config.json").read_text())["model_type"] == model_type
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if "indexer" in name} | {PREDICTION} <= same
    assert all("indexer" in name or name.endswith(("tid2eid", ".bias", PREDICTION)) for name in same)
    assert not (finished / "run" / "export" / "UNVERIFIED").exists()
    _, info = AutoModelForCausalLM.from_pretrained(finished / "run" / "export", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_the_plan_says_what_is_done(finished: Path) -> None:
    printed = " ".join((finished / "printed.txt").read_text().split())
    assert (
        "up to 19 tokens, index_topk 4 entries, the indexer leaves nothing out; it is run, and not trained" in printed
    )
    assert "parameters that the loss does not reach, kept as they are" in printed
    assert "one key and value head, which each tensor parallel rank has whole" in printed


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters(stage: int, tmp_path: Path) -> None:
    """In bf16: the base with adapters is what is exported, and peft loads the adapters."""
    run_file = _run_file(tmp_path, lora={"rank": 8})
    train(
        read_config(
            run_file, [f"deepspeed={{zero_optimization: {{stage: {stage}}}}}", "train.precision=bf16", "eval.every="]
        )
    )
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "run/export"))
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}
    assert {name.split(".", 2)[2] for name in changed if name.startswith("layers.1.attn.")} == {
        f"attn.{part}.weight" for part in ("wq_a", "wq_b", "wkv", "wo_b")
    }
    assert any(".experts." in name for name in changed)
    found = metrics(tmp_path)
    assert found[-1]["train/loss"] < found[0]["train/loss"]


@pytest.mark.parametrize("is_published", [True, False])
def test_weights_in_four_bits_are_exported_in_full_width(is_published: bool, tmp_path: Path) -> None:
    """After a step of nearly nothing they are the stored ones, by the published names or those of transformers."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra `quantize`)")
    lora = {"rank": 8, "quantize": "nf4"}
    run_file = _run_file(tmp_path, is_published=is_published, sizes={"hidden_size": 64, "q_lora_rank": 64}, lora=lora)
    train(read_config(run_file, ["optim.lr=1e-12", "train.for=1 steps", "eval.every="]))
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for name in ("model", "run/export")
    )
    assert all(torch.allclose(before[name], after[name], atol=1e-7, rtol=0) for name in before)


def test_a_config_of_transformers_is_exported_by_the_published_keys(tmp_path: Path) -> None:
    """vLLM's own class refuses the kinds of MLP layers that transformers names."""
    for name in ("compressed", "published"):
        (tmp_path / name).mkdir()
    sizes = {name: size for name, size in TINY_MODELS["deepseek_v4_sparse"].items() if name != "compress_rate_hca"}
    AutoConfig.for_model(**sizes).save_pretrained(tmp_path / "compressed")
    saved = json.loads((tmp_path / "compressed" / "config.json").read_text())
    served = served_config(saved, V4, [])
    assert not served.keys() & {"layer_types", "mlp_layer_types", "compress_rates"}
    assert (served["compress_ratios"], served["num_hash_layers"]) == ([0, 4, 128, 4], 1)
    assert served["topk_method"] == "noaux_tc"
    (tmp_path / "published" / "config.json").write_text(json.dumps(served))
    read, wanted = (AutoConfig.from_pretrained(tmp_path / name) for name in ("published", "compressed"))
    for key in ("layer_types", "mlp_layer_types", "compress_rates"):
        assert getattr(read, key) == getattr(wanted, key), key
    ropes = [each.rope_parameters["compress"] for each in (read, wanted)]
    assert ropes[0] == ropes[1]
    assert not ropes[0]["truncate"]


def test_tensors_in_fp32_are_listed_once(tmp_path: Path) -> None:
    """The list goes through all names, and is asked for each: V4-Flash has 34,000."""
    _run_file(tmp_path)
    source = hub_source(HubFolder(tmp_path / "model"), V4)
    assert "layers.1.attn.compressor.ape" in source.fp32_names
    assert source.fp32_names is source.fp32_names


def _plan(mesh: Mesh | None = None, changes: dict[str, Any] | None = None, **sections: Any) -> ModelPlan:
    tree = {
        "model": {"path": "none"},
        "data": {"train": "none.jsonl"},
        "train": {"for": "1 steps"},
        "output_dir": "out",
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    config = AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"] | (changes or {}))
    model = settings_of(RunConfig.model_validate(tree), mesh=mesh or Mesh(0, 1), model_json=config.to_dict())
    check(model, "sizes of the model", "type of the model", "attention of the model", "activations of the model")
    return plan_model(config, model.run)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"objective": {"name": "grpo"}}, "with objective grpo is not tested"),
        ({"model": {"resize_vocabulary": True}}, "with model.resize_vocabulary true is not tested"),
        ({"optim": {"name": "Muon"}}, "with optim.name Muon is not tested"),
        ({"train": {"precision": "fp16"}}, "with train.precision fp16 is not tested"),
        ({"train": {"tiled_mlp": True}}, "train.tiled_mlp true of model_type deepseek_v4 is not tested"),
        ({"model": {"attention": "eager"}}, "documents of a packed row would see each other"),
        ({"train": {"max_seq_len": 11}}, "max_seq_len 11 with a model whose layers compress up to 12 tokens"),
    ],
)
def test_refusals(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(FinetuneError, match=said):
        _plan(**sections)


def test_layers_that_choose_by_token_ids_are_not_balanced() -> None:
    router = _plan(router={"balance": 0.1, "bias_update": 0.1}).router
    assert router is not None
    assert (router.layers, router.balanced) == ((0, 1, 2, 3), (1, 2, 3))
    assert "but 1 of the layers choose by token ids, which neither changes" in router.lines()[0][1]
    with pytest.raises(FinetuneError, match="routers all choose experts by token ids"):
        _plan(changes={"num_hash_layers": 4}, router={"balance": 0.1})


def test_layouts_that_do_not_divide_its_groups_of_outputs() -> None:
    with pytest.raises(FinetuneError, match=r"parallel\.tp 4 does not divide the 2 groups of outputs"):
        _plan(Mesh(0, 4, tp=4))
    _plan(Mesh(0, 2, tp=2))


def test_its_positions_are_not_extended() -> None:
    with pytest.raises(FinetuneError, match=r"model\.context 256 is not tested with model_type deepseek_v4"):
        plan_context(AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"]).to_dict(), 256)


def test_what_transformers_has_no_class_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no class of model_type `deepseek_v4` for sequence classification"):
        read_hf_config(str(_folder(tmp_path)), task="sequence_classification")


def _predicting(folder: Path) -> Path:
    """A run file that trains the prediction layer of a model that is published with one."""
    run_file = _run_file(folder, mtp={"train": True}, train={"for": "2 steps"}, eval={"every": "2 steps"})
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    write_mtp_model("deepseek_v4_sparse", folder / "published", sizes={"vocab_size": vocabulary})
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / "published" / name, folder / "model" / name)
    return run_file


def test_its_prediction_layer_is_trained_and_exported(tmp_path: Path) -> None:
    """A second run begins with the export of the first and changes nothing, because its learning rate is nearly 0."""
    run_file = _predicting(tmp_path)
    train(read_config(run_file))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "run/export"))
    assert before.keys() == after.keys()
    same = {name for name in before if name.startswith("mtp.") and torch.equal(before[name], after[name])}
    assert same == {"mtp.0.ffn.gate.bias"}
    assert json.loads((tmp_path / "run/export/config.json").read_text())["num_nextn_predict_layers"] == 1
    second = tmp_path / "second"
    again = [f"model.path={tmp_path / 'run/export'}", f"output_dir={second}", "optim.lr=1e-12", "train.for=1 steps"]
    train(read_config(run_file, again))
    found = load_file(second / "export" / "model.safetensors")
    assert found.keys() == after.keys()
    assert all(torch.allclose(found[name].float(), after[name].float(), atol=1e-9, rtol=0) for name in after)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mtp.0.attn.compressor.ape", "only one prediction layer is supported, without compressed entries"),
        ("mtp.1.norm.weight", "only one prediction layer is supported"),
        ("", "has no tensor `mtp.0.e_proj.weight`"),
    ],
)
def test_prediction_layers_that_are_not_known(name: str, said: str, tmp_path: Path) -> None:
    run_file = _predicting(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    if name:
        tensors[name] = torch.ones(3)
    else:
        del tensors["mtp.0.e_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=said):
        train(read_config(run_file))


def test_a_prediction_layer_that_compresses(tmp_path: Path) -> None:
    run_file = _predicting(tmp_path)
    change_json(tmp_path / "model" / "config.json", {"compress_ratios": [0, 4, 128, 4, 4]})
    with pytest.raises(ModelError, match="compress_ratios has 4 for the prediction layer"):
        train(read_config(run_file))


def _folder(folder: Path, **changes: Any) -> Path:
    AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"]).save_pretrained(folder)
    change_json(folder / "config.json", changes)
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deepseek_v41"}, "deepseek_v41 is neither trained nor converted: .* Engram tables"),
        ({"compress_ratios": [0, 4, 7, 4]}, "compress_ratios is .*7.*, not one of 0, 4, 128 for each of 4 layers"),
        ({"compress_rates": {**RATES, "compressed_sparse_attention": 1}}, "not numbers above 1 for"),
        ({"compress_rates": {"heavily_compressed_attention": 12}}, "not numbers above 1 for"),
        ({"compress_rates": {**RATES, "other": 3}}, "not numbers above 1 for compressed_sparse_attention and heavily_"),
        ({"compress_rates": [4, 128]}, r"layers compress \[4, 128\] tokens"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0, not a whole number of at least 1"),
        ({"n_routed_experts": 0}, "n_routed_experts is 0, not a whole number of at least 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, and transformers computes .* only with 1"),
        (
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax', and transformers computes .* only with 'sqrtsoftplus'",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and transformers computes .* only with 0"),
        ({"index_topk": 0}, "index_topk is 0, not a whole number of at least 1"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0, not a number above 0"),
        ({"num_hash_layers": 2}, "num_hash_layers is 2, and by mlp_layer_types it is 1"),
        ({"sliding_window": 0}, "sliding_window is 0, not a whole number of at least 1"),
        ({"index_topk": None}, "it has no index_topk"),
        ({"qk_rope_head_dim": None, "partial_rotary_factor": None}, "it has no qk_rope_head_dim or partial_rotary_"),
        ({"compress_ratios": [[0], 4, 128, 4]}, r"compress_ratios is \[\[0\], 4, 128, 4\], not one of 0, 4, 128"),
        ({"compress_ratios": [0, 4.0, 128, 4]}, "compress_ratios is .*4.0, 128.*, not one of 0, 4, 128"),
        ({"compress_ratios": [4, 4, 4, 4]}, r"compress_ratios is \[4.*, and by layer_types it is \[0, 4, 128, 4\]"),
        ({"layer_types": ["sliding_attention"]}, "not one of sliding_attention, .* for each of 4 layers"),
        ({"compress_rate_csa": -4}, r"layers compress \[-4\] tokens into an entry, not numbers above 1"),
        ({"qk_rope_head_dim": 6}, "qk_rope_head_dim is 6, and by partial_rotary_factor it is 8"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, and transformers computes .* only with True"),
        ({"moe_intermediate_size": -4}, "moe_intermediate_size is -4, not a whole number of at least 1"),
        ({"sliding_window": [5]}, r"sliding_window is \[5\], not a whole number of at least 1"),
        ({"o_groups": 3}, "num_attention_heads 4 is no multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than n_routed_experts 8"),
        ({"hc_eps": -1.0}, "hc_eps is -1.0, not a number above 0"),
        (
            {"rope_parameters": {"main": {"rope_theta": 0}}},
            r"rope_parameters\.main\.rope_theta is 0, not a number above 0",
        ),
        ({"rope_parameters": {"type": "yarn"}}, "Missing required keys in .*'factor'"),
        ({"rope_parameters": {"rope_type": "x"}}, "rope_type is 'x'"),
        ({"hidden_act": "nope"}, "hidden_act is 'nope'"),
    ],
)
def test_configurations_that_are_not_known(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read_hf_config(str(_folder(tmp_path, **changes)))


def test_no_copy_is_made_of_v41(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _folder(
        tmp_path / "model", model_type="deepseek_v41", expert_dtype="fp4", quantization_config={"quant_method": "fp8"}
    )
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", "bf16"]) == 2
    assert "deepseek_v41 is neither trained nor converted" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tables_that_name_an_expert_that_there_is_not(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.ffn.gate.tid2eid"][3] = 8
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"`layers\.0\.ffn\.gate\.tid2eid` .* names experts 0 to 8, but a layer has 8"):
        train(read_config(run_file))


def test_tables_of_other_numbers(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"] + 0.5
    save_file(tensors, file)
    with pytest.raises(
        ModelError, match=r"of dtypes that are not for weights: `layers\.0\.ffn\.gate\.tid2eid` is torch\.float32"
    ):
        train(read_config(run_file))


def test_tables_of_another_vocabulary(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"][1:].clone()
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"1 of another shape: layers\.0\.ffn\.gate\.tid2eid: model \(128, 2\)"):
        train(read_config(run_file))


def test_published_names_stay_as_they_are() -> None:
    config = AutoConfig.for_model(**TINY_MODELS["deepseek_v4_sparse"])
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    names = [p.key for name, t in lm.state_dict().items() for p in hub_pieces(name, tuple(t.shape), V4)]
    assert [renamed(name, V4.published_renames) for name in names] == names
    assert {"embed.weight", "norm.weight", "head.weight", "hc_head_fn", "layers.1.attn.kv_norm.weight"} <= set(names)
    assert {"layers.1.attn.indexer.compressor.ape", "layers.0.ffn.gate.tid2eid", "layers.1.hc_ffn_base"} <= set(names)
