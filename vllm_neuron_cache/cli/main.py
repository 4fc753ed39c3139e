"""Entry point of `vllm-neuron-cache`."""

import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

from vllm_neuron_cache.cli.acceptance import acceptance
from vllm_neuron_cache.cli.bench import bench_app
from vllm_neuron_cache.cli.demo import demo
from vllm_neuron_cache.cli.graphs import graphs_app
from vllm_neuron_cache.cli.plan import plan
from vllm_neuron_cache.cli.warmup import warmup
from vllm_neuron_cache.errors import NeuronCacheError

app = typer.Typer(
    help="Encoder cache for vLLM on AWS Trainium.", no_args_is_help=True, add_completion=False, rich_markup_mode="rich"
)
app.command()(demo)
app.command()(plan)
app.command()(warmup)
app.command()(acceptance)
app.add_typer(bench_app, name="bench")
app.add_typer(graphs_app, name="graphs")


@app.callback()
def _root() -> None:
    # Logs belong to serving; here they would bury the table. Levels that the user set stay.
    for variable in ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        os.environ.setdefault(variable, "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main() -> None:
    """Runs the command line. Errors of this package are one line on stderr and exit status 2."""
    try:
        status = app(standalone_mode=False) or 0
    except NeuronCacheError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        status = 2
    except typer.Exit as request:
        status = request.exit_code
    except typer.Abort:
        status = 130
    except Exception as error:
        # Typer's own usage errors know how to show themselves; anything else is a bug and keeps its traceback.
        if not hasattr(error, "show"):
            raise
        error.show()
        status = getattr(error, "exit_code", 2)
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        # Extension modules in this process complain on stderr when the interpreter tears them down.
        os._exit(status)
    sys.exit(status)
