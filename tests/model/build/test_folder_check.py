"""A model folder that would hang or exhaust a program, or show it files of this machine: one clear error, wherever it
is read.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.cli.main import main
from ds_finetune.errors import ModelError
from ds_finetune.export.safetensors_folder import TOKENIZER_FILES
from ds_finetune.model.build.hub_folder import HubFolder, check_folder, copy_model_file
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.plan.config_json import MAX_LAYERS, read_config_json
from tests.conftest import ROOT
from tests.model.fp8_folder import V3, in_fp8, master, publish
from tests.model.tiny import CONFIGS

SHARD = "model-00002-of-000003.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is read everywhere, with the record of an export."""
    root = tmp_path_factory.mktemp("published")
    base = publish(root / "base", in_fp8(master()))
    assert main(["export", "--no-verify", str(base), str(root / "out"), "--max-shard-size", "200KB"]) == 0
    (root / "secret").write_text("{{ messages }}")
    return root


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def _pipe(folder: Path) -> None:
    file = _shard(folder)
    file.unlink()
    os.mkfifo(file)


def _layers(number: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": number}))

    return change


def _header(folder: Path) -> None:
    """600 MB that claim to be a header, of which the disk holds eight bytes."""
    with _shard(folder).open("r+b") as file:
        file.write((600_000_000).to_bytes(8, "little"))
        file.truncate(600_000_100)


def _linked(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "secret")

    return change


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (_pipe, "which is no regular file but a pipe, socket or device"),
    "layers": (_layers(10**9), f"num_hidden_layers is 1000000000, not a number from 1 to {MAX_LAYERS}"),
    "a header": (_header, "its header has 600,000,000 bytes, more than the 100,000,000 that safetensors allows"),
    "a link": (_linked("chat_template.jinja"), "secret, outside its folder"),
    "a linked vocabulary": (_linked("merges.txt"), "merges.txt is a link to "),
    "a linked configuration": (_linked("generation_config.json"), "generation_config.json is a link to "),
}


def _train(folder: Path) -> int:
    """What a run reads of a model first: its config and the headers of its weights."""
    read_hf_config(str(folder))
    HubFolder(folder)
    return 0


