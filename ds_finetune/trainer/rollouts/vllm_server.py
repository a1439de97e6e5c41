"""Requests to a vLLM server that samples answers and loads new weights on request, tested with vLLM 0.32.

Prompts and answers are token ids. The server has routes for weights only if it was started with
VLLM_SERVER_DEV_MODE=1.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.engine.sampling.answers import Finish, PromptToSample, SampledAnswer, SamplingRequest
from ds_finetune.engine.sampling.noise import answer_keys
from ds_finetune.errors import ServeError
from ds_finetune.families.text_part import text_tree
from ds_finetune.model.build.hub_folder import config_of

Floats = NDArray[np.float64]
T = TypeVar("T")
API_KEY = "DS_FINETUNE_API_KEY"
"""Environment variable with the API key of the server, as for `ds-finetune serve`."""
START = "start the server on a machine that can read output_dir: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers")
_SECONDS, _LONG_SECONDS = 60.0, 3600.0
"""Timeouts in seconds for ordinary requests, and for requests that sample answers or load weights."""
_DEFAULTS = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
"""Sampling parameters that change no distribution. Without them the server would use generation_config.json."""
_NEVER_SAMPLED = -100
"""Bias on the logit of an id that must not be sampled. It lowers the id's probability by a factor of at least 1e43."""


