"""What quantising costs is measured on rows of the run, where there is one."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM

from ds_finetune.export.quantisation_loss import quantisation_loss
from tests.export.gguf.models import save, tokenizer

SPANS = [
    [["<s>def fibonacci", False], ["(n: int):\n    return n</s>", True]],
    [["the best  of times, ", False]],
]


def test_loss_and_divergence_of_supervised_tokens_of_a_run(tmp_path: Path) -> None:
    for name, scale in (("export", 1.0), ("other", 1.1)):
        save("llama", tmp_path / name).save_pretrained(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        model.lm_head.weight.data *= scale
        model.save_pretrained(tmp_path / name)
    tree = {"samples": [{"source": "a", "title": "", "spans": spans} for spans in SPANS]}
    (tmp_path / "data.json").write_text(json.dumps(tree))
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("export", "other"))
    found = quantisation_loss("int8", tmp_path / "export", before, after, (4, 2))
    logs = {before: [], after: []}
    targets = []
    for spans in SPANS:
        parts = [tokenizer()(text, add_special_tokens=False)["input_ids"] for text, _ in spans]
        ids, first = [token for part in parts for token in part], len(parts[0]) if len(parts) > 1 else 1
        targets += ids[first:]
        for model, each in logs.items():
            with torch.no_grad():
                each.append(model(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1))
    one, two = (torch.cat(each) for each in logs.values())
    assert found.tokens == len(targets)
    assert found.loss_before == pytest.approx(float(cross_entropy(one, torch.tensor(targets))), rel=1e-5)
    assert found.loss_after == pytest.approx(float(cross_entropy(two, torch.tensor(targets))), rel=1e-5)
    divergence = kl_div(two, one, reduction="batchmean", log_target=True)
    assert found.divergence == pytest.approx(float(divergence), rel=1e-3)
    assert found.divergence > 0
    assert "on " + str(len(targets)) + " tokens of 2 rows of the run;" in found.line()
    # Without a run it is text that the model samples.
    (tmp_path / "data.json").unlink()
    assert quantisation_loss("int8", tmp_path / "export", before, after, (4, 2)).rows == "that the model sampled"
