"""`vllm-neuron-cache warmup`: compile before serving."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_neuron_cache.cli.engine_file import read_engine_file
from vllm_neuron_cache.cli.report import check_writable, write_json
from vllm_neuron_cache.config import LANES, require_kernel
from vllm_neuron_cache.errors import ConfigurationError
from vllm_neuron_cache.planner.model import load_model_shape


def warmup(
    config: Annotated[Path, typer.Option(help="Engine arguments, the YAML file of `vllm serve --config`.")],
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder or a config.json, in place of the file's model.")
    ] = None,
    lane: Annotated[str | None, typer.Option(help="In place of the file's lane.")] = None,
    device: Annotated[str, typer.Option(help="Where the cache is: cpu, or neuron.")] = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name the graphs and compile nothing.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the manifest as JSON.")] = None,
) -> None:
    """Compiles every graph of a deployment in every bucket, and lists them with their hashes.

    Nothing looks at what they return. A compiler with a cache on disk then finds everything at the first start.
    """
    check_writable(json_file)
    engine = read_engine_file(config)
    lane = engine.config.lane if lane is None else lane
    if lane not in LANES:
        raise ConfigurationError(f"--lane is {lane!r}; give one of {', '.join(LANES)}.")
    require_kernel(engine.config.kernel, lane)
    import torch

    from vllm_neuron_cache.graphs.deployment import plan_deployment
    from vllm_neuron_cache.graphs.lanes import make_lane
    from vllm_neuron_cache.warmup import manifest, warm_up

    deployment = plan_deployment(
        load_model_shape(model or Path(engine.model), dtype=engine.dtype),
        engine.config,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        device=device,
    )
    entries = manifest(deployment)
    result = {
        "lane": lane,
        "kernel": deployment.kernel,
        "cache": deployment.geometry._asdict(),
        "graphs": [entry._asdict() for entry in entries],
    }
    console = Console()
    table = Table(title=f"{len(entries)} graphs")
    for column in ("graph", "bucket", "hash", "MiB of arguments"):
        table.add_column(column, justify="left" if column in ("graph", "hash") else "right")
    for entry in entries:
        table.add_row(entry.graph, str(entry.bucket), entry.sha256[:16], f"{entry.argument_bytes / 2**20:.2f}")
    console.print(table)
    if not dry_run:
        with console.status(f"Compiling in lane {lane}"):
            done = warm_up(deployment, make_lane(lane, deployment.kernel), torch.device(device))
        console.print(f"Lowered {done.graphs_lowered} graphs, {done.graphs_from_cache} of them from a cache on disk.")
        result |= done._asdict()
    if json_file is not None:
        write_json(json_file, result)