class VllmServer:
    """The vLLM server at `address`, such as http://127.0.0.1:8000. Methods raise ServeError if a request fails."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.name = ""
        """Name of the model in requests, set by `check`."""
        self.dtype = ""
        """Dtype of the model's weights, set by `check`."""
        # Requests inside a cluster must not use a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def check(self, shape: Mapping[str, Any], *, max_tokens: int) -> None:
        """Check that the server can sample for the run. It must be a vLLM server in dev mode, and accept
        `max_tokens` tokens of prompt and answer. Its model's config.json must have the values in `shape`.
        """
        models = self._request("/v1/models", missing="is no vLLM server: it has no route /v1/models")
        missing = "is not in dev mode: it has no route {} for loading weights"
        for route in ("/weight_info", "/is_paused"):
            self._request(route, missing=missing.format(route))
        info = self._request("/server_info?config_format=json", missing=missing.format("/server_info"))
        try:
            model = models["data"][0]
            self.name, longest, folder = model["id"], model["max_model_len"], Path(model["root"])
            self.dtype = str(info["vllm_config"]["model_config"]["dtype"])
        except (KeyError, IndexError, TypeError) as absent:
            raise self._error(f"answers /v1/models or /server_info without {absent}", "use vLLM 0.32") from absent
        different = {
            key: (value, shape[key])
            for key, value in text_tree(config_of(folder)).items()
            if key in _SHAPE and key in shape and shape[key] != value
        }
        if different:
            values = ", ".join(f"{key} {served} instead of {expected}" for key, (served, expected) in different.items())
            raise self._error(
                f"serves another model, `{self.name}`, with {values}", f"{START} with the model of this run"
            )
        if longest is not None and longest < max_tokens:
            raise self._error(
                f"takes {longest} tokens of prompt and answer, and train.max_seq_len is {max_tokens}",
                f"start the server with --max-model-len {max_tokens}",
            )

    def load(self, folder: Path, version: str) -> None:
        """Load the weights of a folder that the server has not loaded before, and name them `version`."""
        self._request("/pause?mode=abort", {})
        self._request("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        cache = self._request("/reset_prefix_cache", {})
        if not (isinstance(cache, dict) and cache.get("success")):
            raise self._error(f"has not emptied its prefix cache: {cache}", "see its output; then start both again")
        self._request("/update_weight_version", {"new_version": version})
        self._request("/resume", {})
        self.check_version(version)

    def check_version(self, version: str) -> None:
        """Check that the server's weights are named `version`; another name means a failed load, or another run."""
        served = self._request("/weight_info").get("weight_version")
        if served != version:
            raise self._error(
                f"has weights of version {served}, and this run has loaded {version}",
                "no other run may use this server; restart it if it has lost its weights",
            )

    def answers(
        self, prompt: PromptToSample, request: SamplingRequest, *, stop: Sequence[str] = ()
    ) -> list[SampledAnswer]:
        """Sample answers to a prompt, with the log-probabilities of their tokens; NaN if the server gives none. Answers
        are also cut after the texts `stop`. vLLM seeds answer i with seed + i.
        """
        limits = request.limits
        key = int(answer_keys(request.seed or 0, [(prompt.key, prompt.number, 0)], torch.device("cpu"))[0])
        forbidden = [] if limits.allowed is None else (~limits.allowed).nonzero().flatten().tolist()
        choices = self._complete(
            prompt.ids,
            **_DEFAULTS,
            n=request.group_size,
            # The seed must be at least 0, and small enough that the server can add the number of an answer to it.
            seed=key % 2**62,
            temperature=0 if request.seed is None else 1,
            max_tokens=limits.max_new_tokens,
            logprobs=0,
            stop=list(stop),
            stop_token_ids=list(limits.stop_ids),
            # With ignore_eos, only the ids in `stop_token_ids` end an answer.
            ignore_eos=True,
            skip_special_tokens=False,
            logit_bias={str(number): _NEVER_SAMPLED for number in forbidden},
        )
        if len(choices) != request.group_size:
            raise self._error(f"gives {len(choices)} answers instead of {request.group_size}", "see its output")
        try:
            return [self._answer(choice) for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
        except (AttributeError, KeyError, TypeError, ValueError) as other:
            raise self._error(f"gives answers in another form: {other!r}", "use vLLM 0.32") from other

    def log_probs(self, prompt: Sequence[int]) -> Floats:
        """Log-probabilities of a prompt's tokens, except the first token."""
        (choice,) = self._complete(prompt, prompt_logprobs=0, max_tokens=1, temperature=0)
        rows = choice.get("prompt_logprobs") or []
        try:
            values = [row[str(number)]["logprob"] for number, row in zip(prompt[1:], rows[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as wrong:
            raise self._error("gives no log-probabilities of a prompt", "use vLLM 0.32") from wrong
        return np.array(values, dtype=np.float64)

    def abort(self) -> None:
        """Abort all running requests."""
        self._request("/abort_requests", {}, seconds=_SECONDS)

    def check_health(self) -> None:
        """Check that the server responds."""
        self._request("/health")

    def _answer(self, choice: Mapping[str, Any]) -> SampledAnswer:
        ids, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or log_probs is None or len(ids) != len(log_probs):
            raise self._error("answers without token ids and their log-probabilities", "use vLLM 0.32")
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise self._error(f"has ended an answer for the reason {finish}", "read the server's output")
        cut: Finish = "length" if finish == "length" else "stop"
        return SampledAnswer(np.array(ids, dtype=np.int64), np.array(log_probs, dtype=np.float32), cut)

    def _complete(self, prompt: Sequence[int], **settings: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
        body = {"model": self.name, "prompt": list(prompt), "return_token_ids": True, **settings}
        choices: list[dict[str, Any]] = self._request("/v1/completions", body).get("choices") or []
        return choices

    def _request(self, route: str, body: object = None, *, seconds: float | None = None, missing: str = "") -> Any:  # noqa: ANN401 - JSON
        """GET a route, or POST `body` to it; returns the response. `missing` is the error for an unknown route."""
        data, hint = (None, START) if body is None else (json.dumps(body).encode(), "read the server's output")
        seconds = seconds or (_SECONDS if body is None else _LONG_SECONDS)
        key = os.environ.get(API_KEY)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.address + route, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                response = " ".join(refused.read().decode(errors="replace").split())[:300]
            problem = missing if missing and refused.code == 404 else f"answers {route} with {refused.code}: {response}"
            raise self._error(problem, hint) from refused
        except (OSError, HTTPException) as absent:
            reason = getattr(absent, "reason", absent)
            raise self._error(f"does not answer {route}: {reason}", START) from absent
        try:
            return json.loads(text) if text else {}
        except ValueError as other:
            raise self._error(f"answers {route} with `{text[:60]}`, which is not JSON", START) from other

    def _error(self, problem: str, hint: str) -> ServeError:
        return ServeError(f"the vLLM server at {self.address} {problem}", hint=hint)


def results_of(jobs: Sequence[Callable[[], T]], *, at_once: int) -> "Queue[tuple[int, T | Exception]]":
    """Run jobs in daemon threads. Returns a queue that receives the index and the result (or exception) of each job."""
    # The threads share one iterator of jobs. Sharing an iterator of a list is safe.
    todo, done = iter(list(enumerate(jobs))), Queue[tuple[int, T | Exception]]()

    def work() -> None:
        for index, job in todo:
            try:
                done.put((index, job()))
            except Exception as error:  # noqa: BLE001 - who waits for the result raises it
                done.put((index, error))

    for _ in range(min(at_once, len(jobs))):
        Thread(target=work, daemon=True).start()
    return done
