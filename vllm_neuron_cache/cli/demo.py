"""`vllm-neuron-cache demo`: the cache beside stock vLLM, on real photographs and a clip."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_neuron_cache.cli.report import check_writable, write_json
from vllm_neuron_cache.demo.checkpoint import build_checkpoint
from vllm_neuron_cache.demo.comparison import RequestResult, Summary, run_demo
from vllm_neuron_cache.demo.requests import demo_requests
from vllm_neuron_cache.errors import DemoError

PLOT_FORMATS = (".png", ".svg", ".pdf")


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw the times to first token (PNG, SVG, PDF).")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of the small model; built there if it is missing.")
    ] = None,
) -> None:
    """Runs real photographs and a clip through stock vLLM and through the cache, and compares.

    Exits with 1 if a single token differs.
    """
    check_writable(json_file, plot_file)
    if plot_file is not None and plot_file.suffix not in PLOT_FORMATS:
        raise DemoError(f"cannot draw {plot_file}: give it one of the endings {', '.join(PLOT_FORMATS)}.")
    console = Console()
    requests = demo_requests()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Building the small model", total=len(requests))

        def step(description: str) -> None:
            progress.update(task, description=description)
            if not console.is_terminal:
                console.print(description)

        def done(result: RequestResult) -> None:
            progress.advance(task)

        step("Building the small model")
        summary = run_demo(build_checkpoint(checkpoint), requests, step=step, done=done)
    console.print(_table(summary))
    if json_file is not None:
        write_json(json_file, summary.as_json())
    if plot_file is not None:
        _plot(summary, plot_file)
    if not summary.tokens_identical:
        console.print("[red]The tokens differ from stock vLLM's.[/red]")
        raise typer.Exit(1)


def _table(summary: Summary) -> Table:
    values = summary.as_json()
    ttft, blocks, graphs, runs = values["ttft_ms"], values["blocks"], values["graphs"], values["encoder_runs"]
    table = Table(title="Encoder cache beside stock vLLM, on this CPU")
    table.add_column("")
    table.add_column("stock vLLM", justify="right")
    table.add_column("encoder cache", justify="right")
    table.add_row("requests", str(values["requests"]), str(values["requests"]))
    table.add_row("encoder runs", str(runs["stock"]), f"{runs['blocks']} (predicted {runs['expected']})")
    table.add_row("hits: encoder cache, processor cache", "", f"{values['hits']}, {values['processor_cache_hits']}")
    table.add_row("TTFT of a miss, median ms", _milliseconds(ttft["stock_miss"]), _milliseconds(ttft["blocks_miss"]))
    table.add_row("TTFT of a hit, median ms", _milliseconds(ttft["stock_hit"]), _milliseconds(ttft["blocks_hit"]))
    table.add_row(
        "blocks (one is scratch) x rows x width",
        "",
        f"{blocks['num_blocks']} x {blocks['block_size']} x {blocks['fat_dim']}",
    )
    table.add_row("buffer, MiB", "", f"{blocks['bytes'] / 2**20:.1f}")
    table.add_row("blocks used at the peak", "", str(blocks["peak_used"]))
    table.add_row("rows wasted by padding", "", f"{blocks['padding_waste']:.0%}")
    table.add_row("graphs compiled, after warm-up", "", f"{graphs['compiled']}, {graphs['recompiles_after_warmup']}")
    verdict = "[green]identical[/green]" if summary.tokens_identical else "[red]different[/red]"
    table.add_row("tokens", "", verdict)
    return table


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _plot(summary: Summary, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    positions = range(len(summary.results))
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    for offset, engine, label in ((-0.2, "stock", "stock vLLM"), (0.2, "blocks", "encoder cache")):
        times = [getattr(result, engine).ttft_ms for result in summary.results]
        axes.bar([position + offset for position in positions], times, width=0.4, label=label)
    for position, result in zip(positions, summary.results):
        if result.request.item_keys and result.blocks.encoder_runs == 0:
            axes.annotate("hit", (position, 0), (0, -14), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(
        list(positions), [_label(result) for result in summary.results], rotation=60, ha="right", fontsize=8
    )
    axes.tick_params(axis="x", pad=14)
    axes.set_ylabel("time to first token, ms")
    axes.set_title("Every request on both engines, in the order sent (CPU)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(result: RequestResult) -> str:
    return " + ".join(result.request.item_keys) or "text only"
