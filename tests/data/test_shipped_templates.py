"""Chat templates by name render the texts that the published ones render, and say which tokens they need."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ds_finetune.config.sections import DataConfig
from ds_finetune.data.prompt_format import TEMPLATES, template_settings, trained_ends
from ds_finetune.errors import ConfigError
from tests.export.gguf.models import tokenizer as tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
INTRO = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
# The bos token is <s> and the eos token </s>.
RENDERED = {
    "chatml": (
        "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "<s> [INST] Hi  [/INST] Hello</s> [INST] Bye [/INST]",
        "<s> [INST] Be brief.\n\nHi  [/INST]",
    ),
    "alpaca": (
        f"<s>{INTRO}\n\n### Instruction:\nHi \n\n### Response:\nHello</s>\n\n### Instruction:\nBye\n\n### Response:\n",
        "<s>Be brief.\n\n### Instruction:\nHi \n\n### Response:\n",
    ),
}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "alpaca": "</s>"}
TOKENS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = tiny_tokenizer("")
    made.add_special_tokens({"additional_special_tokens": TOKENS})
    return made


def _source(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return template_settings(DataConfig(train=("a.jsonl",), template=name), tokenizer).chat_template or ""


def test_every_template_is_tested() -> None:
    assert {file.stem for file in TEMPLATES.iterdir()} == RENDERED.keys()


@pytest.mark.parametrize("name", RENDERED)
def test_texts_are_those_of_the_published_template(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    source = _source(name, tokenizer)
    for messages, expected in zip((TURNS, [SYSTEM, TURNS[0]]), RENDERED[name], strict=True):
        assert (
            tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
            == expected
        )


@pytest.mark.parametrize("name", RENDERED)
def test_answers_end_with_the_token_of_the_template(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    settings = template_settings(DataConfig(train=("a.jsonl",), template=name), tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(trained_ends(tokenizer, settings))) == [ENDS[name]]


def test_chatml_is_that_of_qwen(tokenizer: PreTrainedTokenizerFast, chat_templates: dict[str, str]) -> None:
    messages = [SYSTEM, *TURNS]
    theirs, ours = (
        tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
        for source in (chat_templates["Qwen-Qwen2.5-7B-Instruct.jinja"], _source("chatml", tokenizer))
    )
    assert ours == theirs


def test_tokens_that_the_tokenizer_lacks_are_named() -> None:
    made = tiny_tokenizer("")
    made.add_special_tokens({"additional_special_tokens": TOKENS[:1]})
    with pytest.raises(ConfigError, match=r"`chatml` writes <\|im_end\|>, which the tokenizer does not have") as found:
        _source("chatml", made)
    assert "model.resize_vocabulary" in found.value.hint
    assert _source("mistral", made)


def test_a_file_of_the_same_name_is_ambiguous(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="a template of this program and a file") as found:
        _source("chatml", tokenizer)
    assert "./chatml" in found.value.hint
    assert _source("./chatml", tokenizer) == "{{ messages[0].content }}"
