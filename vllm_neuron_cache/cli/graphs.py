"""`vllm-neuron-cache graphs`: what a configuration compiles, and whether it obeys the rules, without any device."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_neuron_cache.cli.report import check_writable, write_json
from vllm_neuron_cache.config import NeuronCacheConfig
from vllm_neuron_cache.errors import ConfigurationError, GraphRuleError
from vllm_neuron_cache.planner.model import load_model_shape
from vllm_neuron_cache.planner.values import DEFAULT_MAX_NUM_BATCHED_TOKENS

if TYPE_CHECKING:
    from vllm_neuron_cache.graphs.deployment import Deployment
    from vllm_neuron_cache.graphs.spec import GraphSpec

graphs_app = typer.Typer(help="The graphs that a configuration compiles.", no_args_is_help=True)

Model = Annotated[Path, typer.Argument(metavar="MODEL_OR_CONFIG", help="A checkpoint's folder, or a config.json.")]
AdditionalConfig = Annotated[
    str, typer.Option(help="vLLM's option of that name: JSON, or the name of a file that holds it.")
]
BatchedTokens = Annotated[int, typer.Option(min=1, help="vLLM's option of that name.")]
ModelLen = Annotated[int | None, typer.Option(min=1, help="vLLM's option of that name. Without it: the model's.")]
Dtype = Annotated[str, typer.Option(help="vLLM's option of that name.")]
Device = Annotated[str, typer.Option(help="cpu or neuron; it decides the default block.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")]

_DEFAULT_CONFIG = '{"vllm_neuron_cache": {}}'


@graphs_app.command("list")
def list_graphs(
    model: Model,
    additional_config: AdditionalConfig = _DEFAULT_CONFIG,
    max_num_batched_tokens: BatchedTokens = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_model_len: ModelLen = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Every graph in every bucket, with its bytes."""
    check_writable(json_file)
    deployment = _deployment(model, additional_config, max_num_batched_tokens, max_model_len, dtype, device)
    rows = [_sizes(spec, bucket) for spec in deployment.specs for bucket in spec.buckets]
    table = Table(title=_title(deployment))
    for column in ("graph", "bucket", "mutates", "MiB moved", "MiB of arguments"):
        table.add_column(column, justify="left" if column in ("graph", "mutates") else "right")
    for row in rows:
        moved, arguments = (f"{row[name] / 2**20:.2f}" for name in ("bytes_moved", "argument_bytes"))
        table.add_row(row["graph"], str(row["bucket"]), ", ".join(row["mutates"]), moved, arguments)
    Console().print(table)
    if json_file is not None:
        write_json(json_file, {"cache": deployment.geometry._asdict(), "graphs": rows})


