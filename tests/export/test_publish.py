"""`--push-to-hub` against a server on this machine that answers as the Hugging Face Hub does."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from ds_finetune.cli.main import main
from tests.model.weights.test_weights import published

TOKEN = "hf_" + "secret" * 5


@dataclass
class Hub:
    """A hub with repositories; it refuses objects after `most`."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    most: int = 100


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - one branch for each route
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, tree: Any) -> None:
            body = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_GET(self) -> None:
            hub.tokens.add(str(self.headers.get("Authorization")))
            name = "/".join(self.path.split("/")[3:5])
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" or name not in hub.files:
                return self.answer(401, {"error": "no such repository"})
            if "/tree/" in self.path:
                found = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40} for path in hub.files[name]]
                return self.answer(200, found)
            siblings = [{"rfilename": path} for path in hub.files[name]]
            return self.answer(200, {"id": name, "sha": "0" * 40, "siblings": siblings, "private": hub.private[name]})

        def do_POST(self) -> None:
            text = self.body()
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "who are you"})
            if self.path == "/api/repos/create":
                asked = json.loads(text)
                name = f"{asked['organization']}/{asked['name']}"
                if name in hub.files:
                    return self.answer(
                        409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
                    )
                hub.files[name], hub.private[name] = (
                    {".gitattributes": b""},
                    asked.get("visibility") == "private" or asked.get("private") is True,
                )
                return self.answer(200, {"url": f"{hub.url}/{name}"})
            if "/preupload/" in self.path:
                files = json.loads(text)["files"]
                modes = [
                    {"path": f["path"], "uploadMode": "lfs" if f["size"] > 5000 else "regular", "shouldIgnore": False}
                    for f in files
                ]
                return self.answer(200, {"files": modes})
            if self.path.endswith("/info/lfs/objects/batch"):
                objects = []
                for each in json.loads(text)["objects"]:
                    action = {"upload": {"href": f"{hub.url}/store/{each['oid']}"}}
                    objects.append({**each, **({} if each["oid"] in hub.objects else {"actions": action})})
                return self.answer(200, {"transfer": "basic", "objects": objects})
            name = "/".join(self.path.split("/")[3:5])
            for line in text.splitlines():
                each = json.loads(line)
                value = each["value"]
                if each["key"] == "file":
                    hub.files[name][value["path"]] = base64.b64decode(value["content"])
                elif each["key"] == "lfsFile":
                    hub.files[name][value["path"]] = hub.objects[value["oid"]]
            return self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True})

        def do_PUT(self) -> None:
            content, oid = self.body(), self.path.rpartition("/")[2]
            if len(hub.objects) >= hub.most:
                return self.answer(403, {"error": "the store is closed"})
            assert hashlib.sha256(content).hexdigest() == oid
            hub.objects[oid] = content
            hub.sent.append(oid)
            return self.answer(200, {})

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(made))
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    huggingface_hub.close_session()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()


def test_a_folder_is_pushed_whole_private_and_not_twice(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published("qwen3", tmp_path / "hub")
    out = tmp_path / "out"
    command = [
        "export",
        str(tmp_path / "hub"),
        str(out),
        "--dtype",
        "fp32",
        "--max-shard-size",
        "60KB",
        "--push-to-hub",
    ]
    hub.most = 1
    assert main([*command, "me/model"]) == 2
    told = capsys.readouterr()
    assert (
        f"the push of `me/model` to {hub.url} has failed: 403\n  hint: check HF_TOKEN and the network; to send the missing files: ds-finetune export --check {out}"
        in told.err
    )
    assert hub.files["me/model"].keys() == {".gitattributes"}
    assert hub.private == {"me/model": True}
    hub.most = 100
    first = list(hub.sent)
    assert main(["export", "--check", str(out), "--push-to-hub", "me/model"]) == 0
    told = capsys.readouterr()
    assert f"pushed: {hub.url}/me/model, private" in told.out
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {name: text for name, text in hub.files["me/model"].items() if name != ".gitattributes"} == files
    assert first
    assert len(hub.sent) == len(set(hub.sent))
    assert main(["export", "--check", str(out), "--push-to-hub", "me/model"]) == 2
    said = capsys.readouterr()
    assert "the repository `me/model` exists and has" in said.err
    assert TOKEN not in "".join((*told, *said))


def test_what_cannot_be_pushed_is_one_error(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published("qwen3", tmp_path / "hub")
    command = ["export", str(tmp_path / "hub"), str(tmp_path / "out"), "--no-verify", "--push-to-hub"]
    for name, told in (
        ("model", "names no owner"),
        ("a/b/c", "--push-to-hub a/b/c"),
        ("me/mod el", "--push-to-hub me/mod el"),
    ):
        assert main([*command, name]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert main([*command, "me/model"]) == 2
    assert "is not verified (it has a file UNVERIFIED)\n  hint: verify it" in capsys.readouterr().err
    assert not hub.files
    (tmp_path / "out" / "UNVERIFIED").unlink()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    push = ["export", "--check", str(tmp_path / "out"), "--push-to-hub", "me/model"]
    assert main(push) == 2
    told = capsys.readouterr().err
    assert f"the push of `me/model` to {hub.url} has failed: 401" in told
    assert "hf_wrong" not in told
