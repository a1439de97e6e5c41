"""Templates that compute without an end, or fill the memory: one error each, also where a row brings it about."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.data import chat_template as limits
from ds_finetune.data.chat_template import ChatTemplate, RenderingError
from ds_finetune.data.prepare import TokenLimits, plan_tokenisation
from ds_finetune.errors import ConfigError

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 9


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENDLESS, "computes for more than 0.2 s on one dialogue"),
        ("{% macro f(n) %}" + ENDLESS + "{% endmacro %}{{ f(1) }}", "computes for more than 0.2 s"),
        ("{{ 'a' * 10**10 }}", "uses `**`"),
        ("{{ 9**9**9**9 }}", "uses `**`"),
        ("{{ 'a' * 10000000000 }}", "takes more than 1 GiB of memory"),
        ("{{ '%99999999999d' % 1 }}", "takes more than 1 GiB of memory"),
        ("{{ '%99999999999d'|format(1) }}", "takes more than 1 GiB of memory"),
        ("{{ 'a'.rjust(9999999999) }}", "takes more than 1 GiB of memory"),
    ],
)
def test_a_hostile_template_is_one_error(
    source: str, message: str, chat_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.2)
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(chat_tokenizer, source)
    assert message in caught.value.message
    assert "data.template" in caught.value.hint


def test_a_row_may_bring_it_about(chat_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% if messages|length > 9 %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(chat_tokenizer, source)
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="computes for more than"):
        template.render(TURNS, None)
    assert template.render(TURNS[:2], None) == "a"


@pytest.mark.parametrize(
    "source", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 1 / 0 }}", "{{ " + "(" * 9999 + "1"]
)
def test_other_faults_of_a_template_are_those_of_a_row(source: str, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RenderingError):
        ChatTemplate(chat_tokenizer, source).render(TURNS, None)


def test_a_template_without_an_end_is_refused(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    config = DataConfig(train=(str(tmp_path / "a.jsonl"),), template="/dev/zero")
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        plan_tokenisation(config, "train", tokenizer=chat_tokenizer, limits=TokenLimits(256, 200_000))


def test_no_prompt_begins_with_the_byte_order_mark_of_a_file(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    file, source = tmp_path / "chat.jinja", "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    config = DataConfig(train=(str(tmp_path / "a.jsonl"),), template=str(file))
    file.write_bytes(b"\xef\xbb\xbf" + source.encode())
    _, tokenisation = plan_tokenisation(config, "train", tokenizer=chat_tokenizer, limits=TokenLimits(256, 200_000))
    assert tokenisation.settings.chat_template == source
    for character, code in (("\0", "0000"), ("\ufeff", "FEFF"), ("\ufffd", "FFFD")):
        file.write_text(source + character, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"contains U\+{code}, which it would write into prompts"):
            plan_tokenisation(config, "train", tokenizer=chat_tokenizer, limits=TokenLimits(256, 200_000))