@graphs_app.command()
def check(
    model: Model,
    additional_config: AdditionalConfig = _DEFAULT_CONFIG,
    max_num_batched_tokens: BatchedTokens = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_model_len: ModelLen = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Traces every graph in every bucket and holds it to the rules; exit status 1 if one breaks them."""
    from vllm_neuron_cache.graphs.check import check_spec

    check_writable(json_file)
    deployment = _deployment(model, additional_config, max_num_batched_tokens, max_model_len, dtype, device)
    table = Table(title=_title(deployment))
    for column in ("graph", "bucket", "rules"):
        table.add_column(column)
    results: list[dict[str, Any]] = []
    for spec in deployment.specs:
        for bucket in spec.buckets:
            violations: list[dict[str, str]] = []
            try:
                check_spec(spec, bucket)
            except GraphRuleError as error:
                violations = [violation._asdict() for violation in error.violations]
            found = "; ".join(f"{v['rule']} at {v['node']}: {v['text']}" for v in violations)
            table.add_row(spec.name, str(bucket), f"[red]{escape(found)}[/red]" if found else "[green]kept[/green]")
            results.append({"graph": spec.name, "bucket": bucket, "violations": violations})
    Console().print(table)
    if json_file is not None:
        write_json(json_file, {"cache": deployment.geometry._asdict(), "graphs": results})
    if any(result["violations"] for result in results):
        raise typer.Exit(1)


@graphs_app.command()
def show(
    model: Model,
    graph: Annotated[str, typer.Option(help="Its name, as `graphs list` has it.")],
    bucket: Annotated[int | None, typer.Option(help="One of its buckets. Without it: the largest.")] = None,
    additional_config: AdditionalConfig = _DEFAULT_CONFIG,
    max_num_batched_tokens: BatchedTokens = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    max_model_len: ModelLen = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Arguments, alias map and operators of one graph in one bucket."""
    from vllm_neuron_cache.graphs.check import check_spec
    from vllm_neuron_cache.graphs.spec import flat_names, flatten

    check_writable(json_file)
    deployment = _deployment(model, additional_config, max_num_batched_tokens, max_model_len, dtype, device)
    specs = {spec.name: spec for spec in deployment.specs}
    if graph not in specs:
        raise ConfigurationError(f"there is no graph {graph!r} here. The graphs are {', '.join(specs)}.")
    spec = specs[graph]
    bucket = spec.buckets[-1] if bucket is None else bucket
    if bucket not in spec.buckets:
        raise ConfigurationError(
            f"graph {graph} has no bucket {bucket}. Its buckets are {', '.join(map(str, spec.buckets))}."
        )
    report = check_spec(spec, bucket)
    args = spec.meta_args(bucket)
    arguments = Table(title=f"{graph}, bucket {bucket}: arguments")
    for column in ("argument", "dtype", "shape", "MiB", "replaced by output"):
        arguments.add_column(column)
    described = []
    for name, tensor in zip(flat_names(spec.fn, args), flatten(args), strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        output = report.aliases.get(name)
        arguments.add_row(
            escape(name),
            kind,
            str(list(tensor.shape)),
            f"{tensor.nbytes / 2**20:.2f}",
            "" if output is None else str(output),
        )
        described.append({"name": name, "dtype": kind, "shape": list(tensor.shape), "bytes": tensor.nbytes})
    operators = Table(title="Operators")
    operators.add_column("operator")
    operators.add_column("times", justify="right")
    for operator, times in report.operators.items():
        operators.add_row(operator, str(times))
    Console().print(arguments, operators)
    if json_file is not None:
        result = {"graph": graph, "bucket": bucket, "arguments": described}
        write_json(json_file, result | {"aliases": report.aliases, "operators": report.operators})


def _deployment(
    model: Path, additional_config: str, max_num_batched_tokens: int, max_model_len: int | None, dtype: str, device: str
) -> "Deployment":
    try:
        from vllm_neuron_cache.graphs.deployment import plan_deployment
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the graphs are PyTorch's, and {error.name} is not installed. Install vllm-neuron-cache[cpu]."
        ) from error
    config = NeuronCacheConfig.from_additional_config(_read_config(additional_config))
    return plan_deployment(
        load_model_shape(model, dtype=dtype),
        config,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        device=device,
    )


def _read_config(additional_config: str) -> Any:
    text = additional_config
    if not text.lstrip().startswith("{"):
        try:
            text = Path(additional_config).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"--additional-config is {additional_config!r}, which is neither JSON nor a readable file ({error})."
            ) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"--additional-config {additional_config!r} is not JSON: {error}.") from error


def _sizes(spec: "GraphSpec", bucket: int) -> dict[str, Any]:
    from vllm_neuron_cache.graphs.spec import flatten

    args = spec.meta_args(bucket)
    return {
        "graph": spec.name,
        "bucket": bucket,
        "mutates": list(spec.mutates),
        "bytes_moved": spec.bytes_per_row * bucket,
        "argument_bytes": sum(tensor.nbytes for tensor in flatten(args)),
    }


def _title(deployment: "Deployment") -> str:
    geometry, buffer = deployment.geometry, deployment.buffer
    return (
        f"{geometry.num_blocks} blocks of {geometry.block_size} rows of {buffer.fat_dim} "
        f"{str(buffer.dtype).removeprefix('torch.')}, {buffer.num_rows * buffer.row_bytes / 2**20:.1f} MiB"
    )
