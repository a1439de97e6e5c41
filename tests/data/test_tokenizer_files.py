"""The tokenizer of a folder makes the tokens of its file, whatever class transformers takes for it."""

import fnmatch
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenizers.normalizers import Lowercase
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from ds_finetune.cli.demo import write_demo
from ds_finetune.data.tokenizer_files import check_beside, load_tokenizer, tokenizer_digest
from ds_finetune.errors import DataError, ModelError
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, read_hf_config

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")
"""Files from which transformers reads a vocabulary and merges."""
QWEN2 = "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B"


def folder_of(shared_data: Path, tmp_path: Path, *, tokenizer: str, config: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(shared_data / "tokenizers" / tokenizer, folder)
    shutil.copy(shared_data / "configs" / config / "config.json", folder)
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "config"),
    [
        ("deepseek-r1-distill-qwen", QWEN2),
        ("deepseek-coder", "deepseek-ai--DeepSeek-V2-Lite"),
        ("deepseek-llm", "meta-llama--Meta-Llama-3.1-8B"),
    ],
)
def test_a_tokenizer_that_is_loaded_as_published(
    shared_data: Path, tmp_path: Path, tokenizer: str, config: str
) -> None:
    assert load_tokenizer(str(folder_of(shared_data, tmp_path, tokenizer=tokenizer, config=config)))


@pytest.mark.parametrize(
    ("tokenizer", "name", "text"),
    [("deepseek-coder", "code", "#include <x>"), ("deepseek-llm", "accents", "café cafe\u0301")],
)
def test_a_tokenizer_that_transformers_replaces(
    shared_data: Path, tmp_path: Path, tokenizer: str, name: str, text: str
) -> None:
    folder = folder_of(shared_data, tmp_path, tokenizer=tokenizer, config=QWEN2)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(folder))
    assert (
        f"{folder / 'tokenizer.json'} as Qwen2Tokenizer, which gives other tokens for {name} (" in caught.value.message
    )
    assert repr(text)[1:-1] in caught.value.message
    found, wanted = caught.value.message.rpartition(" on: ")[2].split(" instead of ")
    assert found != wanted
    assert all(part[0] == "[" and part[-1] == "]" for part in (found, wanted))
    (folder / "config.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(str(folder)), "what the hint says helps"


@pytest.mark.parametrize(("name", "is_own"), [("deepseek-coder", False), ("deepseek-r1-distill-qwen", True)])
def test_a_tokenizer_that_an_export_would_change_is_refused_before_training(
    name: str, is_own: bool, shared_data: Path, tmp_path: Path
) -> None:
    """What transformers makes of the files beside a config.json comes from transformers itself."""
    model = folder_of(shared_data, tmp_path, tokenizer=name, config=QWEN2)
    config = AutoConfig.from_pretrained(model)
    shutil.copytree(shared_data / "tokenizers" / name, tmp_path / "own")
    settings = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(settings))
    own = load_tokenizer(str(tmp_path / "own"))
    text = "def f(x):\n    return x[1:] != 0  # no\n\n\tpass\n#include <x>\r\n"
    served = AutoTokenizer.from_pretrained(model)
    ids, served_ids = (each(text, add_special_tokens=False)["input_ids"] for each in (own, served))
    assert (ids == served_ids) == is_own
    if is_own:
        check_beside(own, str(tmp_path / "own"), config)
        return
    with pytest.raises(DataError, match="an export of this model would have other tokens than training") as caught:
        check_beside(own, str(tmp_path / "own"), config)
    assert "save_pretrained(NEW)" in caught.value.hint
    AutoTokenizer.from_pretrained(tmp_path / "own", config=config).save_pretrained(tmp_path / "new")
    new = load_tokenizer(str(tmp_path / "new"))
    check_beside(new, str(tmp_path / "new"), config)
    assert new(text, add_special_tokens=False)["input_ids"] == served_ids, "what the hint says helps"


