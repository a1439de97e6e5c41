"""Runs an ONNX folder with ONNX Runtime on the CPU, also as a transformers model for `generate` and the server."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ds_finetune.export.onnx import MODEL
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.transformers_attention import CACHE, take_cache

_PAST = "past_key_values."


def open_session(folder: Path, *, is_mapped: bool = False) -> tuple[onnxruntime.InferenceSession, np.dtype]:
    """Open the graph of `folder` with ONNX Runtime on all CPU cores of this process. Returns the session and the
    logits' dtype.

    With `is_mapped`, weights stay in the file, which saves memory but is slower. Quantised weights, which would be
    unpacked at each use, are copied to memory if the head has its own weight, not the embedding's.
    """
    # Folders of earlier versions of this program have model.onnx beside config.json.
    file = folder / MODEL if (folder / MODEL).is_file() else folder / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    if is_mapped:
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        # A higher optimisation level, or the default order of execution, would cast all fp16 weights at the start.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        graph = file.read_bytes()
        is_copied = b"MatMulNBits" in graph and b"Gemm" not in graph
        options.add_session_config_entry("session.disable_prepacking", str(int(not is_copied)))
    disabled = ["ConstantFolding"] if is_mapped else None
    session = onnxruntime.InferenceSession(
        str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    is_half = session.get_outputs()[0].type == "tensor(float16)"
    return session, np.dtype(np.float16 if is_half else np.float32)


class OnnxModel:
    """The language model of an ONNX folder in ONNX Runtime, on all CPU cores of this process."""

    def __init__(self, folder: Path, *, is_mapped: bool = False) -> None:
        self._session, self.dtype = open_session(folder, is_mapped=is_mapped)
        self._caches = {entry.name: entry.shape for entry in self._session.get_inputs() if entry.name.startswith(_PAST)}
        self.run_options = onnxruntime.RunOptions()

    @property
    def has_cache(self) -> bool:
        """Whether the graph has inputs for cached keys and values."""
        return bool(self._caches)

    def empty_cache(self, rows: int) -> list[np.ndarray]:
        """Make empty cached keys and values for `rows` rows, in the order of the graph's inputs."""
        return [np.zeros((rows, heads, 0, width), dtype=self.dtype) for _, heads, _, width in self._caches.values()]

    def run(
        self, ids: np.ndarray, mask: np.ndarray, cache: list[np.ndarray], positions: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Compute the logits [rows, length, vocabulary] of `ids` [rows, length], and the cache extended by these
        tokens. `mask` [rows, total] is the attention mask of cached tokens and `ids`. Without `positions`, positions
        follow from `mask`.
        """
        if positions is None:
            positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        feeds = dict(zip(self._caches, cache, strict=True))
        feeds |= {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        logits, *new_cache = self._session.run(None, feeds, self.run_options)
        return logits, new_cache

    def logits(self, ids: np.ndarray, mask: np.ndarray, chunks: tuple[int, ...]) -> np.ndarray:
        """Logits [rows, length, vocabulary] of `ids`, fed with a cache in chunks of the lengths `chunks`."""
        cache, parts, end = self.empty_cache(len(ids)), [], 0
        for size in chunks:
            part, cache = self.run(ids[:, end : end + size], mask[:, : end + size], cache)
            parts.append(part)
            end += size
        assert end == ids.shape[1], chunks
        return np.concatenate(parts, axis=1)


class OnnxScorer:
    """The classifier of an ONNX folder in ONNX Runtime, on all CPU cores of this process."""

    def __init__(self, folder: Path) -> None:
        self._session, self.dtype = open_session(folder)
        self.names = [entry.name for entry in self._session.get_inputs()]

    def logits(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Logits, fp32 [rows, labels], for `inputs` by name, int64 [rows, tokens]; unknown inputs are ignored."""
        (logits,) = self._session.run(["logits"], {name: inputs[name] for name in self.names})
        return logits.astype(np.float32)  # type: ignore[no-any-return]


class OnnxCausalLM(PreTrainedModel, GenerationMixin):
    """An ONNX folder as a causal LM of transformers, without parameters. `generate` samples and streams as usual.

    Keys and values stay in a DynamicCache as ONNX Runtime returns them, without copies between steps. A graph without a
    cache computes all tokens at each step.
    """

    def __init__(self, config: PretrainedConfig, runtime: OnnxModel) -> None:
        super().__init__(config)
        self.runtime = runtime
        self.run_options = runtime.run_options
        self.eval()

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, is_mapped: bool = False, **_: Any) -> "OnnxCausalLM":  # noqa: ANN401 - devices, dtypes and revisions of transformers' callers
        """Load an ONNX folder, with its generation config if it has one. Other arguments are ignored."""
        folder = Path(folder)
        model = cls(AutoConfig.from_pretrained(folder, trust_remote_code=False), OnnxModel(folder, is_mapped=is_mapped))
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        model.generation_config.use_cache = model.runtime.has_cache
        return model

    @property
    def device(self) -> torch.device:
        """Device of the model, which is always the CPU; inputs must be there too."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits that `forward` returns."""
        return torch.float32

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,  # noqa: ANN401 - a cache, and what does not change the logits
    ) -> CausalLMOutputWithPast:
        """Compute fp32 logits [rows, length, vocabulary] of the tokens `input_ids` [rows, length], which come after the
        cached tokens. TypeError for an argument that would change the logits.
        """
        cached = take_cache(others)
        if unknown := others.keys() - {"use_cache", "return_dict"}:
            raise TypeError(f"{type(self).__name__} has no argument `{min(unknown)}`")
        past = cached.get_seq_length() if cached is not None else 0
        if attention_mask is None:
            attention_mask = torch.ones(len(input_ids), past + input_ids.shape[1])
        cache = self.runtime.empty_cache(len(input_ids))
        if cached is not None and past:
            cache = [states.numpy() for layer in cached.layers for states in (layer.keys, layer.values)]
        positions = None if position_ids is None else position_ids.numpy()
        logits, new_cache = self.runtime.run(input_ids.numpy(), attention_mask.long().numpy(), cache, positions)
        if cached is not None and new_cache:
            states = map(torch.from_numpy, new_cache)
            for layer, keys, values in zip(cached.layers, states, states, strict=True):
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
        return CausalLMOutputWithPast(logits=torch.from_numpy(logits).float(), **{CACHE: cached})
