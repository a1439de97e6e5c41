"""This machine's CPU ranks as a machine: rates that were measured once are read again."""

from dataclasses import replace
from pathlib import Path

import pytest

from ds_finetune.errors import RunError
from ds_finetune.plan.estimate.accelerators import CpuRates, cpu_machine, rates_file
from ds_finetune.reference.bench import cpu_rates
from ds_finetune.reference.bench.cpu_rates import this_cpu_machine

RATES = CpuRates(
    matmul=8e10,
    head=12e10,
    grouped=6e10,
    attention=4e10,
    memory=2e10,
    new_memory=5e9,
    kernel_seconds=2e-6,
    link=1e9,
    message_seconds=2e-4,
    others=0.02,
)


def test_kept_rates_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = rates_file(2, precision="fp32", threads=1)
    assert file.is_relative_to(tmp_path)
    assert file != rates_file(2, precision="bf16", threads=1)
    RATES.write(file)
    machine = this_cpu_machine(2, precision="fp32", threads=1)
    assert machine.accelerator.fp32_flops == RATES.matmul
    assert machine.accelerator.fp32_flops * machine.efficiency.attention == pytest.approx(RATES.attention)
    assert machine.accelerator.fp32_flops * machine.efficiency.head == pytest.approx(RATES.head)
    assert machine.accelerator.memory_bandwidth * machine.efficiency.new_memory == pytest.approx(RATES.new_memory)
    assert machine.accelerator.intra_node_bytes_per_s * machine.efficiency.link == RATES.link
    assert machine.gpus_per_node == 2
    assert machine.blocks_host


@pytest.mark.parametrize("text", ["", "{}", '{"matmul": 1, "other": 2}', "[]"])
def test_a_file_of_another_version_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "rates.json").write_text(text)
    assert CpuRates.read(tmp_path / "rates.json") is None
    assert CpuRates.read(tmp_path / "none.json") is None


@pytest.mark.slow
def test_two_ranks_are_measured_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = this_cpu_machine(2, precision="fp32", threads=1)
    assert this_cpu_machine(2, precision="fp32", threads=1) == machine
    assert 1e9 < machine.accelerator.fp32_flops < 1e13
    assert 1e7 < machine.accelerator.intra_node_bytes_per_s < 1e12
    with pytest.raises(RunError, match="measuring rank 0 of 1 CPU ranks"):
        this_cpu_machine(1, precision="fp8", threads=1)


def test_rates_of_a_busy_machine_are_marked_and_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = rates_file(2, precision="fp32", threads=1)
    busy = replace(RATES, matmul=1e10, others=0.4)
    busy.write(file)
    marked = cpu_machine(busy, ranks=2, memory_bytes=2**30)
    assert any("other processes took 40% of its processors" in note for note in marked.notes)
    measured = iter([replace(RATES, others=0.5), RATES])
    monkeypatch.setattr(cpu_rates, "measure_ranks", lambda *_, **__: next(measured))
    # A second measurement that is more disturbed is not kept.
    assert this_cpu_machine(2, precision="fp32", threads=1).accelerator.fp32_flops == busy.matmul
    again = this_cpu_machine(2, precision="fp32", threads=1)
    assert (again.accelerator.fp32_flops, again.notes) == (RATES.matmul, ())
    assert this_cpu_machine(2, precision="fp32", threads=1) == again
