"""`ds-finetune scaling`: compares the speed of several numbers of ranks and layouts on the same global batches."""

import math
import re
import statistics
from collections.abc import Sequence

import numpy as np

from ds_finetune.config.run_file import set_key
from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError, FinetuneError, RunError
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.runs.experiments.jobs import RUN, ExperimentRun, ShortRuns, run_all, run_slots, slot_on_hosts
from ds_finetune.system.world import World

COLUMNS = ("", "s/step", "tokens/s", "speed-up", "efficiency", "GiB", "loss off by")
"""Column heads of the table that compares variants."""
_LEAST_STEPS, _WARMUP_STEPS = 4, 2
_LEAST_LOSS = 1e-12
_AXIS = re.compile(r"(zero|tp|pp|sp|ep)(\d+)")


class Variant(ExperimentRun):
    """One run of a scaling comparison, on `ranks` ranks with the parallel `layout`, such as `tp2+zero3`; an empty
    layout is the one in the run file. ConfigError or LaunchError names a variant that is impossible.
    """

    def __init__(self, runs: ShortRuns, ranks: int, layout: str, hostfile: str | None) -> None:
        self.ranks, self.layout = ranks, layout
        self.name = f"{ranks} rank{'s' * (ranks > 1)}" + (f", {layout}" if layout else "")
        folder = runs.folder / (f"{ranks}-ranks" + (f"-{layout}" if layout else ""))
        tree = runs.run_tree(folder / RUN)
        for part in filter(None, layout.split("+")):
            match = _AXIS.fullmatch(part)
            if match is None:
                hint = "combine zero, tp, pp, sp and ep with numbers, e.g. `--layouts zero1,zero3,tp2,tp2+zero3`"
                raise ConfigError(f"--layouts has `{part}`, which is not a layout", hint=hint)
            axis, number = match[1], int(match[2])
            if axis == "zero":
                choices, _ = given_choices(tree.get("deepspeed"))
                stage = {**choices.get("zero_optimization", {}), "stage": number}
                tree["deepspeed"] = {**choices, "zero_optimization": stage}
            else:
                set_key(tree, {}, f"parallel.{axis}", number, source="--layouts")
        super().__init__(folder, tree)
        config = validate_tree(tree, {}, f"{runs.run_file} with {self.name}")
        try:
            make_plan(RunSettings.of(config), world=World(0, ranks, 0, ranks, "scaling"), device="cpu")
            self.slots = run_slots(ranks) if hostfile is None else [slot_on_hosts(hostfile, ranks)]
        except FinetuneError as illegal:
            raise type(illegal)(f"the variant {self.name} cannot run: {illegal.message}", hint=illegal.hint) from None

    def timed(self, name: str) -> list[float]:
        """The values of the metric `name` at the steps after the warm-up."""
        return self.metrics.curves[name].values.tolist()[_WARMUP_STEPS:]

    def row(self, first: "Variant") -> tuple[str, ...]:
        """The cells of the table row of this variant, in the order of COLUMNS. Speed-up, efficiency and losses are
        relative to the variant `first`.
        """
        seconds = self.timed("perf/step_seconds")
        tokens = (s * rate for s, rate in zip(seconds, self.timed("perf/tokens_per_second"), strict=True))
        speedup = sum(first.timed("perf/step_seconds")) / sum(seconds)
        losses, first_losses = (run.metrics.curves["train/loss"].values.tolist() for run in (self, first))
        return (
            self.name,
            f"{statistics.median(seconds):.3f}",
            f"{sum(tokens) / sum(seconds):,.0f}",
            f"{speedup:.2f}",
            f"{speedup / (self.ranks / first.ranks):.0%}",
            f"{self.metrics.curves['memory/peak_gib'].values.max():.2f}",
            f"{largest_difference(losses, first_losses):.1e}",
        )


def compare_scaling(
    runs: ShortRuns, variants: Sequence[tuple[int, str]], *, hostfile: str | None, say: Say
) -> list[tuple[str, ...]]:
    """Train the variants of a run file one after another. Each variant is a number of ranks and a layout such as
    `tp2+zero3`, or an empty text for the layout of the run file. Returns the rows of the table that compares them.

    The first two steps of each run are warm-up and not timed. `say` prints the reason of a variant that fails.
    ConfigError, LaunchError or OutputError before anything starts; RunError if all variants fail.
    """
    runs.check(_LEAST_STEPS)
    completed: list[Variant] = []
    for variant in [Variant(runs, ranks, layout, hostfile) for ranks, layout in variants]:
        run_all(iter([variant]), variant.slots)
        say(f"{variant.name}: {f'FAILED: {variant.reason}' if variant.reason else 'done'}")
        completed += [variant] * (not variant.reason)
    if not completed:
        raise RunError(f"all variants failed; {variant.name}: {variant.reason}", hint=f"read the logs in {runs.folder}")
    return [variant.row(completed[0]) for variant in completed]


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of the losses of two runs at equal steps; infinite if a loss is not finite."""
    differences = np.abs(np.subtract(losses, expected)) / np.maximum(np.abs(expected), _LEAST_LOSS)
    return float(np.nan_to_num(differences, nan=math.inf, posinf=math.inf).max(initial=0.0))
