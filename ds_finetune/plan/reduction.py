"""How gradients are summed over ranks: in which dtype, and how often in a step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_finetune.config.sections import TrainConfig
from ds_finetune.errors import ConfigError

_FIRST_STAGE = 2
"""The first ZeRO stage that sums gradients in each forward, and that can accumulate the sums in fp32."""
_COMMUNICATION, _ACCUMULATION = "communication_data_type", "grad_accum_dtype"


def with_reduction_dtype(tree: Mapping[str, Any], train: TrainConfig, *, stage: int, source: str) -> dict[str, Any]:
    """DeepSpeed's choices with the keys that `train.reduction_dtype` stands for.

    ConfigError where the choices name others, and where DeepSpeed 0.19.8 cannot sum so.
    """
    own = _keys(train, stage)
    data_types = dict(tree.get("data_types") or {})
    for key, value in own.items():
        given = (tree if key == _COMMUNICATION else data_types).get(key)
        if given not in (None, "auto", value):
            raise ConfigError(
                f"{source}: {key} {given!r} contradicts train.reduction_dtype {train.reduction_dtype}, that is "
                f"{value!r}",
                hint=f"leave {key} out, or train.reduction_dtype",
            )
    found = {**tree}
    if _COMMUNICATION in own:
        found[_COMMUNICATION] = own[_COMMUNICATION]
    if _ACCUMULATION in own:
        found["data_types"] = data_types | {_ACCUMULATION: own[_ACCUMULATION]}
    return found


def _keys(train: TrainConfig, stage: int) -> dict[str, str]:
    dtype, precision = train.reduction_dtype, train.precision
    if dtype in ("auto", precision):
        return {}
    if precision == "fp16":
        raise ConfigError(
            f"train.reduction_dtype {dtype} with train.precision fp16 is not tested",
            hint="set train.precision to bf16, or leave train.reduction_dtype out",
        )
    if dtype == "bf16":
        return {_COMMUNICATION: "bf16"}
    if stage < _FIRST_STAGE:
        raise ConfigError(
            f"train.reduction_dtype fp32 with train.precision bf16 and zero stage {stage}: DeepSpeed 0.19.8 rounds the "
            "sum to bf16 below stage 2",
            hint="set zero_optimization.stage to 2 or 3, or leave train.reduction_dtype out",
        )
    return {_COMMUNICATION: "fp32", _ACCUMULATION: "fp32"}


def check_reduction(
    train: TrainConfig, optimizer: str, tree: Mapping[str, Any], *, stage: int, offloads: Sequence[str]
) -> None:
    """ConfigError for parts of a run that are not tested with `train.reduction_every: step`, or lose by it."""
    if train.reduction_every != "step":
        return
    for what, hint in _conflicts(train, optimizer, tree, stage, offloads):
        raise ConfigError(f"train.reduction_every step with {what}", hint=hint)


def _conflicts(
    train: TrainConfig, optimizer: str, tree: Mapping[str, Any], stage: int, offloads: Sequence[str]
) -> Iterator[tuple[str, str]]:
    accumulated = (tree.get("data_types") or {}).get(_ACCUMULATION)
    if stage >= _FIRST_STAGE and accumulated == "fp32" and train.precision != "fp32":
        key = "train.reduction_dtype" if train.reduction_dtype == "fp32" else f"data_types.{_ACCUMULATION}"
        yield (
            f"{key} fp32 in {train.precision}: ranks would accumulate their own gradients in {train.precision}",
            "leave one of them out",
        )
    if stage >= _FIRST_STAGE and optimizer.lower() == "muon":
        yield "optim.name Muon is not tested", "use AdamW, or leave train.reduction_every out"
    if "nvme" in offloads:
        yield "offload to nvme is not tested", "offload to cpu, or leave train.reduction_every out"
