"""Adapters of model types without a row in the table of families: tried on a tiny copy, equal to peft, or refused."""

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.olmo2 import modeling_olmo2

from ds_finetune.cli.main import main
from ds_finetune.config.sections import LoraConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.generic_check import LIMIT, check_generic_type, try_model_type
from ds_finetune.reference.selftest.reference_loop import adamw
from tests.lora_twin import adapted, by_our_names, in_peft, write_adapter_of
from tests.model.model_types import attention_of, config_of
from tests.running import metrics, start, tiny_task, torchrun

TINY = {
    "model_type": "olmo2",
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "tie_word_embeddings": False},
}
ROWS: dict[str, Any] = {"attention": "sdpa", "packing": False, "row_tokens": 64, "precision": "fp32"}


@pytest.mark.parametrize("kind", ["olmo2", "gpt_neox", "glm4", "dots1", "starcoder2"])
def test_adapters_of_a_tiny_copy_compute_what_merged_weights_do(kind: str) -> None:
    config = config_of(kind)
    names = {target.name.rpartition(".")[2] for target in plan_lora(config, LoraConfig(rank=8)).targets}
    assert names
    trial = try_model_type(config, attention=attention_of(config), row_tokens=64, adapted=names)
    assert not trial.untried
    assert 0 < trial.adapters < LIMIT / 5


def _reads_a_weight(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    """An MLP that computes with the weight of a linear module without calling it, as fused code of some models does."""
    up = functional.linear(hidden, mlp.up_proj.weight)
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(hidden)) * up)  # type: ignore[no-any-return]


def test_a_type_whose_adapters_would_be_passed_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("olmo2")
    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", _reads_a_weight)
    with pytest.raises(
        ModelError, match="the model with adapters differs from the model with merged weights"
    ) as refused:
        check_generic_type(config, **ROWS, adapted={"up_proj", "q_proj"})
    assert "lora.target_modules" in refused.value.hint
    assert "adapters" in check_generic_type(config, **ROWS, adapted={"down_proj", "q_proj"})[0]


def test_what_peft_would_take_for_experts_is_not_adapted() -> None:
    plan = plan_lora(config_of("dots1"), LoraConfig(rank=8))
    assert {target.name.rpartition(".")[2] for target in plan.adaptable} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match="`up_proj` matches no module"):
        plan_lora(config_of("dots1"), LoraConfig(rank=8, target_modules=("up_proj",)))


def _loss(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 90, (3, 17), generator=torch.Generator().manual_seed(3))
    logits = model(input_ids=ids, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["olmo2", "gpt_neox"])
def test_three_steps_are_those_of_peft_with_all_linear_modules(kind: str, tmp_path: Path) -> None:
    tree = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    tree |= {"num_key_value_heads": 2} if kind == "olmo2" else {}
    config = AutoConfig.for_model(kind, **tree, intermediate_size=128)
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(config).float()
    lora = LoraConfig(rank=8, alpha=32, target_modules=("all-linear",))
    ours = adapted(copy.deepcopy(base), lora)
    write_adapter_of(ours, lora, tmp_path / "adapter", base=tmp_path)
    with torch.device("meta"):
        named = get_peft_model(
            AutoModelForCausalLM.from_config(config), PeftConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        )
    assert {t.name for t in plan_lora(config, lora).targets} == set(named.targeted_module_names)
    theirs = in_peft(copy.deepcopy(base), tmp_path / "adapter", trainable=True)
    optimizers = [adamw(ours.train()), adamw(theirs.train())]
    names = [name for name, param in ours.named_parameters() if param.requires_grad]
    for _ in range(3):
        losses = [_loss(model) for model in (ours, theirs)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = by_our_names(dict(theirs.named_parameters()), names)
    found = dict(ours.named_parameters())
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in names)


def _task(folder: Path, **sections: Any) -> Path:
    run_file = tiny_task(folder, **{"lora": {"rank": 8, "alpha": 16}, "optim": {"lr": 0.02}} | sections)
    tree = yaml.safe_load(run_file.read_text())
    tree["model"] = str(folder / "model")
    run_file.write_text(yaml.safe_dump(tree))
    file = folder / "model" / "config.json"
    vocab = yaml.safe_load(file.read_text())["vocab_size"]
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY, vocab_size=vocab)).float().save_pretrained(
        file.parent
    )
    return run_file


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("quantize", "stage"),
    [
        (None, 3),
        ("nf4", 3),
        *(pytest.param(quantize, stage, marks=pytest.mark.slow) for quantize in (None, "nf4") for stage in (0, 1, 2)),
    ],
)
def test_a_run_exports_what_peft_adds_and_is_the_same_at_each_stage(
    quantize: str | None, stage: int, tmp_path: Path
) -> None:
    lora = {"rank": 8, "alpha": 16, "quantize": quantize}
    if quantize is not None:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra `quantize`)")
    run_file = _task(tmp_path, lora=lora, deepspeed={"zero_optimization": {"stage": stage}})
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout + done.stderr
    (tried,) = (line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "was tried on" in line)
    assert re.search(r"relative differences: loss [^,]+, .*, adapters ", tried)
    base, run = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), tmp_path / "run"
    before = _logits(base)
    together = _logits(PeftModel.from_pretrained(base, run / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    assert (together - before).abs().max() > 1e-2
    assert torch.allclose(_logits(merged), together, atol=1e-5, rtol=0)
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    later, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", run / "export"))
    assert all(torch.allclose(later[name], tensor, atol=1e-6, rtol=0) for name, tensor in wanted.items())
    losses = [record["train/loss"] for record in metrics(tmp_path)]
    alone = _task(tmp_path / "alone", lora=lora, deepspeed={"zero_optimization": {"stage": 0}})
    again = start([sys.executable, "ds_finetune/train.py", str(alone)])
    assert again.returncode == 0, again.stdout + again.stderr
    assert losses == pytest.approx([record["train/loss"] for record in metrics(tmp_path / "alone")], abs=1e-4)
