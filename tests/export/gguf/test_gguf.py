"""A GGUF has the tensors, settings and tokenizer of its source; what llama.cpp does not compute is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import ds_finetune
from ds_finetune.cli.main import main
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError, DataError, ExportError, OutputError
from ds_finetune.export.load import load_exported
from ds_finetune.serving.serve import choose_engine
from tests.export.gguf.models import MODELS, TEMPLATE, VOCAB, save, tokenizer
from tests.json_files import change_json
from tests.running import files_of_at_most, tiny_task

gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")

from ds_finetune.export.gguf import llama_tokenizer  # noqa: E402 - it needs gguf

LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
"""Names of transformers for tensors that are the same in both; the others are put together below."""
KINDS = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127}
"""Largest rounding, relative to the largest number of a block."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a GGUF in fp32, by its name there."""
    reader = gguf.GGUFReader(next(folder.glob("*.gguf")))
    return {
        each.name: torch.from_numpy(np.array(gguf.dequantize(each.data, each.tensor_type), dtype=np.float32)).reshape(
            each.shape.tolist()[::-1]
        )
        for each in reader.tensors
    }


def settings_of(folder: Path) -> dict[str, Any]:
    """Every setting of a GGUF."""
    return {name: field.contents() for name, field in gguf.GGUFReader(next(folder.glob("*.gguf"))).fields.items()}


def state_of(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF as transformers' `model` has them."""
    config, stored, state = model.config, tensors_of(folder), {}
    for name in [*stored]:
        if name.startswith("blk."):
            _, number, part, *end = name.split(".")
            if part in LAYER:
                its = f"model.layers.{number}.{LAYER[part]}" + "".join(f".{each}" for each in end)
                its = re.sub(r"(sinks|correction_bias)\.\w+$", r"\1", its)
                if config.model_type == "gpt_oss":
                    its = its.replace("mlp.gate.", "mlp.router.")
                state[its] = stored.pop(name)
    for number in range(config.num_hidden_layers):
        state |= _joined(f"model.layers.{number}", f"blk.{number}", stored, config.model_type)
    state |= {"model.embed_tokens.weight": stored.pop("token_embd.weight")}
    state |= {"model.norm.weight": stored.pop("output_norm.weight")}
    state |= {"lm_head.weight": stored.pop("output.weight", state["model.embed_tokens.weight"])}
    if config.model_type in ("llama", "mixtral"):
        for key, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            for name in [each for each in state if f".{key}_proj." in each]:
                rows = state[name].reshape(heads, -1, 2, *state[name].shape[1:])
                state[name] = rows.transpose(1, 2).reshape(state[name].shape)
    stored.pop("rope_freqs.weight", None)
    assert not stored
    return state


def _joined(layer: str, block: str, stored: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    state = {}
    if f"{block}.attn_k_b.weight" in stored:
        keys, values = stored.pop(f"{block}.attn_k_b.weight"), stored.pop(f"{block}.attn_v_b.weight")
        state[f"{layer}.self_attn.kv_b_proj.weight"] = torch.cat([keys.mT, values], 1).flatten(0, 1)
    for end in ("weight", "bias"):
        if f"{block}.ffn_gate_exps.{end}" not in stored:
            continue
        gate, up, down = (stored.pop(f"{block}.ffn_{part}_exps.{end}") for part in ("gate", "up", "down"))
        tail = "_bias" if end == "bias" else ""
        if model_type == "gpt_oss":
            both = torch.stack([gate, up], 2).flatten(1, 2)
            both, down = (both, down) if tail else (both.mT, down.mT)
        else:
            both = torch.cat([gate, up], 1)
        state |= {f"{layer}.mlp.experts.gate_up_proj{tail}": both, f"{layer}.mlp.experts.down_proj{tail}": down}
    return state


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "f32") for name in MODELS),
        *(("deepseek_v3", kind) for kind in ("f16", "bf16", "q8_0")),
        ("gpt_oss", "q8_0"),
    ],
)
def test_every_tensor_is_that_of_the_source(name: str, kind: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "hub")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf", dtype=kind)
    state, source = state_of(tmp_path / "out", model), model.state_dict()
    assert state.keys() == source.keys()
    for key, values in source.items():
        # Blocks run along rows of the GGUF, which are columns where it is transposed.
        limit = KINDS[kind] * values.abs().max().item() if kind == "q8_0" else KINDS[kind] * values.abs()
        beyond = (state[key] - values).abs() > limit + (kind != "f32") * 1e-7
        assert not beyond.any(), (key, state[key][beyond], values[beyond])
        if values.ndim == 1 or "mlp.gate." in key:
            assert torch.equal(state[key], values), key


