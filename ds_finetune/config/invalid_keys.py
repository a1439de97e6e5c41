"""Errors for a run file whose keys or values do not fit the schema."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_finetune.config.objectives import OBJECTIVES, GrpoObjective, ObjectiveConfig
from ds_finetune.config.run_file import Lines
from ds_finetune.errors import ConfigError

KEYS_OF_OTHER_PROGRAMS = {
    "model.path": "model_name_or_path model_name base_model pretrained_model_name_or_path model_id",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
    "model.attention": "attn_implementation attn_impl flash_attn flash_attention "
    "flash_attention_2 sdp_attention use_flash_attention_2",
    "model.loss": "use_liger_kernel use_liger liger_kernel enable_liger_kernel liger_fused_linear_cross_entropy",
    "model.kernels": "liger_rope liger_rms_norm liger_swiglu liger_glu_activation torch_compile",
    "data.train": "dataset datasets dataset_name dataset_path train_file train_files train_data data_path dataset_dir",
    "data.eval": "eval_dataset eval_file validation_file val_file test_datasets "
    "eval_data val_set_size val_size test_size",
    "data.columns": "field_messages dataset_text_field prompt_template columns_map column_mapping",
    "data.layout": "dataset_format ds_type formatting",
    "data.template": "chat_template chat_template_path chat_template_jinja template",
    "data.train_on": "train_on_inputs completion_only_loss assistant_only_loss train_on_prompt "
    "mask_history roles_to_train train_on_eos",
    "data.packing": "sample_packing eval_packing neat_packing pad_to_sequence_len",
    "data.long_rows": "truncation truncation_side excess_length_strategy",
    "data.workers": "preprocessing_num_workers dataset_num_proc dataset_processes dataloader_num_workers num_proc",
    "data.cache_dir": "dataset_prepared_path tokenized_path",
    "train.for": "epochs num_epochs num_train_epochs max_steps train_steps total_steps n_epochs duration",
    "train.global_batch_size": "batch_size train_batch_size gradient_accumulation_steps "
    "gradient_accumulation accumulation_steps",
    "train.micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size "
    "micro_batch_size_per_gpu",
    "train.max_seq_len": "max_length max_seq_length max_sequence_length cutoff_len sequence_len "
    "seq_len seq_length model_max_length block_size max_prompt_length",
    "train.precision": "bf16 fp16 fp32 bfloat16 float16 tf32 pure_bf16 torch_dtype dtype mixed_precision",
    "train.seed": "data_seed random_seed",
    "train.max_grad_norm": "gradient_clipping grad_clip clip_grad max_norm gradient_clip_val",
    "train.activation_checkpointing": "gradient_checkpointing disable_gradient_checkpointing "
    "gradient_checkpointing_kwargs recompute",
    "optim.name": "optimizer optim_name optimizer_name optim_type",
    "optim.lr": "learning_rate learning_rate_peak peak_lr max_lr base_lr",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "adam_epsilon epsilon adam_eps",
    "optim.lr_scheduler": "lr_scheduler_type scheduler lr_schedule",
    "optim.warmup": "warmup_steps warmup_ratio warmup_epochs num_warmup_steps lr_warmup_steps",
    "optim.min_lr_ratio": "min_lr min_lr_rate cosine_min_lr_ratio lr_scheduler_kwargs",
    "router.train": "freeze_router moe_freeze_router freeze_gate train_router",
    "router.balance": "router_aux_loss_coef aux_loss_coef aux_loss_alpha moe_aux_loss_coeff moe_aux_loss_coef "
    "moe_router_aux_loss_coef",
    "router.bias_update": "moe_router_bias_update_rate load_balance_coeff gate_bias_update_factor bias_update_speed",
    "indexer.train": "freeze_indexer",
    "indexer.weight": "dsa_indexer_loss_coeff indexer_loss_coeff",
    "indexer.stage": "dsa_indexer_use_sparse_loss",
    "eval.every": "eval_steps eval_strategy evaluation_strategy evals_per_epoch eval_interval do_eval eval_every",
    "eval.limit": "max_eval_samples eval_table_size max_val_samples eval_samples eval_max_batches limit_val_batches",
    "eval.generate": "predict_with_generate eval_max_new_tokens do_sample_eval",
    "eval.patience": "early_stopping_patience early_stopping",
    "eval.keep_best": "load_best_model_at_end metric_for_best_model save_best",
    "checkpoint.every": "save_steps save_strategy saves_per_epoch save_interval checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints",
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints resume_from overwrite_output_dir",
    "log.every": "logging_steps logging_strategy log_every log_interval",
    "log.trackers": "report_to use_wandb wandb_project use_tensorboard use_mlflow logger",
    "lora.rank": "lora_r r lora_rank lora_dim",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear lora_modules",
    "lora.quantize": "load_in_4bit load_in_8bit quantization_bit quantization bnb_4bit_quant_type qlora use_qlora",
    "lora": "adapter finetuning_type use_peft peft_config use_lora peft",
    "parallel.tp": "tensor_parallel_size tensor_model_parallel_size autotp_size tp_size",
    "parallel.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank vpp_size",
    "parallel.ep": "expert_parallel_size expert_model_parallel_size ep_size",
    "parallel.sp": "sequence_parallel_degree sequence_parallel_size context_parallel_size context_parallel sp_size cp",
    "objective": "stage rl rlhf_type task_type problem_type training_type",
    "objective.beta": "dpo_beta pref_beta kto_beta orpo_beta orpo_alpha simpo_beta rl_beta",
    "objective.loss": "loss_type pref_loss dpo_loss preference_loss cpo_loss",
    "objective.label_smoothing": "dpo_label_smoothing label_smoothing_factor cdpo_alpha",
    "objective.nll_weight": "rpo_alpha pref_ftx cpo_alpha dpo_ftx nll_loss_coef sft_loss_weight",
    "objective.gamma": "simpo_gamma cpo_simpo_gamma gamma_beta_ratio",
    "objective.desirable_weight": "kto_chosen_weight kto_desirable_weight chosen_weight",
    "objective.undesirable_weight": "kto_rejected_weight kto_undesirable_weight rejected_weight",
    "objective.reference": "ref_model ref_model_init_kwargs reference_model precompute_ref_log_probs "
    "precompute_ref_batch_size reference_free disable_reference",
    "objective.center_weight": "center_rewards_coefficient center_rewards_coef",
    "objective.teacher": "teacher_model teacher_model_name_or_path teacher_model_init_kwargs",
    "objective.temperature": "kd_temperature distill_temperature",
    "objective.label_weight": "kd_ce_alpha kd_alpha",
    "objective.group_size": "num_generations n_samples_per_prompt num_samples_per_prompt rollouts_per_example",
    "objective.advantage": "scale_rewards advantage_estimator adv_estimator norm_adv_by_std_in_grpo",
    "objective.no_spread": "dynamic_sampling dynamic_sample dynamic_filtering filter_groups",
    "objective.aggregation": "loss_agg_mode",
    "objective.ratio": "importance_sampling_level",
    "objective.clip_low": "epsilon_low clip_ratio clip_ratio_low cliprange eps_clip eps_clip_low",
    "objective.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "objective.dual_clip": "delta clip_ratio_c",
    "objective.kl_weight": "kl_coef init_kl_coef kl_loss_coef kl_coeff kl_penalty_coef",
    "objective.truncated": "mask_truncated_completions overlong_filter",
    "objective.mismatch": "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is "
    "rollout_importance_sampling_mode",
    "objective.mismatch_cap": "vllm_importance_sampling_cap rollout_is_threshold tis_imp_ratio_cap",
    "rollout.engine": "use_vllm vllm_mode vllm_sync_backend weight_transfer_config weight_broadcast",
    "rollout.address": "vllm_server_host vllm_server_port vllm_server_base_url vllm_base_url",
    "rollout.prompts_per_step": "generation_batch_size rollout_batch_size num_prompts_per_step",
    "rollout.steps_per_rollout": "num_iterations steps_per_generation ppo_epochs num_ppo_epochs ppo_mini_batch_size",
    "rollout.max_new_tokens": "max_completion_length max_response_length response_length generate_max_len",
    "rollout.temperature": "top_p top_k min_p repetition_penalty",
    "rollout.stop": "stop_words stop_strings",
    "rewards": "reward_funcs reward_functions reward_function reward_fn custom_reward_function reward_weights "
    "reward_func_weights remote_rm_url",
    "deepspeed": "deepspeed_config deepspeed_config_file ds_config zero_stage zero_optimization fsdp fsdp_config",
    "output_dir": "output out_dir save_dir run_dir checkpoint_dir",
    "export.max_shard_size": "save_max_shard_size shard_size",
}
"""Keys of the run file, each with its names in TRL, Hugging Face's Trainer, LLaMA-Factory, axolotl and others."""
NAMES_OF_OTHER_PROGRAMS: Mapping[str, str] = {
    "sft": "lm instruct instruction_tuning",
    "pretrain": "pt cpt clm continued_pretraining pretraining",
    "classification": "cls seq_cls sequence_classification text_classification regression",
    "reward": "rm reward_model reward_modeling bradley_terry",
    "{name: dpo, loss: ipo}": "ipo",
    "{name: dpo, loss: hinge}": "hinge slic",
    "{name: dpo, loss: robust, label_smoothing: 0.1}": "robust robust_dpo rdpo",
    "{name: dpo, loss: apo_zero}": "apo apo_zero",
    "{name: dpo, loss: apo_down}": "apo_down",
    "{name: dpo, label_smoothing: 0.1}": "cdpo",
    "{name: dpo, nll_weight: 1.0}": "rpo dpop",
    "kto": "kto_pair bco",
    "distill": "gkd distillation knowledge_distillation kd",
    "grpo": "rlvr",
    "{name: grpo, aggregation: fixed}": "dr_grpo drgrpo",
    "{name: grpo, advantage: mean_std, no_spread: resample}": "dapo",
    "{name: grpo, ratio: sequence, aggregation: sequence}": "gspo",
    "{name: grpo, ratio: capped, ratio_cap: 5.0}": "cispo",
    "{name: grpo, advantage: leave_one_out}": "rloo",
}
"""Objectives, each with its names in TRL, LLaMA-Factory, ms-swift, OpenRLHF and papers."""
_SAMPLING = ("ppo", "reinforce", "reinforce++", "online_dpo", "nash_md", "xpo", "rlhf")
"""Other methods that train on answers which the model samples during the training."""
_KEYS_OF_GRPO: Mapping[str, str] = {
    "beta": "objective.kl_weight",
    "epsilon": "objective.clip_low",
    "loss_type": "objective.aggregation",
    "loss": "objective.aggregation",
    "temperature": "rollout.temperature",
    "max_length": "rollout.max_new_tokens",
}
"""Keys of other programs for GRPO that mean something else in other sections, and what to write instead."""
_MEANT = {word: meant for meant, words in NAMES_OF_OTHER_PROGRAMS.items() for word in words.split()}
_MEANINGS = {
    "train.for": "`3 epochs` or `500 steps`",
    "train.global_batch_size": "rows of one optimizer step over all ranks, from which accumulation is derived",
    "train.micro_batch_size": "rows of one forward on one rank",
    "train.precision": "auto, bf16, fp16 or fp32",
    "train.activation_checkpointing": "`full` for true, `none` for false",
    "optim.warmup": "`3%` or `100 steps`",
    "optim.min_lr_ratio": "a share of `lr`",
    "eval.every": "`200 steps`",
    "checkpoint.every": "`500 steps`",
    "lora.quantize": "nf4",
    "objective.advantage": "mean, mean_std or leave_one_out",
    "objective.aggregation": "token (DAPO), sequence (GRPO) or fixed (Dr. GRPO); objective.ratio has GSPO and CISPO",
    "objective.clip_high": "what the ratio may exceed 1 by. For CISPO set objective.ratio_cap, the largest ratio: "
    "epsilon_high of TRL and ms-swift, and 1 + that of verl",
    "rollout.engine": "own or vllm, whose server loads weights from a folder; NCCL and CUDA IPC are not supported",
    "rollout.steps_per_rollout": "how many steps the answers of one rollout are divided over; each is used once",
    "rollout.temperature": "1, with which answers are drawn from the distribution that is trained; nothing else is "
    "supported",
    "objective": "a name such as dpo, or a section with `name`",
    "rewards": "a list such as `[exact_match, {reward: file.py:function, weight: 0.5}]`",
    "objective.nll_weight": "a key of dpo and cpo",
    "objective.loss": "a key of dpo and cpo",
    "objective.reference": "`cache` or `adapters_off`: the reference is the model before training",
}
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
_KEY_OF = {word: key for key, words in KEYS_OF_OTHER_PROGRAMS.items() for word in words.split()}


