"""A server that speaks the part of vLLM's protocol that rollouts use: `python -m tests.trainer.rollouts.vllm_stand_in FOLDER`.

It prints its port, computes with transformers in fp32, and keeps what it was asked for. POST /stand_in sets its faults,
and GET /stand_in returns the log of its requests.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

DEV_ROUTES = {"/weight_info", "/is_paused", "/server_info", "/pause", "/resume", "/collective_rpc"} | {
    "/reset_prefix_cache",
    "/update_weight_version",
    "/abort_requests",
}


class StandIn:
    """The model, its version, and what is wrong with the server, such as `{"not_dev": True}`."""

    def __init__(self, folder: str) -> None:
        self.folder, self.model = folder, _load(folder)
        self.version = "default"
        self.is_running = threading.Event()
        self.is_running.set()
        self.lock = threading.Lock()
        self.log: list[str] = []
        self.faults: dict[str, Any] = {}
        self.asked = self.under_way = 0
        """Requests for answers since the start, and those that are not answered yet."""
        self.is_released = threading.Event()
        """Set when those that are held are to be answered."""

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        """The JSON of an answer; KeyError for a route that the server does not have."""
        if route in DEV_ROUTES and self.faults.get("not_dev"):
            raise KeyError(route)
        return getattr(self, "on_" + route.strip("/").replace("/", "_").replace(".", "_"))(body)

    def on_stand_in(self, body: dict[str, Any]) -> Any:
        if body.get("restart"):
            self.model, self.version, self.log, self.asked = _load(body["restart"]), "default", [], 0
            self.is_running.set()
            self.is_released.clear()
        if body.get("release"):
            self.is_released.set()
        self.faults = body.get("faults", self.faults)
        return self.log

    def on_health(self, _: object) -> Any:
        return {}

    def on_v1_models(self, _: object) -> Any:
        limit = self.faults.get("max_model_len", 32)
        return {"data": [{"id": "tiny", "root": self.folder, "max_model_len": limit}]}

    def on_server_info(self, _: object) -> Any:
        return {"vllm_config": {"model_config": {"dtype": "torch.float32"}}}

    def on_weight_info(self, _: object) -> Any:
        return {"weight_version": self.version}

    def on_is_paused(self, _: object) -> Any:
        return {"is_paused": not self.is_running.is_set()}

    def on_pause(self, _: object) -> Any:
        # It would end them.
        assert not self.under_way, self.under_way
        self.log.append("pause")
        self.is_running.clear()
        return {"status": "paused"}

    def on_resume(self, _: object) -> Any:
        self.log.append("resume")
        self.is_running.set()
        return {"status": "resumed"}

    def on_abort_requests(self, _: object) -> Any:
        return {"status": "aborted"}

    def on_collective_rpc(self, body: dict[str, Any]) -> Any:
        assert body["method"] == "reload_weights"
        assert not self.is_running.is_set()
        folder = body["kwargs"]["weights_path"]
        self.log.append(f"load {folder}")
        if self._is_due("stale", folder):
            return {"results": [None]}
        self.model = _load(folder)
        if self._is_due("garbage", folder):
            with torch.no_grad():
                self.model.get_output_embeddings().weight[::2] = 0
        return {"results": [None]}

    def on_reset_prefix_cache(self, _: object) -> Any:
        self.log.append("reset cache")
        return {"success": not self.faults.get("keeps_cache")}

    def on_update_weight_version(self, body: dict[str, Any]) -> Any:
        self.log.append(f"version {body['new_version']}")
        if not self._is_due("version", body["new_version"]):
            self.version = body["new_version"]
        return {"success": True}

    def on_v1_completions(self, body: dict[str, Any]) -> Any:
        self.is_running.wait(60)
        if self._is_due("dies", self.version) and body.get("n"):
            os._exit(1)
        with self.lock:
            if "prompt_logprobs" in body:
                return {"choices": [{"index": 0, "prompt_logprobs": self._prompt_log_probs(body["prompt"])}]}
            self.asked, self.under_way = self.asked + 1, self.under_way + 1
            is_held = self.asked > self.faults.get("holds_after", self.asked)
        if is_held:
            self.is_released.wait()
        with self.lock:
            self.under_way -= 1
            self.log.append(f"prompt {body['prompt']} seed {body['seed']} by {self.version}")
            choices = [self._choice(body, index) for index in range(body["n"])]
        return {"choices": [{}] if self.faults.get("other_form") else choices}

    def _is_due(self, fault: str, what: str) -> bool:
        """Whether a fault is on, from the step on that is its value."""
        return fault in self.faults and int(what.rstrip("/").rpartition("-")[2]) >= self.faults[fault]

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids]), use_cache=False).logits[0].float()

    def _prompt_log_probs(self, ids: list[int]) -> list[Any]:
        log_probs = self._logits(ids).log_softmax(-1)
        return [None, *({str(ids[at]): {"logprob": float(log_probs[at - 1, ids[at]])}} for at in range(1, len(ids)))]

    def _choice(self, body: dict[str, Any], index: int) -> Any:
        draw = torch.Generator().manual_seed(body["seed"] + index)
        ids, log_probs, finish = list[int](), list[float](), "length"
        while len(ids) < body["max_tokens"] and finish == "length":
            logits = self._logits([*body["prompt"], *ids])[-1]
            for forbidden, bias in body["logit_bias"].items():
                logits[int(forbidden)] += bias
            spread = logits.log_softmax(-1)
            token = int(torch.multinomial(spread.exp(), 1, generator=draw) if body["temperature"] else spread.argmax())
            ids.append(token)
            log_probs.append(float(spread[token]))
            finish = "stop" if token in body["stop_token_ids"] else "length"
        return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": log_probs}, "finish_reason": finish}


def _load(folder: str) -> PreTrainedModel:
    # Read whole, since the folder is removed.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return model.eval()


def handler_of(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    """What answers requests over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            try:
                status, content = 200, stand_in.answer(self.path.partition("?")[0], body)
            except (KeyError, AttributeError):
                status, content = 404, {"detail": "Not Found"}
            except Exception as wrong:  # noqa: BLE001 - as vLLM's frontend does
                status, content = 500, {"error": repr(wrong)}
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            return

    return Handler


class Server(ThreadingHTTPServer):
    """As uvicorn, it lets many connections wait."""

    request_queue_size = 1024
    daemon_threads = True


def main() -> None:
    """Serve until the process that has started this one ends it."""
    torch.set_num_threads(1)
    server = Server(("127.0.0.1", 0), handler_of(StandIn(str(Path(sys.argv[1])))))
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
