"""`ds-finetune plan`: what a run decides and needs on given machines, which need not be here."""

import json
from typing import TYPE_CHECKING

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run
from ds_finetune.console import OUT, pairs
from ds_finetune.errors import ConfigError
from ds_finetune.units import parse_bytes

if TYPE_CHECKING:
    from ds_finetune.config.schema import RunConfig
    from ds_finetune.search.machines import Target


def add_commands(commands: Commands) -> None:
    """Add `plan`."""
    text = "show layout, memory and time of a run on given machines, or search for the best layout"
    plan = add_run_command(commands, "plan", text, _plan)
    plan.add_argument("--gpus", type=positive, help="number of GPUs of the run (default: one node, or this machine's)")
    plan.add_argument(
        "--gpu",
        metavar="NAME",
        help="accelerator, such as h100-80g, or `cpu` for ranks on this machine's cores (default: this machine's)",
    )
    shapes = plan.add_mutually_exclusive_group()
    shapes.add_argument("--nodes", type=positive, help="number of nodes that have them, each as many")
    shapes.add_argument("--gpus-per-node", type=positive, help="number of GPUs of a node (default: as is usual)")
    plan.add_argument("--host-memory", metavar="SIZE", help="memory of a node, e.g. 2000GB")
    plan.add_argument(
        "--tensors",
        action="store_true",
        help="build the model without memory, which takes seconds, and show ranks, tensors and the DeepSpeed JSON",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--dry-run", action="store_true", help="changes nothing: a plan never starts a run")


def _plan(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.search.machines import Request, check_machine, target_of

    host = parse_bytes(arguments.host_memory, name="--host-memory") if arguments.host_memory else None
    request = Request(arguments.gpu, arguments.gpus, arguments.nodes, arguments.gpus_per_node, host)
    target = target_of(request)
    check_machine(target, config.train.precision)
    if arguments.tensors:
        _show_tensors(config, target, is_json=arguments.json)
    else:
        _show_forecast(config, target, is_json=arguments.json)


def _show_tensors(config: "RunConfig", target: "Target", *, is_json: bool) -> None:
    if is_json or target.ranks.device == "cpu":
        other = "--json" if is_json else "--gpu cpu"
        raise ConfigError(f"--tensors with {other} is not possible", hint=f"leave {other} out")
    from ds_finetune.trainer.dry_run import plan_run

    OUT.print(plan_run(config, gpus=target.ranks.number, gpus_per_node=target.ranks.per_node))


def _show_forecast(config: "RunConfig", target: "Target", *, is_json: bool) -> None:
    from ds_finetune.cli.memory_table import memory_table
    from ds_finetune.search.forecast import forecast_run

    forecast = forecast_run(config, target)
    if is_json:
        OUT.print_json(json.dumps(forecast.tree()))
        return
    OUT.print(pairs("plan", forecast.lines()))
    OUT.print(memory_table(forecast.memory))
    for note in forecast.notes():
        OUT.print(note, markup=False)