def test_settings_of_a_model_with_latent_attention(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path / "hub")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf", dtype="f32")
    settings = settings_of(tmp_path / "out")
    expected = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 3,
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.q_lora_rank": 24,
        "deepseek2.attention.kv_lora_rank": 16,
        "deepseek2.attention.key_length": 24,
        "deepseek2.attention.key_length_mla": 24,
        "deepseek2.attention.value_length_mla": 12,
        "deepseek2.leading_dense_block_count": 1,
        "deepseek2.expert_group_count": 4,
        "deepseek2.expert_gating_func": 2,
        "deepseek2.rope.scaling.type": "yarn",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    assert {name: settings[name] for name in expected} == expected
    assert settings["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707)
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "hub").get_vocab()
    tokens, types = settings["tokenizer.ggml.tokens"], settings["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == VOCAB
    assert {tokens[number] for number in vocabulary.values()} == vocabulary.keys()
    assert [types[number] for number in (0, 1, 2, VOCAB - 1)] == [3, 3, 1, 5]
    assert tokens[-1] == f"[PAD{VOCAB - 1}]"


def test_scores_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    save("llama", tmp_path / "hub")
    vocabulary = {
        text: number for number, text in enumerate(("<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "▁a", "▁ab"))
    }
    core = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.add_tokens(["▁new▁"])
    made.save_pretrained(tmp_path / "hub")
    change_json(tmp_path / "hub" / "tokenizer_config.json", {"add_bos_token": True})
    change_json(tmp_path / "hub" / "generation_config.json", {"eos_token_id": [2, 5, 6]})
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf")
    settings = settings_of(tmp_path / "out")
    assert settings["tokenizer.ggml.model"] == "llama"
    assert settings["tokenizer.ggml.tokens"][:10] == [*vocabulary, " new "]
    assert settings["tokenizer.ggml.token_type"][:10] == [2, 3, 3, 6, 1, 1, 1, 1, 1, 4]
    assert settings["tokenizer.ggml.scores"][7:9] == [0, -1]
    assert settings["tokenizer.ggml.add_space_prefix"] is True
    assert settings["tokenizer.ggml.add_bos_token"] is True
    assert [settings[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [2, 5, 6]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("deepseek-llm", "deepseek-llm"),
        ("deepseek-coder", "deepseek-coder"),
        ("deepseek-r1-distill-qwen", "deepseek-r1-qwen"),
    ],
)
def test_published_tokenizers_are_recognised(name: str, rule: str, shared_data: Path, tmp_path: Path) -> None:
    """As they are, and as transformers saves them again, which may add no BOS afterwards."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / name))
    assert llama_tokenizer.splitting(tokenizer) == rule
    AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name).save_pretrained(tmp_path)
    again = llama_tokenizer.splitting(load_tokenizer(str(tmp_path)))
    # llama.cpp splits by the same rules under both names.
    assert again == ("qwen2" if rule == "deepseek-r1-qwen" else rule)


def test_a_changed_byte_is_found_and_its_tensor_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama", tmp_path / "hub")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "hub"), str(out), "--format", "gguf", "--quantise", "q8_0"]) == 0
    said = capsys.readouterr().out
    assert (
        "are kept in f16, since their rows are no multiple of 32 elements, e.g. blk.0.ffn_down.weight with 48" in said
    )
    begin, *_, end = (out / "Modelfile").read_text().splitlines()
    assert (begin, end) == ("FROM ./out.gguf", 'PARAMETER stop "</s>"')
    assert sorted(file.name for file in out.iterdir()) == ["Modelfile", "out.gguf", "verification.json"]
    assert main(["export", "--check", str(out)]) == 0
    data = bytearray((out / "out.gguf").read_bytes())
    data[-1000] ^= 1
    (out / "out.gguf").write_bytes(data)
    assert main(["export", "--check", str(out)]) == 1
    assert "out.gguf holds other bytes than were written" in capsys.readouterr().err
    assert "bytes 0 to" in (out / "UNVERIFIED").read_text()
    assert "blk.2." in (out / "UNVERIFIED").read_text()
    (out / "out.gguf").write_bytes(data[:40])
    assert main(["export", "--check", str(out)]) == 1
    with pytest.raises(ExportError, match=r"its format GGUF is for llama\.cpp and Ollama"):
        load_exported(out)
    with pytest.raises(ExportError, match="this program cannot run"):
        choose_engine("auto", out)


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu"),
    "window": ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
    "groups": ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method is group_limited_greedy"),
    "scales": (
        "deepseek_v3",
        {"rope_parameters": {"mscale": 1.0}},
        "ratio of YaRN's mscale and mscale_all_dim is None",
    ),
    "null": ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is null in config.json"),
    "limit": ("gpt_oss", {"swiglu_limit": 1.0}, "swiglu_limit is 1.0"),
    "unrounded ramp": ("gpt_oss", {"rope_parameters": {"truncate": False}}, "YaRN's truncate is False"),
    "rope": ("qwen3", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type is dynamic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_llama_cpp_does_not_compute(name: str, tmp_path: Path) -> None:
    made, changes, told = REFUSED[name]
    save(made, tmp_path / "hub")
    rope = changes.get("rope_parameters")
    if isinstance(rope, dict):
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
        changes = {"rope_parameters": yarn | rope}
    change_json(tmp_path / "hub" / "config.json", changes)
    with pytest.raises(ExportError, match=told):
        ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["hub"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    hub, out = tmp_path / "hub", tmp_path / "out"
    save("llama", hub)

    def refused(error: type[Exception], told: str, **options: str) -> None:
        with pytest.raises(error, match=told):
            ds_finetune.export_model(hub, out, format="gguf", **options)
        assert [each.name for each in tmp_path.iterdir()] == ["hub"]

    refused(ExportError, r"--format gguf does not support --dtype fp16", dtype="fp16")
    refused(ConfigError, "--format gguf does not support --dtype q4_k_m\n  hint: the library gguf", dtype="q4_k_m")
    refused(ConfigError, "--max-shard-size 1GB is not valid with --format gguf", max_shard_size="1GB")
    with files_of_at_most(20_000):
        refused(OutputError, "cannot be written: File too large")
    tensors = load_file(hub / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e6
    save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})
    refused(ExportError, r"`model\.layers\.1\.mlp\.up_proj\.weight` holds NaN or infinity as float16", dtype="f16")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})
    refused(ExportError, "holds NaN or infinity in the source")
    tree = json.loads((hub / "tokenizer.json").read_text())
    tree["pre_tokenizer"] = {"type": "Whitespace"}
    (hub / "tokenizer.json").write_text(json.dumps(tree))
    refused(
        ExportError, "no rules of llama.cpp are known to split text as the tokenizer .*BPE after Whitespace; sha256"
    )
    (hub / "tokenizer.json").unlink()
    refused(DataError, "no tokenizer in")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{% if a is le 2 %}{{ a | sum // 2 }}{% endif %}",
            "the filter `sum`, the test `le`, `//`, which llama.cpp does not support",
        ),
        ("{% if %}", "a mistake in line 1 \\(Expected an expression"),
    ],
)
def test_a_chat_template_that_llama_cpp_cannot_compute(tmp_path: Path, text: str, said: str) -> None:
    save("llama", tmp_path / "hub")
    (tmp_path / "hub" / "chat_template.jinja").write_text(text)
    with pytest.raises(ExportError, match=f"the chat template `default` has {said}"):
        ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf")
    assert [each.name for each in tmp_path.iterdir()] == ["hub"]


def test_published_chat_templates_are_not_refused(shared_data: Path) -> None:
    texts = [file.read_text() for file in (shared_data / "tokenizers" / "chat_templates").iterdir()]
    texts = [json.loads(text).get("chat_template", "") if text.startswith("{\n") else text for text in texts]
    assert sum(map(bool, texts)) >= 7
    for text in [
        *texts,
        "{%- generation -%}{{ messages | length }}{%- endgeneration -%}{% for a in b %}{% break %}{% endfor %}",
    ]:
        llama_tokenizer.check_template(
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=text)
        )


def test_a_run_is_refused_before_its_first_step_and_exports_at_its_end(tmp_path: Path) -> None:
    run_file = tiny_task(tmp_path, export={"formats": ["safetensors", "gguf"]})
    with pytest.raises(
        ExportError, match=r"no rules of llama\.cpp are known to split text as the tokenizer .*WordLevel"
    ):
        ds_finetune.train(run_file)
    tokenizer().save_pretrained(tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1})
    report = ds_finetune.train(run_file)
    assert [folder.name for folder in report.exports] == ["export", "export-gguf"]
    plain = AutoModelForCausalLM.from_pretrained(report.exports[0])
    stored = state_of(report.exports[1], plain)
    for key, values in plain.float().state_dict().items():
        assert torch.equal(stored[key], values.bfloat16().float()) or values.ndim == 1 or "gate.weight" in key, key
    assert main(["export", "--check", str(report.exports[1])]) == 0
    pytest.importorskip("onnxruntime")
    quantised = ds_finetune.export_model(report.exports[0].parent, tmp_path / "int8", format="onnx", dtype="int8")
    assert re.search(r"int8: loss [\d.]+ before .* on \d+ tokens of 4 rows of the run;", quantised.notes[-2])


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_source_that_failed_verification_is_said(
    is_marked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama", tmp_path / "hub")
    if is_marked:
        (tmp_path / "hub" / "UNVERIFIED").write_text("the tokenizer gives other ids than the run\n")
    ds_finetune.export_model(tmp_path / "hub", tmp_path / "out", format="gguf")
    assert ("is marked UNVERIFIED" in " ".join(capsys.readouterr().out.split())) is is_marked
