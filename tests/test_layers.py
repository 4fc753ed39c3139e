"""Which layer may import what, read from the source of every module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_neuron_cache

PACKAGE = "vllm_neuron_cache"
ROOT = Path(vllm_neuron_cache.__file__).parent

POLICY = f"{PACKAGE}.encoder_cache"
STAGE = f"{PACKAGE}.stage_cache"
TENSOR_MODULES = {f"{POLICY}.blocks", f"{STAGE}.row_store", f"{STAGE}.device_row_store"}
PLANNER = f"{PACKAGE}.planner"
SIMULATION = f"{PACKAGE}.simulation"
DIALECT = f"{PACKAGE}.kernels.dialect"
FRAMEWORKS = ("torch", "vllm")
COMPILERS = (
    "torch._inductor",
    "torch._dynamo",
    "torch.compile",
    "jax",
    "torchax",
    "torch_xla",
    "torch_neuronx",
    "neuronx_distributed",
    "neuronxcc",
    "nki",
)


# The checker ---------------------------------------------------------------------------------------------------


def is_under(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def is_under_any(name, prefixes):
    return any(is_under(name, prefix) for prefix in prefixes)


def imported_names(node, package):
    """Dotted names that an import statement brings in. `from a import b` gives `a.b`; `package` resolves dots."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
        return {f"{base}.{alias.name}" for alias in node.names}
    return set()


