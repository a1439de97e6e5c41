"""`ds-finetune plan`: what a run decides and needs on given machines, which need not be here."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB, parse_bytes
from ds_finetune.console.tables import OUT, show_pairs
from ds_finetune.errors import ConfigError, RunError

if TYPE_CHECKING:
    # Other commands start without these.
    from ds_finetune.plan.estimate.memory import MemoryEstimate
    from ds_finetune.plan.search.machines import Target
    from ds_finetune.plan.search.search import SearchResult

_MOST_HELD = 16
"""Characters of a line of the times at which something is held."""
_MOST_KEY, _LEAST_WIDTH, _WIDE = 25, 80, 120
"""Characters of a key beside the other columns, and columns of narrow and of wide terminals."""
_LEAST_TEXT = 11
"""Characters of a column of texts at least, such as `micro-batch`."""


def add_commands(commands: Commands) -> None:
    """Add `plan`."""
    text = "show layout, memory and time of a run on given machines, or search for the best layout"
    plan = add_run_command(commands, "plan", text, _plan)
    plan.add_argument("--gpus", type=positive, help="number of GPUs of the run (default: one node, or this machine's)")
    text = "accelerator, such as h100-80g, or `cpu` for ranks on this machine's cores (default: this machine's)"
    plan.add_argument("--gpu", metavar="NAME", help=text)
    shapes = plan.add_mutually_exclusive_group()
    shapes.add_argument("--nodes", type=positive, help="number of nodes that have them, each as many")
    shapes.add_argument("--gpus-per-node", type=positive, help="number of GPUs of a node (default: as is usual)")
    plan.add_argument("--host-memory", metavar="SIZE", help="memory of a node, e.g. 2000GB")
    text = "take the links that `ds-finetune doctor --json` measured and wrote to FILE"
    plan.add_argument("--links", metavar="FILE", help=text)
    text = "list the fastest layouts that fit, and why others lose or do not fit"
    plan.add_argument("--search", action="store_true", help=text)
    plan.add_argument("--write", metavar="FILE", help="with --search: write the run file with the best layout")
    text = "build the model without memory, which takes seconds, and show ranks, tensors and the DeepSpeed JSON"
    plan.add_argument("--tensors", action="store_true", help=text)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--dry-run", action="store_true", help="changes nothing: a plan never starts a run")


def _plan(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.export.formats import formats_of_run
    from ds_finetune.plan.estimate.accelerators import check_precision
    from ds_finetune.plan.precision import with_precision
    from ds_finetune.plan.search.machines import Request, target_of
    from ds_finetune.system.info import gpu_models

    host = parse_bytes(arguments.host_memory, name="--host-memory") if arguments.host_memory else None
    here = tuple(gpu_models()) if arguments.gpu is None else ()
    request = Request(arguments.gpu, arguments.gpus, arguments.nodes, arguments.gpus_per_node, host, here)
    target = _with_links(target_of(request, precision=config.train.precision), arguments.links)
    train, notes = with_precision(config.train, device=target.ranks.device, support=target.bf16)
    config, target = config.model_copy(update={"train": train}), replace(target, notes=(*target.notes, *notes))
    if target.machine is not None:
        check_precision(target.machine.accelerator, train.precision)
    _check_options(arguments)
    formats_of_run(config.export.formats)
    if arguments.search:
        _search(arguments, config, target)
    elif arguments.tensors:
        from ds_finetune.api import plan_run

        OUT.print(plan_run(config, gpus=target.ranks.number, gpus_per_node=target.ranks.per_node))
    else:
        if target.ranks.device == "cpu":
            target = _with_time_or_reason(config.train.precision, target, is_asked_for=arguments.gpu == "cpu")
        _show_forecast(config, target, is_json=arguments.json)


def _with_links(target: "Target", file: str | None) -> "Target":
    """The target with measured links; ConfigError where the file has none, or no accelerator is known."""
    if file is None:
        return target
    if target.machine is None:
        raise ConfigError(f"--links {file} needs a known accelerator", hint="name it by --gpu")
    from ds_finetune.plan.estimate.accelerators import with_measured_links

    return replace(target, machine=with_measured_links(target.machine, Path(file)))


def _with_measured_ranks(precision: str, target: "Target") -> "Target":
    """The target with the rates of this machine's CPU ranks, which are measured where they are not known."""
    from ds_finetune.reference.bench.cpu_rates import this_cpu_machine

    measured = this_cpu_machine(target.ranks.number, precision=precision)
    return replace(target, machine=measured)


def _with_time_or_reason(precision: str, target: "Target", *, is_asked_for: bool) -> "Target":
    """The target with rates of CPU ranks, measured where the plan is asked for them, or a note why there is no time."""
    if not is_asked_for:
        reason = "the speed of this machine's CPU ranks has not been measured; `--gpu cpu` measures it"
        return target if target.machine is not None else replace(target, notes=(f"no time is shown: {reason}",))
    try:
        return _with_measured_ranks(precision, target)
    except RunError as error:
        return replace(target, machine=None, notes=(f"no time is shown: {error.message}",))


def _check_options(arguments: Arguments) -> None:
    """ConfigError for options that are not valid together."""
    given = [f"--{name}" for name in ("search", "tensors") if getattr(arguments, name)]
    given += ["--gpu cpu"] if arguments.tensors and arguments.gpu == "cpu" else []
    given += ["--json"] if arguments.tensors and arguments.json else []
    if len(given) > 1:
        raise ConfigError(f"{' with '.join(given)} is not possible", hint=f"leave {given[-1]} out")
    if arguments.write and not arguments.search:
        raise ConfigError(f"--write {arguments.write} needs --search", hint="add --search, or leave --write out")


