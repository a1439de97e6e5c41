"""The table of accelerators, and machines built from it and from measured links."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ds_finetune.cluster.doctor.checks import network_checks
from ds_finetune.cluster.doctor.messages import NetworkResult
from ds_finetune.errors import ConfigError
from ds_finetune.observers.performance import peak_flops
from ds_finetune.plan.estimate.accelerators import (
    ACCELERATORS,
    accelerator,
    accelerator_of_device,
    check_precision,
    machine_of,
    with_measured_links,
)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_rows_are_whole(name: str) -> None:
    row = accelerator(name)
    assert row.name == name
    assert row.source.startswith("https://")
    assert row.network
    rates = (row.fp32_flops, row.inter_node_bytes_per_s, row.pcie_bytes_per_s)
    assert min(rates) > 0
    assert row.fp32_flops < row.bf16_flops
    assert row.inter_node_bytes_per_s < row.intra_node_bytes_per_s < row.memory_bandwidth


@pytest.mark.parametrize("name", ACCELERATORS)
def test_peaks_are_those_of_the_utilisation_of_a_run(name: str) -> None:
    row = accelerator(name)
    for device in row.device_names:
        assert accelerator_of_device(device) is row
        assert peak_flops(device) in (None, row.bf16_flops)


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match="accelerator `h100-90g` is not known") as refused:
        accelerator("h100-90g")
    assert "nearest: h100-80g" in refused.value.hint
    # What users call them: every accelerator that has it in its name.
    for name, nearest in {
        "H100": "h100-80g, h100-pcie-80g;",
        "NVIDIA H100 80GB": "h100-80g;",
        "4090": "rtx4090-24g;",
        "A100_40G": "a100-40g;",
    }.items():
        with pytest.raises(ConfigError) as refused:
            accelerator(name)
        assert refused.value.hint.startswith(f"nearest: {nearest}")
    with pytest.raises(ConfigError, match="`NVIDIA T1000` of this machine is not in the table"):
        accelerator_of_device("NVIDIA T1000")


def test_bf16_needs_an_accelerator_that_has_it() -> None:
    with pytest.raises(ConfigError, match="bf16 on v100-32g"):
        check_precision(accelerator("v100-32g"), "bf16")
    check_precision(accelerator("v100-32g"), "fp16")


@pytest.mark.parametrize(("hosts", "key"), [(["a"] * 4, "intra"), (["a", "a", "b", "b"], "inter")])
def test_links_come_from_doctor(tmp_path: Path, hosts: list[str], key: str) -> None:
    measured = NetworkResult({}, all_reduce=30e9, all_gather=20e9, num_bytes=2**25)
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps([asdict(check) for check in network_checks(hosts, [measured] * len(hosts))]))
    plain = machine_of(accelerator("h100-80g"))
    machine = with_measured_links(plain, file)
    rate = getattr(machine.accelerator, f"{key}_node_bytes_per_s") * machine.efficiency.link
    assert rate == pytest.approx(30e9 if key == "intra" else 15e9)
    other = "inter" if key == "intra" else "intra"
    assert getattr(machine.accelerator, f"{other}_node_bytes_per_s") == getattr(
        plain.accelerator, f"{other}_node_bytes_per_s"
    )
    assert "30 GB/s" in machine.notes[0]


@pytest.mark.parametrize("text", ["[]", "{", '[{"name": "all-reduce", "values": {"ranks": 2}}]', "3"])
def test_a_file_without_links_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "doctor.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="doctor"):
        with_measured_links(machine_of(accelerator("h100-80g")), file)
