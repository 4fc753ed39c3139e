"""The OpenAI server with the one key: base64 images over HTTP, the same tokens as stock, hits that skip the encoder."""

import json

import httpx
import pytest
from engines import small_media, start
from servers import messages, serving

pytestmark = pytest.mark.vllm

ADDITIONAL_CONFIG = '{"vllm_neuron_cache": {}}'
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """Base address of a server on loopback."""
    log_path = tmp_path_factory.mktemp("server") / "log"
    with serving(checkpoint, log_path, additional_config=ADDITIONAL_CONFIG) as address:
        yield address


def ask(server: str, images: list, text: str) -> tuple[int, ...]:
    body = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "messages": messages(images, text),
    }
    response = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


def items_written(server: str) -> int:
    response = httpx.post(
        f"{server}/collective_rpc", json={"method": "encoder_cache_stats"}, timeout=10, trust_env=False
    )
    assert response.status_code == 200, response.text
    (stats,) = response.json()["results"]
    # The endpoint passes what is not a string on as its text.
    return (json.loads(stats.replace("'", '"')) if isinstance(stats, str) else stats)["items_written"]


def test_images_over_http_give_the_tokens_of_stock(server, checkpoint):
    from vllm import SamplingParams

    images = small_media().images
    questions = [
        (["astronaut"], "Describe this."),
        (["coffee", "chelsea"], "Compare these."),
        (["china", "china"], "The same twice."),
        (["astronaut"], "Describe this."),
    ]
    answers = [ask(server, [images[name] for name in names], text) for names, text in questions]
    stock = start(checkpoint, None)
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    chats = [messages([images[name] for name in names], text) for names, text in questions]
    expected = [tuple(stock.llm.chat(chat, sampling, use_tqdm=False)[0].outputs[0].token_ids) for chat in chats]
    stock.close()
    assert answers == expected


def test_a_repeated_image_is_not_encoded_again(server):
    image = small_media().images["hubble"]
    ask(server, [image], "First question.")
    before = items_written(server)
    assert before > 0
    for number in range(3):
        # The text stands after the image, and the KV prefix is dropped: only the encoder cache can help.
        httpx.post(f"{server}/reset_prefix_cache", timeout=10, trust_env=False).raise_for_status()
        ask(server, [image], f"Question {number}.")
    assert items_written(server) == before


def test_the_server_goes_on_after_a_bad_request(server):
    body = {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
        ],
    }
    response = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert 400 <= response.status_code < 600
    assert len(ask(server, [small_media().images["coffee"]], "Still there?")) == MAX_TOKENS
