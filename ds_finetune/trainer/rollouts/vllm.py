"""Answers by a vLLM server that has the weights of the model under training: `rollout.engine: vllm`.

Rank zero sends all requests. Each version of the weights is exported to a folder of its own, which the server loads.
"""

import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty

import numpy as np
import torch

from ds_finetune.checkpoint.folder import raise_on_every_rank
from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.sampling.answers import PromptToSample, SampledAnswer, SamplingLimits
from ds_finetune.engine.sampling.noise import answer_keys
from ds_finetune.errors import RunError, ServeError
from ds_finetune.export.verify.record import fixed_prompts
from ds_finetune.trainer.exports import export
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.rollouts.rollout import FOLDER
from ds_finetune.trainer.rollouts.sampling import AnswerEngine
from ds_finetune.trainer.rollouts.vllm_server import Floats, GroupRequest, VllmServer, results_of

_AT_ONCE = 256
"""Requests that are under way at a time where rollout.batch_rows is auto; each has all answers of a group."""
_POLL_SECONDS = 1.0
_SILENT_SECONDS, _FAILURES = 10.0, 3
"""A server without an answer for so long is asked for its health, and is lost after so many failures in a row."""
_MOST_NATS = {True: 1e-3, False: 0.25}
"""How much the median log-probability of a token of fixed prompts may differ between the server and this engine; True
where both compute in fp32. With half of the weights loaded it is nats.
"""
_MOVED = 0.5
"""Share of tokens whose log-probabilities must have changed here for the server's to be expected to change."""


class ServerLostError(RunError):
    """The server has failed after it had answered; nothing but its answers is lost."""


def check_server(run: PreparedRun) -> VllmServer | None:
    """The server that answers the prompts of a run, which can do so; None where the run's own engine answers them.

    ServeError where there is none, it is not in dev mode, or it serves another model.
    """
    address = run.config.rollout.address
    if run.model.objective.head != "answers" or run.config.rollout.engine == "own":
        return None
    assert address is not None
    server = VllmServer(address)
    server.check(run.inputs.config_tree, max_tokens=run.config.train.max_seq_len)
    return server


@contextmanager
def answer_engine(run: PreparedRun, engine: Engine, progress: RankProgress) -> Iterator[AnswerEngine]:
    """What samples the answers of a run: its engine, or a server."""
    if run.config.rollout.engine == "own":
        yield engine
        return
    server = VllmEngine(run, engine, progress)
    try:
        yield server
    finally:
        server.close()


