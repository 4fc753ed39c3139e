"""`vllm-neuron-cache bench`: measurements that compare, in one run."""

import typer

bench_app = typer.Typer(help="Measurements, each against something in the same run.", no_args_is_help=True)
