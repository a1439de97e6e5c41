"""The plan: batch triple, contradictions, options known to be wrong."""

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune.cli.demo import write_demo
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.plan import plan as layout
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import AccelerateChoices, World
from tests.checking import check, settings_of
from tests.conftest import ROOT

DEEPSPEED_FILES = sorted((ROOT / "ds_configs").glob("*.json"))
NOTHING = AccelerateChoices(None, None, None, None, None, None, None)


def plan_of(
    deepspeed: Any = None,
    *,
    dp: int = 2,
    device: str = "cuda",
    accelerate: AccelerateChoices | None = None,
    **sections: Any,
) -> Plan:
    tree = {
        "model": "m",
        "data": {"train": "a.jsonl"},
        "output_dir": "o",
        "train": {"global_batch_size": 8, "micro_batch_size": 2},
        "deepspeed": deepspeed,
    }
    config = RunConfig.model_validate(tree | sections)
    return make_plan(
        RunSettings.of(config), world=World(0, dp, 0, dp, "torchrun"), device=device, accelerate=accelerate
    )


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"params": params}}


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_odd_heads_of_complex_rotary_embeddings_are_refused(model_type: str) -> None:
    config = RunConfig.model_validate({"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "o"})
    even = {"model_type": model_type, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8}
    check(settings_of(config, model_json=even), "type of the model")
    odd = settings_of(config, model_json=even | {"qk_nope_head_dim": 13})
    if model_type == "deepseek_v3":
        check(odd, "type of the model")
        return
    with pytest.raises(ModelError, match=r"qk_nope_head_dim 13 \+ qk_rope_head_dim 8 in config\.json is an odd number"):
        check(odd, "type of the model")


def test_the_batch_triple_is_derived_and_written() -> None:
    plan = plan_of()
    assert plan.accumulation == 2
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [plan.deepspeed_config[key] for key in keys] == [8, 2, 2, 1.0]


@pytest.mark.parametrize(
    ("deepspeed", "sections", "message", "hint"),
    [
        (
            None,
            {"train": {"global_batch_size": 9, "micro_batch_size": 3}},
            "9 is not a multiple of micro_batch_size 3 x dp 2 = 6",
            "or start 1, 3 ranks",
        ),
        (
            None,
            {"train": {"global_batch_size": 100, "micro_batch_size": 8}},
            "100 is not a multiple of micro_batch_size 8 x dp 2 = 16",
            "96 or 112",
        ),
        ({"train_batch_size": 16}, {}, "train_batch_size 16 contradicts train.global_batch_size 8", '"auto"'),
        (
            {"gradient_accumulation_steps": 4},
            {},
            "gradient_accumulation_steps 4 contradicts global_batch_size / (micro_batch_size x dp) = 2",
            '"auto"',
        ),
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping 0.5 contradicts train.max_grad_norm 1.0", '"auto"'),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled True contradicts train.precision bf16", '"auto"'),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            {},
            "optimizer.params.lr 0.001 contradicts optim.lr 1e-05",
            '"auto"',
        ),
        ({"optimizer": {"type": "Lamb"}}, {}, "optimizer.type 'Lamb' contradicts optim.name 'AdamW'", '"auto"'),
        (
            {"scheduler": {"type": "WarmupLR"}},
            {},
            "`scheduler` = {'type': 'WarmupLR'} does not belong",
            "optim.lr_scheduler",
        ),
        ({"elasticity": {}}, {}, "`elasticity` = {} does not belong in the DeepSpeed configuration", "delete"),
        ({"zero_optimisation": {}}, {}, "unknown key `zero_optimisation`", "did you mean `zero_optimization`?"),
        ({"zero_optimization": {"stage": 4}}, {}, "zero_optimization.stage is 4", "0, 1, 2 or 3"),
        (zero(2, offload_param={"device": "cpu"}), {}, "offload_param below ZeRO-3 is refused", "stage 3"),
        (zero(2, offload_optimizer={"device": "nvme"}), {}, "offload to nvme below ZeRO-3 is refused", "device cpu"),
        (
            zero(0, offload_optimizer={"device": "cpu"}),
            {},
            "offload_optimizer without ZeRO is refused",
            "stage 1, 2 or 3",
        ),
        (
            zero(1) | {"data_types": {"grad_accum_dtype": "fp32"}},
            {},
            "grad_accum_dtype 'fp32' with zero stage 1 in bf16",
            "stage to 2 or 3",
        ),
        (zero(1), {"optim": {"name": "Muon"}}, "clipping with Muon under ZeRO is refused", "train.max_grad_norm 0"),
        (
            zero(3),
            {"optim": {"name": "Muon"}, "train": {"max_grad_norm": 0}},
            "Muon with reduce_scatter under ZeRO-3 is refused",
            "reduce_scatter false",
        ),
        (
            zero(2),
            {"optim": {"name": "Adagrad"}},
            "Adagrad without offload_optimizer under ZeRO is refused",
            "DeepSpeedCPUAdagrad",
        ),
        (zero(1), {"optim": {"name": "Lamb"}}, "Lamb under ZeRO is refused", "stage 0"),
        (zero(2), {"optim": {"name": "Adafactor"}}, "Adafactor under ZeRO is refused", "stage 0"),
        (zero(3), {"optim": {"name": "AdamW8bit"}}, "AdamW8bit under ZeRO is refused", "stage 0"),
        (
            zero(2, offload_optimizer={"device": "cpu"}),
            {"optim": {"name": "RAdam"}},
            "offload_optimizer with optim.name RAdam is refused",
            "AdamW",
        ),
        (
            zero(2),
            {"optim": {"name": "RMSprop", "weight_decay": 0.1}},
            "weight_decay 0.1 with RMSprop would be added to the gradient",
            "AdamW",
        ),
        (
            zero(0),
            {"optim": {"name": "Adagrad", "weight_decay": 0.1}},
            "weight_decay 0.1 with Adagrad would be added to the gradient",
            "AdamW",
        ),
        (zero(0), {"train": {"global_batch_size": 8, "precision": "fp16"}}, "fp16 without ZeRO is refused", "stage 1"),
        (
            zero(3, offload_optimizer={"device": "nvme"}),
            {},
            "offload_optimizer to nvme without nvme_path is refused",
            "nvme_path",
        ),
        (
            zero(3, offload_param={"device": "nvme", "nvme_path": None}),
            {},
            "offload_param to nvme without nvme_path is refused",
            "nvme_path",
        ),
        (
            zero(2, overlap_com=True),
            {},
            "in zero_optimization: unknown key `overlap_com` = True",
            "did you mean `overlap_comm`?",
        ),
        (
            zero(3, offload_param={"device": "cpu", "pin_memori": True}),
            {},
            "in zero_optimization.offload_param: unknown key `pin_memori`",
            "did you mean `pin_memory`?",
        ),
        (
            zero(2, cpu_offload=True),
            {},
            "in zero_optimization: `cpu_offload` = True does not belong",
            'offload_optimizer: {"device": "cpu"}',
        ),
        (
            zero(3, mics_shard_size=2),
            {},
            "`mics_shard_size` = 2 does not belong in the DeepSpeed configuration",
            "delete",
        ),
        ({"zero_optimization": 3}, {}, "`zero_optimization` is 3, not a section", "zero3_offload.json"),
        (
            zero(3, offload_param="cpu"),
            {},
            "`zero_optimization.offload_param` is 'cpu', not a section",
            "zero3_offload.json",
        ),
        ({"bf16": {"enable": True}}, {}, "in bf16: unknown key `enable`", "did you mean `enabled`?"),
        ({"fp16": {"loss_scale": "big"}}, {}, "`fp16.loss_scale` is 'big'", "a number"),
        ({"bf16": [1]}, {}, "`bf16` is [1], not a section", "zero3_offload.json"),
        ({"optimizer": {"params": 3}}, {}, "`optimizer.params` is 3, not a section", "zero3_offload.json"),
        ({"aio": 3}, {}, "`aio` is 3, not a section", "zero3_offload.json"),
        (zero(2, reduce_bucket_size="5e8"), {}, "`zero_optimization.reduce_bucket_size` is '5e8'", "500000000"),
        (
            zero(2, zero_hpz_partition_size="x"),
            {},
            "`zero_optimization.zero_hpz_partition_size` is 'x'",
            "a whole number",
        ),
        (
            zero(2, contiguous_gradients="maybe"),
            {},
            "`zero_optimization.contiguous_gradients` is 'maybe'",
            "true or false",
        ),
        (
            zero(3, offload_param={"device": "disk"}),
            {},
            "`zero_optimization.offload_param.device` is 'disk'",
            "none, cpu, nvme",
        ),
        (zero(True), {}, "zero_optimization.stage is True", "0, 1, 2 or 3"),
        (adam(fused=True), {}, "optimizer.params.fused True is not passed on to AdamW", "delete fused"),
        (adam(torch_adam=1), {}, "optimizer.params.torch_adam 1 is not passed on to AdamW", "delete torch_adam"),
        (
            adam(torch_adam=True),
            {"optim": {"name": "Lion"}},
            "optimizer.params.torch_adam True is not passed on to Lion",
            "delete",
        ),
        (
            adam(torch_adam=True) | zero(2, offload_optimizer={"device": "cpu"}),
            {},
            "torch_adam True has no effect: DeepSpeedCPUAdam is used here",
            "delete",
        ),
        (None, {"optim": {"name": "Adamw2"}}, "optim.name `Adamw2` is not known", "AdamW8bit"),
        ("none.json", {}, "deepspeed file `none.json` does not exist", "ds_configs/"),
    ],
)
def test_contradictions_name_both_values(deepspeed: Any, sections: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(deepspeed, **sections)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_fp16_on_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp16 on the CPU accelerator is refused") as caught:
        plan_of(device="cpu", train={"precision": "fp16", "global_batch_size": 8})
    assert "bf16 or fp32" in caught.value.hint


@pytest.mark.parametrize("name", ["Lion", "Lamb"])
def test_optimizers_without_a_cpu_kernel_are_refused_there(name: str) -> None:
    with pytest.raises(ConfigError, match="on the CPU accelerator is refused"):
        plan_of(zero(0), device="cpu", optim={"name": name})
    assert plan_of(zero(0), optim={"name": name}).zero_stage == 0


@pytest.mark.parametrize("version", ["", layout.LIGER, "0.9.0"])
def test_the_loss_kernel_is_ligers_only_on_a_gpu_that_has_the_tested_version(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(layout, "installed_version", lambda _: version)
    monkeypatch.setattr(layout, "triton_problem", lambda: ("", ""))
    chosen = {
        (asked, device): _kernel(asked, device) for asked in ("auto", "chunked", "liger") for device in ("cpu", "cuda")
    }
    on_gpu = {"": "chunked", layout.LIGER: "liger"}.get(version, "refused")
    assert chosen["auto", "cuda"] == on_gpu
    assert chosen["auto", "cpu"] == chosen["chunked", "cpu"] == chosen["chunked", "cuda"] == "chunked"
    assert chosen["liger", "cpu"] == "refused"
    assert chosen["liger", "cuda"] == ("liger" if version == layout.LIGER else "refused")


def test_ligers_loss_needs_what_triton_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "installed_version", lambda _: layout.LIGER)
    monkeypatch.setattr(layout, "triton_problem", lambda: ("there is no C compiler", "install gcc"))
    assert _kernel("auto", "cuda") == "chunked"
    with pytest.raises(ConfigError, match=r"model\.loss liger needs Triton: there is no C compiler\n.*install gcc"):
        layout.loss_kernel("liger", device="cuda")


def test_the_tested_liger_is_the_pinned_one() -> None:
    assert f"liger-kernel=={layout.LIGER}" in (ROOT / "constraints.txt").read_text().splitlines()


def _kernel(asked: str, device: str) -> str:
    try:
        return layout.loss_kernel(asked, device=device)
    except ConfigError:
        return "refused"


def test_wrong_options_are_rewritten_with_a_visible_line() -> None:
    plan = plan_of(zero(3, overlap_comm=True, offload_optimizer={"device": "cpu"}), device="cpu")
    section = plan.zero
    assert (section["overlap_comm"], section["offload_optimizer"]["pin_memory"]) == (False, False)
    assert [note.split(" is off")[0] for note in plan.notes] == [
        "rewritten: overlap_comm on the CPU accelerator",
        "rewritten: offload_optimizer.pin_memory on the CPU accelerator",
    ]
    assert plan_of(zero(3, overlap_comm=True)).notes == ()


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Muon"])
def test_torchs_adam_is_taken_where_it_is_chosen_and_where_the_other_cannot_be_built(name: str) -> None:
    optim, train = {"name": name}, {"global_batch_size": 8, "micro_batch_size": 2, "max_grad_norm": 0}
    choices = zero(3, reduce_scatter=False)
    fused = plan_of(choices, optim=optim, train=train)
    assert fused.needs_fused_adam
    assert "torch_adam" not in fused.deepspeed_config["optimizer"]["params"]
    chosen = plan_of(choices | adam(torch_adam=True), optim=optim, train=train)
    instead = fused.with_torch_adam("rank 3: no nvcc")
    for plan in (chosen, instead):
        assert not plan.needs_fused_adam
        assert plan.deepspeed_config["optimizer"]["params"].items() >= {"torch_adam": True, "fused": True}.items()
    assert instead.deepspeed_config == chosen.deepspeed_config
    assert instead.notes[-1].endswith("FusedAdam, with the same numbers. rank 3: no nvcc")
    assert "torch_adam" not in fused.deepspeed_config["optimizer"]["params"], "the plan it came from was changed"


def test_torch_adam_false_is_the_default_on_a_gpu_alone() -> None:
    assert plan_of(adam(torch_adam=False)).needs_fused_adam
    with pytest.raises(ConfigError, match="torch_adam False has no effect: torch's fused AdamW is used here"):
        plan_of(adam(torch_adam=False), device="cpu")


def test_the_known_keys_are_those_of_the_installed_deepspeed() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "deepspeed_keys.py"))
    assert script["FILE"].read_text() == script["text"](), "run: python scripts/deepspeed_keys.py"