def explain(invalid: ValidationError, root: type[BaseModel], source: str, lines: Lines) -> ConfigError:
    """The error for values that do not fit the tree of sections below `root`: each key with its line and the nearest
    legal name.
    """
    # A value that may have one of several types has an error of each.
    firsts = {_keys_of(error): error for error in reversed(invalid.errors())}
    errors = [_explain_one(error, root, source, lines) for error in reversed(firsts.values())]
    return ConfigError(
        "; ".join(message for message, _ in errors), hint="; ".join(dict.fromkeys(hint for _, hint in errors))
    )


def _keys_of(error: Any) -> tuple[str, ...]:  # noqa: ANN401 - pydantic's ErrorDetails
    """The keys of an error's place, without indices of lists and pydantic's names of types, as `dict[str,float]`."""
    parts = [part for part in error["loc"] if isinstance(part, str)]
    return tuple(part for part in parts if part != "str" and "[" not in part)


def _explain_one(error: Any, root: type[BaseModel], source: str, lines: Lines) -> tuple[str, str]:  # noqa: ANN401 - pydantic's ErrorDetails
    path, section = _located(root, _keys_of(error))
    line = lines.get(path)
    where = f"{source} line {line}" if line else source
    name = ".".join(path)
    objective = explain_objective(error)
    if objective is not None:
        return f"{where}: {objective[0]}", objective[1]
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key `{name}`{_of_objective(path, section)}", _suggestion(path, section, root)
    # Of a list of a fixed length, the place of a value that is missing is its index.
    is_too_short = error["type"] == "missing" and isinstance(error["loc"][-1], int)
    if error["type"] == "missing" and not is_too_short:
        return f"{where}: `{name}` is missing", f"add `{name}` to the run file"
    message = _plain_message(error["msg"])
    field = _field(section, path[-1])
    if field is not None and (is_too_short or error["type"] == "too_long"):
        message = f"it should have {len(get_args(field.annotation))} values"
    hint = f"give `{name}` a value, or leave it out" if error["input"] is None else _value_hint(name, field)
    if isinstance(error["input"], bool) and name in _MEANINGS:
        hint = f"it is {_MEANINGS[name]}; {hint}"
    return f"{where}: `{name}` is {error['input']!r}: {message}", hint


