"""What clients of `AsyncLLM` and of its HTTP servers are told when their request failed in the engine.

The engine reports such a request as an output with `finish_reason` "error" and the text of a `RequestError` in
`stop_reason`. vLLM's servers look at the former alone and say "Internal server error".
"""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import GenerationError
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_neuron_cache.errors import EncoderCacheReadError, EncoderOutputError, request_error
from vllm_neuron_cache.integrations.vllm.activation import uses_block_cache
from vllm_neuron_cache.integrations.vllm.hooks import wrap_once


class EncoderCacheReadFailure(EncoderCacheReadError, GenerationError):
    """`EncoderCacheReadError` as vLLM's servers know it: HTTP 500."""

    type = "EncoderCacheReadError"


class EncoderOutputFailure(EncoderOutputError, GenerationError):
    """`EncoderOutputError` as vLLM's servers know it: HTTP 500."""

    type = "EncoderOutputError"


RequestFailure = EncoderCacheReadFailure | EncoderOutputFailure

_FAILURES = {EncoderCacheReadError: EncoderCacheReadFailure, EncoderOutputError: EncoderOutputFailure}


def install() -> None:
    """Makes `AsyncLLM.generate` raise for requests that failed. Calling it again changes nothing."""
    wrap_once(AsyncLLM, "generate", _raising_failures)


def failure_of(request_output: Any) -> RequestFailure | None:
    """The error to raise for what `AsyncLLM.generate` yields, or None."""
    for output in request_output.outputs:
        error = request_error(output.stop_reason) if output.finish_reason == "error" else None
        if error is not None:
            return _FAILURES[type(error)](str(error), request_id=request_output.request_id)
    return None


def _raising_failures(generate: Any) -> Any:
    def wrapper(self: AsyncLLM, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        request_outputs = generate(self, *args, **kwargs)
        return _until_failure(request_outputs) if uses_block_cache(self.vllm_config) else request_outputs

    return wrapper


async def _until_failure(request_outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    failure = None
    # Closing what vLLM gave us aborts the request: when the client goes away, and for the other sequences of a request
    # of which one failed. A request that is finished is left to end by itself.
    async with aclosing(request_outputs):
        async for request_output in request_outputs:
            failure = failure or failure_of(request_output)
            if failure is None:
                yield request_output
            elif not request_output.finished:
                break
    if failure is not None:
        _name_failures_over_http()
        raise failure


# HTTP ----------------------------------------------------------------------------------------------------------

_HANDLERS = "vllm.entrypoints.serve.exception_handling.handlers.vllm_error"
_SERVING = "vllm.entrypoints.generate.base.serving"


def _name_failures_over_http() -> None:
    """Makes vLLM's servers give a failure's own class as the error's `type`, where they say "InternalServerError".

    Called when there is a failure to tell: a process without a server has not imported these modules, and need not. A
    server that builds its answers otherwise gives vLLM's type with our message.
    """
    handlers, serving = sys.modules.get(_HANDLERS), sys.modules.get(_SERVING)
    if hasattr(handlers, "create_error_response"):
        wrap_once(handlers, "create_error_response", _naming_the_error)
    server = getattr(serving, "GenerateBaseServing", None)
    if hasattr(server, "_convert_generation_error_to_streaming_response"):
        wrap_once(server, "_convert_generation_error_to_streaming_response", _naming_the_streamed_error)


def _naming_the_error(create_error_response: Any) -> Any:
    def wrapper(message: Any, *args: Any, **kwargs: Any) -> Any:
        response = create_error_response(message, *args, **kwargs)
        if isinstance(message, RequestFailure):
            response.error.type = message.type
        return response

    return wrapper


def _naming_the_streamed_error(convert: Any) -> Any:
    def wrapper(self: Any, error: Any) -> str:
        if isinstance(error, RequestFailure):
            return self.create_streaming_error_response(str(error), err_type=error.type, status_code=error.status_code)
        return convert(self, error)

    return wrapper
