"""A run of DeepSeek-V3.2 from published weights: what its export holds."""

import json
import shutil
import sys
from pathlib import Path

import torch

from ds_finetune.cli.demo import MODEL
from ds_finetune.families.configs import INDEXED
from tests.model.fp8_folder import MTP, V3, master, publish, read_all
from tests.running import start, tiny_task


def test_the_indexer_is_exported_as_published(tmp_path: Path) -> None:
    """Under weight decay, in bf16, with the prediction layer carried; the run reads its export in plain transformers."""
    changes = {name: INDEXED[name] for name in ("index_topk", "index_n_heads", "index_head_dim")}
    changes |= {
        "index_topk": 16,
        "model_type": "deepseek_v32",
        "vocab_size": MODEL["vocab_size"],
        "moe_intermediate_size": 16,
    }
    changes |= {"hidden_size": 32, "intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16}
    run_file = tiny_task(
        tmp_path,
        train={"precision": "bf16"},
        optim={"lr": 1e-2, "weight_decay": 0.5},
        model={"weights": "load"},
        export={"verify": True},
        data={"packing": True},
    )
    tree = {key: value for key, value in (V3 | changes).items() if key != "quantization_config"}
    weights = master(**changes)
    for name in [name for name in weights if ".k_norm." in name]:
        weights[name] = torch.rand_like(weights[name]).bfloat16()
    publish(tmp_path / "base", weights, config=tree | {"architectures": ["DeepseekV32ForCausalLM"]})
    shutil.copytree(tmp_path / "base", tmp_path / "model", dirs_exist_ok=True)
    done = start([sys.executable, "ds_finetune/train.py", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "frozen: 10 parameters that the loss does not reach" in done.stdout
    assert "in documents longer than index_topk 16 the indexer chooses tokens; it is not trained" in done.stdout
    before, after = read_all(tmp_path / "base"), read_all(tmp_path / "run" / "export")
    assert before.keys() == after.keys()
    kept = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert {name for name in before if ".self_attn.indexer." in name} <= kept
    assert any(name.startswith(f"model.layers.{MTP}.eh_proj") for name in kept)
    assert "model.layers.1.self_attn.q_b_proj.weight" not in kept
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("deepseek_v32", 1)