def _field(section: type[BaseModel], key: str) -> FieldInfo | None:
    return next((field for name, field in section.model_fields.items() if key in (name, field.alias)), None)


def _value_hint(name: str, field: FieldInfo | None) -> str:
    """The range of a key, its default and what it is for."""
    if field is None:
        return f"docs/reference/run-file.md describes `{name}`"
    facts = [f"{word} {getattr(part, key)}" for part in field.metadata for key, word in _BOUNDS if hasattr(part, key)]
    if isinstance(field.default, str | int | float | tuple):
        facts.append(f"by default {json.dumps(field.default)}")
    text = " ".join((field.description or "").split()).rstrip(".")
    return f"`{name}`{' (' * bool(facts)}{', '.join(facts)}{')' * bool(facts)}: {text}"


def _located(root: type[BaseModel], parts: Sequence[str]) -> tuple[tuple[str, ...], type[BaseModel]]:
    """The keys from the top of the run file, and the section that has the last one.

    pydantic adds the tag of a section that is one of several.
    """
    path: tuple[str, ...] = ()
    section, rest = root, list(parts)
    while len(rest) > 1:
        key = rest.pop(0)
        path, choices = (*path, key), _sections(section, key)
        if not choices:
            break
        section = next((part for part in choices if _tag(part) == rest[0]), choices[0])
        rest = rest[1:] if len(choices) > 1 else rest
    return (*path, *rest), section


