# ruff: noqa: E402 - collectives are wrapped before DeepSpeed, which keeps some of them, is imported
"""What a step costs at each layout: seconds, and bytes a rank sends. Started as `torchrun --nproc-per-node 2
cost_worker.py OUT.json`.

Bytes are those of the ring or pairwise algorithms: of an all-reduce 2 (n - 1) / n of the tensor, of gathers and
scatters (n - 1) / n of the whole, of an all-to-all what is for other ranks.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

SENT: Counter[str] = Counter()


def _counted(name: str, sent: Callable[[int, list[int], Any], float]) -> None:
    plain = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [value for held in (*args, *kwargs.values()) for value in (held if isinstance(held, list) else [held])]
        sizes = [value.numel() * value.element_size() for value in given if torch.is_tensor(value)]
        SENT[name] += int(sent(dist.get_world_size(kwargs.get("group")), sizes, args))
        return plain(*args, **kwargs)

    setattr(dist, name, call)


def _for_others(ranks: int, sizes: list[int], args: Any) -> float:
    """Of an all-to-all (out, given[, rows taken, rows sent])."""
    if len(args) <= 2:
        return sizes[1] * (ranks - 1) / ranks
    rows = args[3]
    return sizes[1] * (sum(rows) - rows[dist.get_rank() % ranks]) / max(1, sum(rows))


_counted("all_reduce", lambda n, sizes, _: 2 * sizes[0] * (n - 1) / n)
_counted("reduce_scatter_tensor", lambda n, sizes, _: max(sizes) * (n - 1) / n)
_counted("all_gather_into_tensor", lambda n, sizes, _: max(sizes) * (n - 1) / n)
_counted("all_gather", lambda n, sizes, _: (sum(sizes) - sizes[-1]) * (n - 1) / n)
_counted("all_to_all_single", _for_others)
_counted("send", lambda n, sizes, _: sizes[0])

from transformers import AutoConfig

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import BatchPlan, training_batches
from ds_finetune.data.rows import Row
from ds_finetune.engine.default_group import process_group
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.plan.plan import make_plan
from ds_finetune.world import World
from tests.planning import model_of

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
}
MODEL |= {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
}
MODEL |= {
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 8192,
}
EVEN = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
}
"""A model whose layers are nearly all of its work, so that two stages of four take as long."""
TOKENS, ROWS, STEPS = 512, 4, 5
LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2": {},
    "tp 2": {"tp": 2},
    "sp 2": {"sp": 2},
    "ep 2": {"ep": 2},
    "pp 2": {"pp": 2},
}
BUBBLE = (1, 2, 4, 8)
"""Forwards of a step for which the waiting of a pipeline is measured."""


def main() -> None:
    """Every layout at ZeRO 1, 2 and 3, by turns, on the same rows; and the whole model or a pipeline of it with 1 to 8
    forwards.
    """
    world, device = World.from_environment(os.environ), choose_device()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, process_group(world, device):
        AutoConfig.for_model("deepseek_v3", **MODEL).save_pretrained(name)
        for stage, (layout, parallel) in itertools.product((1, 2, 3) if world.world_size > 1 else (), LAYOUTS.items()):
            if layout != "pp 2" or stage == 1:
                found[f"{layout}, ZeRO-{stage}"] = _measured(name, stage, parallel, world, device)
        AutoConfig.for_model("llama", **EVEN).save_pretrained(name)
        for forwards in BUBBLE:
            found[f"{forwards} forwards"] = _measured(
                name,
                1,
                {"pp": world.world_size, "pp_layers": [4, 4]} if world.world_size > 1 else {},
                world,
                device,
                forwards,
            )
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


def _measured(
    model: str, stage: int, parallel: dict[str, Any], world: World, device: str, forwards: int = 0
) -> dict[str, Any]:
    """Median seconds of a step and bytes sent, two forwards of two rows a rank; given `forwards`, as many of one row
    each.
    """
    sharing = parallel.get("tp", 1) * parallel.get("sp", 1) * parallel.get("pp", 1)
    rows, micro = (forwards, 1) if forwards else (ROWS, sharing)
    train = {
        "for": "9 steps",
        "global_batch_size": rows,
        "micro_batch_size": micro,
        "max_seq_len": TOKENS,
        "precision": "fp32" if forwards else "bf16",
    }
    tree = {
        "model": {"path": model, "weights": "random"},
        "data": {"train": "none.jsonl"},
        "parallel": parallel,
        "output_dir": model,
    }
    tree |= {"train": train | {"activation_checkpointing": False}, "deepspeed": {"zero_optimization": {"stage": stage}}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(config, world=world, device=device)
    with start_engine(plan, model_of(config)) as engine:
        shares = BatchPlan(rows, micro, plan.mesh.place("dp"), plan.dp, 0, False, 0, TOKENS)
        seconds = []
        for step, batch in enumerate(training_batches(_rows(), shares, start_step=0, total_rows=rows * (STEPS + 1))):
            SENT.clear()
            began = time.perf_counter()
            engine.step(batch, lr=1e-3)
            seconds.append(time.perf_counter() - began)
            assert step <= STEPS
        return {"seconds": sorted(seconds[1:])[STEPS // 2], "bytes": dict(SENT)}


def _rows() -> list[Row]:
    ids = torch.randint(3, EVEN["vocab_size"], (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)).int().numpy()
    places = torch.arange(TOKENS).int().numpy()
    return [Row(input_ids=row, position_ids=places, labels=row, supervised=TOKENS) for row in ids]


if __name__ == "__main__":
    main()
    exit_process()
