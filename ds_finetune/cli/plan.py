"""`ds-finetune plan`: shows the plan and the memory of a run on given machines, which need not be available."""

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.config.units import GIB, parse_bytes
from ds_finetune.console.phase_line import Say
from ds_finetune.console.tables import ERR, OUT, show_note, show_pairs
from ds_finetune.errors import ConfigError

if TYPE_CHECKING:
    from ds_finetune.model.build.model_plan import ModelPlan
    from ds_finetune.plan.model_tensors import DescribedModel
    from ds_finetune.plan.search.machines import Target
    from ds_finetune.plan.settings import RunSettings
    from ds_finetune.trainer.tracing.cache import Traces


def add_commands(commands: Commands) -> None:
    """Add the command `plan` to the program."""
    text = "show the layout and memory of a run and whether it fits given machines, or list layouts that fit"
    plan = add_run_command(commands, "plan", text, _plan)
    plan.add_argument("--gpus", type=positive, help="number of GPUs of the run (default: one node, or this machine's)")
    gpus = plan.add_mutually_exclusive_group()
    text = "GPU, such as h100-80g, or `cpu` for ranks on this machine's cores (default: this machine's)"
    gpus.add_argument("--gpu", metavar="NAME", help=text)
    gpus.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU instead of its name, e.g. 40GiB")
    shapes = plan.add_mutually_exclusive_group()
    shapes.add_argument("--nodes", type=positive, help="number of nodes, each with as many of the GPUs")
    shapes.add_argument("--gpus-per-node", type=positive, help="GPUs of each node (default: 8, or this machine's)")
    plan.add_argument("--host-memory", metavar="SIZE", help="memory of a node, e.g. 2000GB")
    text = "list the first tested layouts that fit, in a documented order"
    plan.add_argument("--search", action="store_true", help=text)
    text = "build the model without memory, which takes seconds, and show ranks, tensors and the DeepSpeed JSON"
    plan.add_argument("--tensors", action="store_true", help=text)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--dry-run", action="store_true", help="changes nothing: a plan never starts a run")


def _plan(arguments: Arguments) -> None:
    config = read_run(arguments)
    options = [f"--{name}" for name in ("search", "tensors") if getattr(arguments, name)]
    options += ["--gpu cpu"] if arguments.tensors and arguments.gpu == "cpu" else []
    options += ["--json"] if arguments.tensors and arguments.json else []
    if len(options) > 1:
        raise ConfigError(f"the options {' and '.join(options)} cannot be combined", hint=f"leave {options[-1]} out")
    from ds_finetune.export.formats import formats_of_run
    from ds_finetune.model.build.planned_model import model_of_run
    from ds_finetune.plan.precision import with_precision
    from ds_finetune.plan.search.machines import Request, target_of
    from ds_finetune.plan.settings import RunSettings
    from ds_finetune.system.info import gpu_models

    sizes = {"--host-memory": arguments.host_memory, "--gpu-memory": arguments.gpu_memory}
    host, memory = (parse_bytes(size, name=name) if size else None for name, size in sizes.items())
    local_gpus = tuple(gpu_models()) if arguments.gpu is None else ()
    shape = (arguments.gpus, arguments.nodes, arguments.gpus_per_node)
    target = target_of(Request(arguments.gpu, *shape, host, local_gpus, memory))
    train, notes = with_precision(config.train, device=target.ranks.device, support=target.bf16)
    config, target = config.model_copy(update={"train": train}), replace(target, notes=(*target.notes, *notes))
    formats_of_run(config.export.formats)
    if arguments.tensors:
        from ds_finetune.api import plan_run

        OUT.print(plan_run(config, gpus=target.ranks.number, gpus_per_node=target.ranks.per_node))
        return
    run, show = RunSettings.of(config), _search if arguments.search else _show_forecast
    show(run, target, model_of_run(run), planned_traces(run, ERR.print), is_json=arguments.json)


def _search(run: "RunSettings", target: "Target", model: "DescribedModel", traces: "Traces", *, is_json: bool) -> None:
    from ds_finetune.plan.search.candidates import layout_overrides
    from ds_finetune.plan.search.search import layout_text, result_notes, result_tree, search_layouts

    result = search_layouts(run, target, model, traces)
    if is_json:
        OUT.print_json(json.dumps(result_tree(result, run, target)))
        return
    lines = []
    for number, proposal in enumerate(result.proposals, start=1):
        device, host = proposal.memory.device_bytes / GIB, proposal.memory.host_bytes / GIB
        memory = f"{device:,.1f} GiB on a rank, {host:,.1f} GiB of its host's memory"
        lines.append((f"{number:3}", f"{layout_text(proposal)}: {memory}"))
        lines.append(("   ", shlex.join(layout_overrides(proposal.layout, run)) or "as in the run file"))
    show_pairs(f"the first layouts that fit {target.name}", lines)
    for note in result_notes(result, target):
        show_note(note)


def _show_forecast(
    run: "RunSettings", target: "Target", model: "DescribedModel", traces: "Traces", *, is_json: bool
) -> None:
    from ds_finetune.plan.estimate.zero_rows import MOMENTS, peak
    from ds_finetune.plan.search.forecast import forecast_run

    forecast = forecast_run(run, target, model, traces)
    if is_json:
        OUT.print_json(json.dumps(forecast.tree()))
        return
    show_note(forecast.verdict())
    memory = forecast.memory
    # First the peak of each kind of memory (GPU, host, NVMe, disk), then each item, of which some exist only at some
    # moments.
    rows = [
        (memory.device_bytes, memory.device, "at most"),
        (peak(memory.rows, "nvme"), "nvme", "at most"),
        (memory.host_bytes if memory.device != "host" else 0, "host", "at most"),
        (memory.disk_bytes, "disk", "files of the run"),
    ]
    for row in memory.rows:
        held = f" ({', '.join(row.when)})" if row.when != MOMENTS else ""
        lowered = f"; lowered by {row.option}" if row.option else ""
        rows.append((row.num_bytes, row.place, f"{row.name}{held}{lowered}"))
    lines = [(f"{size / GIB:10,.2f} GiB  {memory_kind}", text) for size, memory_kind, text in rows if size]
    show_pairs("memory of a rank", lines)
    show_pairs("plan", forecast.lines())
    for note in forecast.notes():
        show_note(note)


def planned_traces(run: "RunSettings", say: Say) -> "Traces":
    """Trace the activations of a planned run, with only config.json of its model. ConfigError or ModelError if the
    model cannot be built.
    """
    from ds_finetune.trainer.tracing.cache import Traces

    return Traces(run, lambda: _plan_model(run), say)


def _plan_model(run: "RunSettings") -> "ModelPlan":
    # These imports load torch, which is not needed if all traces are cached.
    from ds_finetune.model.build.model_plan import task_of
    from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, read_hf_config
    from ds_finetune.model.loss.score_config import set_classes
    from ds_finetune.trainer.resolve import plan_model, with_classes

    # The model is planned for one rank, because the plan of the run has checked the layout already.
    run = with_classes(replace(run, parallel=ParallelConfig()), is_config_only=True)
    hf_config = read_hf_config(run.model.path, files=TOKENIZER_PATTERNS, task=task_of(run.objective))
    if run.objective.row.head == "scores":
        set_classes(hf_config, run.objective, outputs=run.objective.num_outputs)
    return plan_model(hf_config, run)