def _tag(section: type[BaseModel]) -> str:
    """The value of `name` by which a section is one of several; empty for other sections."""
    field = section.model_fields.get("name")
    values = get_args(field.annotation) if field is not None else ()
    return str(values[0]) if values else ""


def _of_objective(path: Sequence[str], section: type[BaseModel]) -> str:
    return f" of objective {_tag(section)}" if path[0] == "objective" else ""


def _suggestion(path: Sequence[str], section: type[BaseModel], root: type[BaseModel]) -> str:
    """A hint with the key that the last of `path` probably means: another program's, another section's, or a similar
    one.
    """
    word, known = path[-1], _own_names(section)
    meant = _KEYS_OF_GRPO.get(word) if section is GrpoObjective else None
    owners = objectives_with(word) if path[0] == "objective" and not meant else []
    if owners:
        return f"`{word}` is a key of {', '.join(owners)}; known here: {', '.join(known)}"
    key = (
        meant
        or _KEY_OF.get(word.lower())
        or next((name for name in _all_names(root) if name.rpartition(".")[2] == word), None)
    )
    if key is not None:
        return f"did you mean `{key}`?" + (f" It is {_MEANINGS[key]}" if key in _MEANINGS else "")
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"


def _all_names(root: type[BaseModel]) -> Iterator[str]:
    for key in _own_names(root):
        yield key
        yield from (f"{key}.{name}" for name in section_keys(root, key))