def imported_by_name(node):
    """The module of `importlib.import_module("x")` or `__import__("x")`."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return {node.args[0].value}
    return set()


def aliases(tree):
    """Local name -> dotted name, for everything imported anywhere in a module, relative imports aside."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted_use(node, names):
    """`torch.compile` for the expression `t.compile` after `import torch as t`; empty for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if parts and isinstance(node, ast.Name) and node.id in names:
        return {".".join([names[node.id], *reversed(parts)])}
    return set()


def all_uses(source, package=PACKAGE):
    """Every dotted name that a module imports, or reaches through something imported, in whatever scope."""
    tree = ast.parse(source)
    names = aliases(tree)
    uses = set()
    for node in ast.walk(tree):
        uses |= imported_names(node, package) | imported_by_name(node) | dotted_use(node, names)
    return uses


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_when_loaded(source, package=PACKAGE):
    """Dotted names imported when the module itself is imported: not in functions, not for type checkers only."""
    imports = set()
    waiting = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        imports |= imported_names(node, package) | imported_by_name(node)
        waiting += node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)
    return imports


def loaded_with(module, sources):
    """`module` and every module of the package that importing it imports, parents included."""
    loaded, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in sources:
            continue
        loaded.add(name)
        source, package = sources[name]
        for imported in imports_when_loaded(source, package) | {name}:
            parts = imported.split(".")
            waiting += [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return loaded


def framework_imports(sources, layer=POLICY):
    """Modules of a layer that get torch or vllm, with the module that imports it."""
    found = []
    for name, (source, package) in sources.items():
        if not is_under(name, layer) or name in TENSOR_MODULES:
            continue
        found += [(name, name, use) for use in all_uses(source, package) if is_under_any(use, FRAMEWORKS)]
        for other in loaded_with(name, sources) - {name}:
            imports = imports_when_loaded(*sources[other])
            found += [(name, other, use) for use in imports if is_under_any(use, FRAMEWORKS)]
    return found


def uses_outside(prefixes, allowed, sources):
    """Modules not under `allowed` that use something under one of `prefixes`."""
    return [
        (name, use)
        for name, (source, package) in sources.items()
        if not is_under(name, allowed)
        for use in all_uses(source, package)
        if is_under_any(use, prefixes)
    ]


def package_sources():
    """Module name -> (source, package that its relative imports start from)."""
    sources = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
        if parts[-1] == "__init__":
            sources[".".join(parts[:-1])] = (path.read_text(), ".".join(parts[:-1]))
        else:
            sources[".".join(parts)] = (path.read_text(), ".".join(parts[:-1]))
    return sources


# The rules -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources():
    return package_sources()


def test_every_module_of_the_package_is_read(sources):
    assert {PACKAGE, f"{PACKAGE}.errors", POLICY, f"{POLICY}.pool", f"{POLICY}.blocks"} <= set(sources)
    assert f"{PACKAGE}.integrations.vllm.manager" in sources and f"{PACKAGE}.graphs.lanes.inductor" in sources


def test_the_policy_core_imports_neither_torch_nor_vllm(sources):
    assert framework_imports(sources) == []


def test_the_core_of_the_stage_cache_imports_neither_torch_nor_vllm(sources):
    assert f"{STAGE}.manager" in sources and f"{STAGE}.controller" in sources
    assert framework_imports(sources, STAGE) == []


def test_the_planner_imports_neither_torch_nor_vllm(sources):
    assert f"{PLANNER}.plan" in sources
    assert framework_imports(sources, PLANNER) == []
    assert f"{SIMULATION}.trace" in sources
    assert framework_imports(sources, SIMULATION) == []


def test_only_integrations_import_vllm(sources):
    assert uses_outside(["vllm", "vllm_omni"], f"{PACKAGE}.integrations", sources) == []


def test_only_lanes_use_a_compiler(sources):
    outside = uses_outside(COMPILERS, f"{PACKAGE}.graphs.lanes", sources)
    assert [(name, use) for name, use in outside if (name, use.split(".")[0]) != (DIALECT, "nki")] == []
    assert any(name == DIALECT for name, _ in outside)


def test_nothing_but_the_command_line_imports_the_command_line(sources):
    assert uses_outside([f"{PACKAGE}.cli"], f"{PACKAGE}.cli", sources) == []


def test_importing_the_policy_core_loads_neither_torch_nor_vllm(sources):
    modules = [name for name in sources if is_under_any(name, (POLICY, STAGE)) and name not in TENSOR_MODULES]
    program = f"import sys, {', '.join([PACKAGE + '.config', *modules])}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert f"{POLICY}.read_plan" in loaded and f"{STAGE}.manager" in loaded
    assert not {"torch", "vllm"} & set(loaded)


# The checker checked: each rule finds a violation made for it, and the modules that it is meant to find are there ---


VIOLATIONS = [
    "import vllm",
    "import vllm.config",
    "import vllm as v",
    "from vllm import LLM",
    "from vllm.v1.request import Request",
    "def f():\n    from vllm.config import VllmConfig",
    "class C:\n    def f(self):\n        import vllm",
    "try:\n    import vllm\nexcept ImportError:\n    pass",
    "import importlib\nvllm = importlib.import_module('vllm')",
    "vllm = __import__('vllm')",
]


@pytest.mark.parametrize("source", VIOLATIONS)
def test_an_import_of_vllm_is_found_in_any_form(source):
    sources = {f"{PACKAGE}.runtime": (source, PACKAGE), f"{PACKAGE}.integrations.x": (source, PACKAGE)}
    assert {name for name, _ in uses_outside(["vllm"], f"{PACKAGE}.integrations", sources)} == {f"{PACKAGE}.runtime"}


@pytest.mark.parametrize(
    "source",
    ["import vllm_neuron_cache", "from vllm_neuron_cache import config", "x = 'import vllm'", "def vllm():\n    pass"],
)
def test_what_only_looks_like_an_import_of_vllm_is_not_found(source):
    assert uses_outside(["vllm"], f"{PACKAGE}.integrations", {f"{PACKAGE}.runtime": (source, PACKAGE)}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ncompiled = torch.compile(len)",
        "import torch as t\n@t.compile\ndef f():\n    pass",
        "from torch import compile",
        "from torch import compile as lower",
        "import torch\ntorch._dynamo.config.cache_size_limit = 64",
        "import torch._inductor.config",
        "from torch import _dynamo",
        "from torch._inductor.compile_fx import compile_fx",
        "def f():\n    import torch_neuronx",
        "import jax.numpy as jnp",
        "from torchax import interop",
        "import torch_xla",
        "import neuronxcc.nki as nki",
        "from nki import language",
    ],
)
def test_a_compiler_is_found_in_any_form(source):
    sources = {f"{PACKAGE}.graphs.merge": (source, PACKAGE), f"{PACKAGE}.graphs.lanes.x": (source, PACKAGE)}
    found = uses_outside(COMPILERS, f"{PACKAGE}.graphs.lanes", sources)
    assert {name for name, _ in found} == {f"{PACKAGE}.graphs.merge"}


@pytest.mark.parametrize(
    "source", ["import torch\nx = torch.zeros(1)", "import re\nre.compile('x')", "import torchvision"]
)
def test_what_is_no_compiler_is_not_found(source):
    assert uses_outside(COMPILERS, f"{PACKAGE}.graphs.lanes", {f"{PACKAGE}.graphs.merge": (source, PACKAGE)}) == []


@pytest.mark.parametrize(
    "source",
    [
        "from vllm_neuron_cache.cli import main",
        "from vllm_neuron_cache import cli",
        "def f():\n    import vllm_neuron_cache.cli.demo",
        "from . import cli",
        "from .cli.main import app",
    ],
)
def test_an_import_of_the_command_line_is_found_in_any_form(source):
    sources = {f"{PACKAGE}.runtime": (source, PACKAGE), f"{PACKAGE}.cli.demo": (source, PACKAGE)}
    found = uses_outside([f"{PACKAGE}.cli"], f"{PACKAGE}.cli", sources)
    assert {name for name, _ in found} == {f"{PACKAGE}.runtime"}


def policy_sources(source, **others):
    sources = {f"{POLICY}.{name}": (text, POLICY) for name, text in others.items()}
    return {PACKAGE: ("", PACKAGE), POLICY: ("", POLICY), f"{POLICY}.pool": (source, POLICY), **sources}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("form", ["import {}", "from {}.x import y", "def f():\n    import {}"])
def test_a_framework_in_the_policy_core_is_found(framework, form):
    found = framework_imports(policy_sources(form.format(framework)))
    assert [(name, by) for name, by, _ in found] == [(f"{POLICY}.pool", f"{POLICY}.pool")]


@pytest.mark.parametrize(
    "source",
    [
        "from vllm_neuron_cache.encoder_cache.blocks import EncoderCacheBlocks",
        "from vllm_neuron_cache.encoder_cache import blocks",
        "import vllm_neuron_cache.encoder_cache.blocks",
        "from .blocks import EncoderCacheBlocks",
        "from . import blocks",
        "from ..encoder_cache import blocks",
        "from vllm_neuron_cache.encoder_cache import between",
    ],
)
def test_a_framework_that_comes_through_another_module_is_found(source):
    sources = policy_sources(source, blocks="import torch", between="from . import blocks")
    assert (f"{POLICY}.pool", f"{POLICY}.blocks", "torch") in framework_imports(sources)


def test_a_framework_that_comes_through_a_parent_package_is_found():
    sources = policy_sources("")
    sources[POLICY] = ("from vllm_neuron_cache.encoder_cache.blocks import x", POLICY)
    sources[f"{POLICY}.blocks"] = ("import torch", POLICY)
    assert (f"{POLICY}.pool", f"{POLICY}.blocks", "torch") in framework_imports(sources)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "from . import item",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import blocks",
        "def f():\n    from . import blocks",
    ],
)
def test_what_does_not_load_a_framework_is_allowed(source):
    assert framework_imports(policy_sources(source, blocks="import torch", item="")) == []


def test_the_rules_see_the_modules_that_do_import_these_things(sources):
    assert any(is_under(use, "torch") for use in all_uses(*sources[f"{POLICY}.blocks"]))
    assert any(is_under(use, "vllm") for use in all_uses(*sources[f"{PACKAGE}.integrations.vllm.manager"]))
    assert any(is_under_any(use, COMPILERS) for use in all_uses(*sources[f"{PACKAGE}.graphs.lanes.inductor"]))
