"""Runs of the text part of models of text and images: equal to runs of the text part alone, exported with the other
parts as they were, resumed, adapted, and refused.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, Gemma3ForConditionalGeneration

from ds_finetune import read_config, train
from ds_finetune.cli.main import main
from ds_finetune.errors import ModelError
from ds_finetune.export.load import load_exported
from ds_finetune.families.text_part import text_name
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.build.text_config import check_other_parts
from tests.composites import CONFIGS, composite_task, published_tensors
from tests.running import metrics, resume_on_two_ranks, start, torchrun

DEFAULT = ("gemma3", "mistral3", "qwen3_5_moe", "minimax_m3_vl")
"""Tied, not tied, with all experts of a layer in one published tensor, and with other names and shapes than the
model's.
"""
_OMNI = ("chameleon", "idefics", "qwen2_5_omni", "qwen3_omni_moe")
"""Multimodal types whose config.json has no section `text_config`."""
_OTHERS = [kind for kind in CONFIGS if kind != "minimax_m3_vl"]
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in CONFIGS if kind not in DEFAULT]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits  # type: ignore[no-any-return]


def _composite(folder: Path) -> Any:
    return AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", [*DEFAULT, *SLOW])
def test_a_text_part_trains_as_the_text_model_alone(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tied or not, and with each spelling of published names."""
    run_file = composite_task(kind, tmp_path, export={"verify": True, "max_shard_size": "50KB"})
    train(read_config(run_file))
    model_type = CONFIGS[kind].get("model_type", kind)
    assert f"model_type {model_type}: text part trained as " in capsys.readouterr().out
    alone = [f"model.path={tmp_path / 'text'}", f"output_dir={tmp_path / 'alone' / 'run'}", "export.verify=false"]
    train(read_config(run_file, alone))
    of_text = _tensors(tmp_path / "alone" / "run" / "export")
    assert [row["train/loss"] for row in metrics(tmp_path)] == [
        row["train/loss"] for row in metrics(tmp_path / "alone")
    ]

    base, written = _tensors(tmp_path / "model"), _tensors(tmp_path / "run" / "export")
    trained = published_tensors(kind, of_text)
    assert written.keys() == base.keys()
    assert trained.keys() < base.keys()
    for key, value in written.items():
        wanted = trained.get(key, base[key])
        assert value.dtype == wanted.dtype, key
        assert torch.equal(value, wanted), key
    config, published = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "run" / "export", tmp_path / "model")
    )
    assert config == {**published, "dtype": "float32"}
    assert (tmp_path / "run" / "export" / "verification.json").is_file()
    assert not (tmp_path / "run" / "export" / "UNVERIFIED").exists()
    loaded = load_exported(tmp_path / "run" / "export")
    assert type(loaded) is type(_composite(tmp_path / "model"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    # The tower in another dtype than the run's.
    run_file = composite_task("kimi_k25", folder, lora={"rank": 8, "alpha": 16}, optim={"lr": 0.02})
    file = folder / "model" / "model.safetensors"
    tensors = {k: v.bfloat16() if k.startswith("vision_tower.") else v for k, v in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    train(read_config(run_file))
    return folder


def test_adapters_have_the_names_of_the_composite_class(adapted: Path, tmp_path: Path) -> None:
    """Attention and routed experts: peft on the composite class, the merged export, and the adapter merged later."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = _composite(adapted / "model")
    before = _logits(base)
    merged = _logits(_composite(adapted / "run" / "export"))
    assert (merged - before).abs().max() > 1e-2, "the adapter does nothing"
    together = _logits(peft.PeftModel.from_pretrained(base, adapted / "run" / "adapter"))
    assert torch.allclose(merged, together, atol=1e-5, rtol=0)
    adapter, model = str(adapted / "run" / "adapter"), str(adapted / "model")
    assert main(["export", adapter, str(tmp_path / "out"), "--base", model, "--dtype", "fp32"]) == 0
    theirs, base_tensors = _tensors(adapted / "run" / "export"), _tensors(adapted / "model")
    for key, value in _tensors(tmp_path / "out").items():
        assert torch.allclose(value.float(), theirs[key].float(), atol=1e-6, rtol=0), key
        if not key.startswith("language_model."):
            assert value.dtype == base_tensors[key].dtype
            assert torch.equal(value, base_tensors[key]), key


@pytest.mark.parametrize("kind", ["minimax_m3_vl", *(pytest.param(k, marks=pytest.mark.slow) for k in _OTHERS)])
def test_adapters_of_text_parts_fit_the_composite_class(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    train(read_config(composite_task(kind, tmp_path, lora={"rank": 8, "alpha": 16}, optim={"lr": 0.02})))
    base = _composite(tmp_path / "model")
    before, merged = _logits(base), _logits(_composite(tmp_path / "run" / "export"))
    assert (merged - before).abs().max() > 1e-2, "the adapter does nothing"
    published, written = _tensors(tmp_path / "model"), _tensors(tmp_path / "run" / "export")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[key], published[key]) for key in written if text_name(key) is None)
    in_peft = _logits(peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter"))
    assert torch.allclose(merged, in_peft, atol=1e-5, rtol=0)


def test_a_folder_keeps_the_tensors_that_transformers_saved(tmp_path: Path) -> None:
    """Experts in one tensor instead of one each, and a prediction layer that transformers ignores: trained on one rank,
    resumed on two with ZeRO-3.
    """
    run_file, folder = composite_task("minimax_m3_vl", tmp_path, export={"verify": True}), tmp_path / "model"
    _composite(folder).save_pretrained(folder, save_original_format=False)
    base = load_file(folder / "model.safetensors")
    base["model.language_model.mtp.layers.0.norm.weight"] = torch.rand(32)
    save_file(base, folder / "model.safetensors", metadata={"format": "pt"})
    resume_on_two_ranks(run_file, printed=tmp_path / "printed")
    assert "verified: " in (tmp_path / "printed").read_text()
    written = _tensors(tmp_path / "run" / "export")
    assert written.keys() == base.keys()
    kept = {key for key in base if torch.equal(base[key], written[key])}
    trained = ("self_attn.q_proj", "experts.gate_up_proj", "experts.down_proj", "mlp.gate_up_proj", "gate.weight")
    for part in (*trained, "shared_experts.gate_up_proj"):
        assert not any(part in key for key in kept if text_name(key)), part
    assert kept >= {key for key in base if text_name(key) is None or ".mtp." in key or ".indexer." in key}


def test_a_package_that_other_parts_need_and_that_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As towers of timm do in transformers, without timm: their text part trains all the same."""
    composite_task("gemma3", tmp_path)

    def needs_timm(*_: Any, **__: Any) -> None:
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr(Gemma3ForConditionalGeneration, "__init__", needs_timm)
    (note,) = check_other_parts(tmp_path / "model")
    assert note.endswith("are not checked: TimmWrapperModel requires the timm library")


@pytest.mark.parametrize(
    "kind", ["gemma3", *(pytest.param(k, marks=pytest.mark.slow) for k in CONFIGS if k != "gemma3")]
)
def test_other_parts_that_are_incomplete_are_refused(kind: str, tmp_path: Path) -> None:
    """Two tensors of the tower are missing, and one has another shape; nothing is trained."""
    run_file, folder = composite_task(kind, tmp_path), tmp_path / "model"
    tensors = _tensors(folder)
    others = sorted(key for key in tensors if text_name(key) is None)
    del tensors[others[0]], tensors[others[-1]]
    tensors[others[1]] = tensors[others[1]].new_zeros(3, 3, 3)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"do not fit \w+ForConditionalGeneration: 2 missing: .*; 1 of another"
    ) as caught:
        train(read_config(run_file))
    for key in (others[0], others[1], others[-1]):
        assert key.split(".")[-1] in caught.value.message
    assert "checkpoint (3, 3, 3)" in caught.value.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_unknown_tensors_of_other_parts_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that transformers renames when it loads the folder, in an export that is verified."""
    run_file, file = composite_task("gemma3", tmp_path, export={"verify": True}), tmp_path / "model/model.safetensors"
    tensors = {**load_file(file), "vision_tower.unknown.weight": torch.rand(5)}
    save_file(tensors, file, metadata={"format": "pt"})
    train(read_config(run_file))
    assert "1 tensors that Gemma3ForConditionalGeneration does not know" in capsys.readouterr().out
    written = _tensors(tmp_path / "run" / "export")
    assert torch.equal(written["vision_tower.unknown.weight"], tensors["vision_tower.unknown.weight"])
    assert not (tmp_path / "run" / "export" / "UNVERIFIED").exists()


@pytest.mark.parametrize("name", ["export", "adapter"])
def test_the_example_of_the_model_card_generates(name: str, adapted: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    folder, printed = adapted / "run" / name, list[str]()
    found = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert found is not None
    exec(found[1].replace("PATH_OR_ID_OF_THIS_FOLDER", str(folder)), {"print": printed.append})
    assert "TEXT" in printed[0]


def test_a_byte_of_another_part_that_differs_is_found(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the base after the export, so that what was written is unchanged on the disk."""
    base = shutil.copytree(adapted / "model", tmp_path / "model")
    assert main(["export", str(adapted / "run" / "adapter"), str(tmp_path / "out"), "--base", str(base)]) == 0
    tensors = load_file(base / "model.safetensors")
    tensors["mm_projector.proj.0.weight"].view(-1)[7] += 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["export", "--check", str(tmp_path / "out"), "--base", str(base)]) != 0
    printed = capsys.readouterr()
    assert "of the parts other than text" in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "gguf"], "models of type `kimi_k25` cannot be exported to GGUF"),
        (["--format", "onnx"], "models of type `kimi_k25` cannot be exported to ONNX"),
        (["--format", "compressed-tensors"], "models of type `kimi_k25` cannot be exported to"),
        (["--dtype", "fp8"], "cannot be exported in FP8"),
    ],
)
def test_formats_that_want_a_language_model_alone(
    arguments: list[str], said: str, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(adapted / "run" / "export"), str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_of_servers_and_a_checkpoint_without_its_base(
    adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(adapted / "run"), str(tmp_path / "out"), "--format", "adapter"]) == 2
    assert "`kimi_k25` combines text with images or sound" in capsys.readouterr().err
    run_file = composite_task("mistral3", tmp_path / "run")
    train(read_config(run_file, ["export.at_end=false", "train.for=1 steps", "checkpoint.every=1 steps"]))
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    assert main(["export", str(tmp_path / "run" / "run"), str(tmp_path / "out")]) == 2
    assert "the folder with its other parts is not known" in capsys.readouterr().err