class VllmEngine:
    """Samples as `Engine.sample` does; its methods are collective."""

    def __init__(self, run: PreparedRun, engine: Engine, progress: RankProgress) -> None:
        self._run, self._engine, self._progress = run, engine, progress
        self._server: VllmServer | None = None
        """Known to rank zero."""
        self._attempt(self._connect)
        name = all_gather_object(uuid.uuid4().hex[:8])[0]
        self._folder = run.output_dir / FOLDER / f"weights-{name}"
        """A new folder with each start: from one that it has loaded before, a server may take what it has kept."""
        self._step = -1
        """Step of the weights that the server has."""
        self._has_answered = False
        self._prompts = _check_prompts(run)
        self._before: tuple[Floats, Floats] | None = None
        """Log-probabilities of the prompts by the server and by this engine at the update before."""

    def sample(  # noqa: PLR0913
        self,
        prompts: Sequence[PromptToSample],
        *,
        group_size: int,
        limits: SamplingLimits,
        seed: int,
        greedy: bool = False,
        batch_rows: int | None = None,
        is_over: Callable[[], bool] = lambda: False,
        on_forward: Callable[[], object] = lambda: None,
        on_answer: Callable[[int, SampledAnswer], object] = lambda place, answer: None,
    ) -> list[list[SampledAnswer]] | None:
        """`group_size` answers to each of `prompts` by the weights of the moment, on every rank.

        vLLM draws with generators of its own, whose seeds depend on the seed and on the numbers of rollout, prompt and
        answer. `is_over` and `on_forward` are called about once a second, and `on_answer` on one rank for each answer.
        """
        self._update()
        requests = [self._request(prompt, group_size, limits, None if greedy else seed) for prompt in prompts]
        at_once = _AT_ONCE if batch_rows is None else max(1, batch_rows // group_size)
        waiting = _Answers(self._server, requests, at_once=at_once) if self._server else None
        mesh, ranks = self._run.plan.mesh, self._run.plan.zero_ranks
        rank = mesh.place("dp") * mesh.sp + mesh.place("sp")
        found: dict[int, list[SampledAnswer]] = {}
        while len(found) < len(prompts):
            arrived, error = self._arrived(waiting)
            arrived, error = all_gather_object((arrived, error))[0]
            if is_over() or error is not None:
                if waiting:
                    waiting.abandon()
                if error is not None:
                    raise error
                return None
            for place, answers in arrived.items():
                found[place] = [_cut(answer, limits) for answer in answers]
                for number, answer in enumerate(found[place] if place % ranks == rank else []):
                    on_answer(place * group_size + number, answer)
            on_forward()
        self._attempt(lambda server: server.check_version(self._version))
        self._has_answered = True
        return [found[place] for place in range(len(prompts))]

    def _arrived(
        self, waiting: "_Answers | None"
    ) -> tuple[dict[int, list[SampledAnswer]], ServeError | ServerLostError | None]:
        """The answers of a moment by the places of their prompts, and the error of a server that has failed."""
        try:
            return waiting.take() if waiting else {}, None
        except ServeError as failed:
            return {}, self._lost(failed)

    def close(self) -> None:
        """Remove the folders of weights."""
        if self._engine.is_rank_zero:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _version(self) -> str:
        return f"{self._folder.name}-step-{self._step}"

    def _connect(self, _: object) -> None:
        for old in (self._run.output_dir / FOLDER).glob("weights-*"):
            shutil.rmtree(old, ignore_errors=True)
        self._server = check_server(self._run)

    def _attempt(self, work: Callable[[VllmServer], None]) -> None:
        """Do on rank zero what may find that the server has failed; the error is raised on every rank."""
        error = None
        if self._engine.is_rank_zero:
            try:
                work(self._server)  # type: ignore[arg-type]
            except ServeError as failed:
                error = self._lost(failed)
        raise_on_every_rank(error)

    def _lost(self, error: ServeError) -> ServeError | ServerLostError:
        """The error for a failure: before the first answers it is one of the start."""
        return ServerLostError(error.message, hint=error.hint) if self._has_answered else error

    def _request(
        self, prompt: PromptToSample, group_size: int, limits: SamplingLimits, seed: int | None
    ) -> GroupRequest:
        key = int(answer_keys(seed or 0, [(prompt.key, prompt.number, 0)], torch.device("cpu"))[0])
        forbidden = [] if limits.allowed is None else (~limits.allowed).nonzero().flatten().tolist()
        return GroupRequest(
            prompt=prompt.ids,
            number=group_size,
            # Not negative, and with room for the number of an answer that vLLM adds to it.
            seed=key % 2**62,
            temperature=0 if seed is None else 1,
            max_tokens=limits.max_new_tokens,
            stop_ids=limits.stop_ids,
            stop=self._run.config.rollout.stop,
            forbidden=forbidden,
        )

    def _update(self) -> None:
        """Let the server load the weights of this moment, unless it has them, and compare what they compute."""
        step = self._progress.step
        if self._step == step:
            self._attempt(lambda server: server.check_version(self._version))
            return
        before, self._step = self._step, step
        folder = self._folder / f"export-{step:06d}"
        export(self._run, self._engine, folder, step=None)
        own = self._own_log_probs()
        self._attempt(lambda server: self._load(server, folder, own))
        if self._engine.is_rank_zero:
            shutil.rmtree(self._folder / f"export-{before:06d}", ignore_errors=True)

    def _load(self, server: VllmServer, folder: Path, own: Floats) -> None:
        server.load(folder.absolute(), self._version)
        served = np.concatenate([server.log_probs(prompt) for prompt in self._prompts])
        difference = float(np.median(np.abs(served - own)))
        most = _MOST_NATS[self._run.plan.precision == "fp32" and "float32" in server.dtype]
        if not difference <= most:
            raise ServeError(
                f"the vLLM server at {server.address} does not compute what the weights of step {self._step} do: "
                f"log-probabilities of fixed prompts differ by {difference:.3g} nats (median); {most:g} are allowed",
                hint="restart it with the model of this run: it may serve another one, or have loaded half of the "
                "weights; the same command resumes",
            )
        before, self._before = self._before, (served, own)
        if before is not None and (served == before[0]).all() and (own != before[1]).mean() > _MOVED:
            raise ServeError(
                f"the vLLM server at {server.address} has not loaded the weights of step {self._step}: all "
                "log-probabilities of fixed prompts are those of the weights before",
                hint="restart it; the same command resumes",
            )

    def _own_log_probs(self) -> Floats:
        """Log-probabilities of the tokens of the fixed prompts but the first of each, by the model under training."""
        found = []
        for prompt, logits in zip(self._prompts, self._engine.logits(self._prompts), strict=True):
            following = torch.tensor(prompt[1:], device=logits.device)[:, None]
            found.append(logits[:-1].log_softmax(dim=-1).gather(1, following).flatten().double().cpu().numpy())
        return np.concatenate(found)


class _Answers:
    """The answers to requests, of which some are under way."""

    def __init__(self, server: VllmServer, requests: Sequence[GroupRequest], *, at_once: int) -> None:
        self._server, self._left = server, len(requests)
        self._done = results_of([partial(server.answers, each) for each in requests], at_once=at_once)
        self._heard_at, self._failures = time.monotonic(), 0

    def take(self) -> dict[int, list[SampledAnswer]]:
        """What arrives within a moment, by the places of requests. ServeError where one has failed."""
        found: dict[int, list[SampledAnswer]] = {}
        until = time.monotonic() + _POLL_SECONDS
        while self._left and (seconds := until - time.monotonic()) > 0:
            try:
                place, result = self._done.get(timeout=seconds)
            except Empty:
                self._check_health()
                break
            if isinstance(result, ServeError):
                raise result
            found[place], self._heard_at = result, time.monotonic()
            self._left -= 1
        return found

    def abandon(self) -> None:
        """End the requests that are under way, if the server still hears."""
        try:
            self._server.abort()
        except ServeError:
            return

    def _check_health(self) -> None:
        if time.monotonic() - self._heard_at < _SILENT_SECONDS * (self._failures + 1):
            return
        try:
            self._server.check_health()
            self._heard_at, self._failures = time.monotonic(), 0
        except ServeError:
            self._failures += 1
            if self._failures >= _FAILURES:
                raise


def _check_prompts(run: PreparedRun) -> list[tuple[int, ...]]:
    """A prompt of random ids, and one of a text where the tokenizer makes tokens of it."""
    every = fixed_prompts(int(run.inputs.hf_config.vocab_size), run.inputs.tokenizer)
    longest = run.config.train.max_seq_len - 1
    return [prompt[:longest] for prompt in (every[0], *every[8:9]) if len(prompt) > 1]


def _cut(answer: SampledAnswer, limits: SamplingLimits) -> SampledAnswer:
    """The answer up to the token at which one of this package ends; a server may write on to the end of a text."""
    if limits.stops is None:
        return answer
    ids = answer.ids.tolist()
    ends = (end for end in range(1, len(ids) + 1) if ids[end - 1] in limits.stop_ids or limits.stops(ids[:end]))
    end = next(ends, None)
    return answer if end is None else SampledAnswer(answer.ids[:end], answer.log_probs[:end], "stop")
