"""Sampling by a vLLM server with the weights of the model being trained, for `rollout.engine: vllm`.

Rank zero sends all requests. Each version of the weights is exported to a new folder, which the server loads.
"""

import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty

import numpy as np
import torch

from ds_finetune.checkpoint.folder import raise_on_every_rank
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.sampling.answers import SampledAnswer, SamplingLimits, SamplingRequest
from ds_finetune.errors import FinetuneError, RunError, ServeError
from ds_finetune.export.verify.record import fixed_prompts
from ds_finetune.families.text_part import text_tree
from ds_finetune.trainer.exports import export
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.rollouts.rollout import FOLDER
from ds_finetune.trainer.rollouts.sampling import Answers, StartSampling
from ds_finetune.trainer.rollouts.vllm_server import Floats, T, VllmServer, results_of

_AT_ONCE = 256
"""Number of concurrent requests if rollout.batch_rows is auto. Each request samples a whole group of answers."""
_POLL_SECONDS = 1.0
_SILENT_SECONDS, _FAILURES = 10.0, 3
"""Seconds without an answer until the server's health is checked; failed checks in a row until it counts as lost."""
_MOST_NATS = {True: 1e-3, False: 0.25}
"""Tolerance in nats for the median difference between log-probabilities of fixed prompts on the server and in this
engine. The key is whether both compute in fp32. With only half of the weights loaded the difference is whole nats.
"""
_MOVED = 0.25
"""If more than this fraction of the log-probabilities of fixed prompts has changed in this engine, some must have
changed on the server too. Rounding may hide smaller changes.
"""


class ServerLostError(RunError):
    """The vLLM server failed after it had answered before. Only its current answers are lost."""


def check_server(run: PreparedRun) -> VllmServer | None:
    """Connect to the vLLM server of a run, and check that it is usable; None if the run's own engine samples.
    ServeError if it does not respond, is not in dev mode, or serves another model.
    """
    address = run.config.rollout.address
    if run.model.objective.head != "answers" or run.config.rollout.engine == "own":
        return None
    assert address is not None
    server = VllmServer(address)
    server.check(text_tree(run.inputs.config_tree), max_tokens=run.config.train.max_seq_len)
    return server


@contextmanager
def sampling_started(run: PreparedRun, engine: Engine, progress: RankProgress) -> Iterator[StartSampling]:
    """Context with the function that samples a run's answers: with its own engine, or with a server."""
    if run.config.rollout.engine == "own":

        def sample(request: SamplingRequest) -> Callable[[], Answers | None]:
            answers = engine.sample(request)
            return lambda: answers

        yield sample
        return
    server = VllmEngine(run, engine, progress)
    try:
        yield server.start
    finally:
        server.close()