def test_new_tokens_are_rows_of_the_text_part(tmp_path: Path) -> None:
    """Tied embeddings of a composite model, resumed on two ranks with ZeRO-3."""
    model = {"resize_vocabulary": True, "weights": "load", "tokenizer": str(tmp_path / "tokenizer")}
    run_file = composite_task("gemma3", tmp_path, vocab_size=96, model=model, export={"verify": True})
    shutil.copytree(tmp_path / "text", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "config.json").unlink()
    resume_on_two_ranks(run_file, printed=tmp_path / "printed")
    config = AutoConfig.from_pretrained(tmp_path / "run" / "export")
    grown = _composite(tmp_path / "run" / "export")
    assert config.text_config.vocab_size == len(grown.get_input_embeddings().weight) == 101
    assert grown.lm_head.weight is grown.get_input_embeddings().weight
    assert "verified: " in (tmp_path / "printed").read_text()


def test_a_text_part_has_the_layouts_of_its_row(tmp_path: Path) -> None:
    """Gemma 3 with tensor parallelism: the losses of one rank, and an export of the whole."""
    run_file = composite_task("gemma3", tmp_path, export={"verify": True})
    train(read_config(run_file, [f"output_dir={tmp_path / 'alone' / 'run'}", "export.verify=false"]))
    done = start(torchrun("ds_finetune/train.py", str(run_file), "parallel.tp=2"))
    assert done.returncode == 0, done.stdout + done.stderr
    losses, wanted = ([row["train/loss"] for row in metrics(folder)] for folder in (tmp_path, tmp_path / "alone"))
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert "tp 2" in done.stdout
    assert "verified: " in done.stdout


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model_type": "qwen2_vl", "text_config": {}}, "has no causal LM of its text part `qwen2_vl_text`"),
        ({"model_type": "qwen3_vl_moe", "text_config": {}}, "has no causal LM of its text part `qwen3_vl_moe_text`"),
        (
            {"model_type": "glm5_next", "text_config": {"qk_rope_head_dim": 0, "head_dim": 0}},
            "has no causal LM of its text part `glm5_next_text`",
        ),
        ({"model_type": "gemma3"}, "its text part `gemma3_text` cannot be exported"),
        (
            {**CONFIGS["mistral3"], "quantization_config": {"quant_method": "fp8"}},
            "its quantization_config is not supported",
        ),
    ],
    ids=["class", "moe", "no_rotation", "section", "quantised"],
)
def test_text_parts_that_are_not_trained(tree: dict[str, Any], said: str, tmp_path: Path) -> None:
    kind = tree.get("model_type", "mistral3")
    (tmp_path / "config.json").write_text(json.dumps({**tree, "model_type": kind}))
    with pytest.raises(ModelError, match=f"model_type `{kind}`") as caught:
        read_hf_config(str(tmp_path))
    assert said in caught.value.message