WAYS: dict[str, Callable[[Path], int]] = {
    "train": _train,
    "export": lambda folder: main(["export", "--no-verify", str(folder), str(folder.parent / "new")]),
    "base": lambda folder: main(
        ["export", "--no-verify", str(folder.parent / "base"), str(folder.parent / "new"), "--base", str(folder)]
    ),
    "check": lambda folder: main(["export", "--check", str(folder)]),
    "ask": lambda folder: main(["ask", str(folder), "hello"]),
    "serve": lambda folder: main(["serve", str(folder), "--engine", "transformers", "--ready-seconds", "1"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_one_clear_error(
    damage: str, way: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(published, tmp_path / "place"))
    change, said = DAMAGE[damage]
    change(root / "out")
    try:
        code, printed = WAYS[way](root / "out"), capsys.readouterr().err
    except ModelError as refused:
        code, printed = refused.exit_code, f"error: {refused}"
    assert code == 2, printed
    assert said in printed
    assert printed.count("error:") == printed.count("hint:") == 1
    assert not (root / "new").exists()


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "61", 1001])
def test_counts_of_layers(number: object, tmp_path: Path) -> None:
    for config in ({"num_hidden_layers": number}, {"text_config": {"num_hidden_layers": number}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=r"num_hidden_layers is .*, not a number from 1 to 1000"):
            check_folder(tmp_path)
    for good in (
        V3,
        {"num_hidden_layers": 1000},
        {"num_hidden_layers": None},
        [],
        {"text_config": {"num_hidden_layers": 3}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(good))
        check_folder(tmp_path)


@pytest.mark.parametrize("size", [0, -4096, 60.5, "60", True])
def test_sizes_that_no_model_has(size: object, tmp_path: Path) -> None:
    for key in ("hidden_size", "vocab_size", "num_attention_heads", "head_dim", "kv_lora_rank"):
        (tmp_path / "config.json").write_text(json.dumps(V3 | {key: size}))
        with pytest.raises(ModelError, match=rf"{key} is .*, not a whole number of at least 1"):
            check_folder(tmp_path)


def test_a_config_that_transformers_fails_on_is_named(tmp_path: Path) -> None:
    tree = {key: value for key, value in CONFIGS["exaone4"].items() if key != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(tree | {"model_type": "exaone4", "sliding_window": None}))
    with pytest.raises(ModelError, match=r"config\.json cannot be read: "):
        read_hf_config(str(tmp_path))


OTHER_ROUTERS = [
    ("deepseek_v3", "scoring_func", "softmax", "'sigmoid'"),
    ("deepseek_v3", "topk_method", "greedy", "'noaux_tc'"),
    ("deepseek_v3", "moe_layer_freq", 2, "1"),
    ("deepseek_v2", "scoring_func", "sigmoid", "'softmax'"),
    ("deepseek_v2", "norm_topk_prob", True, "False"),
    ("deepseek_v2", "topk_method", "noaux_tc", "'greedy' or 'group_limited_greedy'"),
    ("deepseek_v2", "topk_method", None, "'greedy' or 'group_limited_greedy'"),
]


@pytest.mark.parametrize(("kind", "key", "value", "known"), OTHER_ROUTERS)
def test_routers_that_transformers_does_not_compute_are_refused(
    kind: str, key: str, value: object, known: str, tmp_path: Path
) -> None:
    """transformers ignores the key, so that the logits are the same, or fails at the first forward pass."""
    tree = CONFIGS[kind] | {"model_type": kind}
    logits = []
    for changes in ({}, {key: value}):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree | changes)).eval()
        with suppress(UnboundLocalError):
            logits.append(model(torch.arange(3, 20)[None]).logits)
    assert all(torch.equal(logits[0], other) for other in logits)
    (tmp_path / "config.json").write_text(json.dumps(tree))
    check_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tree | {key: value}))
    with pytest.raises(
        ModelError, match=f"{key} is {value!r}, and transformers computes model_type {kind} only with {known}"
    ) as error:
        check_folder(tmp_path)
    assert error.value.hint == "train a model with a value that transformers computes"
    if value is not None:
        other = {} if (kind, key) == ("deepseek_v2", "topk_method") else {key: None}
        (tmp_path / "config.json").write_text(json.dumps(tree | other))
        check_folder(tmp_path)


