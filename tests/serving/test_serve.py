"""An endpoint over an exported folder, used with the official client; and a chat in the terminal."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ds_finetune.cli.main import main
from ds_finetune.errors import ExportError, ServeError
from ds_finetune.serving.in_process import ChatSession, ask, run_chat
from ds_finetune.serving.serve import Address, ServeOptions, _start_server, choose_engine, server_command
from tests.conftest import ROOT
from tests.running import start, tiny_task

NEW_TOKENS = 6
TURNS = ("1969-07-20", "and now?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder: random weights, tokenizer and chat template of the demo."""
    place = tmp_path_factory.mktemp("serve")
    tiny_task(place)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / "model")).float()
    model.get_output_embeddings().weight.data.mul_(8.0)
    shutil.copytree(place / "model", place / "out")
    model.save_pretrained(place / "out")
    return place / "out"


def _plain_answer(folder: Path, messages: list[dict[str, str]], *, seed: int | None = None, **settings: Any) -> str:
    """Greedy, or drawn with a seed."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed or 0)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=seed is not None, max_new_tokens=NEW_TOKENS, **settings
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _plain_completion(folder: Path, text: str) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serving() -> None:
    for name in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install 'ds_finetune[serve]')")


@pytest.fixture(scope="module")
def onnx_folder(folder: Path) -> Path:
    """The same model for ONNX Runtime."""
    for name in ("onnx", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install 'ds_finetune[onnx]')")
    assert main(["export", str(folder), str(folder.parent / "onnx"), "--format", "onnx"]) == 0
    return folder.parent / "onnx"


@pytest.fixture(scope="module", params=["transformers", "onnx"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(engine: str, request: pytest.FixtureRequest) -> Path:
    """The folder that an engine serves."""
    return Path(request.getfixturevalue("onnx_folder" if engine == "onnx" else "folder"))


@pytest.fixture(scope="module")
def server(engine: str, served: Path) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """`ds-finetune serve` by an engine, which `auto` chooses, ready; its port and process."""
    _serving()
    port = _free_port()
    (served / "UNVERIFIED").write_text("not checked yet\n")
    command = [sys.executable, "-m", "ds_finetune", "serve", str(served), "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(("ready: ", "error: ")):
            break
    assert lines[-1] == f"ready: http://127.0.0.1:{port}/v1, model `{served}`, by {engine}; Ctrl-C ends it\n", "".join(
        lines
    )
    assert any(line == f"{served} is UNVERIFIED: not checked yet\n" for line in lines)
    wanted = f"--engine {engine} answers one request at a time: 16 more may wait, each for 600 s at most; for more traffic install vLLM"
    assert any(line.startswith(wanted) for line in lines)
    yield port, process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _client(port: int) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, max_retries=0)


def test_the_official_client_gets_the_plain_answer(server: tuple[int, Any], folder: Path, served: Path) -> None:
    messages = [{"role": "user", "content": TURNS[0]}]
    wanted = _plain_answer(folder, messages)
    client = _client(server[0])
    asked = {"model": str(served), "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0}
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted
    pieces = [
        part.choices[0].delta.content or ""
        for part in client.chat.completions.create(**asked, stream=True)
        if part.choices
    ]
    assert "".join(pieces) == wanted
    assert len([piece for piece in pieces if piece]) > 1
    assert [model.id for model in client.models.list()] == [str(served)]
    prompt = {"model": str(served), "prompt": TURNS[0], "max_tokens": NEW_TOKENS}
    assert client.completions.create(**prompt, temperature=0).choices[0].text == _plain_completion(folder, TURNS[0])


def test_an_answer_is_drawn_as_the_request_says(server: tuple[int, Any], folder: Path, served: Path) -> None:
    """As plain transformers draws it from the whole vocabulary with the same seed; a mass of nearly nothing leaves the
    likeliest token.
    """
    client = _client(server[0])
    asked = {"model": str(served), "messages": [{"role": "user", "content": TURNS[0]}], "max_tokens": NEW_TOKENS}

    def answer(**settings: Any) -> str:
        return str(client.chat.completions.create(**asked, **settings).choices[0].message.content)

    wanted = [
        _plain_answer(folder, asked["messages"], seed=seed, temperature=3.0, top_p=0.9, top_k=0) for seed in (1, 2)
    ]
    assert [answer(temperature=3.0, top_p=0.9, seed=seed) for seed in (1, 2)] == wanted
    assert answer(seed=1) == _plain_answer(folder, asked["messages"], seed=1, top_k=0)
    assert wanted[0] != wanted[1] != answer(temperature=0) == answer(temperature=3.0, top_p=1e-6)


def test_many_ask_at_once(server: tuple[int, Any], folder: Path, served: Path) -> None:
    questions = [f"{year}-07-20" for year in range(1960, 1966)]
    asked = {"model": str(served), "max_tokens": NEW_TOKENS, "temperature": 0}
    client = _client(server[0])
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(
            pool.map(
                lambda q: client.chat.completions.create(**asked, messages=[{"role": "user", "content": q}]), questions
            )
        )
    wanted = [_plain_answer(folder, [{"role": "user", "content": question}]) for question in questions]
    assert [answer.choices[0].message.content for answer in answers] == wanted


def test_what_cannot_be_answered_is_refused(server: tuple[int, Any], served: Path) -> None:
    """Each refusal is tested in tests/serving/test_http_app.py."""
    from openai import APIStatusError

    client = _client(server[0])
    asked = {"model": str(served), "messages": [{"role": "user", "content": TURNS[0]}]}
    for wrong, status in (
        ({"max_tokens": 0}, 400),
        ({"n": 2}, 400),
        ({"messages": []}, 400),
        ({"model": "other"}, 404),
    ):
        with pytest.raises(APIStatusError) as refused:
            client.chat.completions.create(**asked | wrong)
        assert refused.value.status_code == status
    asked["messages"][0]["content"] = "1" * 400_000
    with pytest.raises(APIStatusError, match="maximum context length is"):
        client.chat.completions.create(**asked)


def test_only_this_machine_is_served(server: tuple[int, Any]) -> None:
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert [place.split(":")[0] for place in listening if int(place.split(":")[1], 16) == server[0]] == ["0100007F"]


def test_the_name_of_another_server_is_refused(server: tuple[int, Any]) -> None:
    """As a page of another site sends it once its name resolves to this machine."""
    for name, code in (("evil.example", 421), (f"localhost:{server[0]}", 200)):
        connection = http.client.HTTPConnection("127.0.0.1", server[0], timeout=60)
        connection.request("GET", "/v1/models", headers={"Host": name})
        assert connection.getresponse().status == code
        connection.close()


def test_a_taken_port_is_refused(server: tuple[int, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--engine", "transformers", "--port", str(server[0])]) == 2
    assert f"cannot listen on 127.0.0.1 port {server[0]}" in capsys.readouterr().err


def _status(pid: int) -> list[str]:
    """State, parent and so on of a process as /proc gives them; empty if it has ended, which it may do at any time."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _descendants(pid: int) -> list[int]:
    statuses = {int(path.name): _status(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    descendants = [pid]
    for ancestor in descendants:
        descendants += [number for number, status in statuses.items() if status[1:2] == [str(ancestor)]]
    return descendants[1:]


def _await_end(pids: list[int]) -> None:
    """Wait until each process has ended; it may be a zombie for which its new parent has not waited yet."""
    until = time.monotonic() + 60
    while running := [pid for pid in pids if _status(pid)[:1] not in ([], ["Z"])]:
        assert time.monotonic() < until, running
        time.sleep(0.05)


def test_a_signal_ends_it_and_leaves_nothing(server: tuple[int, "subprocess.Popen[str]"], served: Path) -> None:
    """Last of the tests that need the server: the requests that wait are refused, with no traceback."""
    from openai import APIError, APIStatusError

    port, process = server
    children = _descendants(process.pid)
    assert children
    client, begun = _client(port), threading.Event()
    ends = {str(AutoTokenizer.from_pretrained(served).eos_token_id): -100}
    asked = {"model": str(served), "messages": [{"role": "user", "content": TURNS[0]}], "logit_bias": ends}

    def ask(number: int) -> int:
        try:
            for _ in client.chat.completions.create(**asked, max_tokens=400, stream=True):
                begun.set()
        except APIStatusError as refused:
            return refused.status_code
        except APIError as cut:
            return 200 if "the server is stopping" in str(cut.body) else 500
        return 200

    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(ask, range(12))
        assert begun.wait(60)
        process.send_signal(signal.SIGTERM)
        assert {200, 503} == set(answers)
    assert process.stdout is not None
    output = process.stdout.read()
    assert output.endswith("stopped\n")
    assert "Traceback" not in output
    assert process.wait(60) == 0
    _await_end(children)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port))


