"""The table of GPUs: names that users give, and those that drivers report."""

import pytest

from ds_finetune.errors import ConfigError
from ds_finetune.plan.search.machines import GPUS, gpu_named, gpu_of_device


@pytest.mark.parametrize(
    ("device", "name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g", 989),
        ("NVIDIA H100 PCIe", "h100-pcie-80g", 756),
        ("NVIDIA H100 NVL", "h100-nvl-94g", 835),
        ("NVIDIA H800", "h100-80g", 989),
        ("NVIDIA H200", "h200-141g", 989),
        ("NVIDIA H200 NVL", "h200-nvl-141g", 835),
        ("NVIDIA H20", "h20-96g", 148),
        ("NVIDIA GH200 480GB", "gh200-96g", 989),
        ("NVIDIA B200", "b200-180g", 2250),
        ("NVIDIA B300 SXM6 AC", "b300-288g", 2250),
        ("NVIDIA GB200", "gb200-186g", 2500),
        ("NVIDIA A100-SXM4-80GB", "a100-80g", 312),
        ("NVIDIA A100-PCIE-40GB", "a100-40g", 312),
        ("NVIDIA A100 80GB PCIe", "a100-80g", 312),
        ("NVIDIA A800-SXM4-80GB", "a100-80g", 312),
        ("NVIDIA A10", "a10-24g", 125),
        ("NVIDIA A10G", "a10g-24g", 70),
        ("NVIDIA L4", "l4-24g", 121),
        ("NVIDIA L40S", "l40s-48g", 362),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24g", 165.2),
        ("Tesla V100-SXM2-16GB", "v100-16g", 125),
        ("Tesla V100-SXM2-32GB", "v100-32g", 125),
        ("Tesla T4", "t4-16g", 65),
        ("AMD Instinct MI300X", "mi300x-192g", 1307.4),
        ("NVIDIA RTX A1000", None, 0),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None, 0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, 0),
        ("NVIDIA GeForce RTX 4090 D", None, 0),
        ("Unknown", None, 0),
    ],
)
def test_a_device_is_known_by_its_whole_name(device: str, name: str | None, tflops: float) -> None:
    found = gpu_of_device(device)
    assert (None if found is None else found.name) == name
    if found is not None:
        assert found.peak("bf16") == found.peak("fp16") == pytest.approx(tflops * 1e12)
        assert 0 < found.peak("fp32") < found.peak("fp16")


def test_memory_is_what_the_name_says() -> None:
    for name, gpu in GPUS.items():
        gigabytes = int(name.rpartition("-")[2].removesuffix("g"))
        assert gpu.memory_bytes in (gigabytes * 10**9, gigabytes * 2**30)
        assert gpu.has_bf16 == (not name.startswith(("v100", "t4")))
        assert gpu_named(name.upper()) is gpu


def test_an_unknown_name_lists_all() -> None:
    # What users call them: every GPU that has it in its name.
    for name, nearest in {
        "h100-90g": "h100-80g, ",
        "H100": "h100-80g, h100-pcie-80g, h100-nvl-94g, gh200-96g;",
        "NVIDIA H100 80GB": "h100-80g;",
        "4090": "rtx4090-24g;",
        "A100_40G": "a100-40g;",
    }.items():
        with pytest.raises(ConfigError, match=f"GPU `{name}` is not in the table") as refused:
            gpu_named(name)
        if "gh200" not in nearest:
            assert refused.value.hint.startswith(f"nearest: {nearest}")
        assert all(known in refused.value.hint for known in GPUS)
