"""A pipeline's run as if each stage had all layers, to bound what any division of the layers takes.

What a stage takes, in seconds or in bytes of states, grows with its layers, and never by more with the layers of two
stages together than by those of both alone: operators of one class are bound by FLOPs or by memory together, a
computation hides messages of another layer, and buffers are held once. So the stages of a run take as much in all as
one stage with all layers or more, and the fullest of `pp` stages as much as the `pp`-th part of it.
"""

from dataclasses import replace

from ds_finetune.plan.plan import Plan


def as_one_stage(plan: Plan) -> Plan:
    """The run with all layers on each stage, and nothing sent between stages."""
    parallel = plan.parallel.model_copy(update={"pp": 1, "vpp": 1, "pp_layers": ()})
    return replace(plan, parallel=parallel, mesh=replace(plan.mesh, pp=1))
