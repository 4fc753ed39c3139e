"""`vllm-neuron-cache plan`: what a model's encoder cache costs and holds, before anything is deployed."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_neuron_cache.cli.report import check_writable, write_json
from vllm_neuron_cache.config import EncoderNeuronConfig
from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.items import DEFAULT_SIZES, MediaSize, parse_sizes, read_sizes_file
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.plan import make_plan
from vllm_neuron_cache.planner.plot import check_format, plot
from vllm_neuron_cache.planner.report import as_json, show
from vllm_neuron_cache.planner.values import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_STAGE_BLOCK_SIZE,
    PlanRequest,
    Simulator,
)


def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL_OR_CONFIG", help="A checkpoint's folder, or a config.json.")],
    hbm_gib: Annotated[
        float | None, typer.Option(help="GiB of HBM on each rank. Without it: the blocks that vLLM's budget needs.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Media, with commas: 512x512 an image, 512x512x30 a video, 12.5s a clip of audio."),
    ] = None,
    sizes_file: Annotated[
        Path | None, typer.Option(help="The same from a file, with counts: `SIZE [COUNT]` lines, or a JSON list.")
    ] = None,
    reuse: Annotated[float | None, typer.Option(help="Share of requests for media seen before, 0 to 1.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks; each holds the whole cache.")] = 1,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="vLLM's option of that name.")
    ] = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_model_len: Annotated[
        int | None, typer.Option(help="vLLM's option of that name. Without it: the model's.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="vLLM's option of that name.")] = "auto",
    encoder_attention_block_size: Annotated[
        int, typer.Option(help="Patches in one attention block of the encoder.")
    ] = EncoderNeuronConfig.encoder_attention_block_size,
    encode_ms_per_1k_tokens: Annotated[
        float | None, typer.Option(help="Milliseconds that the encoder takes for 1000 token rows, as you measured it.")
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of the engine, for the host memory of an omni model's stage cache.")
    ] = None,
    kv_block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = DEFAULT_STAGE_BLOCK_SIZE,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan as JSON.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw padding and resident items (PNG, SVG, PDF).")
    ] = None,
) -> None:
    """How many blocks a model's encoder cache needs, their HBM, what they hold, and what to configure.

    Reads configuration files alone: nothing is downloaded. With --reuse, vLLM's scheduler and this cache's manager play
    requests for such media, without a model; without it, neither torch nor vLLM is loaded.
    """
    check_writable(json_file, plot_file)
    if plot_file is not None:
        check_format(plot_file)
    request = PlanRequest(
        sizes=_media(sizes, sizes_file),
        hbm_gib=hbm_gib,
        reuse=reuse,
        tensor_parallel_size=tensor_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        encode_ms_per_1k_tokens=encode_ms_per_1k_tokens,
        encoder_attention_block_size=encoder_attention_block_size,
        kv_blocks=kv_blocks,
        kv_block_size=kv_block_size,
    )
    answer = make_plan(load_model_shape(model, dtype=dtype), request, None if reuse is None else _simulator())
    show(answer, Console())
    if json_file is not None:
        write_json(json_file, as_json(answer))
    if plot_file is not None:
        plot(answer, plot_file)


def _simulator() -> Simulator:
    try:
        from vllm_neuron_cache.integrations.vllm.simulation.hits import simulate_hits
    except ModuleNotFoundError as error:
        raise PlannerError(
            f"--reuse plays vLLM's scheduler, and {error.name} is not installed. Install "
            "vllm-neuron-cache[cpu], or leave --reuse out."
        ) from error
    return simulate_hits


def _media(sizes: str | None, sizes_file: Path | None) -> tuple[MediaSize, ...]:
    if sizes is not None and sizes_file is not None:
        raise PlannerError("--sizes and --sizes-file name the media twice. Give one of the two.")
    if sizes_file is not None:
        return read_sizes_file(sizes_file)
    return DEFAULT_SIZES if sizes is None else parse_sizes(sizes)
