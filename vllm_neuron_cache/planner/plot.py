"""A plan as a picture."""

from pathlib import Path

from vllm_neuron_cache.errors import PlannerError
from vllm_neuron_cache.planner.values import GIB, Plan

PLOT_FORMATS = (".png", ".svg", ".pdf")


def check_format(path: Path) -> None:
    """Raises `PlannerError` for an ending that cannot be drawn, or where matplotlib is not installed."""
    if path.suffix not in PLOT_FORMATS:
        raise PlannerError(f"cannot draw {path}: give it one of the endings {', '.join(PLOT_FORMATS)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlannerError(
            "matplotlib is not installed, and --plot draws with it. Install it, or vllm-neuron-cache[cpu]."
        ) from error


def plot(plan: Plan, path: Path) -> None:
    """Draws padding by block size, and the items that stay resident by HBM, to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (padding, resident) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    chosen = [size.block_size == plan.geometry.block_size for size in plan.block_sizes]
    # A bar of no height shows no colour, hence the star.
    labels = [f"{size.block_size}{' *' if mark else ''}" for size, mark in zip(plan.block_sizes, chosen)]
    colors = ["C1" if mark else "C0" for mark in chosen]
    bars = padding.bar(labels, [100 * size.padding_waste for size in plan.block_sizes], color=colors)
    padding.bar_label(bars, [f"{size.resident} items" for size in plan.block_sizes], fontsize=8)
    padding.set_xlabel("token rows in a block")
    padding.set_ylabel("rows wasted by padding, %")
    padding.set_title("The same HBM in other block sizes")
    padding.margins(y=0.12)

    gib = [buffer.bytes_per_rank / GIB for buffer in plan.buffers]
    resident.plot(gib, [buffer.resident for buffer in plan.buffers], marker="o")
    resident.plot([plan.buffer.bytes_per_rank / GIB], [plan.buffer.resident], marker="o", color="C1", linestyle="")
    for x, buffer in zip(gib, plan.buffers):
        resident.annotate(
            f"{buffer.num_blocks} blocks", (x, buffer.resident), (4, -11), textcoords="offset points", fontsize=8
        )
    resident.set_xlabel("HBM per rank, GiB")
    resident.set_ylabel("items of the mix resident")
    resident.set_title(f"Blocks of {plan.geometry.block_size} rows, {plan.shape.fat_dim} wide, {plan.shape.dtype}")
    resident.margins(x=0.15)
    resident.set_xlim(left=0)
    resident.set_ylim(bottom=0)
    figure.suptitle(f"{plan.shape.family}: the plan is orange and has a star")
    figure.savefig(path, dpi=150)
    plt.close(figure)
