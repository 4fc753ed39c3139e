"""A server under random requests, repeats, aborts, faults, refusals and resets. `--soak-minutes 30` is the long form.

Every answer is checked: the tokens that the request has always had, or an error that was planted for one of its items.
"""

import contextlib
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from collecting import CollectGarbage
from engines import PHOTOGRAPHS
from faults import ENCODER_FAULTS, FaultInjector
from PIL import Image
from servers import data_url, serving
from services import Ask, HttpService

pytestmark = pytest.mark.vllm

ROWS = {"astronaut": 256, "chelsea": 126, "hubble": 837}
"""Photographs to which faults happen."""

SMALL_POOL = {"lane": "eager", "encoder_cache_block_size": 64, "encoder_cache_num_blocks_exact": 15}
"""The largest photograph fills it; an image of the largest legal size is refused."""

NUM_CLIENTS = 3
BOUNDED_LIBRARIES = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
}
"""What is not ours to keep small. glibc keeps what was freed in an arena for every few threads: a tenth of what is
resident of vLLM's worker after ten minutes, which `malloc_trim` gives back. oneDNN keeps the code it made for each of
the last 1024 shapes of a product, and the random steps here have many."""

MEMORY_FROM_MINUTES = 10
"""A shorter run says nothing about memory: caches are still filling."""


class Soak:
    """Clients in threads, and one that disturbs them. `problems` collects what must not happen."""

    def __init__(self, address: str, seed: int) -> None:
        self.service = HttpService(address)
        self.random = random.Random(seed)
        self.end = threading.Event()
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._armed: set[str] = set()
        self._known: dict[tuple, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        noise = np.random.default_rng(seed).integers(0, 255, (1600, 1600, 3), dtype=np.uint8)
        self._too_large = data_url(Image.fromarray(noise))

    def client(self, seed: int) -> None:
        choose = random.Random(seed)
        while not self.end.is_set():
            try:
                self._request(choose)
            except Exception as error:  # a thread's exception would be lost
                self.problems.append(f"{type(error).__name__}: {error}")

    def _request(self, choose: random.Random) -> None:
        images = tuple(choose.choices(PHOTOGRAPHS, k=choose.choice((0, 1, 1, 1, 2))))
        ask = Ask(choose.choice(("What is it?", "Describe.", "Once more, in detail.")), images)
        body = self.service.body(ask, **({"cache_salt": salt} if (salt := choose.choice(("", "", "a", "b"))) else {}))
        kind = choose.random()
        if kind < 0.15:
            self._leave_early(body, choose)
            return
        if kind < 0.20:
            self._refused(body)
            return
        response = self.service.client.post("/v1/chat/completions", json=body)
        if response.status_code == 200:
            self._compare((ask, bool(images)), tuple(response.json()["choices"][0]["token_ids"]))
            return
        error = response.json()["error"]
        allowed = error["type"] in ("EncoderOutputError", "EncoderCacheReadError") and self._armed & set(images)
        self.counts["failed, as planted" if allowed else "failed"] += 1
        if response.status_code != 500 or not allowed:
            self.problems.append(f"{ask}: {response.status_code} {response.text}")

    def _compare(self, key: tuple, tokens: tuple[int, ...]) -> None:
        with self._lock:
            self.counts["served"] += 1
            if self._known.setdefault(key, tokens) != tokens:
                self.problems.append(f"{key}: {tokens}, and before {self._known[key]}")

    def _leave_early(self, body: dict, choose: random.Random) -> None:
        try:
            timeout = httpx.Timeout(30, read=choose.uniform(0.001, 0.4))
            self.service.client.post("/v1/chat/completions", json=body, timeout=timeout)
        except httpx.ReadTimeout:
            self.counts["left"] += 1

    def _refused(self, body: dict) -> None:
        content = body["messages"][0]["content"]
        content.insert(0, {"type": "image_url", "image_url": {"url": self._too_large}})
        response = self.service.client.post("/v1/chat/completions", json=body)
        self.counts["refused"] += 1
        if response.status_code != 400 or "blocks" not in response.text:
            self.problems.append(f"an item too large: {response.status_code} {response.text}")

    def disturb(self) -> None:
        kind = self.random.random()
        if kind < 0.6:
            photograph = self.random.choice(list(ROWS))
            fault = self.random.choice((*ENCODER_FAULTS, "entry missing", "position unfilled"))
            self._armed = self._armed | {photograph}
            self.counts["faults planted"] += 1
            self.service.rpc("plant_fault", fault, ROWS[photograph], "first", 1)
        elif kind < 0.7:
            self.service.reset_encoder_cache()
        elif kind < 0.8:
            self.service.reset_prefix_cache(running=True)
        elif kind < 0.9:
            self.service.rpc("reload_weights")
        else:
            self.service.rpc("sleep", 1)
            self.service.rpc("wake_up")


def resident_bytes() -> int:
    """Of the server and its engine, the only children of this process. See `CollectGarbage` for what is not in it."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def test_nothing_unexpected_happens(checkpoint, tmp_path, request):
    minutes = request.config.getoption("soak_minutes")
    with serving(
        checkpoint,
        tmp_path / "log",
        additional_config=json.dumps({"vllm_neuron_cache": SMALL_POOL}),
        arguments=[
            *("--max-num-batched-tokens", "512", "--block-size", "32"),
            *("--worker-extension-cls", f"{FaultInjector.__module__}.{FaultInjector.__qualname__}"),
            *("--middleware", f"{CollectGarbage.__module__}.{CollectGarbage.__qualname__}"),
        ],
        environment={"PYTHONPATH": str(Path(__file__).parent)} | BOUNDED_LIBRARIES,
    ) as address:
        soak = Soak(address, seed=1)
        clients = [threading.Thread(target=soak.client, args=(seed,)) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        begin = time.monotonic()
        memory: list[int] = []
        while time.monotonic() < begin + 60 * minutes and not soak.problems:
            time.sleep(soak.random.uniform(0.2, 1.5))
            soak.disturb()
            memory.append(resident_bytes())
        soak.end.set()
        for client in clients:
            client.join(120)

        # What the last faults damaged is found, and gone after that.
        soak.service.rpc("remove_faults")
        for ask in [Ask("At the end.", (photograph,)) for photograph in PHOTOGRAPHS]:
            soak.service.ask([ask, ask])
            soak.service.reset_prefix_cache()
        answers = soak.service.ask([Ask("At the end.", (photograph,)) for photograph in PHOTOGRAPHS])
        assert not [answer for answer in answers if answer.error]
        soak.service.rpc("check_encoder_cache_integrity")
        soak.service.close()
    warm, last = memory[len(memory) // 5 : 2 * len(memory) // 5], memory[-len(memory) // 5 :]
    growth = min(last) / min(warm) - 1
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nSoak, {minutes:g} min: {dict(sorted(soak.counts.items()))}; memory {growth:+.2%} after warm-up\n")
    assert not soak.problems, soak.problems[:5]
    assert soak.counts["served"] > 10 * minutes
    assert soak.counts["left"] and soak.counts["refused"]
    if minutes >= MEMORY_FROM_MINUTES:
        assert growth < 0.02
