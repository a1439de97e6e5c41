"""The table of refused combinations of settings, which `docs/reference/combinations.md` prints.

Combinations that depend on the model's config.json are in `plan/model_checks.py`.

The error says "is not tested" if no test compares the combination with a reference loop.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from ds_finetune.config.objectives import cross_entropies, is_distillation, is_grpo, rows_of_step
from ds_finetune.config.schedule import Duration
from ds_finetune.config.sections import OWN_ATTENTIONS, REPORT_SECONDS
from ds_finetune.plan.deepspeed_config import OPTIMIZERS
from ds_finetune.plan.inexact import inexact_checks
from ds_finetune.plan.mesh import TESTED_LAYOUTS, nearest_layout
from ds_finetune.plan.rollout_checks import ROLLOUTS
from ds_finetune.plan.settings import (
    UNTESTED_STATES,
    UNTESTED_TRAINING,
    Condition,
    Conflict,
    LengthSettings,
    MessageFields,
    Refusal,
    RunSettings,
    refuse_pairs,
    setting,
)

_TESTED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "reduce_scatter": (True,),
    "contiguous_gradients": (True,),
    "gradient_predivide_factor": (1, 1.0),
    "prescale_gradients": (False,),
}
"""DeepSpeed options, each with the values for which tests compare parallel layouts with a reference loop.

