"""Tables of the keys, values and objectives of other trainers, with their equivalents in a run file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

KEYS_OF_OTHER_PROGRAMS = {
    "model.path": "model_name_or_path model_name base_model pretrained_model_name_or_path model_id",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
    "model.attention": "attn_implementation attn_impl flash_attn flash_attention "
    "flash_attention_2 sdp_attention use_flash_attention_2 attention_backend",
    "model.loss": "use_liger_kernel use_liger liger_kernel enable_liger_kernel liger_fused_linear_cross_entropy",
    "model.kernels": "liger_rope liger_rms_norm liger_swiglu liger_glu_activation torch_compile",
    "data.train": "dataset datasets dataset_name dataset_path train_file train_files train_data data_path dataset_dir "
    "pretraining_dataset train_dataset",
    "data.eval": "eval eval_dataset val_dataset eval_file validation_file val_file test_datasets "
    "eval_data val_set_size val_size test_size split_dataset_ratio",
    "data.rows": "max_samples max_train_samples num_train_samples",
    "data.columns": "field_messages dataset_text_field prompt_template columns_map column_mapping",
    "data.layout": "dataset_format ds_type formatting",
    "data.template": "chat_template chat_template_path chat_template_jinja template use_chat_template",
    "data.train_on": "train_on_inputs completion_only_loss assistant_only_loss train_on_prompt "
    "mask_history roles_to_train train_on_eos loss_scale",
    "data.packing": "sample_packing eval_packing neat_packing pad_to_sequence_len",
    "data.long_rows": "truncation truncation_side truncation_mode truncation_strategy excess_length_strategy",
    "data.workers": "preprocessing_num_workers dataset_num_proc dataset_processes dataloader_num_workers num_proc",
    "data.cache_dir": "dataset_prepared_path tokenized_path",
    "train.for": "epochs num_epochs num_train_epochs max_steps train_steps total_steps n_epochs duration train_iters",
    "train.global_batch_size": "batch_size train_batch_size gradient_accumulation_steps "
    "gradient_accumulation accumulation_steps",
    "train.micro_batch_size": "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size_per_gpu",
    "train.max_seq_len": "max_length max_seq_length max_sequence_length cutoff_len sequence_len "
    "seq_len seq_length model_max_length block_size max_prompt_length",
    "train.precision": "bf16 fp16 fp32 bfloat16 float16 pure_bf16 torch_dtype dtype mixed_precision",
    "train.seed": "data_seed random_seed",
    "train.max_grad_norm": "gradient_clipping grad_clip clip_grad max_norm gradient_clip_val",
    "train.activation_checkpointing": "gradient_checkpointing disable_gradient_checkpointing "
    "recompute recompute_granularity",
    "train.only": "unfrozen_parameters trainable_parameters trainable_parameters_regex",
    "train.freeze": "freeze_parameters freeze_parameters_regex",
    "optim.name": "optim optimizer optim_name optimizer_name optim_type optim_config.name use_muon",
    "optim.lr": "learning_rate learning_rate_peak peak_lr max_lr base_lr",
    "optim.weight_decay": "optim_config.wd",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2 optim_config.adamw_betas",
    "optim.eps": "adam_epsilon epsilon adam_eps optim_config.adamw_eps",
    "optim.lr_scheduler": "lr_scheduler_type scheduler lr_schedule lr_decay_style",
    "optim.warmup": "warmup_steps warmup_ratio warmup_epochs num_warmup_steps lr_warmup_steps "
    "lr_warmup_fraction lr_warmup_iters",
    "optim.min_lr_ratio": "min_lr min_lr_rate lr_scheduler_kwargs cosine_min_lr_ratio eta_min",
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
    "checkpoint.resume": "resume_from_checkpoint auto_resume_from_checkpoints resume_from",
    "log.every": "logging_steps logging_strategy log_every log_interval",
    "log.trackers": "report_to use_wandb wandb_project use_tensorboard use_mlflow logger",
    "lora.rank": "lora_r r lora_rank lora_dim",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear lora_modules",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.dropout": "lora_dropout",
    "lora.modules_to_save": "modules_to_save lora_modules_to_save additional_target",
    "lora.start": "adapter_name_or_path lora_model_dir adapters resume_lora_adapter",
    "lora.quantize": "load_in_4bit load_in_8bit quantization_bit quantization bnb_4bit_quant_type qlora use_qlora "
    "quant_bits",
    "lora": "adapter finetuning_type train_type tuner_type use_peft peft_config use_lora peft peft_config.name",
    "parallel.tp": "tensor_parallel_size tensor_model_parallel_size autotp_size tp_size",
    "parallel.pp": "pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank vpp_size",
    "parallel.ep": "expert_parallel_size expert_model_parallel_size ep_size",
    "parallel.sp": "sequence_parallel_degree sequence_parallel_size context_parallel_size context_parallel sp_size cp "
    "cp_size ulysses_size",
    "objective": "stage rl rlhf_type task_type training_type trainer",
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
    "deepspeed": "deepspeed_config deepspeed_config_file ds_config zero_stage zero_optimization fsdp fsdp_config "
    "config_file accelerate_config dist_config.name dist_config.config_file",
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
    "{name: grpo, advantage: mean_std, reward_scale: each}": "gdpo",
    "{name: grpo, advantage: mean_std, no_spread: resample}": "dapo",
    "{name: grpo, ratio: sequence, aggregation: sequence}": "gspo",
    "{name: grpo, ratio: capped, ratio_cap: 5.0}": "cispo",
    "{name: grpo, advantage: leave_one_out}": "rloo",
}
"""Objectives, each with its names in TRL, LLaMA-Factory, ms-swift, OpenRLHF and papers."""
SAMPLING = ("ppo", "reinforce", "reinforce++", "online_dpo", "nash_md", "xpo", "rlhf")
"""Methods of other trainers that sample answers during training and are not available here."""
KEYS_OF_GRPO: Mapping[str, str] = {
    "beta": "objective.kl_weight",
    "epsilon": "objective.clip_low",
    "loss_type": "objective.aggregation",
    "loss": "objective.aggregation",
    "temperature": "rollout.temperature",
    "max_length": "rollout.max_new_tokens",
}
"""Maps keys of other trainers that have another meaning in GRPO runs to the run-file key for that meaning."""
MEANT = {word: meant for meant, words in NAMES_OF_OTHER_PROGRAMS.items() for word in words.split()}
MEANINGS = {
    "model.attention": "the name of a kernel, such as sdpa or flash_attention_2",
    "model.loss": "auto, chunked or liger",
    "model.kernels": "auto, torch, liger or compile",
    "data.columns": "a mapping such as `{prompt: question, completion: answer}`",
    "data.layout": "left out, if the columns of the data show it",
    "data.train_on": "assistant, last_assistant or all",
    "data.long_rows": "auto, truncate, drop or split",
    "optim.name": "`AdamW`; with ZeRO-0 and without LoRA also `AdamW8bit` and `Adafactor`",
    "optim.betas": "both numbers, as in `[0.9, 0.95]`",
    "checkpoint.resume": "auto, never, or the folder of a run or checkpoint",
    "data.eval": "a file, folder or data set of rows that are not trained, or a share of data.train such as `5%`",
    "data.template": "`auto` for the tokenizer's own, `plain` for none, a name such as `chatml`, or a Jinja file",
    "train.for": "`3 epochs` or `500 steps`",
    "train.global_batch_size": "rows of one optimizer step over all ranks, from which accumulation is derived",
    "train.micro_batch_size": "rows of one forward on one rank",
    "train.precision": "auto, bf16, fp16 or fp32",
    "train.activation_checkpointing": "`full` for true, `none` for false",
    "train.only": "names or regular expressions of the parameters that are trained",
    "train.freeze": "names or regular expressions of the parameters that stay as they are",
    "optim.warmup": "`3%` or `100 steps`",
    "optim.min_lr_ratio": "a share of `lr`",
    "eval.every": "`200 steps` or `1 epoch`",
    "checkpoint.every": "`500 steps` or `1 epoch`",
    "lora": "left out to train all weights, else e.g. `{rank: 16}`",
    "lora.quantize": "nf4",
    "lora.modules_to_save": "a list of names such as `[embed_tokens, lm_head]`",
    "lora.start": "the folder of an adapter that is trained further",
    "lora.target_modules": "`all-linear`, or a list of names; left out, all linear modules but routers are adapted",
    "objective.advantage": "mean, mean_std or leave_one_out",
    "objective.aggregation": "token (DAPO), sequence (GRPO) or fixed (Dr. GRPO); objective.ratio has GSPO and CISPO",
    "objective.clip_high": "what the ratio may exceed 1 by. For CISPO set objective.ratio_cap, the largest ratio: "
    "epsilon_high of TRL and ms-swift, and 1 + that of verl",
    "rollout.engine": "own or vllm, whose server loads weights from a folder; NCCL and CUDA IPC are not supported",
    "rollout.steps_per_rollout": "the steps that the answers of one rollout are divided over; each answer is used once",
    "rollout.temperature": "1, with which answers are sampled from the distribution that is trained; nothing else "
    "is supported",
    "objective": "a name such as dpo, or a section with `name`",
    "rewards": "a list such as `[exact_match, {reward: file.py:function, weight: 0.5}]`",
    "objective.nll_weight": "a key of dpo and cpo",
    "objective.loss": "a key of dpo and cpo",
    "objective.reference": "`cache` or `adapters_off`: the reference is the model before training",
}
KEY_OF = {word: key for key, words in KEYS_OF_OTHER_PROGRAMS.items() for word in words.split()}
HAPPENS: Mapping[str, str] = {
    "always so here": "do_train finetune overwrite_cache load_from_cache_file lazy_tokenize "
    "remove_unused_columns no_remove_unused_columns save_safetensors safe_serialization plot_loss "
    "strict low_cpu_mem_usage average_tokens_across_devices include_tokens_per_second logging_first_step "
    "logging_dir ddp_timeout lora_task_type shuffle_merged_datasets padding_free use_fast_tokenizer add_version "
    "log_completions",
    "read from config.json and the tokenizer": "model_type model_class tokenizer_type tokenizer_use_mistral_common "
    "tokenizer_use_fast tokenizer_legacy processor_type cls_model_config",
    "evaluation has the batch of training": "per_device_eval_batch_size eval_batch_size eval_sample_packing",
    "it does not change the numbers of a run": "dataloader_* ddp_* overlap_* recompute_* cross_* liger_* flash_* "
    "moe_* use_distributed_optimizer masked_softmax_fusion gradient_accumulation_fusion bias_activation_fusion "
    "apply_rope_fusion use_precision_aware_optimizer lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_kernels "
    "experts_implementation experts_impl use_scattermoe use_sonicmoe cut_cross_entropy torch_compile_mode "
    "sequence_parallel use_logits_to_keep use_reentrant_gc kernel_config init_config use_v1_kernels device_map "
    "activation_offloading fused_attn_kernel gradient_checkpointing_kwargs fsdp_version gemma4_hybrid_attn_impl",
    "checkpoints hold the state of the run, and exports its weights": "save_only_model no_save_optim no_save_rng "
    "merge_lora create_checkpoint_symlink",
    "no answers are sampled, but for eval.generate": "max_new_tokens sample_backend infer_backend do_predict",
}
"""Maps a reason to keys of other trainers that a run file does not need; `ddp_*` is every key with this prefix."""
ABSENT: Mapping[str, str] = {
    "adapters are those of LoRA": "use_dora use_pissa pissa_* lora_* loraplus_* lorap_* oft_* lora_bias init_weights "
    "relora relora_* quantize_moe_experts loraplus_lr_ratio",
    "train.only and train.freeze name the parameters": "freeze_trainable_layers freeze_* freeze_trainable_modules "
    "mixture_of_depths use_llama_pro",
    "only text is trained": "freeze_vit freeze_llm freeze_aligner freeze_mm_modules freeze_vision_tower "
    "freeze_multi_modal_projector freeze_language_model image_* video_* vit_* aligner_* max_pixels",
    "optim.name has no such optimizer": "use_galore use_apollo use_badam use_adam_mini galore_* apollo_* badam_* "
    "lisa_* optim_target_modules optim_args cosine_constant_lr_ratio lr_quadratic_warmup",
    "the loss has no such term": "neftune_noise_alpha use_asft_loss asft_alpha use_dft_loss enable_dft_loss "
    "use_eaft_loss use_eaft loss_weights lmbda sft_alpha",
    "put it into the rows": "min_sample_len system default_system model_author enable_thinking "
    "add_non_thinking_prefix agent_template cached_dataset cached_val_dataset dataset_exact_deduplication",
    "weights are in bf16, fp16 or fp32, and with QLoRA in NF4": "fp8 fp8_* gptq gptq_* qat quant_method "
    "quantization_method double_quantization bnb_* model_quantization_config",
    "matrices of fp32 are multiplied in fp32": "tf32",
    "Unsloth and KTransformers are not supported": "use_unsloth use_kt kt_*",
    "set WANDB_NAME or WANDB_PROJECT for W&B; other trackers name a run by its folder": "run_name project_name "
    "wandb_entity wandb_run_id wandb_* swanlab_* trackio_*",
    "upload the export by `ds-finetune export --push-to-hub OWNER/NAME`": "push_to_hub hub_model_id hub_token "
    "push_dataset_to_hub",
    "no token and no row is left out": "moe_expert_capacity_factor dataloader_drop_last",
    "code of model folders is never run": "trust_remote_code",
    "code of other trainers is not run; log.observers names a callback": "plugins external_plugins callbacks "
    "custom_register_path",
    "a step has rows of all lengths, which data.balance divides by cost": "group_by_length",
    "tokens are those of the tokenizer's files": "special_tokens added_tokens new_special_tokens tokens eot_tokens "
    "eos_token resize_token_embeddings_to_32x",
    "`ds-finetune launch` starts the ranks": "ENV use_ray device_groups colocate_groups num_processes ray_*",
    "data parallel ranks are those that other axes leave": "dp_shard_size dp_replicate_size",
    "`deepspeed: zero2_offload` does it": "optimizer_cpu_offload optimizer_offload_fraction",
    "a vLLM server runs by itself": "vllm_* sglang_* sleep_level offload_model offload_optimizer",
    "name another output_dir: nothing is overwritten": "overwrite_output_dir",
}
"""Maps a reason to keys of other trainers for options that are not available here."""
NO_KEY = {word: reason for table in (HAPPENS, ABSENT) for reason, words in table.items() for word in words.split()}
NOT_AVAILABLE = frozenset(NO_KEY)
_VALUES: Mapping[str, Mapping[str, str]] = {
    "num_train_epochs num_epochs epochs n_epochs": {"*": "{} epochs"},
    "max_steps train_steps total_steps train_iters": {"*": "{} steps"},
    "eval_steps eval_interval save_steps save_interval checkpoint_interval": {"*": "{} steps"},
    "eval_strategy evaluation_strategy": {"epoch": "1 epoch"},
    "save_strategy": {"epoch": "1 epoch", "no": "never", "false": "never"},
    "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size_per_gpu train_batch_size": {"*": "{}"},
    "bf16 bfloat16 pure_bf16": {"true": "bf16", "full": "bf16", "auto": "auto"},
    "fp16 float16": {"true": "fp16"},
    "torch_dtype dtype mixed_precision": {
        **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
        **{"bf16": "bf16", "fp16": "fp16", "auto": "auto"},
    },
    "gradient_checkpointing recompute recompute_granularity": {
        **{"true": "full", "false": "none", "full": "full", "none": "none", "selective": "selective"},
        **dict.fromkeys(("unsloth", "offload"), "full"),
    },
    "disable_gradient_checkpointing": {"true": "none", "false": "auto"},
    "load_in_4bit qlora use_qlora": {"true": "nf4"},
    "quantization_bit quant_bits": {"4": "nf4"},
    "adapter finetuning_type train_type tuner_type use_peft use_lora peft_config.name": {
        **{"lora": "{{rank: 16}}", "true": "{{rank: 16}}", "qlora": "{{rank: 16, quantize: nf4}}"},
    },
    "optim optimizer optim_name optimizer_name optim_type optim_config.name": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adam"), "AdamW"),
        **dict.fromkeys(("adamw_apex_fused", "adamw_torch_npu_fused", "paged_adamw_32bit"), "AdamW"),
        **{"lion": "Lion", "rmsprop": "RMSprop", "sgd": "SGD", "muon": "Muon", "adagrad": "Adagrad", "lamb": "Lamb"},
    },
    "lr_scheduler_type scheduler lr_scheduler lr_schedule lr_decay_style": {
        **{"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"},
        **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
    },
    "truncation truncation_mode truncation_strategy excess_length_strategy": {
        **{"drop": "drop", "delete": "drop", "keep_start": "truncate", "right": "truncate", "truncate": "truncate"},
        "split": "split",
    },
    "chat_template template": {
        **{"chatml": "chatml", "llama3": "llama3", "alpaca": "alpaca", "mistral": "mistral", "mistral_v1": "mistral"},
        **{"tokenizer_default": "auto", "default": "auto", "empty": "plain"},
    },
    "freeze_router moe_freeze_router freeze_gate freeze_indexer": {"true": "false", "false": "true"},
    "train_on_inputs train_on_prompt": {"true": "all", "false": "assistant"},
    "completion_only_loss assistant_only_loss": {"true": "assistant", "false": "all"},
    "mask_history": {"true": "last_assistant", "false": "assistant"},
    "loss_scale": {"default": "assistant", "last_round": "last_assistant", "all": "all"},
    "use_liger_kernel use_liger liger_kernel enable_liger_kernel liger_fused_linear_cross_entropy": {"true": "liger"},
    "liger_rope liger_rms_norm liger_swiglu liger_glu_activation": {"true": "liger"},
    "torch_compile": {"true": "compile"},
    "attn_implementation attn_impl flash_attn flash_attention attention_backend": {
        **{"sdpa": "sdpa", "eager": "eager", "auto": "sdpa", "disabled": "eager", "flash": "flash_attention_2"},
        **dict.fromkeys(("flash_attention_2", "flash_attn", "fa2", "true"), "flash_attention_2"),
    },
    "lora_target lora_target_modules target_modules": {"all": "all-linear", "all-linear": "all-linear"},
    "lora_target_linear": {"true": "all-linear"},
    "use_rslora peft_use_rslora": {"true": "true"},
    "auto_resume_from_checkpoints": {"true": "auto"},
    "use_chat_template": {"true": "auto", "false": "plain"},
    "metric_for_best_model": {"loss": "true", "eval_loss": "true"},
    "fsdp fsdp_config": {},
    "vllm_server_host vllm_server_port logging_strategy": {},
    "use_wandb": {"true": "wandb"},
    "wandb_project": {"*": "wandb"},
    "report_to logger": {"none": "[]", "*": "{}"},
    "zero_stage": {stage: f"zero{stage}" for stage in "0123"},
    "use_muon": {"true": "Muon"},
    "objective.loss": {
        name: name for name in ["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sigmoid_norm"]
    },
    "objective.aggregation": {
        **{"dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "fixed"},
        **{own: own for own in ("token", "sequence", "fixed")},
    },
    "objective.advantage": {
        **{"group": "mean_std", "true": "mean_std", "none": "mean", "false": "mean"},
        **{"grpo": "mean_std", "rloo": "leave_one_out"},
    },
    "objective.no_spread": {"true": "resample", "false": "count"},
    "objective.truncated": {"true": "mask", "false": "train"},
    "objective.clip_high objective.nll_weight": {"*": "{}"},
    "use_vllm": {"true": "vllm", "false": "own"},
}
"""Maps another trainer's key, or a run-file key, to a table that translates that trainer's values to those of the run
file. The value `*` matches all values that are not listed.
"""
PER_16_ROWS, TWICE_THE_RANK = "16 rows", "twice the rank"
"""Defaults that the other trainer computes: accumulation until a step has 16 rows, and lora_alpha = 2 x rank."""
HUGGING_FACE_TRAINER: Mapping[str, object] = {
    **{"num_train_epochs": 3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "seed": 42},
    **{"learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_ratio": 0, "min_lr_rate": 0, "max_grad_norm": 1.0},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0, "packing": False, "output_dir": "trainer_output"},
}
_GRPO: dict[str, object] = {
    **{"num_generations": 8, "max_completion_length": 512, "beta": 0.0, "epsilon": 0.2, "scale_rewards": "group"},
    **{"loss_type": "dapo", **dict.fromkeys(("packing", "max_length", "truncation_mode", "truncation_strategy"))},
}
_PREFERENCES = ("dpo", "simpo", "cpo", "orpo", "kto")


@dataclass(frozen=True)
class Program:
    """Another trainer: how its files are recognised, and its defaults for keys that a file leaves out."""

    name: str
    version: str
    """Commit of the trainer's repository whose defaults are listed."""
    marks: str
    """Keys by which a file of the trainer is recognised, because no other trainer has them; separated by spaces."""
    command: str
    """Regular expression that matches the trainer's command in a shell script; group 1 is the objective."""
    defaults: Mapping[str, object]
    """Defaults of the trainer, by its own keys, that may differ from those of a run file."""
    of_objective: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Further defaults of the trainer that hold for one objective, by name of the objective."""
    of_lora: Mapping[str, object] = field(default_factory=dict)
    """Further defaults of the trainer for runs with LoRA."""
    trains_adapters: bool = False
    """Whether the trainer trains adapters by default."""
    names_objective: bool = True
    """Whether a YAML or JSON file of the trainer names its objective; otherwise only the command of a script does."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Keys whose meaning in this trainer is not available here, each with the reason."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Notes for the user, by run-file key. Shown if the key gets the trainer's default; always for `data.train`."""