def test_a_forward_of_onnx_runtime_is_stopped(onnx_folder: Path) -> None:
    from ds_finetune.export.onnx.runtime import OnnxCausalLM
    from ds_finetune.serving.generation import GenerationStopper

    model = OnnxCausalLM.from_pretrained(onnx_folder)
    stopper, ids = GenerationStopper(model), torch.ones(1, 8, dtype=torch.int64)
    stopper.stop("enough")
    with pytest.raises(Exception, match="terminate flag"):
        model.forward(ids)
    stopper.clear()
    assert model(ids).logits.shape[:2] == (1, 8)


def test_a_signal_while_the_server_imports_prints_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    imports = "import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)"
    script = f"import os; os.chdir({str(tmp_path)!r}); {imports}"
    with _start_server([sys.executable, "-c", script], str(tmp_path)) as server:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
    assert server.returncode == -signal.SIGTERM
    assert "Traceback" not in capfd.readouterr().err


def test_a_closed_terminal_ends_the_server_too(folder: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "vllm").write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new && mv {pid_file}.new {pid_file}\nexec sleep 600\n"
    )
    (tmp_path / "vllm").chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "ds_finetune", "serve", str(folder), "--engine", "vllm", "--port", str(_free_port())],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        # Under nohup, these tests ignore the signal, and so would their processes.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    while not pid_file.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_a_server_that_ends_by_itself_is_an_error(folder: Path, tmp_path: Path) -> None:
    _serving()
    shutil.copytree(folder, tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor[..., :1].contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    began = time.monotonic()
    done = start(
        [sys.executable, "-m", "ds_finetune", "serve", str(tmp_path / "broken"), "--port", str(_free_port())],
        {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
    )
    assert done.returncode == 2
    assert "the server ended with exit code" in done.stderr
    assert time.monotonic() - began < 120


def test_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--engine", "vllm"]) == 2
    assert "needs the command `vllm`, which is not on the path" in capsys.readouterr().err
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    assert choose_engine("vllm", tmp_path) == "vllm"
    assert main(["serve", str(tmp_path), "--engine", "onnx"]) == 2
    assert "--engine onnx reads onnx folders" in capsys.readouterr().err
    (tmp_path / "model.onnx").write_bytes(b"")
    assert main(["serve", str(tmp_path), "--engine", "vllm"]) == 2
    assert "is one of ONNX" in capsys.readouterr().err
    command = server_command(ServeOptions("vllm"), tmp_path, Address("::", 81))
    assert command == [
        "vllm",
        "serve",
        str(tmp_path),
        "--served-model-name",
        str(tmp_path),
        "--host",
        "::",
        "--port",
        "81",
    ]
    assert Address("::", 81).url == "http://[::1]:81"


def test_limits_of_a_server_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", str(tmp_path), "--engine", "vllm", "--queue", "3"]) == 2
    assert "--queue 3 is not valid with --engine vllm" in capsys.readouterr().err
    assert main(["serve", str(tmp_path), "--engine", "vllm", "--allow-host", "a.example"]) == 2
    assert "--allow-host a.example is not valid with --engine vllm" in capsys.readouterr().err
    _serving()
    assert main(["serve", str(tmp_path), "--engine", "transformers", "--request-seconds", "0"]) == 2
    assert "--request-seconds 0 must be more than 0" in capsys.readouterr().err


def test_a_chat_keeps_earlier_messages(folder: Path, served: Path) -> None:
    command = [sys.executable, "-m", "ds_finetune", "chat", str(served), "--max-new-tokens", str(NEW_TOKENS)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        input="\n".join((*TURNS, "", "exit", "never asked")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    messages: list[dict[str, str]] = []
    answers = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answers.append(_plain_answer(folder, messages))
        messages.append({"role": "assistant", "content": answers[-1]})
    assert answers[0] != answers[1]
    assert done.stdout == f"`exit` ends the chat\n> {answers[0]}\n> {answers[1]}\n> > "


def test_a_chat_leaves_out_what_its_context_does_not_hold(folder: Path) -> None:
    session, printed = ChatSession(folder, max_new_tokens=100), []
    turns = iter(["1" * 220, "2" * 220, "3" * 600, "4" * 500, "exit"])
    run_chat(session, read=lambda: next(turns), write=printed.append)
    notes = [piece for piece in printed if "context" in piece]
    assert notes == [
        "(2 earlier messages left out: the context is 512 tokens)\n",
        "the message has 603 tokens, and the model's context is 512 tokens\n  hint: send a shorter message\n",
        "(2 earlier messages left out: the context is 512 tokens)\n",
    ]
    question, answer = session.messages
    assert question["content"] == "4" * 500
    assert len(session._tokenizer(answer["content"])["input_ids"]) <= 12


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("generation_config.json", "[]", "holds a list, not an object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x', not a token id"),
        ("generation_config.json", '{"max_new_tokens": -1}', "transformers cannot read"),
        ("generation_config.json", '{"max_new_tokens": "x"}', "transformers cannot read"),
        ("generation_config.json", '{"num_beams": 0}', "cannot generate with"),
        ("generation_config.json", '{"bad_words_ids": 5}', "cannot generate with"),
        ("generation_config.json", '{"forced_eos_token_id": 99999}', "cannot generate with"),
        ("chat_template.jinja", "{% if", "does not render the message: unexpected"),
        ("chat_template.jinja", "{{ raise_exception('no user') }}", "does not render the message: no user"),
        ("chat_template.jinja", "{{ nope.x }}", "does not render the message: 'nope' is undefined"),
        ("chat_template.jinja", "hello", "does not render the message: its text is not in the prompt"),
    ],
)
def test_a_damaged_template_or_generation_config_is_named(
    name: str, text: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "export")
    (tmp_path / "export" / name).write_text(text)
    assert main(["ask", str(tmp_path / "export"), "1"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_texts_that_no_model_can_read_are_refused(folder: Path) -> None:
    session, printed = ChatSession(folder, max_new_tokens=4), []
    turns = iter([b"a\xff".decode(errors="surrogateescape"), "1", "exit"])
    run_chat(session, read=lambda: next(turns), write=printed.append)
    assert printed[0].startswith(r"the text 'a\udcff' has bytes that are no characters")
    assert [message["content"] for message in session.messages if message["role"] == "user"] == ["1"]
    for text, message in (("\udcff", "has bytes that are no characters"), ("9" * 600, "context is 512 tokens")):
        with pytest.raises(ExportError, match=message):
            ask(folder, [text])


def test_bytes_of_another_encoding_in_a_chat_print_no_traceback(folder: Path) -> None:
    command = [sys.executable, "-m", "ds_finetune", "chat", str(folder), "--max-new-tokens", "1"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, input=b"\xe6\x97\nexit\n", capture_output=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"has bytes that are no characters" in done.stdout


def test_an_error_while_an_answer_is_generated_ends_the_chat(folder: Path) -> None:
    session = ChatSession(folder, max_new_tokens=4)
    layer = session._model.model.layers[0]
    layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError, match="no memory"):
        list(session.reply("1"))
    assert session.messages == []


def test_a_generation_config_that_transformers_refuses_is_found_before_the_first_question(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "export")
    settings = tmp_path / "export" / "generation_config.json"
    settings.write_text(json.dumps({"do_sample": True, "temperature": 0.0}))
    with pytest.raises(ExportError, match=r"generation_config\.json`: .*temperature"):
        ChatSession(tmp_path / "export", max_new_tokens=4)


@pytest.mark.parametrize(
    ("host", "key", "flags", "ok"),
    [
        ("0.0.0.0", "", [], False),
        ("::", "", [], False),
        ("0.0.0.0", "secret", [], True),
        ("0.0.0.0", "", ["--no-api-key"], True),
        ("localhost", "", [], True),
    ],
)
def test_other_machines_need_an_api_key(
    folder: Path,
    host: str,
    key: str,
    flags: list[str],
    ok: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _serving()
    monkeypatch.setenv("DS_FINETUNE_API_KEY", key)
    started: list[str] = []

    def start_server(command: list[str], cache: str) -> Any:
        started.extend(command)
        raise ServeError("it would start")

    monkeypatch.setattr("ds_finetune.serving.serve._start_server", start_server)
    assert main(["serve", str(folder), "--host", host, "--port", str(_free_port()), *flags]) == 2
    assert bool(started) is ok
    assert ("DS_FINETUNE_API_KEY is not set" in capsys.readouterr().err) is not ok
    assert "secret" not in " ".join(started)


def test_the_image_is_pinned_and_has_no_rights_and_needs_a_key(tmp_path: Path) -> None:
    lines = (ROOT / "docs" / "Dockerfile.serve").read_text().splitlines()
    words = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines if line and line[0] != "#"}
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", words["FROM"])
    assert int(words["USER"]) > 0
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*json.loads(words["ENTRYPOINT"]), "--max-model-len", "64"]
    refused = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "VLLM_API_KEY" in refused.stderr
    done = subprocess.run(command, env=path | {"VLLM_API_KEY": "k"}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("serve /model ")
    assert done.stdout.endswith("--max-model-len 64\n")


def test_a_folder_without_a_template_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    assert main(["chat", str(tmp_path / "plain")]) == 2
    assert "has no chat template" in capsys.readouterr().err
