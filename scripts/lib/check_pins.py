"""Compare the environment this runs in with a lock file: check_pins.py [--repair] LOCK

Prints a line for every pin that is missing, present in another version, or damaged, and exits 1 if
there was one. With --repair it deletes the metadata of damaged packages, because pip goes by the
metadata alone and would take a half-written package for an installed one; exits 0.
"""

import re
import shutil
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(lock: Path) -> dict[str, str]:
    pins = {}
    for line in lock.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line:
            name, _, version = line.partition("==")
            pins[canonical(name)] = version
    return pins


def same_version(installed: str, pinned: str) -> bool:
    # As in pip: a pin without a local part (+cpu) admits every local part.
    return installed == pinned or installed.partition("+")[0] == pinned


def damaged(dist: Distribution) -> bool:
    # pip writes INSTALLER after all the files of a package.
    if not dist.read_text("INSTALLER") or not dist.read_text("RECORD"):
        return True
    for file in dist.files or ():
        if not file.size:  # compiled files are recorded without a size and may be absent
            continue
        try:
            # Sizes are not compared exactly: two packages may own one path.
            if file.locate().stat().st_size == 0:
                return True
        except OSError:
            return True
    return False


def metadata_folder(dist: Distribution) -> Path:
    return Path(str(dist.locate_file(""))) / dist._path.name  # no public name for it before 3.13


def main(arguments: list[str]) -> int:
    repair = "--repair" in arguments
    (lock,) = (Path(a) for a in arguments if a != "--repair")
    pins = read_pins(lock)

    found, problems = {}, []
    for dist in distributions():
        # An interrupted install can leave a metadata folder without METADATA, hence without a name.
        name = canonical(dist.metadata["Name"]) if dist.read_text("METADATA") else None
        if name is not None and name not in pins:
            continue
        if name is None or damaged(dist):
            folder = metadata_folder(dist)
            problems.append(f"{name or folder.name}: incomplete")
            if repair:
                shutil.rmtree(folder, ignore_errors=True)
        if name is not None:
            found.setdefault(name, dist.version)

    if repair:
        # pip renames a package it replaces to ~name until it is done.
        for prefix in {Path(p) for p in sys.path if p.endswith("site-packages")}:
            for leftover in prefix.glob("~*"):
                shutil.rmtree(leftover, ignore_errors=True)
    else:
        for name, version in pins.items():
            if name not in found:
                problems.append(f"{name}=={version}: missing")
            elif not same_version(found[name], version):
                problems.append(f"{name}=={version}: {found[name]} is installed")

    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems and not repair else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
