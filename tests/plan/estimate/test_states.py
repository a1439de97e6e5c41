"""One estimate of what a run needs: train, `plan --dry-run` and the doctor have the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.api import plan_run
from ds_finetune.cli.doctor import run_needs
from ds_finetune.cluster.doctor.run import resolve_on
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import read_config
from ds_finetune.config.units import GIB
from ds_finetune.plan.estimate.memory import DiskNeed
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import prepare_run
from ds_finetune.trainer.resolve import resolve_here
from tests.described import described_tree
from tests.model.tiny import CONFIGS
from tests.running import tiny_task

RANKS = 4
STATES = ("weights", "fp32 weights", "moments", "gradients")
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense, ZeRO-0": ("llama", {"stage": 0}, {}),
    "dense, ZeRO-1, tp": ("llama", {"stage": 1}, {"parallel": {"tp": 2}}),
    "dense, offloaded": ("llama", OFFLOAD, {}),
    "experts, ZeRO-2, ep": ("deepseek_v3", {"stage": 2}, {"parallel": {"ep": 2}}),
    "experts, ZeRO-3, ep": ("deepseek_v3", {"stage": 3}, {"parallel": {"ep": 4}}),
    "experts, pp": ("deepseek_v3", {"stage": 1}, {"parallel": {"pp": 2}}),
    "experts, LoRA": ("deepseek_v3", {"stage": 2}, {"lora": {"rank": 8}, "model": {"weights": "load"}}),
    "experts, node-local": ("deepseek_v3", {"stage": 3}, {"checkpoint": {"node_local": True}}),
    "nothing saved": ("llama", {"stage": 2}, {"checkpoint": {"every": "never"}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_train_plan_and_doctor_agree(tmp_path: Path, layout: str) -> None:
    family, zero, sections = LAYOUTS[layout]
    run_file = tiny_task(tmp_path, deepspeed={"zero_optimization": zero}, **sections)
    published = json.loads((tmp_path / "model" / "config.json").read_text())
    vocabulary = {key: published[key] for key in ("vocab_size", "max_position_embeddings") if key in published}
    tree = CONFIGS[family] | {"model_type": family} | vocabulary
    (tmp_path / "model" / "config.json").write_text(json.dumps(tree))
    if "lora" in sections:
        # Adapters belong to weights, of which a digest is taken.
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(
            tmp_path / "model"
        )
    config = read_config(run_file)
    hosts = [Host("a", 3, 1), Host("b", 1, 2)]
    trained = prepare_run(resolve_here(config, World(0, RANKS, 0, 3, "a test")))
    planned = plan_run(config, gpus=RANKS, gpus_per_node=RANKS)
    resolved, check = resolve_on(run_needs(config)["resolve"], hosts, "cpu")
    assert resolved is not None, check
    assert trained.needs.files == resolved.needs.files
    assert dict(planned.lines)["disk"].startswith(f"{trained.needs.files.num_bytes / GIB:,.2f} GiB")
    assert [row.num_bytes for row in trained.states.rows if row.name in STATES] == [
        row.num_bytes for row in planned.states.rows if row.name in STATES
    ]
    assert trained.model.described.tensors.numel == described_tree(tree).tensors.numel
    assert resolved.states == trained.states
    for host in hosts:
        of_host = {"ranks": host.slots, "is_first_host": host is hosts[0]}
        assert resolved.needs.files.of_host(resolved.plan, **of_host) == trained.needs.files.of_host(
            trained.plan, **of_host
        )
    places = {row.place for row in trained.states.rows if row.place != "disk"}
    assert places == {"host"}, "a rank without a GPU keeps everything in host memory"


def test_what_each_host_writes(tmp_path: Path) -> None:
    files = DiskNeed(exports=2, export_bytes=10, checkpoints=4, checkpoint_bytes=120)
    shared, local = (
        make_plan(
            RunSettings.of(tiny_task(tmp_path / str(is_local), checkpoint={"node_local": is_local})),
            world=World(0, RANKS, 0, 3, "a test"),
            device="cpu",
        )
        for is_local in (False, True)
    )
    assert files.of_host(shared, ranks=2, is_first_host=True) == files
    assert files.of_host(shared, ranks=2, is_first_host=False).num_bytes == 0
    assert files.of_host(local, ranks=3, is_first_host=True).num_bytes == 2 * 10 + 4 * 90
    assert files.of_host(local, ranks=1, is_first_host=False).num_bytes == 4 * 30
