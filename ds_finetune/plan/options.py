"""Options of a DeepSpeed JSON that are known to give errors or wrong results, with version and evidence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.errors import ConfigError

Tree = dict[str, Any]


@dataclass(frozen=True)
class Situation:
    """What a rule depends on: the accelerator (`cpu` or `cuda`), ZeRO stage, precision and optimizer name."""

    device: str
    stage: int
    precision: str
    optimizer: str
    max_grad_norm: float = 0.0


@dataclass(frozen=True)
class OptionRule:
    """An option known to be wrong: when the rule applies, the evidence, and how to rewrite the option.

    Without `rewrite` the option is an error, with `hint`.
    """

    name: str
    applies: Callable[[Situation, Mapping[str, Any]], bool]
    evidence: str
    rewrite: Callable[[Tree], None] | None = None
    hint: str = ""


def _turn_off(*path: str) -> Callable[[Tree], None]:
    def write(zero: Tree) -> None:
        branch = zero
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = False

    return write


def offload_device(zero: Mapping[str, Any], what: str) -> str:
    """The device of `offload_optimizer` or `offload_param` in a ZeRO section: `none`, `cpu` or `nvme`."""
    section = zero.get(what) or {}
    return str(section.get("device") or "none")


def _pins(what: str) -> Callable[[Situation, Mapping[str, Any]], bool]:
    return lambda s, z: (
        s.device == "cpu" and offload_device(z, what) != "none" and (z.get(what) or {}).get("pin_memory", True)
    )


_PINNED = "DeepSpeed 0.19.8: the CPU accelerator has no pinned memory; asking for it compiles an op that only copies"

RULES = (
    OptionRule(
        "overlap_comm on the CPU accelerator",
        lambda s, z: s.device == "cpu" and s.stage >= 1 and z.get("overlap_comm", s.stage == 3) is not False,
        "DeepSpeed 0.19.8, gloo: streams are no-ops there, ZeRO-3 reads gradients before they are reduced; "
        "four of six fp32 starts gave wrong losses without an error (same family: DeepSpeed issue 7718)",
        rewrite=_turn_off("overlap_comm"),
    ),
    OptionRule(
        "offload_optimizer.pin_memory on the CPU accelerator",
        _pins("offload_optimizer"),
        _PINNED,
        _turn_off("offload_optimizer", "pin_memory"),
    ),
    OptionRule(
        "offload_param.pin_memory on the CPU accelerator",
        _pins("offload_param"),
        _PINNED,
        _turn_off("offload_param", "pin_memory"),
    ),
    OptionRule(
        "fp16 on the CPU accelerator",
        lambda s, z: s.device == "cpu" and s.precision == "fp16",
        "DeepSpeed 0.19.8 has no fp16 there",
        hint="train.precision bf16 or fp32",
    ),
    OptionRule(
        "fp16 without ZeRO",
        lambda s, z: s.stage == 0 and s.precision == "fp16",
        "DeepSpeed 0.19.8 scales the loss for ZeRO optimizers alone (runtime/engine.py:3417), but its "
        "FP16_Optimizer divides the gradients"
        " by the scale all the same (fp16/fused_optimizer.py:374): a gradient norm of 0.767 became 1.17e-5",
        hint="zero_optimization.stage 1, or train.precision bf16",
    ),
    OptionRule(
        "offload to nvme below ZeRO-3",
        lambda s, z: (
            s.stage < 3 and "nvme" in (offload_device(z, "offload_optimizer"), offload_device(z, "offload_param"))
        ),
        "DeepSpeed 0.19.8 stages 1 and 2 keep the states in CPU memory instead, without a word (zero/stage_1_and_2.py)",
        hint="zero_optimization.stage 3, or device cpu",
    ),
    *(
        OptionRule(
            f"{what} to nvme without nvme_path",
            lambda s, z, what=what: offload_device(z, what) == "nvme" and not z[what].get("nvme_path"),  # type: ignore[misc]
            "DeepSpeed 0.19.8 has no folder to write to and fails while it builds the engine (swap_tensor/)",
            hint=f'{what}.nvme_path "FOLDER" on a local NVMe disk',
        )
        for what in ("offload_optimizer", "offload_param")
    ),
    OptionRule(
        "offload_param below ZeRO-3",
        lambda s, z: s.stage < 3 and offload_device(z, "offload_param") != "none",
        "parameters are only partitioned, and so offloadable, at stage 3",
        hint="zero_optimization.stage 3, or leave offload_param out",
    ),
    OptionRule(
        "offload_optimizer without ZeRO",
        lambda s, z: s.stage == 0 and offload_device(z, "offload_optimizer") != "none",
        "stage 0 has no partitioned optimizer to offload",
        hint="zero_optimization.stage 1, 2 or 3",
    ),
    OptionRule(
        "Muon with reduce_scatter under ZeRO-3",
        lambda s, z: s.stage == 3 and s.optimizer.lower() == "muon" and z.get("reduce_scatter", True) is not False,
        "DeepSpeed 0.19.8 refuses the pair after loading (zero/stage3.py:361)",
        hint="zero_optimization.reduce_scatter false",
    ),
    OptionRule(
        "clipping with Muon under ZeRO",
        lambda s, z: s.stage >= 1 and s.optimizer.lower() == "muon" and s.max_grad_norm > 0,
        "DeepSpeed 0.19.8 orthogonalises before it takes the norm (zero/stage_1_and_2.py:2865, "
        "zero/stage3.py:1697): the update would be"
        " clipped, not the gradient; losses of a tiny DeepSeek-V3 depart from stage 0 by 3e-4 after two steps",
        hint="train.max_grad_norm 0, or zero_optimization.stage 0",
    ),
    OptionRule(
        "Adagrad without offload_optimizer under ZeRO",
        lambda s, z: (
            s.stage >= 1 and s.optimizer.lower() == "adagrad" and offload_device(z, "offload_optimizer") == "none"
        ),
        "DeepSpeed 0.19.8: torch.optim.Adagrad makes its states in its constructor, which ZeRO's flat partitions "
        "have not; it ends in an IndexError",
        hint="offload_optimizer.device cpu (DeepSpeedCPUAdagrad), or zero_optimization.stage 0",
    ),
    OptionRule(
        "Lion without offload_optimizer on the CPU accelerator",
        lambda s, z: (
            s.device == "cpu" and s.optimizer.lower() == "lion" and offload_device(z, "offload_optimizer") == "none"
        ),
        "DeepSpeed 0.19.8: FusedLion has not been implemented on the CPU backend",
        hint="offload_optimizer.device cpu (DeepSpeedCPULion) with zero_optimization.stage 1, 2 or 3",
    ),
    OptionRule(
        "Lamb on the CPU accelerator",
        lambda s, z: s.device == "cpu" and s.optimizer.lower() == "lamb",
        "DeepSpeed 0.19.8: FusedLamb has not been implemented on the CPU backend",
        hint="optim.name AdamW, or a GPU",
    ),
    OptionRule(
        "Lamb under ZeRO",
        lambda s, z: s.stage >= 1 and s.optimizer.lower() == "lamb",
        "its trust ratio is a ratio of whole parameters' norms; on a rank's flat partition it would be another "
        "number on each count of ranks",
        hint="zero_optimization.stage 0, or optim.name AdamW",
    ),
)
"""Options known to be wrong for an accelerator or stage; each is rewritten with one visible line, or refused."""


def apply_rules(zero: Tree, situation: Situation) -> list[str]:
    """Apply rules to `zero` in place and return a line for each that rewrites it; ConfigError where a rule refuses."""
    lines = []
    for rule in RULES:
        if not rule.applies(situation, zero):
            continue
        if rule.rewrite is None:
            raise ConfigError(
                f"{rule.name} is refused (device {situation.device}, zero stage {situation.stage}, "
                f"{situation.precision}): {rule.evidence}",
                hint=f"use {rule.hint}",
            )
        rule.rewrite(zero)
        lines.append(f"rewritten: {rule.name} is off. {rule.evidence}")
    return lines
