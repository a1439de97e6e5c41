"""Compares versions, and choices that depend on the host, between all ranks before anything is loaded."""

import json
import socket
from collections.abc import Mapping
from importlib.util import find_spec

import torch.distributed as dist

from ds_finetune.config.sections import TrainConfig
from ds_finetune.engine.devices import bf16_support, choose_device, exchange
from ds_finetune.engine.groups.default_group import COLLECTIVE_TIMEOUT
from ds_finetune.errors import ConfigError
from ds_finetune.model.attention.kernels import FLASH_3_MODULE
from ds_finetune.plan.kernels import ChosenKernels, triton_problem
from ds_finetune.plan.precision import with_precision
from ds_finetune.system.info import host_versions
from ds_finetune.system.versions import installed_versions
from ds_finetune.system.world import World


def check_same_versions(world: World, store: dist.Store) -> None:
    """Raise ConfigError if ranks have different versions of this program, torch, transformers or another package that
    computes. The commands `launch` and `doctor` compare hosts in the same way.
    """
    versions = host_versions(installed_versions([""]))
    compared = {name: (version, "") for name, version in versions.items() if name not in ("python", "driver")}
    _check_same("versions", compared, world, store, "install the same versions on every host")


def check_same_precision(section: TrainConfig, world: World, store: dist.Store) -> None:
    """Raise ConfigError if `train.precision: auto` gives different precisions on different ranks."""
    if section.precision != "auto":
        return
    train, lines = with_precision(section, device=(device := choose_device()), support=bf16_support(device, world))
    hint = "set train.precision to one that all devices compute fast, such as fp32"
    _check_same("precision", {"train.precision auto": (train.precision, lines[0])}, world, store, hint)


def check_same_kernels(kernels: ChosenKernels, device: str, world: World, store: dist.Store) -> None:
    """Raise ConfigError if `model.kernels: auto` gives different kernels on different ranks. Also if Triton or
    FlashAttention 3 is usable only on some ranks, e.g. because one host has no C compiler.
    """
    choices = {"model.kernels": (kernels.name, kernels.reason)}
    if device == "cuda" and kernels.has_others:
        problem, has_flash_3 = triton_problem()[0], find_spec(FLASH_3_MODULE) is not None
        choices["Triton"] = ("unusable" if problem else "usable", problem)
        choices["FlashAttention 3"] = ("installed" if has_flash_3 else "not installed", "")
    hint = "install the missing parts on every host, or set model.kernels to torch"
    _check_same("kernels", choices, world, store, hint)


def _check_same(topic: str, own: Mapping[str, tuple[str, str]], world: World, store: dist.Store, hint: str) -> None:
    """Raise ConfigError if the values of a name differ between ranks. `own` maps a name to its value and the reason."""
    record = json.dumps([socket.gethostname(), own])
    ranks = [json.loads(text) for text in exchange(store, world, topic, record, timeout=COLLECTIVE_TIMEOUT)]
    for rank, (_, of_rank) in enumerate(ranks):
        for name in ranks[0][1] | of_rank:
            compared = {number: (ranks[number][0], *ranks[number][1].get(name, ("", ""))) for number in (0, rank)}
            if compared[0][1] != compared[rank][1]:
                texts = [
                    f"{value or 'absent'}{reason and f' ({reason})'} on rank {number} ({host})"
                    for number, (host, value, reason) in compared.items()
                ]
                raise ConfigError(f"ranks differ in {name}: {' and '.join(texts)}", hint=hint)