def _search(arguments: Arguments, config: RunConfig, target: "Target") -> None:
    from ds_finetune.plan.search.search_run import result_notes, result_tree, search_layouts
    from ds_finetune.plan.settings import RunSettings

    if target.ranks.device == "cpu":
        target = _with_measured_ranks(config.train.precision, target)
    result = search_layouts(RunSettings.of(config), target)
    if arguments.write:
        from ds_finetune.config.edit_run_file import write_run_file

        # With train.precision as it is written.
        given = read_run(arguments)
        text = run_file_text(Path(arguments.run), given, result, target, overrides=arguments.overrides)
        write_run_file(Path(arguments.write), text, option="--write")
    if arguments.json:
        OUT.print_json(json.dumps(result_tree(result, target)))
        return
    for table in _search_tables(result):
        OUT.print(table)
    for note in result_notes(result, target):
        OUT.print(note, markup=False)
    if arguments.write:
        OUT.print(f"written: {arguments.write}", markup=False)


def run_file_text(
    source: Path, config: RunConfig, result: "SearchResult", target: "Target", *, overrides: Sequence[str]
) -> str:
    """The run file `source`, which `config` was read from with `overrides`, with the best layout of a search."""
    from ds_finetune.config.edit_run_file import override_values, written_run_file
    from ds_finetune.plan.search.layout import layout_keys
    from ds_finetune.plan.search.search_run import layout_header
    from ds_finetune.plan.settings import RunSettings

    best, run = result.proposals[0], RunSettings.of(config)
    keys = layout_keys(best.layout, run)
    sections = best.layout.sections(run) | {"deepspeed": keys.get("deepspeed", config.deepspeed)}
    rest = f"The rest is {source} with these choices; its comments were written for other ones."
    header, wanted = [*layout_header(best, target), rest], config.model_copy(update=sections)
    return written_run_file(source, {**dict(override_values(overrides)), **keys}, wanted, header=header)


def _show_forecast(config: RunConfig, target: "Target", *, is_json: bool) -> None:
    from ds_finetune.plan.search.forecast import forecast_run
    from ds_finetune.plan.settings import RunSettings

    forecast = forecast_run(RunSettings.of(config), target)
    if is_json:
        OUT.print_json(json.dumps(forecast.tree()))
        return
    show_pairs("plan", forecast.lines())
    OUT.print(_memory_table(forecast.memory))
    if forecast.time is not None:
        show_pairs("time", forecast.time_lines())
    for note in forecast.notes():
        OUT.print(note, markup=False)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def _memory_table(memory: "MemoryEstimate") -> Table:
    """What, where, how much, when it is held if not always, and what lowers it; then the most of each place."""
    from ds_finetune.plan.estimate.rows import MOMENTS, peak

    table = _table("memory of a rank")
    for head in ("what", "where", "GiB", "held", "lowered by"):
        table.add_column(
            head,
            justify="right" if head == "GiB" else "left",
            overflow="fold",
            no_wrap=head in ("where", "GiB") or (head == "lowered by" and OUT.width >= _LEAST_WIDTH),
            max_width=_MOST_HELD if head == "held" else None,
        )
    for row in memory.rows:
        held = "" if row.when == MOMENTS else ", ".join(row.when)
        # On a narrow terminal a long key continues after its last dot.
        section, _, name = row.option.rpartition(".")
        option = f"{section}.\n{name}" if len(row.option) > _MOST_KEY and OUT.width < _WIDE else row.option
        table.add_row(row.name, row.place, f"{row.num_bytes / GIB:,.2f}", held, option)
    totals = {
        memory.device: memory.device_bytes,
        "nvme": peak(memory.rows, "nvme"),
        "host": memory.host_bytes,
        "disk": memory.disk_bytes,
    }
    for place, num_bytes in totals.items():
        if num_bytes:
            what = "files of the run" if place == "disk" else "at most"
            table.add_row(what, place, f"{num_bytes / GIB:,.2f}", "", "", style="bold")
    return table


def _search_tables(result: "SearchResult") -> Iterator[RenderableType]:
    """The best layouts with memory and time, and why the next ones lose or do not fit."""
    from ds_finetune.plan.search.forecast import seconds_text
    from ds_finetune.plan.search.search_run import layout_text, reason_text

    best = result.proposals[0]
    table = _table(f"best of {result.num_groups} layouts")
    for head in ("", "layout", "s a step", "tokens/s", "MFU", "GiB", "host GiB", "why"):
        is_text = head in ("layout", "why")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold", min_width=_LEAST_TEXT * is_text)
    for number, found in enumerate(result.proposals, start=1):
        time, memory = found.time, found.memory
        sizes = f"{memory.device_bytes / GIB:,.1f}", f"{memory.host_bytes / GIB:,.1f}"
        rates = seconds_text(time.seconds), f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}"
        table.add_row(str(number), layout_text(found.candidate), *rates, *sizes, reason_text(best, found))
    yield table
    if not result.misfits:
        return
    table = _table("faster, but too large")
    for head in ("layout, where it needs least", "s a step", "why not"):
        table.add_column(head, overflow="fold")
    for misfit in result.misfits:
        text = result.budget.problem(misfit.memory)
        table.add_row(layout_text(misfit.candidate), seconds_text(misfit.seconds), text)
    yield table
