"""`vllm-neuron-cache bench`: measurements that compare, in one run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_neuron_cache.cli.report import check_writable, write_json
from vllm_neuron_cache.demo.checkpoint import build_checkpoint

bench_app = typer.Typer(help="Measurements, each against something in the same run.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")]


@bench_app.command()
def graphs(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement; the least time counts.")] = 9,
    checkpoint: Annotated[Path | None, typer.Option(help="Directory of the small model.")] = None,
) -> None:
    """The write and merge graphs against a memcpy of the same bytes, and the vision encoder against vLLM's own (needs
    about 6 GB of memory)."""
    from vllm_neuron_cache.bench.encoder import bench_encoder
    from vllm_neuron_cache.bench.graphs import bench_graphs

    check_writable(json_file)
    with _progress() as progress:
        task = progress.add_task("Graphs")

        def step(description: str) -> None:
            progress.update(task, description=description)

        result = bench_graphs(rounds=rounds, step=step)
        encoder = bench_encoder(build_checkpoint(checkpoint), rounds=-(-rounds // 2), step=step)
    result |= {"encoder": encoder}
    result["recompiles_after_warmup"] += encoder.pop("recompiles_after_warmup")
    _show("Graphs beside a memcpy of the useful bytes, and beside vLLM's encoder", result)
    if json_file is not None:
        write_json(json_file, result)


@bench_app.command()
def hits(
    json_file: JsonFile = None,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of the same request, to stock and to the cache.")] = 240,
    checkpoint: Annotated[Path | None, typer.Option(help="Directory of the small model.")] = None,
) -> None:
    """The time to first token of a hit, ours over stock vLLM's own."""
    from vllm_neuron_cache.bench.hits import bench_hits

    check_writable(json_file)
    with _progress() as progress:
        task = progress.add_task("Building the small model", total=pairs)
        result = bench_hits(
            build_checkpoint(checkpoint),
            pairs=pairs,
            step=lambda description: progress.update(task, description=description),
            advance=lambda: progress.advance(task),
        )
    _show("Hits beside stock vLLM", result)
    if json_file is not None:
        write_json(json_file, result)


@bench_app.command()
def pool(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each timing; the least time counts.")] = 15,
    requests: Annotated[int, typer.Option(min=8, help="Requests to each of the two real engines.")] = 120,
    checkpoint: Annotated[Path | None, typer.Option(help="Directory of the small model.")] = None,
) -> None:
    """The block pool beside vLLM's own manager: time, stalls, resident items, and hits in a quarter of the bytes."""
    from vllm_neuron_cache.bench.pool import bench_pool

    check_writable(json_file)
    with _progress() as progress:
        task = progress.add_task("Building the small model")
        result = bench_pool(
            build_checkpoint(checkpoint),
            rounds=rounds,
            requests=requests,
            step=lambda description: progress.update(task, description=description),
        )
    _show("The pool beside stock vLLM's manager", result)
    if json_file is not None:
        write_json(json_file, result)


@bench_app.command(name="stage-cache")
def stage_cache(
    json_file: JsonFile = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 5,
) -> None:
    """The stage cache beside vLLM-Omni's own, where that is installed, and beside straight-line code (needs about 3 GB
    of memory)."""
    from vllm_neuron_cache.bench.stage_cache import bench_stage_cache

    check_writable(json_file)
    with _progress() as progress:
        task = progress.add_task("Stage cache")
        result = bench_stage_cache(rounds=rounds, step=lambda text: progress.update(task, description=text))
    _show("The stage cache beside vLLM-Omni's and straight-line code", result)
    if result["workload_ratio_peer"] is None:
        Console().print("vLLM-Omni is not installed: run this through scripts/omni_env to compare with it.")
    if json_file is not None:
        write_json(json_file, result)


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(), transient=True)


def _show(title: str, result: dict[str, Any]) -> None:
    table = Table(title=title)
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in _flat(result):
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)


def _flat(result: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for name, value in result.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return rows