Parallel layouts with other values are refused: some fail after weights are read, and some compute a token with another
rank's experts.
"""
_ATTENTION = Conflict(
    "model.attention {model.attention}",
    "set model.attention: sdpa",
    lambda run: run.model.attention not in OWN_ATTENTIONS,
)
_ONE_NORM = Conflict(
    # At stage 0 in 16 bits, DeepSpeed 0.19.8 clips all gradients by one norm (fp16/unfused_optimizer.py:214). Gradients
    # of an auxiliary loss must be clipped by a norm of their own.
    "zero stage {zero_stage} in {precision}",
    "use zero stage 1, or fp32",
    lambda run: run.zero_stage == 0 and run.precision != "fp32",
)


def _untested_value(option: str) -> Conflict:
    tested = _TESTED_OPTIONS[option]
    return Conflict(
        f"{option} {{options[{option}]}}",
        f"leave {option} out",
        lambda run: option in run.options and run.options[option] not in tested,
    )


def _other_objective(feature: str) -> Conflict:
    return Conflict(
        "objective {objective.name}",
        f"set objective to {{legal}}, or leave {feature} out",
        lambda run: not run.objective.row.is_cross_entropy and {"legal": " or ".join(cross_entropies())},
    )


_OBJECTIVE: tuple[Refusal[RunSettings], ...] = (
    Refusal(
        lambda run: run.model.loss == "liger" and not run.objective.row.is_cross_entropy,
        "model.loss liger with objective {objective.name}: its kernel sums the cross entropy of tokens",
        "set model.loss: auto",
    ),
    Refusal(
        lambda run: (
            is_distillation(run.objective) and (run.objective.teacher is None) == (run.objective.scores is None)
        ),
        "objective distill has objective.teacher {objective.teacher!r} and objective.scores {objective.scores!r}, but "
        "needs exactly one of them",
        "give either a teacher, which runs beside the model, or scores that `ds-finetune teach` wrote",
    ),
    Refusal(
        lambda run: run.objective.reference_source == "adapters_off" and run.lora is None,
        "objective.reference adapters_off without lora: there are no adapters to turn off",
        "add `lora`, or set objective.reference: cache",
    ),
    Refusal(
        lambda run: run.data.streaming and (run.data.rows or run.data.held_out_share),
        "data.streaming true with data.rows or a share as data.eval: rows of a stream are not counted",
        "set data.streaming: false, or leave data.rows out and name files as data.eval",
    ),
    Refusal(
        lambda run: run.data.rows and run.data.weights,
        "data.rows {data.rows} with weights of data.train: the first rows all come from the first files",
        "give data.train as a list without weights, or leave data.rows out",
    ),
    Refusal(
        lambda run: run.objective.reference_source == "cache" and run.data.streaming,
        "objective {objective.name} with objective.reference cache and data.streaming true: log-probabilities are "
        "cached for prepared rows",
        "set data.streaming: false, or objective.reference: adapters_off with `lora`",
    ),
    Refusal(
        lambda run: "baseline" in run.objective.row.needs and run.data.streaming,
        "objective {objective.name} with data.streaming true: z0 needs the answer of another example for each prompt",
        "set data.streaming: false",
    ),
    Refusal(
        lambda run: "baseline" in run.objective.row.needs and run.train.global_batch_size == 1,
        "objective {objective.name} with train.global_batch_size 1: z0 is a mean over the examples of the global batch",
        "set train.global_batch_size to 8 or more",
    ),
    # DeepSpeed 0.19.8 applies Muon to every head that is not named `lm_head` (__init__.py:369).
    Refusal(
        lambda run: run.optimizer == "muon" and run.objective.row.head == "scores",
        "optim.name {optim.name} with objective {objective.name} would orthogonalise the score head",
        "set optim.name: AdamW",
    ),
    Refusal(
        lambda run: is_distillation(run.objective) and run.objective.scores and run.objective.temperature != 1,
        "objective distill with scores and temperature {objective.temperature:g}: "
        "probabilities of tokens that are not stored are unknown at another temperature",
        "set temperature: 1, or name a teacher",
    ),
    Refusal(
        lambda run: is_distillation(run.objective) and run.objective.scores and run.data.streaming,
        "objective distill with scores and data.streaming true: rows of a stream have no row numbers, by which "
        "stored scores are looked up",
        "set data.streaming: false, or name a teacher",
    ),
    # Only ranks of the last pipeline stage run the teacher, but with offload every rank would hold a part of the
    # teacher's weights.
    Refusal(
        lambda run: is_distillation(run.objective) and run.mesh.pp > 1 and run.objective.teacher_offload != "none",
        "objective distill with teacher_offload {objective.teacher_offload} and parallel {mesh} is not tested",
        "set parallel.pp: 1, or teacher_offload: none",
    ),
)


def _activation_checks(key: str) -> Iterator[Refusal[RunSettings]]:
    hint = f"leave train.{key} out"
    others = (
        setting("mtp.train true", hint),
        setting("indexer.train true", hint),
        setting("lora.quantize", hint),
    )
    return refuse_pairs(f"train.{key} true", lambda run: getattr(run.train, key), others)


_ACTIVATIONS: tuple[Refusal[RunSettings], ...] = (
    *_activation_checks("activation_offload"),
    *_activation_checks("tiled_mlp"),
    Refusal(
        lambda run: run.train.activation_offload and run.device == "cpu",
        "train.activation_offload true with device {device}: activations are in host memory already",
        "leave train.activation_offload out, or train on a GPU",
    ),
)


def _unknown_ranks(run: RunSettings) -> MessageFields:
    profile, number = run.profile, run.mesh.world_size
    unknown = [str(rank) for rank in profile.ranks if isinstance(rank, int) and rank >= number] if profile else []
    return {"unknown": ", ".join(unknown), "ranks": number, "last": number - 1} if unknown else None


_RANKS: tuple[Refusal[RunSettings], ...] = (
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
    return " or ".join(str(n * size) for n in (number // size, number // size + 1) if n)


_LAYOUT: tuple[Refusal[RunSettings], ...] = (
    Refusal(
        lambda run: (
            run.axes
            and not any(row.axes == run.axes and run.zero_stage in row.stages for row in TESTED_LAYOUTS)
            and {"nearest": nearest_layout(run.axes, run.zero_stage)}
        ),
        "parallel {mesh} with zero stage {zero_stage} is not tested",
        "use the nearest tested layout: {nearest}",
    ),
    # At stage 0 in 16 bits, DeepSpeed 0.19.8 clips by the gradient norm of each rank's own shard
    # (fp16/unfused_optimizer.py). On the tiny DeepSeek-V3 that is 0.78 of the true norm.
    Refusal(
        lambda run: run.mesh.pp * run.mesh.tp * run.mesh.ep > 1 and run.zero_stage == 0 and run.precision != "fp32",
        "parallel {mesh} with zero stage 0 in {precision} clips by a wrong norm",
        "use zero stage 1, or fp32",
    ),
    *refuse_pairs(
        "parallel {mesh}",
        lambda run: run.axes,
        (_ATTENTION, *UNTESTED_TRAINING, *map(_untested_value, _TESTED_OPTIONS)),
    ),
    Refusal(
        lambda run: (
            run.data.packing
            and run.train.max_seq_len % run.mesh.sp
            and {"legal": _multiples(run.train.max_seq_len, run.mesh.sp)}
        ),
        "train.max_seq_len {train.max_seq_len} is not a multiple of parallel.sp {mesh.sp}",
        "set train.max_seq_len to {legal}",
    ),
)


def _rounded_sum(run: RunSettings) -> MessageFields:
    key = "train.reduction_dtype" if run.train.reduction_dtype == "fp32" else "data_types.grad_accum_dtype"
    is_rounded = run.zero_stage >= 2 and run.accumulation_dtype == "fp32" and run.precision != "fp32"
    return {"key": key} if is_rounded else None


_REDUCTION: tuple[Refusal[RunSettings], ...] = (
    Refusal(
        lambda run: run.precision == "fp16" and run.train.reduction_dtype != "auto",
        "train.reduction_dtype {train.reduction_dtype} with train.precision fp16 is not tested",
        "set train.precision: bf16, or leave train.reduction_dtype out",
    ),
    Refusal(
        lambda run: run.zero_stage < 2 and run.train.reduction_dtype == "fp32" and run.precision == "bf16",
        "train.reduction_dtype fp32 with train.precision bf16 and zero stage {zero_stage}: DeepSpeed 0.19.8 rounds the "
        "sum to bf16 below stage 2",
        "set zero_optimization.stage to 2 or 3, or leave train.reduction_dtype out",
    ),
    # With a `grad_accum_dtype` below stage 2, DeepSpeed 0.19.8 uses its BF16_Optimizer (runtime/engine.py:2305), whose
    # state this program cannot save.
    Refusal(
        lambda run: run.accumulation_dtype and run.zero_stage < 2 and run.precision == "bf16",
        "data_types.grad_accum_dtype {accumulation_dtype!r} with zero stage {zero_stage} in bf16 is not tested",
        "set zero_optimization.stage to 2 or 3, or leave grad_accum_dtype out",
    ),
    Refusal(
        lambda run: run.train.reduction_every == "step" and _rounded_sum(run),
        "train.reduction_every step with {key} fp32 in {precision}: ranks would accumulate their own gradients in "
        "{precision}",
        "leave train.reduction_every or {key} out",
    ),
    Refusal(
        lambda run: run.train.reduction_every == "step" and run.zero_stage >= 2 and run.optimizer == "muon",
        "train.reduction_every step with optim.name Muon is not tested",
        "use AdamW, or leave train.reduction_every out",
    ),
    Refusal(
        lambda run: run.train.reduction_every == "step" and "nvme" in (run.offload_optimizer, run.offload_param),
        "train.reduction_every step with offload to nvme is not tested",
        "offload to cpu, or leave train.reduction_every out",
    ),
)


def _turns_adapters_off(run: RunSettings) -> bool:
    if is_grpo(run.objective):
        return run.objective.has_reference(has_adapters=True)
    return run.objective.reference_source == "adapters_off"


def _quantizes(run: RunSettings) -> bool:
    return run.lora is not None and run.lora.quantize is not None


_LORA: tuple[Refusal[RunSettings], ...] = (
    *refuse_pairs(
        "lora",
        lambda run: run.lora is not None,
        (
            *UNTESTED_STATES,
            setting("model.weights random", "load weights, or leave `lora` out"),
            # With LoRA the embedding and the head are frozen and not exported. Their rows for new tokens would stay
            # random and be lost.
            setting("model.resize_vocabulary true", "train all weights, or use a tokenizer that fits the model"),
            # A server loads a LoRA adapter with the published base model, whose config.json lacks the extended context.
            setting("model.context", "write the extension into the config.json of a copy of the model's folder"),
        ),
    ),
    Refusal(
        lambda run: (
            run.lora is not None
            and run.lora.dropout
            and ("reference" in run.objective.row.needs or is_grpo(run.objective))
        ),
        "lora.dropout {lora.dropout:g} with objective {objective.name}: the model would not be its reference before "
        "the first step",
        "leave lora.dropout out",
    ),
    Refusal(
        lambda run: run.lora is not None and run.lora.dropout and run.train.tiled_mlp,
        "lora.dropout {lora.dropout:g} with train.tiled_mlp true: backward would drop other inputs than forward",
        "leave lora.dropout or train.tiled_mlp out",
    ),
    Refusal(
        lambda run: run.lora is not None and run.lora.modules_to_save and _turns_adapters_off(run),
        "lora.modules_to_save with objective {objective.name}, whose reference is the model with its adapters off: "
        "modules that are trained in full cannot be turned off",
        "leave modules_to_save out, or choose another objective.reference",
    ),
    Refusal(
        lambda run: run.lora is not None and run.lora.modules_to_save and run.mtp.train,
        "lora.modules_to_save with mtp.train true is not tested",
        "leave lora.modules_to_save or mtp.train out",
    ),
    # Quantising a shard of a weight gives other values than quantising the full weight: 256 block scales share a
    # second-level scale, and all block scales of a weight share a mean.
    Refusal(
        lambda run: _quantizes(run) and run.mesh.tp > 1,
        "lora.quantize {lora.quantize} with parallel {mesh} would round other numbers than without parallel.tp",
        "set parallel.tp: 1; pp, sp and ep may be larger",
    ),
    Refusal(
        lambda run: (
            _quantizes(run)
            and (devices := [device for device in (run.offload_optimizer, run.offload_param) if device != "none"])
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


_FREEZING = refuse_pairs(
    "train.only or train.freeze",
    lambda run: run.train.only or run.train.freeze,
    (
        *UNTESTED_STATES,
        # A run that resumes reads frozen weights from the model's folder, because checkpoints have no frozen weights.
        setting("model.weights random", "load weights, or train all"),
        setting("model.resize_vocabulary true", "train all weights, or use a tokenizer that fits the model"),
        setting("model.context", "train all weights"),
        setting("lora", "name modules in lora.target_modules instead"),
        setting("`router`", "leave router out; train.freeze may name gate"),
        setting("mtp.train true", "train all weights, or set mtp.train: false"),
        setting("indexer.train true", "train all weights, or set indexer.train: false"),
    ),
)


def _broken_groups(run: RunSettings) -> MessageFields:
    rows, pp = run.micro_batch_size * run.mesh.dp, run.mesh.pp
    legal = _multiples(run.accumulation * rows, pp * rows)
    return {"rows": rows // run.mesh.dp, "legal": legal} if run.accumulation % pp else None


_INTERLEAVING: tuple[Refusal[RunSettings], ...] = (
    Refusal(
        lambda run: run.parallel.vpp > 1 and run.mesh.pp == 1,
        "parallel.vpp {parallel.vpp} with parallel.pp 1, which has no pipeline stages to interleave",
        "set parallel.pp, or leave parallel.vpp out",
    ),
    Refusal(
        lambda run: run.parallel.vpp > 1 and run.indexer.train,
        "parallel.vpp {parallel.vpp} with indexer.train true is not tested",
        "set parallel.vpp: 1",
    ),
    Refusal(
        lambda run: run.parallel.vpp > 1 and _broken_groups(run),
        "parallel.vpp {parallel.vpp} computes micro-batches in groups of parallel.pp {mesh.pp}, and a step has "
        "{accumulation}: train.global_batch_size {train.global_batch_size} / (micro_batch_size {rows} x dp {mesh.dp})",
        "set train.global_batch_size to {legal}, or parallel.vpp to 1",
    ),
)
_PREDICTION = refuse_pairs(
    "mtp.train true",
    lambda run: run.mtp.train,
    (
        # No test trains indexers and a multi-token prediction layer together, and that layer's indexer has no loss.
        setting("indexer.train true", "train indexers first, and then mtp on the export of that run"),
        _other_objective("mtp"),
        setting("model.attention flash_attention_2", "set model.attention: sdpa"),
        setting("model.resize_vocabulary true", "use a tokenizer that fits the model"),
        *UNTESTED_TRAINING,
        _ONE_NORM,
    ),
)
_INDEXERS = refuse_pairs(
    "indexer.train true (stage {indexer.stage})",
    lambda run: run.indexer.train,
    (
        setting("lora", "leave lora or indexer out; with adapters indexers stay as they are"),
        _other_objective("indexer"),
        _ATTENTION,
        *UNTESTED_TRAINING,
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


def _option(name: str, applies: Condition[RunSettings], evidence: str, hint: str) -> Refusal[RunSettings]:
    """Refusal of a DeepSpeed option that fails or computes wrong numbers, with the `evidence` for it."""
    message = f"{name} is refused (device {{device}}, zero stage {{zero_stage}}, {{precision}}): {evidence}"
    return Refusal(applies, message, f"use {hint}")


def _without_path(what: str) -> Refusal[RunSettings]:
    return _option(
        f"{what} to nvme without nvme_path",
        lambda run: (section := run.zero.get(what) or {}).get("device") == "nvme" and not section.get("nvme_path"),
        "DeepSpeed 0.19.8 has no folder to write to and fails while it builds the engine (swap_tensor/)",
        f'{what}.nvme_path "FOLDER" on a local NVMe disk',
    )


_OPTIONS: tuple[Refusal[RunSettings], ...] = (
    Refusal(
        lambda run: run.optim.weight_decay and "weight_decay" not in OPTIMIZERS[run.optimizer].keys,
        "optim.weight_decay {optim.weight_decay} with {optim.name} would be added to the gradient (torch.optim), "
        "not decoupled from it",
        "set optim.weight_decay: 0, or optim.name: AdamW",
    ),
    _option(
        "fp16 on the CPU accelerator",
        lambda run: run.device == "cpu" and run.precision == "fp16",
        "DeepSpeed 0.19.8 does not support fp16 on CPUs",
        "train.precision bf16 or fp32",
    ),
    _option(
        "fp16 without ZeRO",
        lambda run: run.zero_stage == 0 and run.precision == "fp16",
        "DeepSpeed 0.19.8 scales the loss only for ZeRO optimizers (runtime/engine.py:3417), but its FP16_Optimizer "
        "divides the gradients by the scale all the same (fp16/fused_optimizer.py:374): a gradient norm of 0.767 "
        "became 1.17e-5",
        "zero_optimization.stage 1, or train.precision fp32",
    ),
    _option(
        "offload to nvme below ZeRO-3",
        lambda run: run.zero_stage < 3 and "nvme" in (run.offload_optimizer, run.offload_param),
        "DeepSpeed 0.19.8 silently keeps the states in CPU memory at stages 1 and 2 (zero/stage_1_and_2.py)",
        "zero_optimization.stage 3, or device cpu",
    ),
    _without_path("offload_optimizer"),
    _without_path("offload_param"),
    _option(
        "offload_param below ZeRO-3",
        lambda run: run.zero_stage < 3 and run.offload_param != "none",
        "parameters are partitioned, and can be offloaded, only at stage 3",
        "zero_optimization.stage 3, or leave offload_param out",
    ),
    _option(
        "offload_optimizer without ZeRO",
        lambda run: run.zero_stage == 0 and run.offload_optimizer != "none",
        "stage 0 has no partitioned optimizer to offload",
        "zero_optimization.stage 1, 2 or 3",
    ),
    # A ZeRO-3 gather must wait until an optimizer step has written the weights. DeepSpeed waits only in the gather of
    # small weights after the step (zero/stage3.py:2840, zero/partition_parameters.py:2128); other gathers start on a
    # separate stream.
    _option(
        "ZeRO-3 with overlap_comm and a persistence threshold of 0",
        lambda run: (
            run.zero_stage == 3
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
        lambda run: (
            run.zero_stage == 3 and run.optimizer == "muon" and run.zero.get("reduce_scatter", True) is not False
        ),
        "DeepSpeed 0.19.8 refuses the pair after loading (zero/stage3.py:361)",
        "zero_optimization.reduce_scatter false",
    ),
    _option(
        "clipping with Muon under ZeRO",
        lambda run: run.zero_stage >= 1 and run.optimizer == "muon" and run.train.max_grad_norm > 0,
        "DeepSpeed 0.19.8 orthogonalises before it takes the norm (zero/stage_1_and_2.py:2865, zero/stage3.py:1697): "
        "it would clip the update instead of the gradient; losses of a tiny DeepSeek-V3 differ from those at stage 0 "
        "by 3e-4 after two steps",
        "train.max_grad_norm 0, or zero_optimization.stage 0",
    ),
    _option(
        "Adagrad without offload_optimizer under ZeRO",
        lambda run: run.zero_stage >= 1 and run.optimizer == "adagrad" and run.offload_optimizer == "none",
        "torch.optim.Adagrad creates its states in its constructor, and ZeRO's flat partitions get none, so DeepSpeed "
        "0.19.8 ends in an IndexError",
        "offload_optimizer.device cpu (DeepSpeedCPUAdagrad), or zero_optimization.stage 0",
    ),
    _option(
        "Lion without offload_optimizer on the CPU accelerator",
        lambda run: run.device == "cpu" and run.optimizer == "lion" and run.offload_optimizer == "none",
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
        "optim.name {optim.name} under ZeRO",
        lambda run: run.zero_stage >= 1 and (why := OPTIMIZERS[run.optimizer].needs_unsharded) and {"why": why},
        "{why}; computed on a rank's flat partition, the step would depend on the number of ranks",
        "zero_optimization.stage 0, or optim.name AdamW",
    ),
    _option(
        "offload_optimizer with optim.name {optim.name}",
        lambda run: run.offload_optimizer != "none" and run.optimizer in ("radam", "adamax", "rmsprop"),
        "DeepSpeed 0.19.8 has no CPU kernel for this optimizer, and torch's is not tested with offload",
        "optim.name AdamW, or leave offload_optimizer out",
    ),
    Refusal(
        lambda run: OPTIMIZERS[run.optimizer].of == "bitsandbytes" and find_spec("bitsandbytes") is None,
        "optim.name {optim.name} needs bitsandbytes, which is not installed",
        "pip install 'ds_finetune[quantize]', or set optim.name: AdamW",
    ),
)


def _hopeless_patience(length: LengthSettings) -> MessageFields:
    patience = length.run.eval.patience
    if not patience or length.run.eval.every is None:
        return None
    evaluations = length.run.eval.interval.in_steps(length.steps_per_epoch).times(length.schedule.steps - 1) + 1
    return {"evaluations": evaluations} if patience + 1 >= evaluations else None


def length_notes(length: LengthSettings) -> list[str]:
    """Note of the plan about an optimizer step that uses more rows than an epoch has."""
    values = _larger_step(length)
    text = "{key} {batch} is more than the {rows} {kind} of an epoch: each step sees rows more than once"
    return [text.format(**values)] if values else []


def _larger_step(length: LengthSettings) -> MessageFields:
    samples, kind = is_grpo(length.run.objective), "packed rows" if length.run.data.packing else "rows"
    batch = rows_of_step(length.run.objective, length.run.rollout, length.run.train.global_batch_size)
    key, kind = ("rollout.prompts_per_step", "prompts") if samples else ("train.global_batch_size", kind)
    is_larger = length.rows is not None and batch > length.rows
    return {"key": key, "batch": batch, "rows": length.rows, "kind": kind} if is_larger else None


LENGTH_CHECKS: tuple[Refusal[LengthSettings], ...] = (
    Refusal(
        lambda length: length.schedule.warmup_steps > length.schedule.steps,
        "optim.warmup `{run.optim.warmup}` is {schedule.warmup_steps} steps, and the run has {schedule.steps}: "
        "`optim.lr` would never be reached",
        "shorten optim.warmup to at most {schedule.steps} steps, or give a share such as `3%`",
    ),
    Refusal(
        _hopeless_patience,
        "eval.patience {run.eval.patience} cannot end a run of {schedule.steps} steps early: with eval.every "
        "`{run.eval.every}` it has {evaluations} evaluations, the first of which is the best so far",
        "lower eval.patience or eval.every, or leave eval.patience out",
    ),
    Refusal(
        lambda length: length.run.profile is not None and length.run.profile.first_and_last[1] > length.schedule.steps,
        "profile.steps `{run.profile.steps}` ends at step {run.profile.first_and_last[1]}, and the run has "
        "{schedule.steps} steps",
        "profile steps up to {schedule.steps}",
    ),
    Refusal(
        lambda length: Duration.parse(length.run.train.duration).unit != "steps" and _larger_step(length),
        "{key} {batch} is more than the {rows} {kind} of an epoch: the epochs of `{run.train.duration}` would be "
        "joined in fewer steps",
        "set {key} to at most {rows}, or give train.for in steps",
    ),
)

BEFORE_MODEL: dict[str, tuple[Refusal[RunSettings], ...]] = {
    "objective": _OBJECTIVE,
    "sampled answers": ROLLOUTS,
    "activations": _ACTIVATIONS,
    "ranks": _RANKS,
    "layout": _LAYOUT,
    "reduction of gradients": _REDUCTION,
    "LoRA": _LORA,
    "frozen parameters": tuple(_FREEZING),
    "interleaving": _INTERLEAVING,
    "multi-token prediction": tuple(_PREDICTION),
    "indexers": tuple(_INDEXERS),
    "inexact options": tuple(inexact_checks()),
    "options of DeepSpeed": _OPTIONS,
}
"""Table of the settings that are refused without reading the model's config.json, by subject. The checks run in this
order.
"""


def check(run: RunSettings, *subjects: str) -> None:
    """Raise the ConfigError or ModelError of the first refused combination of settings. `subjects` limits the check to
    some keys of `BEFORE_MODEL`.
    """
    for subject in subjects or BEFORE_MODEL:
        for row in BEFORE_MODEL[subject]:
            row.raise_for(run)
