"""One way of asking for tokens, whatever serves them: an engine in this process, in another one, or an HTTP server."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

import httpx
from servers import messages

from vllm_neuron_cache.demo.media import load_photograph
from vllm_neuron_cache.demo.requests import Media, MediaRequest, engine_prompt

MAX_TOKENS = 6
TOKENS_OF_ONE_WHO_LEAVES = 400
"""So many that the answer is not complete before its client has gone away."""


class Ask(NamedTuple):
    """A question about photographs."""

    text: str
    images: tuple[str, ...] = ()
    after: str = ""


class Answer(NamedTuple):
    """Tokens, or the class and message of what went wrong; neither for a request that was aborted."""

    tokens: tuple[int, ...] | None = None
    error: str | None = None
    message: str = ""


class EngineService:
    """An `OfflineEngine`, stepped by hand so that something can happen in between."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.sees_prompts = hasattr(engine.llm.llm_engine.engine_core, "engine_core")
        """Whether the engine is in this process, where one can look into it."""
        self._llm_engine = engine.llm.llm_engine
        self._number = 0

    def ask(
        self, asks: Sequence[Ask], *, event: Callable[[list[str]], None] | None = None, phase: str = "queued"
    ) -> list[Answer]:
        """Answers to all, asked at once. `event` gets their ids and is called once: as they are queued, as the second
        of them is in the middle of its prompt, or as it has its first token."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        ids = []
        for ask in asks:
            self._number += 1
            ids.append(f"request-{self._number}")
            media = Media(images={name: load_photograph(name) for name in ask.images})
            prompt = engine_prompt(MediaRequest(before=ask.text, images=ask.images, after=ask.after), media)
            self._llm_engine.add_request(ids[-1], prompt, sampling)
        answers = dict.fromkeys(ids, Answer())
        begun = False
        while True:
            if event is not None and (phase == "queued" or (phase == "prompt" and self._in_prompt(ids[1])) or begun):
                happening, event = event, None
                happening(ids)
            if not self._llm_engine.has_unfinished_requests():
                break
            for output in self._llm_engine.step():
                begun = begun or (
                    phase == "tokens" and output.request_id == ids[1] and bool(output.outputs[0].token_ids)
                )
                if output.finished:
                    answers[output.request_id] = self._answer(output.outputs[0])
        assert event is None, f"phase {phase!r} was never seen"
        return [answers[request_id] for request_id in ids]

    def _in_prompt(self, request_id: str) -> bool:
        requests = self.engine.scheduler.requests.values()
        own = [request for request in requests if request.request_id.startswith(f"{request_id}-")]
        return bool(own) and 0 < own[0].num_computed_tokens < own[0].num_prompt_tokens

    @staticmethod
    def _answer(output: Any) -> Answer:
        from vllm_neuron_cache.errors import request_error

        if output.finish_reason != "error":
            return Answer(tokens=tuple(output.token_ids))
        error = request_error(output.stop_reason)
        return Answer(error=type(error).__name__, message=str(error))

    def abort(self, ids: list[str]) -> None:
        self._llm_engine.abort_request([ids[1]])

    def rpc(self, method: str, *args: Any) -> None:
        self.engine.llm.collective_rpc(method, args=args)

    def reset_encoder_cache(self) -> None:
        self._llm_engine.reset_encoder_cache()

    def reset_prefix_cache(self, *, running: bool = False) -> None:
        self._llm_engine.reset_prefix_cache(running)

    def fresh(self) -> None:
        """As after the start: no faults, nothing cached."""
        self.rpc("remove_faults")
        self.reset_encoder_cache()
        self.reset_prefix_cache()


class HttpService:
    """An OpenAI server with its development endpoints."""

    sees_prompts = False

    def __init__(self, address: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=120, trust_env=False)
        self._victim_has_tokens = Event()
        self._leave = Event()

    def ask(
        self,
        asks: Sequence[Ask],
        *,
        stream: bool = False,
        event: Callable[[list[str]], None] | None = None,
        phase: str = "queued",
    ) -> list[Answer]:
        """Answers to all, asked at once. `event` is called when they have been sent, or when the second of them streams
        its first token."""
        self._victim_has_tokens.clear()
        self._leave.clear()
        streamed = stream or phase == "tokens"
        bodies = [self.body(ask) for ask in asks]
        if event == self.abort:
            bodies[1]["max_tokens"] = TOKENS_OF_ONE_WHO_LEAVES
        with ThreadPoolExecutor(len(asks)) as pool:
            answers = [
                pool.submit(self._ask_streaming if streamed or (event and index == 1) else self._ask, body, index == 1)
                for index, body in enumerate(bodies)
            ]
            if event is not None:
                if phase == "tokens":
                    assert self._victim_has_tokens.wait(60)
                event([])
            return [answer.result() for answer in answers]

    def close(self) -> None:
        self.client.close()

    def abort(self, ids: list[str]) -> None:
        """The client of the second request goes away."""
        self._leave.set()

    def body(self, ask: Ask, **more: Any) -> dict:
        return {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "messages": messages([load_photograph(name) for name in ask.images], ask.text),
        } | more

    def _ask(self, body: dict, is_victim: bool) -> Answer:
        response = self.client.post("/v1/chat/completions", json=body)
        answer = response.json()
        if response.status_code == 200:
            return Answer(tokens=tuple(answer["choices"][0]["token_ids"]))
        assert response.status_code == 500, response.text
        assert answer["error"]["code"] == 500
        return Answer(error=answer["error"]["type"], message=answer["error"]["message"])

    def _ask_streaming(self, body: dict, is_victim: bool) -> Answer:
        answer = Answer(tokens=())
        with self.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if is_victim and self._leave.is_set():
                    return Answer()
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    answer = Answer(error=chunk["error"]["type"], message=chunk["error"]["message"])
                elif chunk["choices"] and chunk["choices"][0].get("token_ids"):
                    answer = Answer(tokens=(*answer.tokens, *chunk["choices"][0]["token_ids"]))
                    if is_victim:
                        self._victim_has_tokens.set()
        assert line in ("", "data: [DONE]"), line
        return answer

    def rpc(self, method: str, *args: Any) -> None:
        self._post("/collective_rpc", json={"method": method, "args": list(args)})

    def reset_encoder_cache(self) -> None:
        self._post("/reset_encoder_cache")

    def reset_prefix_cache(self, *, running: bool = False) -> None:
        self._post("/reset_prefix_cache", params={"reset_running_requests": str(running).lower()})

    def fresh(self) -> None:
        """As after the start: no faults, nothing cached."""
        self.rpc("remove_faults")
        self.reset_encoder_cache()
        self.reset_prefix_cache()

    def _post(self, path: str, **arguments: Any) -> None:
        response = self.client.post(path, **arguments)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
