"""The tiny tokenizer of the tests in the table of those that llama.cpp's converter lists."""

from hashlib import sha256

import pytest

from tests.export.gguf.models import tokenizer


@pytest.fixture(autouse=True)
def known_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp splits text as it does; published vocabularies are recognised by their ids of one text."""
    module = pytest.importorskip("ds_finetune.export.gguf.llama_tokenizer", reason="the gguf extra is not installed")
    ids = tokenizer()(module._PROBE)["input_ids"]
    monkeypatch.setitem(module._SPLITTERS, sha256(str(ids).encode()).hexdigest(), "gpt-2")