def test_code_of_a_folder_is_refused_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at the terminal otherwise, for 15 seconds, and runs the code after a `y`."""
    write_demo(tmp_path)
    model = tmp_path / "model"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    code = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings | code))
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", asked.append)
    with pytest.raises(DataError, match="contains custom code"):
        load_tokenizer(str(model))
    with pytest.raises(ModelError, match="contains custom code"):
        read_hf_config(str(model))
    assert not asked


@pytest.mark.parametrize(
    "settings", [{"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}, {}], ids=["code", ""]
)
def test_a_vocabulary_of_tiktoken_alone_is_refused(
    settings: dict[str, object], tmp_path: Path, shared_data: Path
) -> None:
    """As Kimi K2 and Moonlight are published, and after a user has removed the code's name."""
    (tmp_path / "tiktoken.model").write_text("IQ== 0\nIg== 1\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"} | settings))
    with pytest.raises(DataError, match=r"has tiktoken\.model and no tokenizer\.json: .* never run") as caught:
        load_tokenizer(str(tmp_path))
    assert "model.tokenizer" in caught.value.hint
    published = shared_data / "tokenizers" / "deepseek-coder"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(published / name, tmp_path)
    assert load_tokenizer(str(tmp_path)), "what the hint says helps"


def test_the_digest_of_a_tokenizer_knows_all_that_decides_ids(shared_data: Path, tmp_path: Path) -> None:
    published = shared_data / "models" / "stories260K"
    copies = [tmp_path / "one", tmp_path / "two"]
    for folder in copies:
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(published / name, folder)
    written = json.loads((copies[1] / "tokenizer.json").read_text())
    written["model"]["merges"].reverse()
    (copies[1] / "tokenizer.json").write_text(json.dumps(written))
    loaded, same, other = (load_tokenizer(str(folder)) for folder in (published, *copies))
    before = tokenizer_digest(loaded)
    assert tokenizer_digest(same) == before
    assert tokenizer_digest(other) != before, "other merges, everything else alike"
    same.add_tokens(["<new>"])
    assert tokenizer_digest(same) != before
    loaded.backend_tokenizer.normalizer = Lowercase()
    assert tokenizer_digest(loaded) != before


def test_a_tokenizer_from_no_folder_is_digested_whole(shared_data: Path) -> None:
    core = Tokenizer.from_file(str(shared_data / "models" / "stories260K" / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert tokenizer_digest(tokenizer) == hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2", "deepseek_v3"])
def test_a_folder_without_a_vocabulary_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers makes an empty tokenizer of some of them."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(DataError, match=r"no tokenizer in .* neither tokenizer\.json nor another file") as caught:
        load_tokenizer(str(tmp_path))
    assert "model.tokenizer" in caught.value.hint


def test_each_file_of_a_vocabulary_is_fetched_from_the_hub() -> None:
    missing = [name for name in VOCABULARIES if not any(fnmatch.fnmatch(name, kind) for kind in TOKENIZER_PATTERNS)]
    assert not missing


def test_deep_settings_of_a_tokenizer_are_refused(tmp_path: Path) -> None:
    write_demo(tmp_path)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    with pytest.raises(DataError, match=r"no tokenizer in .* maximum recursion depth"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["", "null", "[]", "\0\0"])
def test_a_file_of_a_tokenizer_with_other_content_is_named(name: str, text: str, tmp_path: Path) -> None:
    write_demo(tmp_path)
    (tmp_path / "model" / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} holds no JSON object"):
        load_tokenizer(str(tmp_path / "model"))


def test_a_tokenizer_that_the_class_of_the_model_type_refuses(tmp_path: Path) -> None:
    """The tokenizers library raises Exception itself; the hint names a way that works."""
    core = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(tmp_path)
    AutoConfig.for_model("gemma3_text").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(file.read_text()).items() if key != "tokenizer_class"}
    file.write_text(json.dumps(settings))
    with pytest.raises(DataError, match="Unk token `<unk>` not found") as caught:
        load_tokenizer(str(tmp_path))
    assert "tokenizer_class to PreTrainedTokenizerFast" in str(caught.value.hint)
    file.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert load_tokenizer(str(tmp_path)).tokenize("a") == ["a"]
