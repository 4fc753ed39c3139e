"""An OpenAI server as a process of its own, and what is said to it over HTTP."""

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

START_SECONDS = 420
"""Half a minute as a rule, and several minutes on a busy machine. One that ends is noticed at once."""


@contextmanager
def serving(
    checkpoint: Path,
    log_path: Path,
    *,
    additional_config: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Runs a server on loopback, and ends it. Gives its base address, once it answers.

    Args:
        checkpoint: the model, served under the name "tiny".
        log_path: where the server's output goes.
        additional_config: JSON.
        arguments: flags after those that every server here has; the last of two that are the same counts.
        environment: variables over those of this process.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(checkpoint), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--limit-mm-per-prompt", '{"image": 4, "video": 1}'),
        *("--additional-config", additional_config),
        *arguments,
    ]
    # The development endpoints give access to collective_rpc, and so to the workers.
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | settings | (environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its engine and workers can be ended with it
        )
    try:
        _wait_until_it_answers(process, f"http://127.0.0.1:{port}", log_path)
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def data_url(image: Any) -> str:
    """A PIL image as OpenAI's API takes it."""
    png = io.BytesIO()
    image.save(png, "PNG")  # lossless: the server sees the pixels that an offline engine would see
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def messages(images: Sequence[Any], text: str, *, uuids: Sequence[str | None] = ()) -> list[dict]:
    """A chat of one message. `uuids` are the client's own ids of the images."""
    content = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    for part, uuid in zip(content, uuids):
        part["uuid"] = uuid
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end(process: subprocess.Popen) -> None:
    """Ends the server; one that does not go by itself with its engine and workers, which would live on without it."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_it_answers(process: subprocess.Popen, address: str, log_path: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log_path.read_text()[-4000:]}")
        try:
            if httpx.get(f"{address}/health", timeout=1, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    pytest.fail(f"the server did not start:\n{log_path.read_text()[-4000:]}")
