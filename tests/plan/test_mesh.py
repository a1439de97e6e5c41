"""The grid of ranks, and what is refused before anything is read."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.configs import DENSE
from ds_finetune.families.table import FAMILIES
from ds_finetune.plan.mesh import TESTED_LAYOUTS, Mesh
from ds_finetune.plan.settings import RunSettings
from tests.checking import check, settings_of


def test_ranks_are_numbered_row_major_and_tensor_ranks_stand_together() -> None:
    mesh = Mesh(rank=13, dp=3, pp=2, sp=2, tp=2)
    assert mesh.world_size == 24
    assert [mesh.coordinate(axis) for axis in ("pp", "dp", "sp", "tp")] == [1, 0, 0, 1]
    assert mesh.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert mesh.groups("sp")[0] == [0, 2]
    assert mesh.groups("dp", "sp")[1] == [1, 3, 5, 7, 9, 11]
    assert sorted(rank for line in mesh.groups("pp") for rank in line) == list(range(24))
    assert str(mesh) == "dp 3 x pp 2 x sp 2 x tp 2"
    assert mesh.leader == 12
    assert mesh.holders_of_leader() == [12, 13]


def test_ranks_that_do_not_factor_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.of(ParallelConfig(sp=4), world_size=6, rank=0)
    assert caught.value.message == "6 ranks are not a multiple of parallel sp 4 = 4"
    assert caught.value.hint == "start 4 or 8 ranks, or set smaller sizes"


def _config(**sections: Any) -> RunConfig:
    tree = {
        "model": "m",
        "data": {"train": "t.jsonl"},
        "train": {"for": "1 steps", "max_seq_len": 30, "precision": "bf16"},
        "parallel": {"sp": 4},
        "output_dir": "o",
    }
    return RunConfig.model_validate(tree | sections)


def _check_layout(mesh: Mesh, zero: dict[str, Any] | None = None, **sections: Any) -> None:
    tree = {"zero_optimization": zero or {"stage": 2}}
    check(RunSettings.of(_config(**sections), mesh=mesh, deepspeed_config=tree), "layout")


def _check_model(subject: str, mesh: Mesh, model: dict[str, Any], **sections: Any) -> None:
    check(settings_of(_config(parallel={}, **sections), mesh=mesh, model_json=model), subject)


@pytest.mark.parametrize(
    ("sections", "message", "hint"),
    [
        ({}, "train.max_seq_len 30 is not a multiple of parallel.sp 4", "set train.max_seq_len to 28 or 32"),
        (
            {"model": {"path": "m", "attention": "eager"}},
            "parallel dp 1 x sp 4 with model.attention eager is not tested",
            "set model.attention: sdpa",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(sections: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check_layout(Mesh(rank=0, dp=1, sp=4), **sections)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("mesh", "stage", "offload", "message", "hint"),
    [
        (
            Mesh(0, 1, pp=2),
            2,
            "none",
            "parallel dp 1 x pp 2 with zero stage 2 is not tested",
            "use the nearest tested layout: parallel.pp with zero stage 0, 1",
        ),
        (
            Mesh(0, 1, pp=2, tp=2),
            3,
            "none",
            "parallel dp 1 x pp 2 x tp 2 with zero stage 3 is not tested",
            "use the nearest tested layout: parallel.pp and parallel.tp with zero stage 0, 1",
        ),
        (
            Mesh(0, 1, pp=2),
            0,
            "none",
            "parallel dp 1 x pp 2 with zero stage 0 in bf16 clips by a wrong norm",
            "use zero stage 1, or fp32",
        ),
        (
            Mesh(0, 2, sp=2, tp=2, ep=2),
            3,
            "none",
            "parallel dp 2 x sp 2 x tp 2 x ep 2 with zero stage 3 is not tested",
            "use the nearest tested layout: parallel.sp and parallel.tp with zero stage 0, 1, 2, 3",
        ),
        (
            Mesh(0, 1, tp=2),
            0,
            "none",
            "parallel dp 1 x tp 2 with zero stage 0 in bf16 clips by a wrong norm",
            "use zero stage 1, or fp32",
        ),
        (Mesh(0, 1, tp=2), 3, "nvme", "parallel dp 1 x tp 2 with offload to nvme is not tested", "offload to cpu"),
    ],
)
def test_combinations_that_nothing_compares_are_refused(
    mesh: Mesh, stage: int, offload: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _check_layout(mesh, {"stage": stage, "offload_optimizer": {"device": offload}})
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("sections", [{"optim": {"lr": 1e-3, "name": "Muon"}}, {"optim": {"lr": 1e-3, "name": "Lamb"}}])
def test_optimizers_of_whole_matrices_are_refused(sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"with optim.name (Muon|Lamb) is not tested"):
        _check_layout(Mesh(0, 1, tp=2), **sections)


@pytest.mark.parametrize(
    "zero", [{"reduce_scatter": False}, {"contiguous_gradients": False}, {"prescale_gradients": True}]
)
def test_choices_of_deepspeed_that_nothing_compares_are_refused(zero: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match=f"with {next(iter(zero))} .* is not tested"):
        _check_layout(Mesh(0, 2, ep=2), {"stage": 2} | zero)


def test_four_bits_of_shards_are_refused() -> None:
    config = _config(lora={"quantize": "nf4"})
    with pytest.raises(ConfigError) as caught:
        check(RunSettings.of(config, mesh=Mesh(0, 1, tp=2)), "LoRA")
    assert caught.value.message == (
        "lora.quantize nf4 with parallel dp 1 x tp 2 would round other numbers than without parallel.tp"
    )
    assert caught.value.hint == "set parallel.tp: 1; pp, sp and ep may be larger"


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not tested"):
        _check_layout(Mesh(0, 1, tp=2), train={"for": "1 steps", "precision": "fp16"})


def test_ranks_of_experts() -> None:
    mesh = Mesh(rank=6, dp=4, tp=2, ep=2)
    assert mesh.expert_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert mesh.same_expert_groups() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert mesh.expert_holders() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.expert_index == 1
    with pytest.raises(ConfigError) as caught:
        Mesh.of(ParallelConfig(ep=4, tp=2), world_size=12, rank=0)
    assert (caught.value.message, caught.value.hint) == (
        "parallel.ep 4 does not divide the 6 ranks of dp 6 x sp 1",
        "set parallel.ep to one of 1, 2, 3, 6",
    )


@pytest.mark.parametrize(
    ("mesh", "model", "message", "hint"),
    [
        (
            Mesh(0, 1, sp=3),
            DENSE | {"model_type": "llama"},
            "parallel.sp 3 does not divide the 4 attention heads of the model",
            "set parallel.sp to one of 1, 2, 4",
        ),
        (
            Mesh(0, 1, sp=4, tp=2),
            DENSE | {"model_type": "llama"},
            "parallel.sp 4 does not divide the 2 attention heads of a tensor parallel rank of the model",
            "set parallel.sp to one of 1, 2",
        ),
        (
            Mesh(0, 1, sp=2),
            DENSE | {"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}},
            "parallel dp 1 x sp 2 of a model with rope_type longrope is not tested",
            "set parallel.sp: 1",
        ),
        (
            Mesh(0, 1, tp=2),
            DENSE | {"model_type": "llama", "mlp_bias": True},
            "parallel dp 1 x tp 2 of a model with mlp_bias true is not tested",
            "set parallel.tp: 1",
        ),
        (
            Mesh(0, 1, tp=2),
            DENSE | {"model_type": "mixtral", "router_jitter_noise": 0.1},
            "parallel dp 1 x tp 2 of a model with router_jitter_noise 0.1 is not tested",
            "set parallel.tp: 1",
        ),
        (
            Mesh(0, 1, ep=3),
            DENSE | {"model_type": "mixtral", "num_local_experts": 4},
            "parallel.ep 3 does not divide the 4 routed experts of the model",
            "set parallel.ep to one of 1, 2, 4",
        ),
        (
            Mesh(0, 1, tp=4),
            DENSE | {"model_type": "llama"},
            "parallel.tp 4 does not divide the 2 key and value heads of the model",
            "set parallel.tp to one of 1, 2",
        ),
        (
            # A prime: a divisor is looked for up to its root alone, and a size that no machine has is not named.
            Mesh(0, 1, tp=2),
            DENSE | {"model_type": "llama", "vocab_size": 10**12 + 39},
            "parallel.tp 2 does not divide the 1000000000039 tokens of the vocabulary of the model",
            "set parallel.tp to one of 1",
        ),
        (
            Mesh(0, 1, tp=7),
            DENSE
            | {"model_type": "llama", "num_attention_heads": 7, "num_key_value_heads": 7}
            | {"intermediate_size": 49, "vocab_size": 151936},
            "parallel.tp 7 does not divide the 151936 tokens of the vocabulary of the model",
            "set parallel.tp to one of 1, 2, 4, 8, 16, 32, 64, 128, 1187, 2374",
        ),
        (
            Mesh(0, 1, sp=2),
            {"model_type": "gpt2"},
            "parallel dp 1 x sp 2 of model_type gpt2 is not tested",
            f"use one of {', '.join(TESTED_LAYOUTS[0].families)}",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(
    mesh: Mesh, model: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _check_model("sizes of the model", mesh, model)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("pp", "given", "message", "hint"),
    [
        (3, [], "parallel.pp 3 is more than the 2 layers of the model", "set parallel.pp to at most 2"),
        (
            2,
            [2],
            "parallel.pp_layers [2] does not divide 2 layers over 2 stages",
            "name 2 numbers of at least 1 whose sum is 2, or leave parallel.pp_layers out",
        ),
        (
            2,
            [2, 0],
            "parallel.pp_layers [2, 0] does not divide 2 layers over 2 stages",
            "name 2 numbers of at least 1 whose sum is 2, or leave parallel.pp_layers out",
        ),
        (
            1,
            [1, 1],
            "parallel.pp_layers [1, 1] with parallel.pp 1, which has no pipeline stages",
            "set parallel.pp, or leave parallel.pp_layers out",
        ),
    ],
)
def test_stages_that_do_not_share_out_the_layers_are_refused(
    pp: int, given: list[int], message: str, hint: str
) -> None:
    config = _config(parallel={"pp": pp, "pp_layers": given})
    run = settings_of(config, mesh=Mesh(0, 1, pp=pp), model_json=DENSE | {"model_type": "llama"})
    with pytest.raises(ConfigError) as caught:
        check(run, "sizes of the model")
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize("kind", [name for name, family in FAMILIES.items() if family.fused_experts])
@pytest.mark.parametrize(
    ("tp", "sizes", "precision", "message", "hint"),
    [
        (
            1,
            {"moe_intermediate_size": 44},
            "bf16",
            "moe_intermediate_size 44 / parallel.tp 1 = 44 columns of an expert x 2 bytes in bf16 is no multiple of 16 bytes",
            "set train.precision: fp32, or train a model of other widths",
        ),
        (
            4,
            {"moe_intermediate_size": 48},
            "bf16",
            "moe_intermediate_size 48 / parallel.tp 4 = 12 columns of an expert x 2 bytes in bf16 is no multiple of 16 bytes",
            "set parallel.tp to 1 or 2 or 3",
        ),
        (
            1,
            {"hidden_size": 36},
            "bf16",
            "hidden_size 36 x 2 bytes in bf16 is no multiple of 16 bytes",
            "set train.precision: fp32, or train a model of other widths",
        ),
        (
            1,
            {"moe_intermediate_size": 18},
            "fp32",
            "moe_intermediate_size 18 / parallel.tp 1 = 18 columns of an expert x 4 bytes in fp32 is no multiple of 16 bytes",
            "train a model of other widths",
        ),
    ],
)
def test_widths_that_the_grouped_product_rejects_are_refused(
    kind: str, tp: int, sizes: dict[str, int], precision: str, message: str, hint: str
) -> None:
    keys = FAMILIES[kind].expert_keys
    model = {"model_type": kind, "hidden_size": 32, "moe_intermediate_size": 64} | sizes
    model[keys.width_key] = model.pop("moe_intermediate_size")
    message, train = message.replace("moe_intermediate_size", keys.width_key), {"precision": precision}
    with pytest.raises(ConfigError) as caught:
        _check_model("experts of the model", Mesh(0, 1, tp=tp), model, train=train)
    assert caught.value.message.startswith(message)
    assert caught.value.hint == hint
    fitting = model | {"hidden_size": 32, keys.width_key: 48}
    _check_model("experts of the model", Mesh(0, 1), fitting, train=train)
    _check_model("experts of the model", Mesh(0, 1, tp=tp), model | {"model_type": "llama"}, train=train)


@pytest.mark.parametrize(
    ("width", "precision", "is_accepted"),
    [(44, "bf16", False), (44, "fp32", True), (18, "fp32", False), (48, "bf16", True)],
)
def test_torch_itself_rejects_those_widths(width: int, precision: str, is_accepted: bool) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    rows, down = torch.ones(4, width, dtype=dtype), torch.ones(2, 32, width, dtype=dtype)
    with nullcontext() if is_accepted else pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        functional.grouped_mm(rows, down.transpose(-2, -1), offs=torch.tensor([2, 4], dtype=torch.int32))
