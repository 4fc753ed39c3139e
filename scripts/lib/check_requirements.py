"""Check that the pins of a lock file are installed, and what they require: check_requirements.py LOCK

Prints a line for every package that is missing or of a version that does not fit, and exits 1 if there was one. Only
what the pinned packages themselves ask for is looked at: the other packages are another lock's.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from check_pins import read_pins, same_version
from packaging.requirements import Requirement


def problems(lock: Path) -> Iterator[str]:
    for name, pinned in read_pins(lock).items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield f"{name}=={pinned}: missing"
            continue
        if not same_version(installed, pinned):
            yield f"{name}=={pinned}: {installed} is installed"
        for text in requires(name) or ():
            yield from unmet(name, Requirement(text))


def unmet(name: str, requirement: Requirement) -> Iterator[str]:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        yield f"{name} requires {requirement}, which is missing"
        return
    if not requirement.specifier.contains(installed, prereleases=True):
        yield f"{name} requires {requirement}: {installed} is installed"


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