def section_keys(root: type[BaseModel], key: str) -> list[str]:
    """Names of the keys of section `key`, of all kinds of it where there are several; none where it is a value."""
    return list(dict.fromkeys(name for section in _sections(root, key) for name in _own_names(section)))


def _sections(parent: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """The sections that `key` has one of; empty where it is a value, or no key of `parent`."""
    field = _field(parent, key)
    kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    if ObjectiveConfig in kinds:
        return [row.section for row in OBJECTIVES.values()]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _own_names(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _plain_message(message: str) -> str:
    message = re.sub(r"a valid dictionary or instance of \w+", "a section", message)
    message = re.sub(r"(?:Tuple|List) (should have .*) after validation, not \d+", r"it \1", message)
    return (
        message.removeprefix("Value error, ")
        .replace("a valid dictionary", "a mapping")
        .replace("Input should be a valid tuple", "it should be a list")
        .replace("Input should", "it should")
        .replace("greater than or equal to", "at least")
        .replace("less than or equal to", "at most")
    )


def explain_objective(error: Any) -> tuple[str, str] | None:  # noqa: ANN401 - pydantic's ErrorDetails
    """What is wrong with the objective, and a hint; None where the error is about one of its keys."""
    if tuple(error["loc"]) != ("objective",):
        return None
    names = f"objectives are {', '.join(OBJECTIVES)}"
    if error["type"] == "union_tag_not_found":
        return "`objective` has no `name`", f"write e.g. `objective: {{name: dpo, beta: 0.1}}`; {names}"
    if error["type"] != "union_tag_invalid":
        return f"`objective` is {error['input']!r}: it should be a name or a section with a name", names
    given = error["input"]["name"]
    word = str(given).lower().replace("-", "_")
    if word in _SAMPLING:
        return (
            f"`objective` is {given!r}, which trains on sampled answers and is not available in this version",
            f"train grpo, which compares rewards of sampled answers, or dpo with pairs of answers; {names}",
        )
    near = _MEANT.get(word) or next(iter(difflib.get_close_matches(word, OBJECTIVES, n=1)), None)
    hint = f"did you mean `{near}`? " if near else ""
    return f"`objective` is {given!r}, which is no objective", f"{hint}{names}"


def objectives_with(key: str) -> list[str]:
    """Names of the objectives that have a key `key`."""
    return [name for name, row in OBJECTIVES.items() if key in row.section.model_fields]