def test_heads_share_keys_and_values_evenly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, "num_key_value_heads": 8}))
    with pytest.raises(ModelError, match="num_attention_heads 12 is no multiple of num_key_value_heads 8"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"model_type": "llama", "head_dim": 13},
            "head_dim 13 is an odd number, but rotary embeddings rotate pairs",
        ),
        (
            {"model_type": "qwen2", "hidden_size": 52, "num_attention_heads": 4},
            "hidden_size / num_attention_heads 13 is an odd number",
        ),
        (
            {"model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 7},
            "qk_rope_head_dim 7 is an odd number",
        ),
        ({"model_type": "llama", "head_dim": 12}, ""),
        ({"model_type": "glm4_moe", "head_dim": 13, "partial_rotary_factor": 0.5}, ""),
        ({"model_type": "glm4_moe", "head_dim": 13, "rope_parameters": {"partial_rotary_factor": 0.5}}, ""),
        ({"model_type": "bert", "hidden_size": 39, "num_attention_heads": 3}, ""),
        ({"model_type": "of_another_kind", "head_dim": 13}, ""),
    ],
)
def test_heads_that_cannot_be_rotated_are_refused_by_train_and_plan(
    tree: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tree))
    for read in (check_folder, lambda folder: read_config_json(str(folder))):
        with pytest.raises(ModelError, match=re.escape(said)) if said else nullcontext():
            read(tmp_path)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_no_link_out_of_the_folder_is_copied(name: str, tmp_path: Path) -> None:
    """Neither by the check before the folder is read, nor where the link is made after it."""
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "model"
    folder.mkdir()
    for target in ("../secret", "via"):
        (folder / "via").unlink(missing_ok=True)
        (folder / "via").symlink_to("../secret")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(ModelError, match=rf"{name} is a link to .*secret, outside its folder"):
            check_folder(folder)
        with pytest.raises(ModelError, match=rf"{name} is a link to .*secret, outside its folder"):
            copy_model_file(folder / name, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()


def test_weights_may_be_links(tmp_path: Path, published: Path) -> None:
    for file in (published / "out").iterdir():
        is_weights = ".safetensors" in file.name
        (tmp_path / file.name).symlink_to(file) if is_weights else shutil.copyfile(file, tmp_path / file.name)
    check_folder(tmp_path)
    assert HubFolder(tmp_path).shapes == HubFolder(published / "out").shapes


def test_files_of_models_are_copied_in_one_place() -> None:
    """`link_folder` copies an export that this process has just written, `kept_edits` what a user has changed in one,
    and the demo its own files.
    """
    copying = {
        str(path.relative_to(ROOT / "ds_finetune"))
        for path in (ROOT / "ds_finetune").rglob("*.py")
        if re.search(r"shutil\.copy|os\.link|copytree", path.read_text())
    }
    assert copying == {
        "model/build/hub_folder.py",
        "export/safetensors_folder.py",
        "export/kept_edits.py",
        "cli/demo.py",
        "checkpoint/commit.py",
    }


def test_links_within_the_folder_and_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    """The cache keeps files by their digests, and links to them from the folder of each revision."""
    cached = tmp_path / "models--a--b"
    snapshot = cached / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "blobs" / "456").write_text("x")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/456")
    check_folder(snapshot)
    (snapshot / "part").mkdir()
    (snapshot / "part" / "merges.txt").symlink_to("../../../blobs/456")
    check_folder(snapshot / "part")
    copy_model_file(snapshot / "part" / "merges.txt", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "x"
    assert not (tmp_path / "copy").is_symlink()
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "other").write_text("x")
    (snapshot / "chat_template.jinja").symlink_to("other")
    check_folder(snapshot)
    (tmp_path / "elsewhere").write_text("x")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to("../../../elsewhere")
    with pytest.raises(ModelError, match=r"is a link to .*elsewhere, outside its folder"):
        check_folder(snapshot)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["load", "os.system", "torch.float16", "float99", 7, {"": "load"}])
def test_a_dtype_is_one_of_torch(key: str, value: object, tmp_path: Path) -> None:
    """transformers takes the attribute of torch that it names: `load` is a function."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: value}))
    for read in (check_folder, lambda folder: read_config_json(str(folder))):
        with pytest.raises(ModelError, match=f"{key}.* is .*, not one of auto, bfloat16"):
            read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: "bfloat16"}))
    check_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": "gptq"}))
    with pytest.raises(ModelError, match="quantization_config is 'gptq', not an object"):
        check_folder(tmp_path)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 10000.0}}, "rope_theta is 500000.0, and rope_par"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}},
            "partial_rotary_factor is",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}, "rope_parameters": YARN}, "rope_scaling.factor is 8.0"),
        (
            {"rope_scaling": None, "rope_parameters": YARN},
            "rope_scaling is None, and rope_parameters.rope_type is 'yarn'",
        ),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": {"rope_theta": 1e4}}, "rope_type is 'default'"),
        ({"rope_theta": 10000, "rope_parameters": YARN}, ""),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4}, "rope_parameters": YARN}, ""),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}, ""),
        ({"rope_theta": 1e6, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, ""),
        ({"rope_scaling": {"type": None}, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ""),
        ({"rope_theta": "x", "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 'x', not a number above 0"),
    ],
)
def test_rotary_settings_that_contradict_each_other_are_refused(
    rope: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """transformers 4.57 reads the base frequency 500,000 from the first file, and transformers 5.23 reads 10,000."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **rope}))
    if not problem:
        read_config_json(str(tmp_path))
        return
    with pytest.raises(ModelError, match=re.escape(problem)):
        read_config_json(str(tmp_path))


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}])
def test_a_model_type_that_is_no_text_is_an_error(kind: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError, match="has no key `model_type` whose value is a text"):
        read_config_json(str(tmp_path))
