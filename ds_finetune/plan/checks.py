"""The combinations of settings that are refused: one table, which `docs/reference/combinations.md` prints.

"Is not tested" stands where no test compares a combination with a plain PyTorch loop.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec

from ds_finetune.config.objectives import cross_entropies, is_distillation, is_grpo, rows_of_step
from ds_finetune.config.schedule import Duration
from ds_finetune.config.sections import OWN_ATTENTIONS, REPORT_SECONDS
from ds_finetune.errors import ModelError
from ds_finetune.families.parameters import indexed_layers, longest_window
from ds_finetune.families.table import FAMILIES, FULLY_TESTED
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.forward import problem_of_calls, varlen_problem
from ds_finetune.plan.inexact import inexact_checks
from ds_finetune.plan.kernels import fused_operations
from ds_finetune.plan.rollout_checks import ROLLOUT_MODEL, rollout_checks
from ds_finetune.plan.routers import has_routers, plan_routers
from ds_finetune.plan.settings import Condition, Conflict, Refusal, RunSettings, setting, together
from ds_finetune.plan.tested_layouts import ROW_BYTES, TESTED_LAYOUTS, WEIGHT_BYTES, nearest_layout, wider

_MOST_RANKS_OF_AXIS = 4096
"""Larger sizes of an axis are not named in hints."""
_TESTED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "reduce_scatter": (True,),
    "contiguous_gradients": (True,),
    "gradient_predivide_factor": (1, 1.0),
    "prescale_gradients": (False,),
}
"""DeepSpeed options and the values that the layouts are tested with.

