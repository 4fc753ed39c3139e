"""`vllm-neuron-cache acceptance`: what a machine with a Trainium has to show, in one report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_neuron_cache.cli.engine_file import read_engine_file
from vllm_neuron_cache.cli.report import check_writable, write_json
from vllm_neuron_cache.config import HARDWARE_LANES, LANES
from vllm_neuron_cache.errors import AcceptanceError, ConfigurationError
from vllm_neuron_cache.planner.model import load_model_shape

CONFIGS = Path(__file__).parents[2] / "configs"
DEFAULT_MODEL = "qwen3-vl-32b"


def acceptance(
    config: Annotated[
        Path | None, typer.Option(help="Engine arguments; by default configs/CHIP/qwen3-vl-32b.yaml of this chip.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder or a config.json, in place of the file's model.")
    ] = None,
    lane: Annotated[str | None, typer.Option(help="In place of the file's lane.")] = None,
    device: Annotated[str, typer.Option(help="Where the cache is: neuron, or cpu.")] = "neuron",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="The model whose tokens are compared, on this CPU. The demo's small one is the default."),
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Where the report goes.")] = Path("acceptance.json"),
) -> None:
    """Checks on a Trn2 or Trn3 what no CPU can prove, and writes the report. `docs/trainium.md` says how to get there.

    Exits with 1 if a check fails, and with 2 and a list of what is missing if it cannot start.
    """
    check_writable(json_file)
    import torch

    from vllm_neuron_cache.acceptance.machine import chip_of, instance_type, require_device
    from vllm_neuron_cache.acceptance.run import run_acceptance
    from vllm_neuron_cache.graphs.deployment import plan_deployment

    if lane is not None and lane not in LANES:
        raise ConfigurationError(f"--lane is {lane!r}; give one of {', '.join(LANES)}.")
    instance = instance_type()
    chip = chip_of(instance)
    if config is None:
        require_device(lane or "neuron", device, instance)
        config = CONFIGS / (chip or "") / f"{DEFAULT_MODEL}.yaml"
        if chip is None or not config.is_file():
            raise AcceptanceError(
                f"there is no file of engine arguments for {instance or 'this machine'}: give --config."
            )
    engine = read_engine_file(config)
    lane = lane or engine.config.lane
    require_device(lane, device, instance, engine.config.kernel)
    deployment = plan_deployment(
        load_model_shape(model or Path(engine.model), dtype=engine.dtype),
        engine.config,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        device=device,
    )
    console = Console()
    with console.status("Starting") as status:
        report = run_acceptance(
            deployment,
            checkpoint,
            lane_name=lane,
            device=torch.device(device),
            config=str(config),
            model=str(model or engine.model),
            hardware=instance if chip and lane in HARDWARE_LANES and device != "cpu" else None,
            step=lambda text: status.update(text),
        )
    table = Table(title=escape(report.note))
    table.add_column("check")
    table.add_column("")
    table.add_column("seen")
    for check in report.checks:
        table.add_row(check.name, "[green]passed[/green]" if check.passed else "[red]FAILED[/red]", escape(check.text))
    console.print(table)
    write_json(json_file, report.as_json())
    console.print(f"The report is in {json_file}.", highlight=False)
    if not report.passed:
        raise typer.Exit(1)