def test_an_unknown_type_of_a_text_part_is_named_without_all_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral3", "text_config": {"model_type": "foo_text"}}')
    with pytest.raises(ModelError) as caught:
        read_hf_config(str(tmp_path))
    assert re.fullmatch(
        rf"{tmp_path}/config\.json: Unrecognized model \w+( for subconfig)?: foo_text", caught.value.message
    )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, ": it combines text with images or sound, and its config.json has no text_config") for kind in _OMNI),
        ("t5", ""),
        ("mistral4", ""),
    ],
)
def test_what_is_not_a_causal_model_is_called_multimodal_where_it_is(kind: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError) as caught:
        read_hf_config(str(tmp_path))
    assert caught.value.message.endswith(f"model_type `{kind}` is not a causal LM{reason}")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.weights=random", "an export would lack the weights of the parts for other media"),
        ("objective={name: classification, num_labels: 2}", "is trained as a language model only"),
        ("export.formats=[safetensors,gguf]", "cannot be exported to GGUF"),
        ("mtp={train: true}", "has model_type internvl, with which mtp.train is not tested"),
        (
            "lora={rank: 4, modules_to_save: [lm_head]}",
            "lora.modules_to_save is not tested with .* combines text with images or sound",
        ),
        ("lora={rank: 4, start: folder}", "lora.start is not tested with .* combines text with images or sound"),
    ],
)
def test_settings_that_composite_models_do_not_have(setting: str, said: str, tmp_path: Path) -> None:
    run_file = composite_task("internvl", tmp_path)
    with pytest.raises(Exception, match=said):
        train(read_config(run_file, [setting]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.language_model.x.weight", None),
        ("mtp.layers.0.input_layernorm.weight", None),
    ],
)
def test_names_of_text_parts(name: str, expected: str | None) -> None:
    assert text_name(name) == expected