With other values, some layouts fail after weights are read, and some compute with another rank's experts.
"""
_TRAINING = (
    setting("train.precision fp16", "set train.precision to bf16"),
    Conflict("offload to nvme", "offload to cpu", lambda run: "nvme" in run.offloads),
    # Muon and Lamb depend on whole matrices.
    Conflict("optim.name {optim.name}", "use AdamW", lambda run: run.optimizer not in ("adam", "adamw")),
)
"""Settings that tests of layouts, adapters, indexers and multi-token prediction leave out."""
_ATTENTION = Conflict(
    "model.attention {model.attention}",
    "set model.attention to sdpa",
    lambda run: run.model.attention not in OWN_ATTENTIONS,
)
_ONE_NORM = Conflict(
    # DeepSpeed 0.19.8 takes the norm of all gradients there, also of parameters that are apart
    # (fp16/unfused_optimizer.py:214).
    "zero stage {stage} in {precision}",
    "use zero stage 1, or fp32",
    lambda run: run.stage == 0 and run.precision != "fp32",
)


def _untested_value(option: str) -> Conflict:
    tested = _TESTED_OPTIONS[option]
    return Conflict(
        f"{option} {{options[{option}]}}",
        "leave it out",
        lambda run: option in run.options and run.options[option] not in tested,
    )


def _other_objective(feature: str) -> Conflict:
    return Conflict(
        "objective {objective.name}",
        f"set objective to {{legal}}, or leave {feature} out",
        lambda run: not run.objective.row.is_cross_entropy and {"legal": " or ".join(cross_entropies())},
    )


_OBJECTIVE = (
    Refusal(
        lambda run: run.model.loss == "liger" and not run.objective.row.is_cross_entropy,
        "model.loss liger with objective {objective.name}: its kernel sums the cross entropy of tokens",
        "set model.loss to auto",
    ),
    Refusal(
        lambda run: (
            is_distillation(run.objective) and (run.objective.teacher is None) == (run.objective.scores is None)
        ),
        "objective distill has objective.teacher {objective.teacher!r} and objective.scores {objective.scores!r}",
        "give one of them: a teacher that runs beside the model, or scores that `ds-finetune teach` wrote",
    ),
    Refusal(
        lambda run: run.objective.reference_source == "adapters_off" and run.lora is None,
        "objective.reference adapters_off without lora: there are no adapters to turn off",
        "add `lora`, or set objective.reference to cache",
    ),
    Refusal(
        lambda run: run.objective.reference_source == "cache" and run.data.streaming,
        "objective {objective.name} with objective.reference cache and data.streaming true: log-probabilities are "
        "cached for prepared rows",
        "set data.streaming to false, or objective.reference to adapters_off with `lora`",
    ),
    Refusal(
        lambda run: "baseline" in run.objective.row.needs and run.data.streaming,
        "objective {objective.name} with data.streaming true: z0 needs the answer of another example for each prompt",
        "set data.streaming to false",
    ),
    Refusal(
        lambda run: "baseline" in run.objective.row.needs and run.train.global_batch_size == 1,
        "objective {objective.name} with train.global_batch_size 1: z0 is a mean over the examples of the global batch",
        "set train.global_batch_size to 8 or more",
    ),
    # DeepSpeed 0.19.8 knows heads by the name `lm_head` (__init__.py:369).
    Refusal(
        lambda run: run.optimizer == "muon" and run.objective.row.head == "scores",
        "optim.name {optim.name} with objective {objective.name} would orthogonalise the score head",
        "set optim.name: AdamW",
    ),
    Refusal(
        lambda run: is_distillation(run.objective) and run.objective.scores and run.objective.temperature != 1,
        "objective distill with scores and temperature {objective.temperature:g}: how the probability of the tokens "
        "that are not stored changes with the temperature is not known",
        "set temperature to 1, or name a teacher",
    ),
    Refusal(
        lambda run: is_distillation(run.objective) and run.objective.scores and run.data.streaming,
        "objective distill with scores and data.streaming true: rows of a stream have no numbers by which scores are "
        "found",
        "set data.streaming to false, or name a teacher",
    ),
    # Only the ranks of the last stage run the teacher, and its weights would be on all ranks.
    Refusal(
        lambda run: is_distillation(run.objective) and run.mesh.pp > 1 and run.objective.teacher_offload != "none",
        "objective distill with teacher_offload {objective.teacher_offload} and parallel {mesh} is not tested",
        "set parallel.pp to 1, or teacher_offload to none",
    ),
)


def _activation_checks(key: str) -> Iterator[Refusal]:
    hint = f"leave train.{key} out"
    others = (
        setting("mtp.train true", hint),
        setting("indexer.train true", hint),
        Conflict("lora.quantize {lora.quantize}", hint, lambda run: run.lora is not None and run.lora.quantize),
    )
    return together(f"train.{key} true", lambda run: getattr(run.train, key), others)


_ACTIVATIONS = (
    *_activation_checks("activation_offload"),
    *_activation_checks("tiled_mlp"),
    Refusal(
        lambda run: run.train.activation_offload and run.device == "cpu",
        "train.activation_offload true with device {device}: activations are in host memory already",
        "leave it out, or train on a GPU",
    ),
)


def _unknown_ranks(run: RunSettings) -> dict[str, object] | None:
    profile, number = run.profile, run.mesh.world_size
    unknown = [str(rank) for rank in profile.ranks if isinstance(rank, int) and rank >= number] if profile else []
    return {"unknown": ", ".join(unknown), "ranks": number, "last": number - 1} if unknown else None


_RANKS = (
    Refusal(
        lambda run: (
            run.watchdog.limit != "never"
            and run.watchdog.collective_seconds < (needed := run.watchdog.longest_limit + REPORT_SECONDS)
            and {"needed": needed}
        ),
        "watchdog.collective is {watchdog.collective}, and the longest of watchdog.limit, start and other is "
        "{watchdog.longest_limit:.0f} seconds: torch would abort a collective before the watchdog reports which rank "
        "is at fault",
        "leave watchdog.collective out, or make it {needed:.0f} seconds or more",
    ),
    Refusal(
        lambda run: run.model.attention == "varlen" and run.device == "cpu",
        "model.attention varlen on device {device}: its kernel runs only on GPUs",
        "set model.attention: sdpa, which attends document by document on CPUs",
    ),
    Refusal(
        _unknown_ranks,
        "profile.ranks names {unknown}, and the run has {ranks} ranks, from 0 to {last}",
        "name ranks of the run, or `all`",
    ),
)


def _multiples(number: int, size: int) -> str:
    """The multiples of `size` next to `number`."""
    return " or ".join(str(n * size) for n in (number // size, number // size + 1) if n)


_LAYOUT = (
    Refusal(
        lambda run: (
            run.axes
            and not any(row.axes == run.axes and run.stage in row.stages for row in TESTED_LAYOUTS)
            and {"nearest": nearest_layout(run.axes, run.stage)}
        ),
        "parallel {mesh} with zero stage {stage} is not tested",
        "nearest: {nearest}",
    ),
    # DeepSpeed 0.19.8 computes the norm of each rank's own shard there (fp16/unfused_optimizer.py): 0.78 of the true
    # norm on the tiny DeepSeek-V3.
    Refusal(
        lambda run: run.mesh.pp * run.mesh.tp * run.mesh.ep > 1 and run.stage == 0 and run.precision != "fp32",
        "parallel {mesh} with zero stage 0 in {precision} clips by a wrong norm",
        "use zero stage 1, or fp32",
    ),
    *together(
        "parallel {mesh}", lambda run: run.axes, (_ATTENTION, *_TRAINING, *map(_untested_value, _TESTED_OPTIONS))
    ),
    Refusal(
        lambda run: (
            run.data.packing
            and run.train.max_seq_len % run.mesh.sp
            and {"legal": _multiples(run.train.max_seq_len, run.mesh.sp)}
        ),
        "train.max_seq_len {train.max_seq_len} is not a multiple of parallel.sp {mesh.sp}",
        "set it to {legal}",
    ),
)


def _rounded_sum(run: RunSettings) -> dict[str, object] | None:
    key = "train.reduction_dtype" if run.train.reduction_dtype == "fp32" else "data_types.grad_accum_dtype"
    is_rounded = run.stage >= 2 and run.accumulation_dtype == "fp32" and run.precision != "fp32"
    return {"key": key} if is_rounded else None


_REDUCTION = (
    Refusal(
        lambda run: run.precision == "fp16" and run.train.reduction_dtype != "auto",
        "train.reduction_dtype {train.reduction_dtype} with train.precision fp16 is not tested",
        "set train.precision to bf16, or leave train.reduction_dtype out",
    ),
    Refusal(
        lambda run: run.stage < 2 and run.train.reduction_dtype == "fp32" and run.precision == "bf16",
        "train.reduction_dtype fp32 with train.precision bf16 and zero stage {stage}: DeepSpeed 0.19.8 rounds the sum "
        "to bf16 below stage 2",
        "set zero_optimization.stage to 2 or 3, or leave train.reduction_dtype out",
    ),
    # DeepSpeed 0.19.8 then uses its BF16_Optimizer (runtime/engine.py:2305), whose state is not supported here.
    Refusal(
        lambda run: run.accumulation_dtype and run.stage < 2 and run.precision == "bf16",
        "data_types.grad_accum_dtype {accumulation_dtype!r} with zero stage {stage} in bf16 is not tested",
        "use stage 2 or 3, or leave it out",
    ),
    Refusal(
        lambda run: run.train.reduction_every == "step" and _rounded_sum(run),
        "train.reduction_every step with {key} fp32 in {precision}: ranks would accumulate their own gradients in "
        "{precision}",
        "leave one of them out",
    ),
    Refusal(
        lambda run: run.train.reduction_every == "step" and run.stage >= 2 and run.optimizer == "muon",
        "train.reduction_every step with optim.name Muon is not tested",
        "use AdamW, or leave train.reduction_every out",
    ),
    Refusal(
        lambda run: run.train.reduction_every == "step" and "nvme" in run.offloads,
        "train.reduction_every step with offload to nvme is not tested",
        "offload to cpu, or leave train.reduction_every out",
    ),
)


def _quantizes(run: RunSettings) -> bool:
    return run.lora is not None and run.lora.quantize is not None


_LORA = (
    *together(
        "lora",
        lambda run: run.lora is not None,
        (
            *_TRAINING,
            setting("model.weights random", "load weights, or leave `lora` out"),
            # Embedding and head are frozen: a new row would keep its random values, and adapters do not contain it.
            setting("model.resize_vocabulary true", "train all weights, or use a tokenizer that fits the model"),
            # An adapter folder names its base model, whose config.json has other positions and rotary scaling.
            Conflict(
                "model.context {model.context}",
                "write the extension into the config.json of a copy of the model's folder",
                lambda run: run.model.context is not None,
            ),
        ),
    ),
    # The scales of 256 blocks have a common scale, and those of all blocks of a weight a common mean: of a shard they
    # are others.
    Refusal(
        lambda run: _quantizes(run) and run.mesh.tp > 1,
        "lora.quantize {lora.quantize} with parallel {mesh} would round other numbers than without parallel.tp",
        "set parallel.tp to 1; pp, sp and ep may be larger",
    ),
    Refusal(
        lambda run: (
            _quantizes(run)
            and (devices := [device for device in run.offloads if device != "none"])
            and {"offload": devices[0]}
        ),
        "lora.quantize {lora.quantize} with offload to {offload} is not tested",
        "leave offload out",
    ),
    Refusal(
        lambda run: _quantizes(run) and find_spec("bitsandbytes") is None,
        "lora.quantize {lora.quantize} needs bitsandbytes, which is not installed",
        "pip install 'ds_finetune[quantize]', or leave lora.quantize out",
    ),
)


def _broken_groups(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where the forwards of a step are no multiple of the pipeline's size."""
    rows, pp = rows_of_forward(run.train) * run.mesh.dp, run.mesh.pp
    legal = _multiples(run.accumulation * rows, pp * rows)
    return {"rows": rows // run.mesh.dp, "legal": legal} if run.accumulation % pp else None


_INTERLEAVING = (
    Refusal(
        lambda run: run.parallel.vpp > 1 and run.mesh.pp == 1,
        "parallel.vpp {parallel.vpp} with parallel.pp 1",
        "set parallel.pp, or leave parallel.vpp out",
    ),
    Refusal(
        lambda run: run.parallel.vpp > 1 and run.indexer.train,
        "parallel.vpp {parallel.vpp} with indexer.train true is not tested",
        "set parallel.vpp to 1",
    ),
    Refusal(
        lambda run: run.parallel.vpp > 1 and _broken_groups(run),
        "parallel.vpp {parallel.vpp} computes micro-batches in groups of parallel.pp {mesh.pp}, and a step has "
        "{accumulation}: train.global_batch_size {train.global_batch_size} / (micro_batch_size {rows} x dp {mesh.dp})",
        "set train.global_batch_size to {legal}, or parallel.vpp to 1",
    ),
)
_PREDICTION = together(
    "mtp.train true",
    lambda run: run.mtp.train,
    (
        # No test compares both losses together; the indexer of the prediction layer has no loss.
        setting("indexer.train true", "train indexers first, and then mtp on the export of that run"),
        _other_objective("mtp"),
        setting("model.attention flash_attention_2", "set model.attention to sdpa"),
        setting("model.resize_vocabulary true", "use a tokenizer that fits the model"),
        *_TRAINING,
        _ONE_NORM,
    ),
)
_INDEXERS = together(
    "indexer.train true (stage {indexer.stage})",
    lambda run: run.indexer.train,
    (
        Conflict(
            "lora",
            "leave lora or indexer out; with adapters indexers stay as they are",
            lambda run: run.lora is not None,
        ),
        _other_objective("indexer"),
        _ATTENTION,
        *_TRAINING,
        _ONE_NORM,
        Conflict(
            "parallel {mesh}",
            "set parallel.pp and parallel.ep to 1",
            lambda run: run.indexer.stage == "dense_warmup" and (run.mesh.pp > 1 or run.mesh.ep > 1),
        ),
        Conflict(
            "`router`",
            "leave router out: routers stay as they are in this stage",
            lambda run: run.indexer.stage == "dense_warmup" and run.router is not None,
        ),
    ),
)


def _option(name: str, applies: Condition, evidence: str, hint: str) -> Refusal:
    """An option of DeepSpeed that is known to fail, or to compute something else."""
    message = f"{name} is refused (device {{device}}, zero stage {{stage}}, {{precision}}): {evidence}"
    return Refusal(applies, message, f"use {hint}")


def _without_path(what: str) -> Refusal:
    return _option(
        f"{what} to nvme without nvme_path",
        lambda run: "nvme" in run.offloads and _is_nvme_without_path(run.zero.get(what) or {}),
        "DeepSpeed 0.19.8 has no folder to write to and fails while it builds the engine (swap_tensor/)",
        f'{what}.nvme_path "FOLDER" on a local NVMe disk',
    )


def _is_nvme_without_path(section: Mapping[str, object]) -> bool:
    return section.get("device") == "nvme" and not section.get("nvme_path")


_OPTIONS = (
    Refusal(
        lambda run: run.optimizer == "adagrad" and run.optim.weight_decay,
        "optim.weight_decay {optim.weight_decay} with Adagrad would be added to the gradient (torch.optim.Adagrad), "
        "not decoupled",
        "set optim.weight_decay to 0, or take AdamW",
    ),
    _option(
        "fp16 on the CPU accelerator",
        lambda run: run.device == "cpu" and run.precision == "fp16",
        "DeepSpeed 0.19.8 has no fp16 there",
        "train.precision bf16 or fp32",
    ),
    _option(
        "fp16 without ZeRO",
        lambda run: run.stage == 0 and run.precision == "fp16",
        "DeepSpeed 0.19.8 scales the loss only for ZeRO optimizers (runtime/engine.py:3417), but its FP16_Optimizer "
        "divides the gradients by the scale all the same (fp16/fused_optimizer.py:374): a gradient norm of 0.767 "
        "became 1.17e-5",
        "zero_optimization.stage 1, or train.precision bf16",
    ),
    _option(
        "offload to nvme below ZeRO-3",
        lambda run: run.stage < 3 and "nvme" in run.offloads,
        "DeepSpeed 0.19.8 stages 1 and 2 keep the states in CPU memory instead, without a word (zero/stage_1_and_2.py)",
        "zero_optimization.stage 3, or device cpu",
    ),
    _without_path("offload_optimizer"),
    _without_path("offload_param"),
    _option(
        "offload_param below ZeRO-3",
        lambda run: run.stage < 3 and run.offloads[1] != "none",
        "parameters are only partitioned, and so offloadable, at stage 3",
        "zero_optimization.stage 3, or leave offload_param out",
    ),
    _option(
        "offload_optimizer without ZeRO",
        lambda run: run.stage == 0 and run.offloads[0] != "none",
        "stage 0 has no partitioned optimizer to offload",
        "zero_optimization.stage 1, 2 or 3",
    ),
    # Only gathering whole small weights after a step waits for the step's writes (zero/stage3.py:2840,
    # zero/partition_parameters.py:2128); other gathers begin on a stream of their own.
    _option(
        "ZeRO-3 with overlap_comm and no weights that stay whole",
        lambda run: (
            run.stage == 3
            and run.device != "cpu"
            and run.mesh.dp * run.mesh.sp > 1
            and run.zero.get("overlap_comm", True) is not False
            and 0 in (run.zero.get(f"stage3_{key}_persistence_threshold") for key in ("param", "model"))
        ),
        "DeepSpeed 0.19.8 may gather weights from before the last optimizer step",
        "zero_optimization.overlap_comm false, or leave the persistence thresholds out",
    ),
    _option(
        "Muon with reduce_scatter under ZeRO-3",
        lambda run: run.stage == 3 and run.optimizer == "muon" and run.zero.get("reduce_scatter", True) is not False,
        "DeepSpeed 0.19.8 refuses the pair after loading (zero/stage3.py:361)",
        "zero_optimization.reduce_scatter false",
    ),
    _option(
        "clipping with Muon under ZeRO",
        lambda run: run.stage >= 1 and run.optimizer == "muon" and run.train.max_grad_norm > 0,
        "DeepSpeed 0.19.8 orthogonalises before it takes the norm (zero/stage_1_and_2.py:2865, zero/stage3.py:1697): "
        "the update would be clipped, not the gradient; losses of a tiny DeepSeek-V3 depart from stage 0 by 3e-4 after "
        "two steps",
        "train.max_grad_norm 0, or zero_optimization.stage 0",
    ),
    _option(
        "Adagrad without offload_optimizer under ZeRO",
        lambda run: run.stage >= 1 and run.optimizer == "adagrad" and run.offloads[0] == "none",
        "DeepSpeed 0.19.8: torch.optim.Adagrad makes its states in its constructor, which ZeRO's flat partitions have "
        "not; it ends in an IndexError",
        "offload_optimizer.device cpu (DeepSpeedCPUAdagrad), or zero_optimization.stage 0",
    ),
    _option(
        "Lion without offload_optimizer on the CPU accelerator",
        lambda run: run.device == "cpu" and run.optimizer == "lion" and run.offloads[0] == "none",
        "DeepSpeed 0.19.8: FusedLion has not been implemented on the CPU backend",
        "offload_optimizer.device cpu (DeepSpeedCPULion) with zero_optimization.stage 1, 2 or 3",
    ),
    _option(
        "Lamb on the CPU accelerator",
        lambda run: run.device == "cpu" and run.optimizer == "lamb",
        "DeepSpeed 0.19.8: FusedLamb has not been implemented on the CPU backend",
        "optim.name AdamW, or a GPU",
    ),
    _option(
        "Lamb under ZeRO",
        lambda run: run.stage >= 1 and run.optimizer == "lamb",
        "its trust ratio is a ratio of whole parameters' norms; on a rank's flat partition it would be another number "
        "on each count of ranks",
        "zero_optimization.stage 0, or optim.name AdamW",
    ),
)


def _untested_type(run: RunSettings) -> dict[str, object] | None:
    tested = next((row.families for row in TESTED_LAYOUTS if row.axes == run.axes), ())
    return {"tested": ", ".join(tested)} if run.axes and run.model_type not in tested else None


def _chunk_values(run: RunSettings) -> dict[str, int]:
    layers = int(run.model_json["num_hidden_layers"])
    return {"layers": layers, "chunks": run.mesh.pp * run.parallel.vpp, "legal": layers // run.mesh.pp}


def _wrong_shares(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where `parallel.pp_layers` does not name the layers of each chunk."""
    given, pp, vpp = run.parallel.pp_layers, run.mesh.pp, run.parallel.vpp
    values = _chunk_values(run)
    if len(given) == values["chunks"] and sum(given) == values["layers"] and min(given) >= 1:
        return None
    return {**values, "given": list(given), "parts": f"{pp} stages" if vpp == 1 else f"{pp} x {vpp} chunks"}


def _rotary_type(run: RunSettings) -> object:
    scaling = run.model_json.get("rope_parameters") or run.model_json.get("rope_scaling") or {}
    return scaling.get("rope_type", scaling.get("type"))


def _in_each_rank(key: str) -> Refusal:
    return Refusal(
        lambda run: run.mesh.tp > 1 and (value := run.model_json.get(key)) and {"value": str(value).lower()},
        f"parallel {{mesh}} of a model with {key} {{value}} is not tested",
        "set parallel.tp to 1",
    )


def _undivided(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where a parallel size does not divide a dimension of the model."""
    for axis, what, number in _divided_dimensions(run) if run.axes else ():
        size = getattr(run.mesh, axis)
        if number % size:
            legal = ", ".join(map(str, _divisors(number)))
            return {"axis": axis, "size": size, "number": number, "what": what, "legal": legal}
    return None


def _divided_dimensions(run: RunSettings) -> Iterator[tuple[str, str, int]]:
    """Each axis with a dimension of the model that it divides, and the size of this dimension."""
    model, tp, keys = run.model_json, run.mesh.tp, run.family.expert_keys
    heads = int(model["num_attention_heads"])
    yield "tp", "attention heads", heads
    if run.family.compresses:
        yield "tp", "groups of outputs", int(model["o_groups"])
    else:
        yield "sp", f"attention heads{' of a tensor parallel rank' if tp > 1 else ''}", heads // tp
        yield "tp", "key and value heads", int(model.get("num_key_value_heads") or heads)
    if keys is None or (keys.width_key != "intermediate_size" and "intermediate_size" in model):
        yield "tp", "columns of the MLP", int(model["intermediate_size"])
    if keys is not None:
        yield "tp", "columns of an expert", keys.width(model)
    yield "tp", "tokens of the vocabulary", int(model["vocab_size"])
    if keys is not None:
        yield "ep", "routed experts", keys.number(model)


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number that an axis may have; found in pairs, since a search refuses thousands of layouts and
    vocabularies are large.
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = {*small, *(number // n for n in small)}
    return tuple(sorted(n for n in found if n <= _MOST_RANKS_OF_AXIS))


_SIZES = (
    Refusal(
        lambda run: run.mesh.pp == 1 and run.parallel.pp_layers and {"given": list(run.parallel.pp_layers)},
        "parallel.pp_layers {given} with parallel.pp 1",
        "set parallel.pp, or leave it out",
    ),
    Refusal(_untested_type, "parallel {mesh} of model_type {model_type} is not tested", "tested: {tested}"),
    Refusal(
        lambda run: run.axes and run.mesh.pp > (values := _chunk_values(run))["layers"] and values,
        "parallel.pp {mesh.pp} is more than the {layers} layers of the model",
        "set it to {layers} at most",
    ),
    Refusal(
        lambda run: run.axes and (values := _chunk_values(run))["chunks"] > values["layers"] and values,
        "parallel.pp {mesh.pp} x parallel.vpp {parallel.vpp} = {chunks} chunks are more than the {layers} layers of "
        "the model",
        "set parallel.vpp to {legal} at most",
    ),
    Refusal(
        lambda run: run.parallel.pp_layers and _wrong_shares(run),
        "parallel.pp_layers {given} does not share out {layers} layers over {parts}",
        "name {chunks} numbers of at least 1 whose sum is {layers}, or leave it out",
    ),
    # transformers 5.23 chooses its factors by the positions in a call (modeling_rope_utils.py:47), and a call on one
    # rank has only a part of the positions.
    Refusal(
        lambda run: run.mesh.sp > 1 and _rotary_type(run) == "longrope",
        "parallel {mesh} of a model with rope_type longrope is not tested",
        "set parallel.sp to 1",
    ),
    # Every rank would add the bias of shared experts, whose outputs are summed together with those of routed ones, or
    # draw a noise of its own.
    _in_each_rank("mlp_bias"),
    _in_each_rank("router_jitter_noise"),
    Refusal(
        _undivided,
        "parallel.{axis} {size} does not divide the {number} {what} of the model",
        "set it to one of {legal}",
    ),
)


def _unaligned_width(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where the columns of an expert on a rank are no multiple of 16 bytes."""
    keys, tp, size = run.family.expert_keys, run.mesh.tp, WEIGHT_BYTES[run.precision]
    width = keys.width(run.model_json) if keys is not None else 0
    if keys is None or width // tp * size % ROW_BYTES == 0:
        return None
    legal = [str(n) for n in range(1, tp) if width % n == 0 and width // n * size % ROW_BYTES == 0]
    hint = f"set parallel.tp to {' or '.join(legal)}" if legal else wider(run.precision)
    return {"key": keys.width_key, "width": width, "columns": width // tp, "bytes": size, "legal": hint}


def _unaligned_hidden(run: RunSettings) -> dict[str, object] | None:
    size = WEIGHT_BYTES[run.precision]
    is_refused = run.family.expert_keys is not None and int(run.model_json["hidden_size"]) * size % ROW_BYTES
    return {"bytes": size, "legal": wider(run.precision)} if is_refused else None


_EXPERTS = (
    # torch 2.13 needs each row of their matrices to be a multiple of 16 bytes ("strides should be multiple of 16
    # bytes").
    Refusal(
        _unaligned_width,
        "{key} {width} / parallel.tp {mesh.tp} = {columns} columns of an expert x {bytes} bytes in {precision} is no "
        f"multiple of {ROW_BYTES} bytes, which torch's grouped product needs",
        "{legal}",
    ),
    Refusal(
        _unaligned_hidden,
        "hidden_size {model_json[hidden_size]} x {bytes} bytes in {precision} is no multiple of "
        f"{ROW_BYTES} bytes, which torch's grouped product of experts needs",
        "{legal}",
    ),
    # The biases of experts are one matrix per layer, and DeepSpeed 0.19.8 takes every tensor of two or more dimensions
    # (__init__.py:369).
    Refusal(
        lambda run: run.optimizer == "muon" and run.family.transposed_experts,
        "optim.name {optim.name} of model_type {model_type} would orthogonalise the biases of its experts",
        "set optim.name: AdamW",
    ),
    # DeepSpeed 0.19.8 takes tensors of three dimensions for vectors (zenflow/zenflow_stage_1_and_2.py:216): it would
    # choose and update the wrong elements.
    Refusal(
        lambda run: "zenflow" in run.inexact and run.family.expert_keys is not None,
        "zero_optimization.zenflow cannot work with experts, which model_type {model_type} has: it knows only "
        "matrices and vectors",
        "train a dense model, or leave zenflow out",
    ),
)


def _untested_switch(key: str) -> Refusal:
    return Refusal(
        lambda run: getattr(run.train, key) and run.model_type not in FULLY_TESTED,
        f"train.{key} true of model_type {{model_type}} is not tested",
        f"leave it out; tested: {', '.join(FULLY_TESTED)}",
    )


def _odd_columns(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where pairs of columns are complex numbers and heads have an odd number of columns."""
    graph, keys = run.family.onnx, ("qk_nope_head_dim", "qk_rope_head_dim")
    numbers = [int(run.model_json.get(key) or 0) for key in keys]
    is_odd = graph is not None and graph.is_rotary_interleaved and sum(numbers) % 2
    return {"sum": " + ".join(f"{key} {n}" for key, n in zip(keys, numbers, strict=True))} if is_odd else None


def _given_router(run: RunSettings) -> dict[str, object] | None:
    """Values of a message on the section `router`; None where it is left out."""
    if run.router is None:
        return None
    given = ", ".join(f"{name} {getattr(run.router, name)}" for name in run.router.model_fields_set)
    what = "has no routed experts" if run.model_type in FAMILIES else "is not in the table of model families"
    return {"given": given or "empty", "what": what, "legal": _types_with("router")}


def _types_with(part: str) -> str:
    return ", ".join(name for name, family in FAMILIES.items() if getattr(family, part))


def _without_bias(run: RunSettings) -> dict[str, object] | None:
    if run.router is None or not run.router.bias_update or run.family.router is None or run.family.router.bias:
        return None
    return {"legal": ", ".join(name for name, row in FAMILIES.items() if row.router is not None and row.router.bias)}


_TYPE = (
    Refusal(
        lambda run: run.lora is not None and not run.family.has_lora and {"tested": _types_with("has_lora")},
        "lora of model_type {model_type} is not tested",
        "tested: {tested}",
    ),
    # torch fails at them in the first step (transformers 5.23, deepseek_v2/modeling_deepseek_v2.py:264).
    Refusal(
        _odd_columns,
        "{sum} of the model make an odd number of columns",
        "take the config.json published with the model",
        ModelError,
    ),
    Refusal(
        lambda run: run.router is not None and not has_routers(run.model_json) and _given_router(run),
        "`router` ({given}) with model_type {model_type}, which {what}",
        "leave `router` out; it is for {legal}",
    ),
    Refusal(
        lambda run: run.lora is not None and _given_router(run),
        "`router` ({given}) with lora.rank {lora.rank}: adapters leave routers as they are",
        "leave `router` out, or train all weights; lora.target_modules adapts routers where it names `gate`",
    ),
    Refusal(
        _without_bias,
        "router.bias_update {router.bias_update:g} with model_type {model_type}, whose routers have no bias",
        "set router.balance instead; routers of {legal} have a bias",
    ),
    Refusal(
        lambda run: run.router is not None and run.router.balance and not run.router.train,
        "router.balance {router.balance:g} with router.train false: the loss could not change the routers",
        "set router.train to true, or router.balance to 0",
    ),
    Refusal(
        lambda run: run.indexer.train and run.family.indexer is None and {"legal": _types_with("indexer")},
        "indexer.train true with model_type {model_type}, whose attention has no indexer",
        "leave indexer out; it is for {legal}",
    ),
)


def _without_entries(run: RunSettings) -> dict[str, object] | None:
    window = longest_window(run.model_json) if run.family.compresses else 0
    return {"window": window} if run.train.max_seq_len < window else None


def _without_balance(run: RunSettings) -> dict[str, object] | None:
    if run.router is None or not (run.router.balance or run.router.bias_update):
        return None
    router = plan_routers(run.router, run.model_json)
    return _given_router(run) if router is not None and not router.balanced else None


_COMPRESSED = (
    Refusal(
        _without_entries,
        "train.max_seq_len {train.max_seq_len} with a model whose layers compress up to {window} tokens into an entry: "
        "shorter rows have none, and weight decay would shrink what gets no gradient",
        "set train.max_seq_len to at least {window}",
    ),
    *together(
        "model_type {model_type}",
        lambda run: run.family.compresses,
        (
            *_TRAINING,
            Conflict("objective {objective.name}", "set objective to sft or dpo", lambda run: is_grpo(run.objective)),
            setting("model.resize_vocabulary true", "use a tokenizer that fits the model: new ids have no experts"),
            Conflict(
                "lora and mtp.train true", "leave lora or mtp out", lambda run: run.lora is not None and run.mtp.train
            ),
        ),
    ),
    Refusal(
        _without_balance,
        "`router` ({given}) with a model whose routers all choose experts by token ids: there is nothing to balance",
        "leave router.balance and router.bias_update out",
    ),
)


def _blind_to_sinks(run: RunSettings) -> dict[str, object] | None:
    if not run.family.has_sinks or run.model.attention in OWN_ATTENTIONS:
        return None
    is_flash = run.model.attention == "flash_attention_2"
    return {"why": "its kernels have none" if is_flash else "documents of a packed row would see each other"}


def _unfit_for_varlen(run: RunSettings) -> dict[str, object] | None:
    if run.model.attention != "varlen":
        return None
    problem = varlen_problem(run.model_json, precision=run.precision)
    problem = problem or problem_of_calls(run.model_json, run.train.max_seq_len)
    return {"problem": problem} if problem else None


_KERNEL = (
    Refusal(
        _blind_to_sinks,
        "model.attention {model.attention} with model_type `{model_type}`, whose attention has sinks: {why}",
        "set model.attention: sdpa",
        ModelError,
    ),
    Refusal(
        _unfit_for_varlen,
        "model.attention varlen with model_type `{model_type}`: {problem}",
        "set model.attention: sdpa, which attends document by document there",
        ModelError,
    ),
    Refusal(
        lambda run: run.model.kernels in ("liger", "compile") and not fused_operations(run.family),
        "model.kernels {model.kernels} with model_type `{model_type}` computes nothing, or is not tested",
        "set model.kernels to auto",
        ModelError,
    ),
)


def _beyond_positions(run: RunSettings) -> dict[str, object] | None:
    if not run.positions or run.train.max_seq_len <= run.positions:
        return None
    return {"extend": ", or extend the model by model.context" if run.model_type in FULLY_TESTED else ""}


_POSITIONS = (
    Refusal(
        lambda run: run.model.context is not None and run.train.max_seq_len > run.model.context,
        "train.max_seq_len {train.max_seq_len} is more than model.context {model.context}",
        "set train.max_seq_len to {model.context} or less, or a larger model.context",
    ),
    Refusal(
        _beyond_positions,
        "train.max_seq_len {train.max_seq_len} is more than the {positions} positions of {model.path}",
        "set train.max_seq_len to {positions} or less{extend}",
    ),
)


def _unshared_teacher(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where sequence parallel ranks cannot share out the heads of the teacher."""
    heads = int(run.model_json.get("num_attention_heads") or 1)
    is_refused = run.mesh.sp > 1 and ("sp" not in run.family.parallel_axes or heads % run.mesh.sp)
    return {"heads": heads} if is_refused else None


_TEACHER = (
    Refusal(
        lambda run: run.train.max_seq_len > (run.model_json.get("max_position_embeddings") or math.inf),
        "train.max_seq_len {train.max_seq_len} is more than the {model_json[max_position_embeddings]} positions of the "
        "teacher {objective.teacher}",
        "set train.max_seq_len to {model_json[max_position_embeddings]} or less",
    ),
    Refusal(
        _unshared_teacher,
        "parallel {mesh} with the teacher {objective.teacher} of model_type {model_type} and {heads} attention heads "
        "is not tested",
        "set parallel.sp to 1",
    ),
)


def _first_without_indexer(run: RunSettings) -> dict[str, object] | None:
    """The first stage in which a chunk begins with a layer that has no indexer of its own."""
    with_indexer = indexed_layers(run.model_json)
    for stage, layers in enumerate(run.stages):
        for chunk in layers.chunks if layers is not None else ():
            if chunk[0] not in with_indexer and chunk[0] < run.model_json["num_hidden_layers"]:
                return {"stage": stage, "layer": chunk[0], "legal": ", ".join(map(str, with_indexer))}
    return None


def _is_held_twice(run: RunSettings) -> bool:
    """Whether the first and the last stage of a pipeline both train the embedding."""
    is_tied = bool(run.model_json.get("tie_word_embeddings")) and run.objective.row.head != "scores"
    return run.parallel.pp > 1 and run.lora is None and (run.mtp.train or is_tied)


_STAGES = (
    # The last stage would look for the state of the embedding in a folder that only the ranks of the first may see.
    Refusal(
        lambda run: run.checkpoint.node_local and _is_held_twice(run),
        "checkpoint.node_local true with parallel.pp {parallel.pp} of a model whose first and last stage both hold the "
        "embedding is not tested",
        "save to a folder that all hosts share",
    ),
    # Such a layer attends to the tokens that are chosen in the layer before.
    Refusal(
        lambda run: run.indexer.train and not run.family.compresses and _first_without_indexer(run),
        "indexer.train true with parallel.pp {parallel.pp}: stage {stage} begins with layer {layer}, which has no "
        "indexer",
        "let stages begin with one of layers {legal} by parallel.pp_layers",
    ),
)


def _may_choose(run: RunSettings) -> bool:
    """Whether a layer uses the choice of another one's indexer, if a document is as long as a row."""
    chosen = run.model_json.get("index_topk")
    is_shared = run.family.indexer is not None and run.family.indexer.is_shared
    return bool(is_shared and chosen and run.train.max_seq_len > chosen)


_DOCUMENTS = (
    # The search cannot know the documents; `train` looks at each.
    Refusal(
        lambda run: _may_choose(run) and _first_without_indexer(run),
        "train.max_seq_len {train.max_seq_len} is more than index_topk {model_json[index_topk]}, and a stage of "
        "parallel.pp {parallel.pp} begins with layer {layer}, which has no indexer",
        "set train.max_seq_len: {model_json[index_topk]}, or parallel.pp: 1",
    ),
)


def _hopeless_patience(run: RunSettings) -> dict[str, object] | None:
    patience, every = run.eval.patience, run.eval.every
    if not patience or every is None:
        return None
    evaluations = math.ceil(run.steps / Duration.parse(every).value)
    return {"evaluations": evaluations} if patience + 1 >= evaluations else None


def _joined_epochs(run: RunSettings) -> dict[str, object] | None:
    return None if Duration.parse(run.train.duration).unit == "steps" else _larger_step(run)


def length_notes(run: RunSettings) -> list[str]:
    """A line where an optimizer step has more rows than an epoch."""
    values = _larger_step(run)
    text = "{key} {batch} is more than the {rows} {kind} of an epoch: each step sees rows more than once"
    return [text.format(**values)] if values else []


def _larger_step(run: RunSettings) -> dict[str, object] | None:
    """Values of a message where an optimizer step has more rows than an epoch."""
    samples, kind = is_grpo(run.objective), "packed rows" if run.data.packing else "rows"
    batch = rows_of_step(run.objective, run.rollout, run.train.global_batch_size)
    key, kind = ("rollout.prompts_per_step", "prompts") if samples else ("train.global_batch_size", kind)
    is_larger = run.rows is not None and batch > run.rows
    return {"key": key, "batch": batch, "rows": run.rows, "kind": kind} if is_larger else None


_LENGTH = (
    Refusal(
        lambda run: run.warmup > run.steps,
        "optim.warmup `{optim.warmup}` is {warmup} steps, and the run has {steps}: `optim.lr` would never be reached",
        "shorten optim.warmup to at most {steps} steps, or give a share such as `3%`",
    ),
    Refusal(
        _hopeless_patience,
        "eval.patience {eval.patience} cannot end a run of {steps} steps early: with eval.every `{eval.every}` it has "
        "{evaluations} evaluations, the first of which is the best so far",
        "lower eval.patience or eval.every, or leave eval.patience out",
    ),
    Refusal(
        lambda run: run.profile is not None and run.profile.first_and_last[1] > run.steps,
        "profile.steps `{profile.steps}` ends at step {profile.first_and_last[1]}, and the run has {steps} steps",
        "profile steps up to {steps}",
    ),
    Refusal(
        _joined_epochs,
        "{key} {batch} is more than the {rows} {kind} of an epoch: the epochs of `{train.duration}` would be joined in "
        "fewer steps",
        "set {key} to at most {rows}, or give train.for in steps",
    ),
)

BEFORE_MODEL = {
    "objective": _OBJECTIVE,
    "sampled answers": tuple(rollout_checks()),
    "activations": _ACTIVATIONS,
    "ranks": _RANKS,
    "layout": _LAYOUT,
    "reduction of gradients": _REDUCTION,
    "LoRA": _LORA,
    "interleaving": _INTERLEAVING,
    "multi-token prediction": tuple(_PREDICTION),
    "indexers": tuple(_INDEXERS),
    "inexact options": tuple(inexact_checks()),
    "options of DeepSpeed": _OPTIONS,
}
"""The checks that need no config.json, by subject, in the order in which they are made."""
WITH_MESH = {"sizes of the model": _SIZES, "experts of the model": _EXPERTS}
WITHOUT_MESH = {
    "activations of the model": (_untested_switch("activation_offload"), _untested_switch("tiled_mlp")),
    "type of the model": (*_TYPE, *_COMPRESSED),
    "sampled answers of the model": ROLLOUT_MODEL,
    "attention of the model": _KERNEL,
}
"""The checks of config.json with and without the layout of the run."""
CHECKS: dict[str, tuple[Refusal, ...]] = {
    **BEFORE_MODEL,
    **WITH_MESH,
    **WITHOUT_MESH,
    "positions": _POSITIONS,
    "teacher": _TEACHER,
    "stages": _STAGES,
    "length of documents": _DOCUMENTS,
    "length of the run": _LENGTH,
}
"""All checks by subject."""


def check(run: RunSettings, *subjects: str) -> None:
    """ConfigError or ModelError for the first combination of settings that is refused."""
    for subject in subjects:
        for row in CHECKS[subject]:
            row.raise_for(run)