class VllmEngine:
    """Samples answers with a vLLM server. Its methods are collective."""

    def __init__(self, run: PreparedRun, engine: Engine, progress: RankProgress) -> None:
        self._run, self._engine, self._progress = run, engine, progress
        self._server: VllmServer | None = None
        """The vLLM server; None on ranks other than zero."""
        self._attempt(self._connect)
        name = all_gather_object(uuid.uuid4().hex[:8])[0]
        self._folder = run.output_dir / FOLDER / f"weights-{name}"
        """Folder for exported weights, new at each start, because a server may reuse weights of a known folder."""
        self._step = -1
        """Optimizer step of the weights that the server has."""
        self._has_answered = False
        prompts = fixed_prompts(int(run.model.hf_config.vocab_size), run.inputs.tokenizer)
        longest = run.config.train.max_seq_len - 1
        self._prompts = [prompt[:longest] for prompt in (prompts[0], *prompts[8:9]) if len(prompt) > 1]
        """Prompts by which the server's weights are checked: one of random ids, and one from a text if possible."""
        self._before: tuple[Floats, Floats] | None = None
        """Log-probabilities of the check prompts on the server and in this engine, at the previous update of weights.
        """
        self._begun: _Answers | None = None
        """The request that the server is sampling."""

    def start(self, request: SamplingRequest) -> Callable[[], Answers | None]:
        """Start to sample on the server with the current weights. Returns a function that waits for the answers on
        every rank. An earlier request is completed before the server gets the current weights. vLLM uses random
        generators of its own, seeded from the seed and the numbers of rollout, prompt and answer.
        """
        if self._begun is not None:
            self._wait(self._begun)
        self._update()
        begun = self._begun = _Answers(self._server, request, self._run.config.rollout.stop)
        return partial(self._wait, begun)

    def _wait(self, begun: "_Answers") -> Answers | None:
        if self._begun is begun:
            self._collect(begun)
        if begun.error is not None:
            raise begun.error
        return [begun.answers[index] for index in sorted(begun.answers)] if begun.is_complete else None

    def _collect(self, begun: "_Answers") -> None:
        """Wait until the server has sampled the request, or has failed. Afterwards no request is running."""
        while not begun.is_complete and begun.error is None:
            arrived, begun.error = all_gather_object(self._tried(lambda _: begun.take()))[0]
            for index, answers in (arrived or {}).items():
                self._take(begun, index, answers)
            if begun.request.is_over():
                break
            begun.request.on_forward()
        self._begun = None
        if not begun.is_complete:
            begun.abandon()
            return
        try:
            self._attempt(lambda server: server.check_version(self._version))
            self._has_answered = True
        except FinetuneError as failed:
            begun.error = failed

    def _take(self, begun: "_Answers", index: int, answers: Sequence[SampledAnswer]) -> None:
        request, plan = begun.request, self._run.plan
        begun.answers[index] = [_cut(answer, request.limits) for answer in answers]
        if index % plan.zero_ranks == plan.mesh.coordinate("dp") * plan.mesh.sp + plan.mesh.coordinate("sp"):
            for number, answer in enumerate(begun.answers[index]):
                request.on_answer(index * request.group_size + number, answer)

    def close(self) -> None:
        """Stop sampling on the server, and remove the folders of weights."""
        if self._begun is not None:
            self._begun.abandon()
        if self._engine.is_rank_zero:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _version(self) -> str:
        return f"{self._folder.name}-step-{self._step}"

    def _connect(self, _: object) -> None:
        for old in (self._run.output_dir / FOLDER).glob("weights-*"):
            shutil.rmtree(old, ignore_errors=True)
        self._server = check_server(self._run)

    def _attempt(self, work: Callable[[VllmServer], object]) -> None:
        raise_on_every_rank(self._tried(work)[1])

    def _tried(self, work: Callable[[VllmServer], T]) -> tuple[T | None, FinetuneError | None]:
        """Run `work` on rank zero. Returns its result or error: ServerLostError if the server had answered before."""
        if not self._engine.is_rank_zero:
            return None, None
        try:
            return work(self._server), None  # type: ignore[arg-type]
        except ServeError as failed:
            lost = ServerLostError(**vars(failed))
            return None, lost if self._has_answered else failed

    def _update(self) -> None:
        step = self._progress.step
        if self._step == step:
            self._attempt(lambda server: server.check_version(self._version))
            return
        self._step = step
        folder = self._folder / f"export-{step:06d}"
        export(self._run, self._engine, folder, step=None)
        log_probs = []
        for prompt, logits in zip(self._prompts, self._engine.logits(self._prompts), strict=True):
            following = torch.tensor(prompt[1:], device=logits.device)[:, None]
            log_probs.append(logits[:-1].log_softmax(dim=-1).gather(1, following).flatten().double().cpu().numpy())
        del logits, following
        own_log_probs = np.concatenate(log_probs)
        self._attempt(lambda server: self._load(server, folder, own_log_probs))
        if self._engine.is_rank_zero:
            shutil.rmtree(folder, ignore_errors=True)

    def _load(self, server: VllmServer, folder: Path, own_log_probs: Floats) -> None:
        server.load(folder.absolute(), self._version)
        served = np.concatenate([server.log_probs(prompt) for prompt in self._prompts])
        difference = float(np.median(np.abs(served - own_log_probs)))
        limit = _MOST_NATS[self._run.plan.precision == "fp32" and "float32" in server.dtype]
        if not difference <= limit:
            raise ServeError(
                f"the vLLM server at {server.address} does not compute with the weights of step {self._step}: "
                f"log-probabilities of fixed prompts differ by {difference:.3g} nats (median); {limit:g} are allowed",
                hint="it may serve another model, or have loaded only half of the weights: restart the server with the "
                "model of this run, then start the same command again to resume",
            )
        before, self._before = self._before, (served, own_log_probs)
        if before is not None and (served == before[0]).all() and (own_log_probs != before[1]).mean() > _MOVED:
            raise ServeError(
                f"the vLLM server at {server.address} has not loaded the weights of step {self._step}: it gives the "
                "same log-probabilities of fixed prompts as with the earlier weights",
                hint="restart the server, then start the same command again to resume",
            )


class _Answers:
    """The answers to a request, some of which may not have arrived yet. Only rank zero has the server."""

    def __init__(self, server: VllmServer | None, request: SamplingRequest, stop: Sequence[str]) -> None:
        self._server, self.request, rows = server, request, request.batch_rows
        self.answers: dict[int, list[SampledAnswer]] = {}
        """Answers that every rank has, by index of the prompt."""
        self.error: FinetuneError | None = None
        jobs = [partial(server.answers, prompt, request, stop=stop) for prompt in request.prompts] if server else []
        self._done = results_of(jobs, at_once=_AT_ONCE if rows is None else max(1, rows // request.group_size))
        self._num_left = len(jobs)
        self._last_answer_at, self._failures = time.monotonic(), 0

    @property
    def is_complete(self) -> bool:
        """Whether every rank has all answers to the request."""
        return len(self.answers) == len(self.request.prompts)

    def take(self) -> dict[int, list[SampledAnswer]]:
        """Collect the answers that arrive within a second, by index of the prompt. ServeError if a request failed."""
        answers: dict[int, list[SampledAnswer]] = {}
        until = time.monotonic() + _POLL_SECONDS
        while self._num_left and (seconds := until - time.monotonic()) > 0:
            try:
                index, result = self._done.get(timeout=seconds)
            except Empty:
                self._check_health()
                break
            if isinstance(result, Exception):
                raise result
            answers[index], self._last_answer_at = result, time.monotonic()
            self._num_left -= 1
        return answers

    def abandon(self) -> None:
        """Abort the running requests, if the server still responds."""
        if self._server is not None:
            with suppress(ServeError):
                self._server.abort()

    def _check_health(self) -> None:
        if self._server is None or time.monotonic() - self._last_answer_at < _SILENT_SECONDS * (self._failures + 1):
            return
        try:
            self._server.check_health()
            self._last_answer_at, self._failures = time.monotonic(), 0
        except ServeError:
            self._failures += 1
            if self._failures >= _FAILURES:
                raise


def _cut(answer: SampledAnswer, limits: SamplingLimits) -> SampledAnswer:
    """Cut an answer at the token where this program's conditions end it. A server may go beyond a stop text."""
    if limits.stops is None:
        return answer
    ids = answer.ids.tolist()
    ends = (end for end in range(1, len(ids) + 1) if ids[end - 1] in limits.stop_ids or limits.stops(ids[:end]))
    end = next(ends, None)
    return answer if end is None else SampledAnswer(answer.ids[:end], answer.log_probs[:end], "stop")