def test_the_users_tree_is_not_changed() -> None:
    given = zero(3, offload_optimizer={"device": "cpu"})
    before = json.dumps(given)
    plan_of(given, device="cpu")
    assert json.dumps(given) == before


@pytest.mark.parametrize("path", DEEPSPEED_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_deepspeed_file_is_finished(path: Path, precision: str) -> None:
    plan = plan_of(str(path), device="cpu", train={"precision": precision, "global_batch_size": 8})
    assert "auto" not in json.dumps(plan.deepspeed_config)
    assert f"zero{plan.zero_stage}" in path.stem
    assert plan.deepspeed_config["bf16"]["enabled"] == (precision == "bf16")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs" / "runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_is_read_and_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = read_config(path)
    numbers = re.match(r"# Planned on (\d+)(?: x (\d+))? GPUs? ?", path.read_text())
    assert numbers is not None
    gpus = math.prod(int(number) for number in numbers.groups() if number)
    for ranks in {1, gpus, 8 if gpus == 1 else gpus} if config.parallel.ep == 1 else (config.parallel.ep, gpus):
        make_plan(RunSettings.of(config), world=World(0, ranks, 0, min(ranks, 8), "deepspeed"), device="cuda")


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs" / "runs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_is_planned_on_one_to_eight_gpus_or_says_what_fits(
    path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = read_config(path)
    batch, world = config.train.global_batch_size, World(0, ranks, 0, ranks, "deepspeed")
    if ranks % config.parallel.ep:
        with pytest.raises(ConfigError, match=r"parallel\.ep"):
            make_plan(RunSettings.of(config), world=world, device="cuda")
    elif batch % (config.train.micro_batch_size * ranks):
        with pytest.raises(ConfigError, match=f"global_batch_size {batch} is not a multiple") as caught:
            make_plan(RunSettings.of(config), world=world, device="cuda")
        assert "set train.global_batch_size to " in caught.value.hint
        assert "ranks" in caught.value.hint
    else:
        plan = make_plan(RunSettings.of(config), world=world, device="cuda")
        assert plan.accumulation * config.train.micro_batch_size * plan.dp == batch
        assert plan.needs_fused_adam


@pytest.mark.parametrize("ranks", range(1, 9))
def test_the_quickstart_is_planned_on_any_number_of_gpus(tmp_path: Path, ranks: int) -> None:
    config = read_config(write_demo(tmp_path, ranks=ranks))
    plan = make_plan(RunSettings.of(config), world=World(0, ranks, 0, ranks, "deepspeed"), device="cuda")
    assert 8 <= config.train.global_batch_size < 8 + ranks
    assert plan.accumulation * config.train.micro_batch_size * ranks == config.train.global_batch_size


@pytest.mark.parametrize(
    "path", sorted((ROOT / "ds_configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_accelerate_file_names_a_deepspeed_file(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    assert tree["distributed_type"] == "DEEPSPEED"
    assert (ROOT / tree["deepspeed_config"]["deepspeed_config_file"]).is_file()
    hosts = tree["deepspeed_config"].get("deepspeed_hostfile")
    assert hosts is None or (ROOT / hosts).is_file()


def test_accelerate_chooses_where_the_run_file_does_not() -> None:
    choices = AccelerateChoices(None, 3, "cpu", None, None, None, None)
    plan = plan_of(accelerate=choices)
    assert (plan.zero_stage, plan.offload_optimizer) == (3, "cpu")
    file = AccelerateChoices(str(ROOT / "ds_configs" / "zero1.json"), None, None, None, None, None, None)
    assert plan_of(accelerate=file).zero_stage == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("zero_stage", 3, "accelerate's zero_stage 3 contradicts zero_optimization.stage 1"),
        (
            "gradient_accumulation_steps",
            7,
            "accelerate's gradient_accumulation_steps 7 contradicts global_batch_size / (micro_batch_size x dp) = 2",
        ),
        ("gradient_clipping", 0.3, "accelerate's gradient_clipping 0.3 contradicts train.max_grad_norm 1.0"),
        ("mixed_precision", "fp16", "accelerate's mixed_precision 'fp16' contradicts train.precision 'bf16'"),
    ],
)
def test_accelerate_and_the_run_file_must_agree(field: str, value: Any, message: str) -> None:
    choices = AccelerateChoices(**{**NOTHING.__dict__, field: value})
    with pytest.raises(ConfigError) as caught:
        plan_of(zero(1), accelerate=choices)
    assert message in caught.value.message
    assert "leave" in caught.value.hint


def test_accelerates_deepspeed_file_must_say_what_the_run_file_says(tmp_path: Path) -> None:
    file = tmp_path / "theirs.json"
    choices = AccelerateChoices(str(file), None, None, None, None, None, None)
    file.write_text(json.dumps(zero(3, overlap_comm=False) | {"gradient_clipping": "auto"}))
    with pytest.raises(ConfigError) as caught:
        plan_of(zero(1), accelerate=choices)
    assert f"`deepspeed` in the run file contradicts accelerate's deepspeed_config_file {file}" in caught.value.message
    assert "zero_optimization.stage 1 and 3; zero_optimization.overlap_comm None and False" in caught.value.message
    assert "leave one of the two configurations out" in caught.value.hint
    assert plan_of(zero(3, overlap_comm=False), accelerate=choices).zero_stage == 3


def test_gathers_that_nothing_orders_after_a_step_are_refused() -> None:
    """Without a weight that stays whole DeepSpeed does not wait for the step before it gathers on another stream."""

    def plan(ranks: int, device: str, **section: Any) -> Plan:
        tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", "deepspeed": zero(3, **section)}
        config = RunConfig.model_validate(tree | {"train": {"global_batch_size": 8, "precision": "bf16"}})
        return make_plan(RunSettings.of(config), world=World(0, ranks, 0, ranks, "test"), device=device)

    for key in ("param", "model"):
        none = {f"stage3_{key}_persistence_threshold": 0}
        with pytest.raises(ConfigError, match="ZeRO-3 with overlap_comm and a persistence threshold of 0 is refused"):
            plan(2, "cuda", **none)
        plan(1, "cuda", **none)
        plan(2, "cpu", **none)
        plan(2, "cuda", overlap_comm=False, **none)
    plan(2, "cuda", stage3_param_persistence_threshold=40)
