# ruff: noqa: E402 - the modules under test need packages that may be absent
"""The server for transformers and ONNX Runtime, in this process, used with the official client: what it refuses, and
what it stops.
"""

import asyncio
import json
import re
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import nn

from tests.running import tiny_task

for package in ("openai", "starlette", "uvicorn"):
    pytest.importorskip(package, reason=f"{package} is not installed (pip install 'ds_finetune[serve]')")

from openai import APIError, APIStatusError, AuthenticationError, NotFoundError, OpenAI
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ds_finetune.data import chat_template
from ds_finetune.serving import generation
from ds_finetune.serving import http_app as serving
from ds_finetune.serving.generation import GenerationStoppedError, GenerationStopper, QueueLimits, RequestQueue
from ds_finetune.serving.openai_request import ChatRequest, RequestError

CONTEXT = 2048
QUEUE = 2
USER = [{"role": "user", "content": "1969-07-20"}]
TOOLS = [{"type": "function", "function": {"name": "day", "parameters": {"type": "object", "properties": {}}}}]


class Running:
    """A server in a thread: its client, its model's name, and how many forwards its model has done."""

    def __init__(self, folder: Path, api_key: str = "") -> None:
        import uvicorn

        torch.manual_seed(5)
        models: list[serving.ServedModel] = []
        plain = serving.ServedModel.__init__

        def remembered(self: serving.ServedModel, *given: Any) -> None:
            plain(self, *given)
            models.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving.ServedModel, "__init__", remembered)
            self.app = serving.make_app(folder, QueueLimits(QUEUE, request_seconds=300.0), api_key=api_key)
        self.name, self.forwards, self.served = str(folder), 0, models[0]
        models[0].model.register_forward_pre_hook(self._count)
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],), daemon=True)
        self._thread.start()
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=60, max_retries=0)
        while not self._server.started:
            time.sleep(0.01)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def chat(self, **given: Any) -> Any:
        return self.client.chat.completions.create(
            **{"model": self.name, "messages": USER, "max_tokens": 2, "temperature": 0} | given
        )

    def refusal(self, **given: Any) -> Any:
        """Status and error object of a refused request."""
        with pytest.raises(APIStatusError) as refused:
            self.chat(**given)
        return refused.value.status_code, refused.value.body

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("server")
    tiny_task(place)
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(place / "model")
    config.max_position_embeddings = CONTEXT
    AutoModelForCausalLM.from_config(config).float().save_pretrained(place / "model")
    template = place / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("in messages %}", "in messages if message.role != 'narrator' %}"))
    return place / "model"


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    server = Running(folder)
    yield server
    server.close()


def _endless(running: Running) -> dict[str, Any]:
    """A request for a long answer: no end of sequence is drawn."""
    ends = {str(AutoTokenizer.from_pretrained(running.name).eos_token_id): -100}
    return {"max_tokens": CONTEXT - 100, "logit_bias": ends}


@pytest.mark.parametrize(
    ("given", "param", "part"),
    [
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e-30}, None, "at least 0.01"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hello"}, "messages", "list"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "only text",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "a", "name": "b"}]}, "messages.1.name", "not supported"),
        ({"messages": [{"role": "narrator", "content": "It was dark."}]}, "messages.0", "drops the text"),
        ({"n": 2}, "n", "should be 1"),
        ({"logprobs": True}, "logprobs", "should be False"),
        ({"top_logprobs": 3}, "top_logprobs", "less than or equal to 0"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "should be 'text'"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 items"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "less than or equal to 0"),
        ({"presence_penalty": 0.5}, "presence_penalty", "less than or equal to 0"),
        ({"tools": TOOLS}, "tools", "ignores `tools`"),
        ({"tool_choice": "required"}, "tool_choice", "should be 'auto' or 'none'"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"extra_body": {"top_k": 3}}, "top_k", "not supported"),
        ({"extra_body": {"generation_config": "{}"}}, "generation_config", "not supported"),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            "chat_template_kwargs",
            "does not use `tokenize`",
        ),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "vocabulary of 128"),
        ({"max_tokens": CONTEXT}, "messages", f"maximum context length is {CONTEXT} tokens"),
        (
            {"messages": [{"role": "user", "content": "7" * 50_000}]},
            "messages",
            f"maximum context length is {CONTEXT} tokens",
        ),
    ],
)
def test_unsupported_parameters_are_refused(
    running: Running, given: dict[str, Any], param: str | None, part: str
) -> None:
    before = running.forwards
    status, error = running.refusal(**given)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert part in error["message"]
    assert running.forwards == before