PROGRAMS = (
    Program(
        "axolotl",
        "067b021c",
        "base_model sequence_len num_epochs sample_packing val_set_size adapter evals_per_epoch dataset_prepared_path",
        r"\baxolotl train\b|axolotl\.cli\.train\b",
        {
            **HUGGING_FACE_TRAINER,
            **{"num_train_epochs": 1, "per_device_train_batch_size": 1, "lr_scheduler_type": "cosine"},
            **{"warmup_ratio": 0.03, "sequence_len": 512, "excess_length_strategy": "drop", "output_dir": "model-out"},
        },
        {"grpo": {**_GRPO, "sequence_len": None, "excess_length_strategy": None}},
        notes={"optim.warmup": "at most 100 steps there"},
    ),
    Program(
        "LLaMA-Factory",
        "ff6d4d12e",
        "stage finetuning_type cutoff_len template lora_target dataset_dir pref_beta model_class train_dataset",
        r"\b(?:llamafactory-cli|lmf) train\b|\bsrc/train\.py\b",
        {**HUGGING_FACE_TRAINER, "cutoff_len": 2048, "output_dir": "saves"},
        {"pretrain": {"packing": True}, **{name: {"pref_beta": 0.1} for name in _PREFERENCES}},
        {"lora_rank": 8, "lora_alpha": TWICE_THE_RANK, "lora_target": "all"},
        trains_adapters=True,
    ),
    Program(
        "ms-swift",
        "3602360a5",
        "tuner_type train_type rlhf_type split_dataset_ratio torch_dtype val_dataset loss_scale model_author",
        r"\bswift (sft|pt|rlhf)\b|\bswift/cli/(?:sft|pt|rlhf)\.py\b",
        {
            **HUGGING_FACE_TRAINER,
            **{"per_device_train_batch_size": 1, "learning_rate": 1e-5, "lr_scheduler_type": "cosine"},
            **{"weight_decay": 0.1, "adam_beta2": 0.95, "truncation_strategy": "delete", "output_dir": "output"},
            "gradient_accumulation_steps": PER_16_ROWS,
        },
        {
            "simpo": {"simpo_gamma": 1.0},
            "grpo": _GRPO | {"loss_type": "grpo", "beta": 0.04, "temperature": 0.9, "gradient_accumulation_steps": 1},
        },
        {"learning_rate": 1e-4, "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"},
        trains_adapters=True,
        names_objective=False,
        absent={"model_name": "put it into the rows", "columns": "data.columns names the columns of the data"},
        notes={"data.train": "a name of ModelScope, which Hugging Face may not have"},
    ),
    Program(
        "TRL",
        "f2cd57710",
        "model_name_or_path dataset_name use_peft lora_r dataset_config dataset_train_split",
        r"\btrl (sft|dpo|grpo|kto|reward|rloo)\b|\b(?:trl|examples)/scripts/(?:\w+/)*(\w+)\.py\b",
        {**HUGGING_FACE_TRAINER, "learning_rate": 2e-5, "max_length": 1024, "truncation_mode": "keep_start"},
        {
            "sft": {"assistant_only_loss": False},
            **{name: {"learning_rate": 1e-6} for name in _PREFERENCES},
            "reward": {"learning_rate": 1e-4},
            "grpo": {**_GRPO, "learning_rate": 1e-6},
            "rloo": {**_GRPO, "learning_rate": 1e-6, "num_generations": 2, "beta": 0.05, "scale_rewards": None},
        },
        {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": "q_proj,v_proj"},
        names_objective=False,
        notes={
            "data.train_on": "of rows with prompt and completion TRL trains the completion: then write `assistant`",
            "lora.target_modules": "peft's default for Llama, Qwen and most others",
        },
    ),
)
"""Trainers whose files `ds-finetune init --from` reads."""
_VALUES_OF = {word: values for words, values in _VALUES.items() for word in words.split()}


def value_of(word: str, value: object, key: str) -> str | None:
    """The value of run-file key `key` for another trainer's `word: value`, as YAML; None if there is no conversion."""
    word, text = word.lower(), str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, list | Mapping) or value is None:
        return None
    if key == "objective":
        return MEANT.get(text.lower(), text.lower())
    if key in ("optim.warmup", "data.eval") and re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text):
        larger = f"{float(text):g} steps" if key == "optim.warmup" else None
        return f"{float(text) * 100:g}%" if 0 < float(text) < 1 else larger
    values = _VALUES_OF.get(word, _VALUES_OF.get(key))
    if values is not None:
        form = values.get(text.lower(), values.get("*"))
        if form is not None and " " in form and values.get("*") == form and not re.fullmatch(r"\d+\.?\d*", text):
            return None
        return None if form is None else form.format(text)
    is_switch = text in ("true", "false") and key not in ("data.packing", "eval.keep_best")
    return None if word in KEY_OF and (key in MEANINGS or is_switch) else text
