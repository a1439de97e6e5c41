"""The section of a report about the loads of experts, over layers and over steps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.runs.report.blocks import Block, Chart, ReportSection
from ds_finetune.runs.report.charts import load_map_plot, value_map_plot
from ds_finetune.runs.report.run import ReportedRun

_MOST_CELLS = 16_384
"""Cells of a heat map of loads at most: DeepSeek-V3 has 58 layers of 256 experts."""
_MOST_COLUMNS = 60
_ROW_PIXELS, _MANY_ROWS, _ROW_PIXELS_OF_MANY = 18, 24, 10
_FRAME_PIXELS, _LEAST_PIXELS, _MOST_PIXELS = 90, 180, 1200


def expert_section(run: ReportedRun) -> ReportSection | None:
    """Heat maps of the loads of experts; None for a run without routed experts."""
    found = run.folder.experts
    if found is None or not len(found[1]):
        return None
    # A table of another origin may have texts here.
    layers, records = [int(layer) for layer in found[0]], found[1]
    counts, steps = records["counts"].astype(np.float64), records["step"]
    tenth = max(len(counts) // 10, 1)
    row = _ROW_PIXELS if len(layers) <= _MANY_ROWS else _ROW_PIXELS_OF_MANY
    height = int(np.clip(_FRAME_PIXELS + row * len(layers), _LEAST_PIXELS, _MOST_PIXELS))
    blocks: list[Block] = []
    parts = {"first": slice(0, tenth), "last": slice(len(counts) - tenth, len(counts))}
    if len(layers) * counts.shape[2] <= _MOST_CELLS:
        for word, part in parts.items():
            span = f"steps {steps[part][0]:,} to {steps[part][-1]:,}" if tenth > 1 else f"step {steps[part][0]:,}"
            blocks.append(_load_map(f"Load of each expert, {word} tenth ({span})", counts[part], layers, height))
    blocks.append(_violation_map(counts, layers, steps, height))
    lead = (
        "The load of an expert is the number of tokens sent to it. Colours show it relative to the mean load of its "
        "layer: grey is the mean, blue less and orange more."
    )
    return ReportSection("experts", "Load of experts", blocks, lead)


def relative_loads(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Loads [layers, experts] over the mean load of their layer, from counts [steps, layers, experts].

    They are 0 where a layer had no token.
    """
    total = counts.sum(axis=0)
    mean = total.mean(axis=1, keepdims=True)
    return np.divide(total, mean, out=np.zeros_like(total), where=mean > 0)


def _load_map(title: str, counts: NDArray[np.float64], layers: list[int], height: int) -> Chart:
    loads = relative_loads(counts)
    row, expert = np.unravel_index(int(loads.argmax()), loads.shape)
    summary = (
        f"The busiest expert is {expert} of layer {layers[row]}, with {loads.max():.2f} times the mean load; "
        f"{int((loads == 0).sum()):,} of {loads.size:,} experts had no token."
    )
    return Chart(title, load_map_plot(loads, layers), summary, "ratio", is_wide=True, height=height, note=summary)


def _violation_map(counts: NDArray[np.float64], layers: list[int], steps: NDArray[Any], height: int) -> Chart:
    """MaxVio of each layer (equation 4 of arXiv 2408.15664) over spans of steps."""
    spans = np.array_split(np.arange(len(counts)), min(len(counts), _MOST_COLUMNS))
    values = np.array([relative_loads(counts[span]).max(axis=1) - 1 for span in spans])
    least_even = int(values[-1].argmax())
    summary = (
        f"At the end layer {layers[least_even]} is the least even one: its busiest expert has "
        f"{values[-1].max() + 1:.2f} times the mean load."
    )
    plot = value_map_plot(np.maximum(values, 0.0), layers, [int(steps[span[0]]) for span in spans])
    title = "Busiest expert of each layer over the run (largest load over the mean, less 1)"
    return Chart(title, plot, summary, "number", is_wide=True, height=height, note=summary)
