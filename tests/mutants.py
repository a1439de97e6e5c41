"""Deliberate faults, each of which a named part of the default suite must find: `bash scripts/mutants.sh [NAME ...]`.

A fault is one piece of source text replaced in a copy of the tree. A text that is no longer there once is an error,
so that the list follows the source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `text` becomes `fault`, which a test of `tests` finds."""

    name: str
    file: str
    text: str
    fault: str
    tests: str


PARITY, PARALLEL, ROWS = "tests/parity/test_parity.py", "tests/parity/test_parallel.py", "tests/data/test_rows.py"
OBJECTIVES, SCORES = "tests/parity/test_objectives.py", "tests/parity/test_scores.py"
ROUTERS = "tests/parity/test_routers.py"
PREFERENCES, LABELS = "tests/data/test_preferences.py", "tests/data/test_labelled_texts.py"
CLASSIFIERS, ONNX_CLASSIFIERS = "tests/export/test_classifiers.py", "tests/export/onnx/test_classifiers.py"
SINKS, MXFP4 = "tests/model/test_sinks.py", "tests/model/quantised/test_mxfp4.py"
WHOLE_RUNS = "tests/trainer/test_objectives.py"
DISTILLATION, SOFT_TARGETS = "tests/parity/test_distillation.py", "tests/model/loss/test_soft_targets.py"
ONNX = "tests/export/onnx/test_onnx.py"
ENCODER, LENGTHS = "tests/model/build/test_encoder.py", "tests/data/test_batch_lengths.py"
INDEXER = "tests/model/attention/test_indexed_attention.py"
MTP, TRAINED_INDEXER = "tests/parity/test_mtp.py", "tests/parity/test_indexer.py"
LOADS = "tests/observers/test_expert_loads.py tests/observers/test_routers.py"
FP4, CONVERSIONS = "tests/export/test_fp4.py", "tests/export/test_from_checkpoint.py"
CONTEXT, OFFLOAD = "tests/model/test_context.py", "tests/model/memory/test_activation_offload.py"
TILES, TRACE = "tests/model/memory/test_tiled_mlp.py", "tests/trainer/tracing/test_activations.py"
COMMUNICATION, BALANCE = "tests/engine/groups/test_communication.py", "tests/data/test_balance.py"
REDUCTION = "tests/parity/test_reduction.py"
INEXACT, LORA = "tests/parity/test_inexact.py", "tests/parity/test_lora.py"
HEAD = "tests/model/loss/test_head_chunks.py"
GRPO, ANSWERS = "tests/objectives/test_grpo.py", "tests/parity/test_grpo.py"
LATE = "tests/objectives/rewards/test_pool.py -k other_rewards"
RESUMED = "tests/trainer/rollouts/test_runs.py -k bit_by_bit"
COMPRESSED = "tests/model/attention/test_compressed_attention.py"
FUSED, GGUF = "tests/model/fused/test_operations.py", "tests/export/gguf/test_gguf.py"
GGUF_SETTINGS = "tests/export/gguf/test_settings.py"
MUTANTS = (
    Mutant(
        "a window of DeepSeek-V4 over the border of documents",
        "model/attention/compressed_layout.py",
        "first = np.maximum(begins, np.arange(len(begins)) - window + 1)",
        "first = np.maximum(0, np.arange(len(begins)) - window + 1)",
        COMPRESSED,
    ),
    Mutant(
        "compressed entries that are seen a token late",
        "model/attention/compressed_layout.py",
        "shards.own(first + (positions + 1) // rate)",
        "shards.own(first + positions // rate)",
        COMPRESSED,
    ),
    Mutant(
        "compressed entries of another document's window",
        "model/attention/compressed_attention.py",
        "is_absent = layout.is_first[:, None] &",
        "is_absent = (layout.is_first[:, None] < 0) &",
        COMPRESSED,
    ),
    Mutant(
        "compressed keys without the gradient of values",
        "model/attention/compressed_attention.py",
        "in ((d_logits, query[at]), (weights.to(query.dtype), grad[at])):",
        "in ((d_logits, query[at]),):",
        COMPRESSED,
    ),
    Mutant(
        "all entries in backward where the indexer chose some",
        "model/attention/compressed_attention.py",
        "for block, chosen in zip(blocks, chosen_of_blocks, strict=True):",
        "for block, chosen in zip(blocks, [None] * len(chosen_of_blocks), strict=True):",
        COMPRESSED,
    ),
    Mutant(
        "a cached window without an end",
        "model/attention/compressed_attention.py",
        "seen = (distance >= 0) & (distance < self.sliding_window)",
        "seen = distance >= 0",
        COMPRESSED,
    ),
    Mutant(
        "a fused norm that rounds after its weight",
        "model/fused/formulas.py",
        "if rounds_last else weight * normed.to(rows.dtype), scale",
        "if rounds_last else (weight * normed).to(rows.dtype), scale",
        FUSED,
    ),
    Mutant(
        "overwritten gates that a second backward may read",
        "model/fused/operations.py",
        "        increment_version(parts)\n",
        "",
        FUSED,
    ),
    Mutant(
        "experts of a GGUF in the order of letters",
        "export/gguf/gguf_tensors.py",
        "sorted(parts)]",
        "sorted(parts, key=lambda part: part[1])]",
        GGUF,
    ),
    Mutant(
        "heads of a GGUF that are not interleaved",
        "export/gguf/gguf_tensors.py",
        "return heads.view(groups, 2, rows // 2, columns).transpose(1, 2)",
        "return heads.view(groups, rows // 2, 2, columns).transpose(1, 2)",
        GGUF,
    ),
    Mutant(
        "expert weights of DeepSeek-V2 normed by llama.cpp",
        "export/gguf/settings.py",
        "is_sigmoid and config.norm_topk_prob",
        "config.norm_topk_prob",
        GGUF_SETTINGS,
    ),
    Mutant(
        "YaRN's mscale without llama.cpp's tenth",
        "export/gguf/settings.py",
        '0.1 * rope["mscale_all_dim"]',
        'rope["mscale_all_dim"]',
        GGUF_SETTINGS,
    ),
    Mutant(
        "an all-reduce counted as one pass over the ring",
        "engine/groups/communication.py",
        'times = 2 if kind == "all_reduce" else 1',
        "times = 1",
        COMMUNICATION,
    ),
    Mutant(
        "gradients of exchanged rows that are not sent back",
        "model/parallel/expert.py",
        "return ctx.exchange.wait(), None",
        "return ctx.exchange.wait() * 0, None",
        COMMUNICATION + " " + PARALLEL,
    ),
    Mutant(
        "shared experts without a gradient of their input",
        "model/parallel/expert.py",
        "self._hidden, self._has_grad = args[0], torch.is_grad_enabled()",
        "self._hidden, self._has_grad = args[0].detach(), torch.is_grad_enabled()",
        COMMUNICATION,
    ),
    Mutant(
        "a row on two ranks",
        "data/batches.py",
        "parts[most][given], parts[least][received] = parts[least][received], parts[most][given]",
        "parts[most][given] = parts[least][received]",
        BALANCE,
    ),
    Mutant(
        "gradients reduced in fp32 and accumulated in bf16",
        "plan/deepspeed_config.py",
        'merged | {"data_types": data_types | {_ACCUMULATION: dtype}} if dtype == "fp32" else merged',
        "merged",
        REDUCTION,
    ),
    Mutant(
        "gradients of a head's weight from the last chunk of tokens alone",
        "model/loss/head_chunks.py",
        "torch.addmm(total, left, right, out=total)",
        "torch.mm(left, right, out=total)",
        HEAD,
    ),
    Mutant(
        "gradients of logits of a block left in its scratch memory",
        "model/loss/head_chunks.py",
        "products.copy_(d_logits)",
        "products.copy_(products)",
        HEAD,
    ),
    Mutant(
        "second copies of weights from before they were loaded",
        "engine/patches/deepspeed_engine.py",
        "        forget_second_copies(trained)\n",
        "        pass\n",
        INEXACT,
    ),
    Mutant(
        "matrices that ZenFlow scrambles at its start",
        "engine/patches/deepspeed_init.py",
        "                param.data = param.data.view(columns, rows).t()\n",
        "                pass\n",
        INEXACT,
    ),
    Mutant(
        "weights for answers that are whole on one rank alone",
        "engine/patches/deepspeed_gathering.py",
        "enabled=bool(partitioned)",
        "enabled=False",
        INEXACT,
    ),
    Mutant(
        "gradient of an adapter's whole factor not summed over tensor parallel ranks",
        "model/adapters/lora.py",
        "if self.tp_group is not None and weight_shard.dim is not None and shard.dim is None:",
        "if self.tp_group is not None and weight_shard.dim is not None and shard.dim is not None:",
        LORA,
    ),
    Mutant(
        "whole factor of an adapter counted on every tensor parallel rank",
        "model/adapters/lora.py",
        "param.model_parallel = shard.dim is not None",
        "param.model_parallel = True",
        LORA,
    ),
    Mutant(
        "adapters of the first experts on every rank",
        "model/adapters/lora.py",
        "shard.slice(values).view(local)",
        "values.flatten()[: shard.slice(values).numel()].view(local)",
        LORA,
    ),
    Mutant(
        "halves of gate and up not kept apart in a shard of B",
        "model/parallel/sharding.py",
        'has_halves = is_gate_up and side != "A"',
        "has_halves = is_gate_up and not side",
        LORA,
    ),
    Mutant(
        "positions of a longer context without the factor",
        "plan/context.py",
        'extended = {**rope, "rope_type": "yarn", "factor": _new_factor(rope, original, context)',
        'extended = {**rope, "rope_type": "yarn", "factor": _factor(rope)',
        CONTEXT,
    ),
    Mutant(
        "latent attention without the scales of DeepSeek-V3",
        "plan/context.py",
        'added = _LATENT_SCALES if is_latent and _rope_type(rope) == "default" else {}',
        "added = {}",
        CONTEXT,
    ),
    Mutant(
        "weights that stay on the device sent to the host too",
        "model/activation_memory.py",
        "is_input = _identity(saved) == host_copy",
        "is_input = saved.dim() > 0",
        OFFLOAD,
    ),
    Mutant(
        "gradients of the last tile alone",
        "model/activation_memory.py",
        "                total += grad\n",
        "                total.copy_(grad)\n",
        TILES,
    ),
    Mutant(
        "gradients of tiles summed in the precision of the weights",
        "model/activation_memory.py",
        "torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)",
        "torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)",
        TILES,
    ),
    Mutant(
        "weights that are fetched ahead bounded by the bucket",
        "plan/estimate/zero_rows.py",
        "rules.max_live if rules.prefetch_bucket else 0",
        "rules.prefetch_bucket",
        "tests/plan/estimate/test_gathered_weights.py",
    ),
    Mutant(
        "inputs of layers that are sent to the host kept on the device too",
        "model/activation_memory.py",
        "is_input = _identity(saved) == host_copy",
        "is_input = _identity(saved) == host_copy and hidden is not None",
        TRACE,
    ),
    Mutant(
        "scales of the first rows for all of an FP4 matrix",
        "model/quantised/mxfp4.py",
        "dequantise(blocks, self.scales.rows(first, last).view(torch.uint8))",
        "dequantise(blocks, self.scales.rows(0, last - first).view(torch.uint8))",
        FP4,
    ),
    Mutant(
        "scale of a changed block rounded down to a power of two",
        "model/quantised/fp8.py",
        "exponent - (mantissa == _HALF).to(exponent.dtype)",
        "exponent - 1",
        CONVERSIONS,
    ),
    Mutant(
        "router of an FP8 folder not listed",
        "export/safetensors_folder.py",
        "if tensor.key.endswith(_WEIGHT) and len(tensor.shape)",
        "if not tensor.key.endswith('.gate.weight') and len(tensor.shape)",
        CONVERSIONS,
    ),
    Mutant(
        "tokens chosen over the whole row",
        "model/attention/indexed_attention.py",
        "parts = [part[row].split(lengths) if not is_last else (part[row],) for part in scored]",
        "parts = [part[row, : sum(lengths)].split(lengths[::-1]) for part in scored]",
        INDEXER,
    ),
    Mutant(
        "rotary embedding of the other indexer",
        "model/attention/indexed_attention.py",
        '"pairs" if attention.rotates_pairs else "halves"',
        '"halves"',
        INDEXER,
    ),
    Mutant(
        "choice of the layer before not taken",
        "model/attention/indexed_attention.py",
        "choice = prev_topk_indices",
        "choice: Choice | None = None",
        INDEXER,
    ),
    Mutant(
        "divergence of padding counted",
        "features/indexer.py",
        "each.masked_fill(~rows.real.is_real, 0.0).sum()",
        "each.sum()",
        f"{TRAINED_INDEXER} -k padded",
    ),
    Mutant(
        "gradient of the indexer's loss in the model",
        "model/attention/indexed_attention.py",
        "_inputs_of_scores(self, hidden_states.detach(), low_rank.detach(), position_embeddings)",
        "_inputs_of_scores(self, hidden_states, low_rank, position_embeddings)",
        f"{TRAINED_INDEXER} -k dp-z0",
    ),
    Mutant(
        "indexer follows the heads of one rank",
        "model/attention/indexed_attention.py",
        "for group in target.groups:",
        "for group in ():",
        f"{TRAINED_INDEXER} -k tp2",
    ),
    Mutant(
        "scored tokens without the gradients of other ranks",
        "model/parallel/sequence.py",
        "ctx.sp_group.shard(ctx.sp_group.all_reduce(grad))",
        "ctx.sp_group.shard(grad)",
        f"{TRAINED_INDEXER} -k sp2",
    ),
    Mutant(
        "losses of layers that share a choice added",
        "features/indexer.py",
        "return {layer: 1 / served[indexer] for",
        "return {layer: 1.0 for",
        f"{TRAINED_INDEXER} -k dp-z3",
    ),
    Mutant(
        "indexers warmed up on chosen tokens",
        "model/attention/indexed_attention.py",
        "None if is_warmup else _choose",
        "_choose",
        f"{TRAINED_INDEXER} -k dense_warmup",
    ),
    Mutant(
        "indexers count in the norm",
        "features/indexer.py",
        "return bool(self.own_loss) and self.model.family.is_of_indexer(name)",
        "return False",
        f"{TRAINED_INDEXER} -k dp-z0",
    ),
    Mutant(
        "indexer trained",
        "engine/rank_model.py",
        "if name in plan.frozen or model.is_untrained(name):",
        "if name in plan.frozen:",
        PARALLEL,
    ),
    Mutant(
        "sinks of another rank's heads",
        "model/attention/by_document.py",
        "s_aux.chunk(sp_group.size)[sp_group.group_rank]",
        "s_aux.chunk(sp_group.size)[0]",
        PARALLEL,
    ),
    Mutant(
        "sinks masked by the window",
        "model/attention/by_document.py",
        "functional.pad(mask, (1, 0), value=True)",
        "functional.pad(mask, (1, 0), value=False)",
        SINKS,
    ),
    Mutant(
        "a block of queries without the first key of its window",
        "model/attention/by_document.py",
        "earlier + begin - self.window + 1",
        "earlier + begin - self.window + 2",
        SINKS,
    ),
    Mutant(
        "output bias of experts added on each tensor parallel rank",
        "model/parallel/tensor.py",
        "copy_to_tensor_parallel_region(bias, self.tp_group) / self.tp_group.size",
        "copy_to_tensor_parallel_region(bias, self.tp_group)",
        PARALLEL,
    ),
    Mutant(
        "four-bit numbers of a byte swapped",
        "model/quantised/mxfp4.py",
        "[_E2M1.repeat(16), _E2M1.repeat_interleave(16)]",
        "[_E2M1.repeat_interleave(16), _E2M1.repeat(16)]",
        MXFP4,
    ),
    Mutant(
        "labels of multi-token prediction from the next document",
        "data/batches.py",
        "labels.roll(-1, dims=1).masked_fill(is_last, IGNORE_INDEX)",
        "labels.roll(-1, dims=1)",
        "tests/data/test_look_ahead.py",
    ),
    Mutant(
        "multi-token prediction from hidden states before the final norm",
        "features/mtp.py",
        "hidden.detach() if self._detach else hidden)",
        "hidden.detach() / self._lm.base_model.norm.weight)",
        f"{MTP} -k dp-z0",
    ),
    Mutant(
        "hidden states before embeddings in multi-token prediction",
        "model/mtp.py",
        "torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1)",
        "torch.cat([layer.hnorm(hidden), layer.enorm(embedded)], dim=-1)",
        f"{MTP} -k dp-z0",
    ),
    Mutant(
        "the layer of multi-token prediction counts in the norm",
        "engine/gradients.py",
        "if loss_of(param) == loss]",
        "]",
        f"{MTP} -k dp-z0",
    ),
    Mutant(
        "the layer of multi-token prediction clipped by the norm of the others",
        "engine/patches/deepspeed_clipping.py",
        "total_norm if loss is None else self._own[loss].to(total_norm)",
        "total_norm",
        f"{MTP} -k ep2-z3",
    ),
    Mutant(
        "the norm of the layer of multi-token prediction without the other tensor parallel shards",
        "engine/patches/deepspeed_clipping.py",
        '"model_parallel_group", self._shards)',
        '"model_parallel_group", None)',
        f"{MTP} -k tp2",
    ),
    Mutant(
        "a bad gradient of the layer of multi-token prediction applied",
        "engine/patches/deepspeed_clipping.py",
        "if self._engine.has_bad_gradient or not all(map(math.isfinite, (value, *values))):",
        "if False:",
        "tests/engine/test_steps.py",
    ),
    Mutant(
        "a prediction layer with the indexer of the last layer",
        "model/mtp.py",
        "[*settings[k], *[kind or settings[k][-1]] * number]",
        "[*settings[k], *[settings[k][-1]] * number]",
        f"{MTP} -k glm_moe_dsa_sparse",
    ),
    Mutant(
        "the embedding's gradient of multi-token prediction stays on the last stage",
        "features/mtp.py",
        "self.trains_embedding = not detach",
        "self.trains_embedding = False",
        f"{MTP} -k pp2",
    ),
    Mutant(
        "multi-token prediction from an old embedding on the last stage",
        "engine/engine.py",
        "            stage.broadcast_embedding(module.lm.get_input_embeddings().weight)",
        "            pass",
        f"{MTP} -k pp2",
    ),
    Mutant(
        "separator by side",
        "data/units.py",
        "    if not (isinstance(chosen, Completion) and isinstance(rejected, Completion)):",
        "    if chosen:",
        PREFERENCES,
    ),
    Mutant(
        "half a row for each side of a pair",
        "data/units.py",
        "max(limit.max_seq_len // 2, limit.max_seq_len - shorter)",
        "limit.max_seq_len // 2",
        PREFERENCES,
    ),
    Mutant(
        "earlier answers of pairs supervised",
        "data/units.py",
        'replace(self.settings, train_on="last_assistant")',
        "self.settings",
        PREFERENCES,
    ),
    Mutant(
        "a divergence without the ratio",
        "objectives/grpo.py",
        "self._section.kl_weight * log_ratio.exp() * divergence",
        "self._section.kl_weight * divergence",
        GRPO,
    ),
    Mutant(
        "groups without spread found by their standard deviation",
        "objectives/grpo.py",
        "for number in np.flatnonzero(has_spread(rewards)):",
        "for number in np.flatnonzero(rewards.std(axis=1) > 0):",
        GRPO,
    ),
    Mutant(
        "a reward that is late is asked again",
        "objectives/rewards/pool.py",
        'return {**late_part(settings, "and its process was killed"), "seconds": settings["timeout"]}',
        "continue",
        LATE,
    ),
    Mutant(
        "a rollout ahead that is sampled again after a resume",
        "trainer/rollouts/source.py",
        "self.latest, self._ahead = self._files.read(**self._resumed)",
        "self.latest, _ = self._files.read(**self._resumed)",
        RESUMED,
    ),
    Mutant(
        "prompts of the first epoch after a resume in a later one",
        "trainer/rollouts/source.py",
        "cursor = position.epoch * self._per_epoch + position.index",
        "cursor = position.index",
        RESUMED,
    ),
    Mutant(
        "a reference with its adapters",
        "trainer/rollouts/source.py",
        "self._engine.token_log_probs(batches, of_reference=True)",
        "self._engine.token_log_probs(batches)",
        "tests/trainer/rollouts/test_runs.py -k LoRA",
    ),
    Mutant(
        "the planned number of forwards for sampled answers",
        "engine/engine.py",
        "varies = not once and isinstance(self.objective, AnswerObjective)",
        "varies = False",
        ANSWERS,
    ),
    Mutant(
        "the tokens of one rank for the ratio of an answer",
        "model/loss/log_probs.py",
        "        if self.sp_group is not None:\n            sums = self.sp_group.all_reduce(sums)\n",
        "",
        ANSWERS,
    ),
    Mutant(
        "ids that are never sampled in the loss",
        "model/loss/log_probs.py",
        "logits if self._forbidden is None else logits.masked_fill_(self._forbidden, -torch.inf)",
        "logits",
        "tests/model/loss/test_answer_loss.py",
    ),
    Mutant("earlier turns not compared", "data/preferences.py", "    if ours == theirs:", "    if True:", PREFERENCES),
    Mutant(
        "classes in the order of the rows",
        "data/classes.py",
        "tuple(read.order) or tuple(sorted(read.names))",
        "tuple(found.order) or tuple(found.names)",
        LABELS,
    ),
    Mutant(
        "rows that fill a batch counted as documents",
        "data/prepared_rows.py",
        "return 0 if self.is_filler else len(document_starts(self.position_ids))",
        "return len(document_starts(self.position_ids))",
        LENGTHS,
    ),
    Mutant(
        "padding counted as text",
        "data/batches.py",
        "lengths=torch.tensor([row.num_tokens for row in rows])",
        "lengths=torch.tensor([length for _ in rows])",
        LENGTHS,
    ),
    Mutant(
        "steps done again kept in the table of experts",
        "trainer/run_dir.py",
        "RECORDS = (METRICS, RANK_TIMES, SAMPLES, ROLLOUTS, EXPERTS)",
        "RECORDS = (METRICS, RANK_TIMES, SAMPLES, ROLLOUTS)",
        "tests/trainer/test_run_dir.py",
    ),
    Mutant(
        "skipped steps move the followed biases",
        "observers/routers.py",
        '            if not record.values["train/skipped"]:\n                above =',
        "            if True:\n                above =",
        LOADS,
    ),
    Mutant(
        "biases followed by a rate of 1",
        "observers/routers.py",
        "self.bias_update * above",
        "above",
        LOADS,
    ),
    Mutant(
        "drafts compared with the choice before them",
        "evaluation/model_scores.py",
        "chosen[:, 1:]",
        "chosen[:, :-1]",
        "tests/evaluation/test_drafts.py",
    ),
    Mutant(
        "log-probabilities of pairs without their reference",
        "evaluation/objective_scores.py",
        "-reference.loss",
        "0 * reference.loss",
        "tests/evaluation/test_preference_scores.py",
    ),
    Mutant("no end token after a cut text", "data/units.py", "[*ids[: limit - 1], eos]", "ids[:limit]", LABELS),
    Mutant(
        "scale of the loss",
        "engine/loss_normalisation.py",
        "loss * float(zero_ranks)",
        "loss * 1.0",
        PARITY,
    ),
    Mutant(
        "local count of tokens",
        "engine/engine.py",
        "counts = global_counts(batch, mesh, self._device)",
        "counts = unit_counts(batch.counts)",
        PARITY,
    ),
    Mutant(
        "first token of a document counted as a label",
        "data/prepared_rows.py",
        "np.count_nonzero(mask[start + 1 : end])",
        "np.count_nonzero(mask[start:end])",
        "tests/data/test_preferences.py",
    ),
    Mutant(
        "local count of pairs",
        "engine/engine.py",
        "counts = global_counts(batch, mesh, self._device)",
        "counts = global_counts(batch, mesh, self._device)\n"
        '        counts[UNITS.index("pairs")] = batch.counts["pairs"]',
        OBJECTIVES,
    ),
    Mutant(
        "gradient of the divergence without temperature",
        "model/loss/soft_targets.py",
        "gradient *= (1 - mix.label_weight) * mix.temperature",
        "gradient *= 1 - mix.label_weight",
        SOFT_TARGETS,
    ),
    Mutant(
        "probability of tokens that are not stored is free",
        "model/loss/soft_targets.py",
        "return divergence, gradient.sub_(others.add_(teacher_log_probs[:, -1:] - bucket).exp_())",
        "return divergence, gradient",
        SOFT_TARGETS,
    ),
    Mutant(
        "teacher sees the other documents of a row",
        "features/teacher.py",
        "hidden = teacher.hidden(rows.input_ids, rows.position_ids, rows.documents, supervised)",
        "hidden = teacher.hidden(rows.input_ids, rows.position_ids, None, supervised)",
        DISTILLATION,
    ),
    Mutant(
        "norm of a teacher's shard of the vocabulary",
        "model/loss/soft_targets.py",
        "teacher_logits -= shard.log_norm(teacher_logits)",
        "teacher_logits -= torch.logsumexp(teacher_logits, dim=-1, keepdim=True)",
        DISTILLATION,
    ),
    Mutant(
        "scores of whole rows on sequence parallel ranks",
        "features/teacher.py",
        "(part if self.sp_group is None else self.sp_group.shard(part)).flatten(0, 1)",
        "part.flatten(0, 1)",
        DISTILLATION,
    ),
    Mutant(
        "documents scored on every sequence parallel rank's first tokens",
        "model/loss/score_head.py",
        "ends % (tokens * ranks) - tokens * rank",
        "ends % tokens",
        SCORES,
    ),
    Mutant(
        "scores counted by every sequence parallel rank",
        "model/loss/score_head.py",
        "self.groups.sp.group_rank == 0",
        "self.groups.sp.size > 0",
        SCORES,
    ),
    Mutant(
        "gradient of scores summed again over sequence parallel ranks",
        "model/parallel/rank_group.py",
        "        return grad, None\n",
        "        return grad * 2, None\n",
        "tests/parity/test_scores.py",
    ),
    Mutant(
        "score head frozen beside adapters",
        "features/adapters.py",
        "param.requires_grad_(True)",
        "param.requires_grad_(False)",
        SCORES,
    ),
    Mutant(
        "margin of pairs ignored",
        "objectives/scores.py",
        "chosen - rejected - targets.view(-1, 2)[:, 0]",
        "chosen - rejected",
        SCORES,
    ),
    Mutant(
        "no all-reduce of documents in sequence parallelism",
        "model/loss/log_probs.py",
        "sums = self.sp_group.all_reduce(sums)",
        "pass",
        OBJECTIVES,
    ),
    Mutant(
        "documents counted by every sequence parallel rank",
        "model/loss/log_probs.py",
        "sp_group.group_rank == 0",
        "sp_group.size",
        OBJECTIVES,
    ),
    Mutant(
        "reference ignored",
        "model/loss/log_probs.py",
        "self.examples.targets, self.examples.reference)",
        "self.examples.targets, torch.zeros_like(sums[0]))",
        OBJECTIVES,
    ),
    Mutant(
        "adapters on in the reference",
        "model/adapters/lora.py",
        'replaced(module, "lora_scale", 0.0)',
        'replaced(module, "lora_scale", module.lora_scale)',
        OBJECTIVES,
    ),
    Mutant(
        "second pass forwards",
        "model/loss/log_probs.py",
        "for start in reversed(self._starts):",
        "for start in self._starts:",
        "tests/model/loss/test_log_probs.py",
    ),
    Mutant(
        "clipping left out",
        "engine/gradients.py",
        "if max_norm and",
        "if False and",
        f"{PARITY} {PARALLEL}",
    ),
    Mutant(
        "NaN applied",
        "engine/engine.py",
        "is_skipped = self.has_bad_gradient or not all(map(math.isfinite, (norm, *own_norms)))",
        "is_skipped = False",
        "tests/engine/test_steps.py",
    ),
    Mutant(
        "labels not shifted",
        "data/prepared_rows.py",
        "labels[:-1] = np.where(mask[1:], ids[1:], IGNORE_INDEX)",
        "labels[:] = np.where(mask, ids, IGNORE_INDEX)",
        "tests/data",
    ),
    Mutant(
        "prompt supervised",
        "data/prepared_rows.py",
        "np.where(mask[1:], ids[1:], IGNORE_INDEX)",
        "np.where(mask[1:] | True, ids[1:], IGNORE_INDEX)",
        "tests/data",
    ),
    Mutant(
        "documents see each other",
        "data/prepared_rows.py",
        "np.arange(len(own)), next_token_labels",
        "np.arange(len(own)) + 1, next_token_labels",
        f"tests/data {PARITY}",
    ),
    Mutant(
        "last row lost",
        "data/batches.py",
        "if index < len(row_ids) else None",
        "if index < len(every) - 1 else None",
        ROWS,
    ),
    Mutant(
        "z0 of one rank",
        "data/batches.py",
        "_baseline(mismatched, row_ids, plan)",
        "_baseline(mismatched, [i for i in ids if i is not None], replace(plan, rank=0, dp=1))",
        "tests/data/test_mismatched.py",
    ),
    Mutant("every epoch in one order", "data/batches.py", "default_rng([seed, epoch])", "default_rng([seed])", ROWS),
    Mutant(
        "rank shares overlap",
        "data/batches.py",
        "range(plan.rank * rows_of_rank, (plan.rank + 1) * rows_of_rank)",
        "range(0, rows_of_rank)",
        f"{ROWS} {PARITY}",
    ),
    Mutant(
        "window one too wide",
        "model/attention/by_document.py",
        "(distance < (self.window or keys))",
        "(distance <= (self.window or keys))",
        "tests/model/attention/test_attention.py",
    ),
    Mutant(
        "window of packed documents one too wide",
        "model/attention/kernels.py",
        "else window - 1",
        "else window",
        "tests/model/attention/test_packed_attention.py",
    ),
    Mutant(
        "values of packed documents not cut again",
        "model/attention/kernels.py",
        "out[:, :, :value_width]",
        "out",
        "tests/model/attention/test_packed_attention.py",
    ),
    Mutant(
        "sinks dropped by the kernel of packed documents",
        "model/attention/by_document.py",
        "packed is not None and s_aux is None and",
        "packed is not None and",
        "tests/model/attention/test_packed_attention.py",
    ),
    Mutant(
        "causal attention of encoders",
        "model/attention/by_document.py",
        'getattr(module, "is_causal", True)',
        "True",
        ENCODER,
    ),
    Mutant(
        "padding behind a text seen by it",
        "data/batches.py",
        " or plan.separates_padding",
        "",
        ROWS,
    ),
    Mutant(
        "positions of RoBERTa from zero",
        "model/build/encoder.py",
        "hf_config.pad_token_id + 1 if",
        "0 if",
        ENCODER,
    ),
    Mutant(
        "no types of tokens",
        "model/build/encoder.py",
        'inputs["token_type_ids"] = token_types',
        "pass",
        ENCODER,
    ),
    Mutant(
        "no all-reduce of gradients of a tensor parallel region",
        "model/parallel/tensor.py",
        "return ctx.tp_group.all_reduce(grad), None",
        "return grad, None",
        PARALLEL,
    ),
    Mutant(
        "last dimensions of a head rotated",
        "export/onnx/layers.py",
        'names=2, axis=-1)\n        return graph.op("Concat", self.rotate(rotated), rest, axis=-1)',
        'names=2, axis=-1)\n        return graph.op("Concat", rotated, self.rotate(rest), axis=-1)',
        ONNX,
    ),
    Mutant(
        "bias of a row parallel layer added on every rank",
        "model/parallel/tensor.py",
        "return functional.linear(shard, self.weight)",
        "return functional.linear(shard, self.weight, self.bias)",
        PARALLEL,
    ),
    Mutant(
        "rotary key without its sum",
        "model/parallel/tensor.py",
        "copy_to_tensor_parallel_region(latents[..., rank:], tp_group)",
        "latents[..., rank:]",
        PARALLEL,
    ),
    Mutant(
        "norm over this rank's heads alone",
        "model/parallel/tensor.py",
        "sum_over_ranks(wide.square().sum(-1, keepdim=True), self.tp_group)",
        "wide.square().sum(-1, keepdim=True) * self.tp_group.size",
        PARALLEL,
    ),
    Mutant(
        "norm over heads without the gradients of other ranks",
        "model/parallel/tensor.py",
        "copy_to_tensor_parallel_region(squares, self.tp_group) /",
        "squares /",
        PARALLEL,
    ),
    Mutant(
        "gate and up of Mixtral exchanged",
        "families/family.py",
        'gate="w1", up="w3"',
        'gate="w3", up="w1"',
        "tests/model/weights/test_weights.py",
    ),
    Mutant(
        "weights of Mixtral's experts not normalised in ONNX",
        "export/onnx/experts.py",
        'getattr(layers.module(name), "norm_topk_prob", True)',
        'getattr(layers.module(name), "norm_topk_prob", False)',
        "tests/export/onnx/test_parts.py",
    ),
    Mutant(
        "no all-to-all of gradients in sequence parallelism",
        "model/parallel/sequence.py",
        "return ctx.sp_group.all_to_all(grad), None",
        "return grad, None",
        PARALLEL,
    ),
    Mutant(
        "router without gradient",
        "model/parallel/expert.py",
        "chosen.weights_of(top_k_weights)",
        "chosen.weights_of(top_k_weights.detach())",
        PARALLEL,
    ),
    Mutant(
        "kept outputs of a layer in another order",
        "model/kept_outputs.py",
        "self._outputs.popleft()",
        "self._outputs.pop()",
        "tests/model/memory/test_kept_outputs.py",
    ),
    Mutant(
        "gradients of tokens from the rows of others",
        "model/experts.py",
        "_sums(grad.index_select(0, back), ctx.k_back)",
        "_sums(grad, ctx.k_back)",
        "tests/model/test_experts.py",
    ),
    Mutant(
        "tied weights with one gradient",
        "engine/engine.py",
        "            if self._trains_both_ends:\n",
        "            if False:\n",
        PARALLEL,
    ),
    Mutant(
        "balance of the biased choice",
        "features/routers.py",
        "chosen = logits.float().topk(chosen.shape[1], dim=-1).indices",
        "pass",
        ROUTERS,
    ),
    Mutant(
        "padding chosen by routers",
        "model/loss/forward_rows.py",
        "inside = min(part, end - start)",
        "inside = part",
        ROUTERS,
    ),
    Mutant(
        "choices counted again in backward",
        "model/routers.py",
        'with replaced(self, "_is_listening", True), replaced(self, "_is_counting", is_counting):',
        "self._is_listening, self._is_counting = True, is_counting\n        if True:",
        ROUTERS,
    ),
    Mutant(
        "shares of choices on one sequence parallel rank",
        "features/routers.py",
        "counts = self._sp_group.all_reduce(counts)",
        "pass",
        ROUTERS,
    ),
    Mutant(
        "biases by the choices of one rank",
        "engine/results.py",
        "name: (on_device.view_as(table),",
        "name: (table,",
        ROUTERS,
    ),
    Mutant(
        "biases updated on a skipped step",
        "features/routers.py",
        "if self.routers.plan.section.bias_update and not is_skipped:",
        "if self.routers.plan.section.bias_update:",
        "tests/engine/test_steps.py",
    ),
    Mutant(
        "backwards of chunks in the order of their forwards",
        "plan/batch.py",
        "PipelineTurn(False, vpp - 1 - turn.chunk, turn.micro)",
        "PipelineTurn(False, turn.chunk, turn.micro)",
        "tests/plan/test_pipeline.py",
    ),
    Mutant(
        "the last norm after every chunk of the last rank",
        "model/parallel/pipeline.py",
        '                part["norm"] = nn.Identity()\n',
        "                pass\n",
        PARALLEL,
    ),
    Mutant(
        "tokens counted again for every chunk",
        "model/routers.py",
        "if is_counting and counts_tokens:",
        "if is_counting:",
        PARALLEL,
    ),
    Mutant(
        "balance of the last stage alone",
        "engine/pipeline_schedules.py",
        "return sent_back if done.loss is None else sent_back + done.loss",
        "return sent_back",
        ROUTERS,
    ),
    Mutant(
        "gate and up exchanged",
        "model/weights/names.py",
        "((names.gate, slice(0, half)), (names.up, slice(half, rows)))",
        "((names.up, slice(0, half)), (names.gate, slice(half, rows)))",
        "tests/model tests/export/test_safetensors_folder.py",
    ),
    Mutant(
        "scale of adapters",
        "model/adapters/lora.py",
        "module.lora_scale = lora.scale",
        "module.lora_scale = lora.alpha",
        "tests/model/adapters/test_lora.py tests/parity/test_lora.py",
    ),
    Mutant(
        "warm-up one step short",
        "config/schedule.py",
        "return self.lr * step / peak",
        "return self.lr * (step - 1) / peak",
        "tests/config/test_schedule.py",
    ),
    Mutant(
        "box one row short",
        "checkpoint/part_storage.py",
        "yield from flat_range_chunks(shape, start + rows * inner, numel - rows * inner)",
        "return",
        "tests/checkpoint/test_commit.py",
    ),
    Mutant(
        "a fragment one element late",
        "checkpoint/part_storage.py",
        "row, column = divmod(start, inner)",
        "row, column = divmod(start + (start > 0), inner)",
        "tests/checkpoint/test_commit.py",
    ),
    Mutant(
        "a part of a chunk read into its beginning",
        "checkpoint/part_storage.py",
        "destination = destination.narrow(dim, at - chunk.offsets[dim], length)",
        "destination = destination.narrow(dim, 0, length)",
        "tests/checkpoint/test_commit.py",
    ),
    Mutant(
        "a chunk passed over by its last element",
        "checkpoint/part_storage.py",
        "last * size + offset + length - 1",
        "last * size + offset",
        "tests/checkpoint/test_commit.py",
    ),
    Mutant(
        "adapters of the plain loop without their scale",
        "reference/selftest/plain_features.py",
        "return weight + self._scale * (self.lora_B @ self.lora_A)",
        "return weight + self.lora_B @ self.lora_A",
        "tests/reference/selftest/test_selftest.py",
    ),
    Mutant(
        "another token scored in a record",
        "model/loss/score_head.py",
        "return head_of(lm)(hidden)[0, -1:]",
        "return head_of(lm)(hidden)[0, -2:-1]",
        WHOLE_RUNS,
    ),
    Mutant(
        "texts of an exported classifier without EOS",
        "export/fitted_tokenizer.py",
        '"single": [*added("before"), first, *added("after")],',
        '"single": [*added("before"), first],',
        CLASSIFIERS,
    ),
    Mutant(
        "padded batches not compared",
        "export/verify/verify.py",
        "(compare_logits, compare_padding, compare_tokens)",
        "(compare_logits, compare_tokens)",
        CLASSIFIERS,
    ),
    Mutant(
        "inputs of adapters dropped otherwise on tensor parallel ranks",
        "model/adapters/lora.py",
        "mask.narrow(-1, start, hidden.shape[-1])",
        "mask.narrow(-1, 0, hidden.shape[-1])",
        "tests/parity/test_lora_options.py",
    ),
    Mutant(
        "layers computed again with other dropout",
        "model/activation_memory.py",
        '"preserve_rng_state": drops',
        '"preserve_rng_state": is_random(lm.config)',
        "tests/model/adapters/test_lora_options.py",
    ),
    Mutant(
        "head of an adapter not written",
        "export/adapter.py",
        "for name, tensor in base.trained.items()}",
        "for name, tensor in {}.items()}",
        CLASSIFIERS,
    ),
    Mutant(
        "last place of a row scored in ONNX",
        "export/onnx/decoder.py",
        'graph.op("Mul", positions_in_row, "attention_mask")',
        'graph.op("Add", positions_in_row, graph.op("Sub", "attention_mask", "attention_mask"))',
        ONNX_CLASSIFIERS,
    ),
    Mutant(
        "window of an encoder one token narrower in ONNX",
        "export/onnx/encoders.py",
        'near = graph.op("LessOrEqual",',
        'near = graph.op("Less",',
        ONNX_CLASSIFIERS,
    ),
)


