"""Lets torchvision import beside a CPU build of torch when its own extension cannot be loaded.

PyPI's x86_64 wheels of torchvision are CUDA builds. Without CUDA's libraries their `_C` extension
does not load, torchvision goes on without it, and then its import fails because the operators
`nms` and `qnms`, for which it registers shape functions unconditionally, were never declared.
vLLM's Qwen3-VL model imports torchvision before it loads any plugin, so no plugin can help.

The environment script copies this file into site-packages together with a `.pth` line that imports
it at start-up, and only when the installed torchvision has that problem. Image transforms then
work; calling `nms` itself still fails, with torchvision's own message.
"""

import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

# A torch.library.Library takes its declarations back when it is collected.
_keep_alive = []


def _declare_missing_operators(package: Path) -> None:
    import torch

    for extension in package.glob("_C.*so"):
        try:
            # The same call torchvision makes; a second load of one file is a no-op.
            torch.ops.load_library(str(extension))
            return
        except (ImportError, OSError):
            continue
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _keep_alive.append(library)


class _Loader(SourceFileLoader):
    def exec_module(self, module):
        if not _keep_alive:  # declared once per process, also when torchvision is reloaded
            _declare_missing_operators(Path(self.path).parent)
        super().exec_module(module)


class _Finder:
    # Only the execution of torchvision does any work, not the search for it: libraries ask
    # importlib whether torchvision exists and should not pay an import of torch for the answer.
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