def test_only_the_served_model_answers(running: Running, folder: Path) -> None:
    status, error = running.refusal(model=str(folder.parent))
    assert (status, error["code"]) == (404, "model_not_found")
    assert [model.id for model in running.client.models.list()] == [running.name]
    assert running.client.models.retrieve(running.name).id == running.name
    assert running.client.models.retrieve(running.chat().model).id == running.name
    assert {piece.model for piece in running.chat(stream=True)} == {running.name}
    with pytest.raises(NotFoundError, match="this server serves"):
        running.client.models.retrieve("other/model")
    for path in ("/load_model", "/reset", "/v1/responses"):
        with pytest.raises(APIStatusError) as refused:
            running.client.post(f"http://127.0.0.1:{running.port}{path}", body={"model": str(folder)}, cast_to=object)
        assert refused.value.status_code == 404
        assert path in refused.value.message


def test_neutral_values_and_echoed_answers_are_accepted(running: Running) -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "stop": [],
        "user": "me",
        "tool_choice": "auto",
    }
    first = running.chat(**neutral).choices[0].message
    again = running.chat(
        messages=[*USER, first.model_dump(), {"role": "user", "content": [{"type": "text", "text": "1970-01-01"}]}]
    )
    assert again.usage.completion_tokens <= 2
    pieces = list(running.chat(stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage.completion_tokens == 2


def _cut(text: str, stops: list[str]) -> str:
    """`text` before the stop text that is complete first when it is read letter by letter."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


def test_an_answer_ends_before_a_stop_text(running: Running) -> None:
    """Also where the text spans several tokens, or ends within one."""
    drawn = {"temperature": 3, "seed": 3, "max_tokens": 60, "logit_bias": _endless(running)["logit_bias"]}
    whole = running.chat(**drawn).choices[0].message.content
    cases: list[str | list[str]] = [whole[20:27], whole[9], whole[-3:], whole[:1], "not in it"]
    cases += [[whole[30:33], whole[12:40], "not in it", whole[33:]], [whole[25:31], whole[27:29]]]
    for stop in cases:
        expected = _cut(whole, [stop] if isinstance(stop, str) else stop)
        answer = running.chat(**drawn, stop=stop)
        pieces = list(running.chat(**drawn, stop=stop, stream=True))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert (answer.choices[0].message.content, text) == (expected, expected), stop
        reasons = answer.choices[0].finish_reason, pieces[-1].choices[0].finish_reason
        assert reasons == (("length",) * 2 if stop == "not in it" else ("stop",) * 2), stop
        assert pieces[-1].usage == answer.usage
        assert answer.usage.completion_tokens <= 60 - (expected == "")
    plain = {"model": running.name, "prompt": "1969", "max_tokens": 30, "temperature": 3, "seed": 3}
    whole = running.client.completions.create(**plain).choices[0].text
    expected = _cut(whole, [whole[2:4]])
    assert running.client.completions.create(**plain, stop=whole[2:4]).choices[0].text == expected
    pieces = list(running.client.completions.create(**plain, stop=whole[2:4], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def _bytes_tokenizer() -> Tokenizer:
    """Bytes that begin and continue characters in UTF-8, digits and letters."""
    names = [f"<0x{number:02X}>" for number in (*range(0x80, 0xA0), *range(0xD8, 0xF8))]
    names += ["<|bos|>", "<|eos|>", *(chr(ord("!") + number) for number in range(50))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    return tokenizer


def test_broken_bytes_are_streamed(folder: Path, tmp_path: Path) -> None:
    """A later byte can make bytes invalid that were a character, for which tokenizers raises an error."""
    shutil.copytree(folder, tmp_path / "bytes")
    _bytes_tokenizer().save(str(tmp_path / "bytes" / "tokenizer.json"))
    server = Running(tmp_path / "bytes")
    for seed in range(5):
        drawn = {"model": server.name, "prompt": "1969", "temperature": 5, "seed": seed, "max_tokens": 40}
        whole = server.client.completions.create(**drawn).choices[0].text
        pieces = list(server.client.completions.create(**drawn, stream=True))
        assert "\ufffd" in whole
        assert pieces[-1].choices[0].finish_reason in ("stop", "length")
        text = "".join(piece.choices[0].text for piece in pieces)
        assert [letter for letter in text if letter < "~"] == [letter for letter in whole if letter < "~"]
    server.close()


def test_an_error_in_a_stream_is_json(running: Running) -> None:
    text = 'a "quoted" text,\nof two lines'

    def fail(*_: Any) -> None:
        raise RuntimeError(text)

    hook = running.served.model.register_forward_pre_hook(fail)
    with pytest.raises(APIError) as broken:
        list(running.chat(stream=True))
    hook.remove()
    assert text in str(broken.value.body)


def _stream(running: Running, path: str, **given: Any) -> list[str]:
    """The lines of a streamed answer as they are sent."""
    body = json.dumps({"model": running.name, "max_tokens": 2, "stream": True} | given).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{running.port}/v1/{path}", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return [line for line in answer.read().decode().splitlines() if line]


@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", {"messages": USER}), ("completions", {"prompt": "1"})]
)
def test_a_stream_ends_with_the_protocol_s_mark(running: Running, path: str, prompt: dict[str, Any]) -> None:
    lines = _stream(running, path, **prompt)
    assert lines.count("data: [DONE]") == 1
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_tool_call_that_max_tokens_cuts_is_returned_as_text(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt opens the call, so that the first tokens of the answer are an incomplete one."""
    call = {"open": "<|assistant|>", "close": "</tool_call>", "repeats": True, "content": "json"}
    fields = {"tool_calls": call, "content": {"content": "text"}}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "<|user|>", "fields": fields}
    whole = running.chat().choices[0].message.content
    monkeypatch.setattr(running.served.tokenizer, "response_template", template, raising=False)
    answer = running.chat().choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (whole, None, "length")


@pytest.mark.parametrize(
    ("body", "said"), [("for b in range(99999)", "computes for more than 0.2 s"), ("if 9**9", "uses `**`")]
)
def test_a_template_that_computes_without_an_end_is_refused(
    body: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread, where the server renders: here without a server, whose thread would be another."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    served = serving.ServedModel(folder, "cpu")
    kind = body.partition(" ")[0]
    loop = "{% for a in range(99999) %}{% " + body + " %}{% end" + kind + " %}{% endfor %}"
    served.tokenizer.chat_template = (
        "{{ messages[0].content }}{% if messages[0].content == 'loop' %}" + loop + "{% endif %}"
    )
    requests = [ChatRequest(model="m", messages=[{"role": "user", "content": text}]) for text in ("other", "loop")]
    assert said == "uses `**`" or served.prompt_text(requests[0]) == "other"
    with pytest.raises(RequestError, match=re.escape(said)):
        served.prompt_text(requests[1])


def test_a_prompt_is_tokenised_in_its_turn(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, and of one that is much too long only the beginning."""
    active, most, sizes = [0], [0], []
    plain_count, plain_tokenizer = running.served.prompt_tokens, running.served.tokenizer

    def count(*given: Any, **named: Any) -> int:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.1)
        tokens = plain_count(*given, **named)
        active[0] -= 1
        return tokens

    monkeypatch.setattr(running.served, "prompt_tokens", count)
    with ThreadPoolExecutor(QUEUE) as pool:
        list(pool.map(lambda _: running.chat(), range(QUEUE)))
    assert most == [1]

    def tokenise(text: str, **given: Any) -> Any:
        sizes.append(len(text))
        return plain_tokenizer(text, **given)

    class Counting:
        chat_template = plain_tokenizer.chat_template
        apply_chat_template = staticmethod(plain_tokenizer.apply_chat_template)
        __call__ = staticmethod(tokenise)

    monkeypatch.setattr(running.served, "tokenizer", Counting())
    status, error = running.refusal(messages=[{"role": "user", "content": "7" * 1_000_000}])
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert sum(sizes) < 200_000


def test_a_client_that_goes_while_it_sends_is_no_error(running: Running) -> None:
    """uvicorn would log a traceback."""
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(running.app(scope, receive, send))
    assert sent == []


def test_requests_need_the_api_key(folder: Path) -> None:
    server = Running(folder, api_key="secret")
    with pytest.raises(AuthenticationError, match="API key"):
        server.chat()
    with pytest.raises(AuthenticationError, match="API key"):
        server.client.models.list()
    assert server.client.with_options(api_key="secret").models.retrieve(server.name).id == server.name
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health") as healthy:
        assert healthy.status == 200
    server.close()


def test_an_answer_has_the_tokens_that_the_context_leaves(running: Running) -> None:
    prompt = "7" * (CONTEXT - 40)
    given = {key: value for key, value in _endless(running).items() if key != "max_tokens"}
    used = running.client.chat.completions.create(
        model=running.name, messages=[{"role": "user", "content": prompt}], **given
    ).usage
    assert used.prompt_tokens < used.total_tokens == CONTEXT


def test_a_request_draws_where_the_folder_is_greedy(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "greedy")
    (tmp_path / "greedy" / "generation_config.json").write_text('{"do_sample": false}')
    server = Running(tmp_path / "greedy")
    given = {key: value for key, value in _endless(server).items() if key == "logit_bias"} | {"max_tokens": 12}
    likeliest = server.chat(**given).choices[0].message.content
    assert {server.chat(temperature=None, seed=seed, **given).choices[0].message.content for seed in range(2)} == {
        likeliest
    }
    assert likeliest not in {
        server.chat(temperature=5, seed=seed, **given).choices[0].message.content for seed in range(2)
    }
    server.close()


def test_plain_completions_are_checked_too(running: Running) -> None:
    ask = running.client.completions.create
    assert ask(model=running.name, prompt="1969", max_tokens=2).choices[0].text is not None
    for given in (
        {"prompt": ""},
        {"prompt": ["a", "b"]},
        {"logprobs": 1},
        {"echo": True},
        {"suffix": "x"},
        {"logit_bias": {"1": 1}},
    ):
        with pytest.raises(APIStatusError) as refused:
            ask(**{"model": running.name, "prompt": "1969", "max_tokens": 2} | given)
        assert refused.value.status_code == 400


def test_a_body_that_is_no_request(running: Running) -> None:
    halves = json.dumps(
        {"model": running.name, "messages": [{"role": "user", "content": "hi"}], "tools": [{"x": "\ud800"}]}
    ).encode()
    for content, status in (
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 100_000, 400),
        (halves, 400),
        (b" " * (2**20 + 64 * CONTEXT + 1), 413),
    ):
        with pytest.raises(APIStatusError) as refused:
            running.client.post("/chat/completions", content=content, cast_to=object)
        assert (refused.value.status_code, refused.value.type) == (status, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_stops_its_answer(running: Running, stream: bool) -> None:
    body = json.dumps({"model": running.name, "messages": USER, "stream": stream, **_endless(running)}).encode()
    before = running.forwards
    with socket.create_connection(("127.0.0.1", running.port)) as leaving:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        leaving.sendall(head.encode() + body)
        while running.forwards < before + 5:
            time.sleep(0.01)
    running.chat()
    assert running.forwards - before < CONTEXT // 2


def test_an_answer_ends_with_its_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.app.state.queue, "_limits", QueueLimits(QUEUE, request_seconds=2.0))
    status, error = running.refusal(**_endless(running))
    assert (status, error["code"], error["type"]) == (504, "request_timeout", "server_error")
    assert error["message"] == "the request took more than --request-seconds 2"
    with pytest.raises(APIError, match="stream") as cut:
        list(running.chat(stream=True, **_endless(running)))
    assert "--request-seconds 2" in str(cut.value.body)
    monkeypatch.undo()
    running.chat()


def test_a_prompt_is_stopped_between_layers() -> None:
    class Layer(nn.Module):
        def forward(self, x: int) -> int:
            done.append(x)
            time.sleep(0.02)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(200))

        def forward(self, x: int) -> int:
            for layer in self.layers:
                x = layer(x)
            return x

    done: list[int] = []
    model = Model()
    stopper = GenerationStopper(model)
    threading.Timer(0.1, stopper.stop, ["enough"]).start()
    with pytest.raises(GenerationStoppedError, match="enough"):
        model(1)
    assert 0 < len(done) < 100
    stopper.clear()
    assert model.layers[0](2) == 2


def _queue(limits: QueueLimits, stopped: list[str]) -> RequestQueue:
    stopper = GenerationStopper(nn.Linear(1, 1))
    plain = stopper.stop
    stopper.stop = lambda reason: (stopped.append(reason), plain(reason))[0]  # type: ignore[method-assign, assignment]
    return RequestQueue(limits, stopper, lambda: asyncio.sleep(0))


def _never() -> Coroutine[Any, Any, None]:
    return asyncio.Event().wait()  # type: ignore[return-value]


def test_a_full_queue_refuses_and_keeps_its_order() -> None:
    answered: list[int] = []

    def work(number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        async def answer() -> None:
            await asyncio.sleep(0.05)
            answered.append(number)

        return answer

    async def all_at_once() -> list[Any]:
        queue = _queue(QueueLimits(queue=2, request_seconds=60), [])
        return await asyncio.gather(*(queue.run(work(number), _never) for number in range(5)), return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert answered == [0, 1, 2]
    assert [error.status for error in found if isinstance(error, RequestError)] == [429, 429]
    assert "2 requests wait, and --queue is 2" in str(found[-1])


def test_who_waits_too_long_or_goes_leaves_the_queue() -> None:
    stopped: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.3)

    async def both() -> list[Any]:
        queue = _queue(QueueLimits(queue=4, request_seconds=0.1), stopped)
        first = asyncio.create_task(queue.run(slow, _never))
        await asyncio.sleep(0)
        others = [queue.run(slow, _never), queue.run(slow, lambda: asyncio.sleep(0.05))]
        return await asyncio.gather(first, *others, return_exceptions=True)

    first, late, gone = asyncio.run(both())
    assert (first, gone) == (None, None)
    assert isinstance(late, RequestError)
    assert late.status == 504
    assert len(stopped) == 1


def test_a_closed_queue_refuses_and_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_CLOSING_SECONDS", 0.05)
    stopped = asyncio.Event()

    async def work() -> None:
        await stopped.wait()
        raise GenerationStoppedError("stopped")

    async def all_of_them() -> list[Any]:
        reasons: list[str] = []
        queue = _queue(QueueLimits(queue=4, request_seconds=60), reasons)
        stop = queue._stopper.stop
        queue._stopper.stop = lambda reason: (stop(reason), stopped.set())[0]  # type: ignore[method-assign]
        requests = [asyncio.create_task(queue.run(work, _never)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not queue.is_idle
        queue.close()
        queue.close()
        refused = await asyncio.gather(*requests, queue.run(work, _never), return_exceptions=True)
        assert reasons == ["the server is stopping"]
        assert queue.is_idle
        return refused

    refused = asyncio.run(all_of_them())
    assert [(error.status, error.error["code"]) for error in refused] == [(503, "server_stopping")] * 3