def main(names: list[str]) -> int:
    """Try the mutants whose name is given, or all; 1 where one is not found."""
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        sys.exit(f"no such faults: {sorted(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    missed = [mutant.name for mutant in chosen if not _is_found(mutant)]
    sys.stdout.write(
        f"{len(chosen) - len(missed)} of {len(chosen)} faults found{f'; missed: {missed}' if missed else ''}\n"
    )
    return int(bool(missed))


def _is_found(mutant: Mutant) -> bool:
    """Whether the tests fail in a copy of the tree with the fault, by a failed test and not for another reason."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        _copy_tree(tree)
        path = tree / "ds_finetune" / mutant.file
        source = path.read_text()
        if source.count(mutant.text) != 1:
            sys.exit(f"{mutant.name}: {mutant.file} holds the text {source.count(mutant.text)} times: {mutant.text}")
        path.write_text(source.replace(mutant.text, mutant.fault))
        command = [sys.executable, "-m", "pytest", "-q", "-x", *mutant.tests.split()]
        done = subprocess.run(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    last = done.stdout.strip().splitlines()[-1:]
    sys.stdout.write(
        f"{'found ' if done.returncode == 1 else 'MISSED'} {mutant.name} ({time.monotonic() - began:.0f} s): {' '.join(last)}\n"
    )
    sys.stdout.flush()
    return done.returncode == 1


def _copy_tree(tree: Path) -> None:
    """What git tracks, as it lies on disk."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
