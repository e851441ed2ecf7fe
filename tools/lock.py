"""Make requirements/ anew: the distributions that set-up installs, with their versions and hashes.

    python tools/lock.py [--dry-run]     `make lock`; --dry-run only prints which versions would change

uv resolves pyproject.toml and constraints.txt once, for all of ENVIRONMENTS.  demo.txt has what the extra
`demo` needs, test.txt what `test` adds, campaign.txt what `campaign` adds; set-up installs APART separately.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
GROUPS = {"demo": "", "test": "-r demo.txt\n", "campaign": "-r test.txt\n"}
"""Extra, which names its file, and the line that includes another file."""
APART = {"torch": "torch$", "cuda": "nvidia-|cuda-|triton$", "uv": "uv$"}
"""File, and the distributions in it.  torch with CUDA needs cuda.txt; torch-cpu.txt is a build without."""
ENVIRONMENTS = {
    f"cpython-3{minor}-{system}": re.compile(
        rf"-((py2\.)?py3({minor})?-none|cp3{minor}-cp3{minor}|cp3\d+-abi3)-(any|\S*{platform})\.whl"
    )
    for minor in (11, 12, 13, 14)
    for system, platform in {
        "Linux-x86_64": r"manylinux\S*_x86_64\S*",
        "Linux-aarch64": r"manylinux\S*_aarch64\S*",
        "Darwin-arm64": r"macosx\S*_(arm64|universal2)",
    }.items()
}
"""Where set-up uses the lock, and the wheels that fit there."""
HEADER = '# Made by "make lock" for these environments; tools/setup.sh installs it.\n' + "".join(
    f"# {name}\n" for name in ENVIRONMENTS
)


def resolved(extra: str, known: dict[str, str]) -> dict[str, Any]:
    """Return the packages that uv chooses for an extra, by name; `known` versions are kept."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with tempfile.TemporaryDirectory() as folder:
        constraints, lock = Path(folder, "known.txt"), Path(folder, "pylock.toml")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in known.items()))
        command = f"{uv or 'uv'} pip compile -q pyproject.toml --extra={extra} --group=setup -o {lock}"
        command += f" -c constraints.txt -c {constraints}"
        command += " --universal --python-version=3.11 --fork-strategy=fewest --only-binary=:all:"
        # a wheel that only this machine has is no choice for others
        subprocess.run(command.split(), cwd=ROOT, check=True, env={**os.environ, "UV_FIND_LINKS": ""})
        return {package["name"]: package for package in tomllib.loads(lock.read_text())["packages"]}


def entry(package: dict[str, Any]) -> str:
    """Return the lines of a package, or "" if it is for other systems."""
    name, version, marker = package["name"], package["version"], package.get("marker")
    hashes = set[str]()
    for environment, fitting in ENVIRONMENTS.items():
        wheels = [wheel for wheel in package["wheels"] if fitting.search(wheel["url"])]
        if not wheels and not marker:
            raise SystemExit(f"{name} {version} has no wheel for {environment}")
        hashes.update(wheel["hashes"]["sha256"] for wheel in wheels)
    return lines(f"{name}=={version}" + (f" ; {marker}" if marker else ""), hashes)


def lines(first: str, hashes: Iterable[str]) -> str:
    listed = [f"    --hash=sha256:{digest}" for digest in sorted(hashes)]
    return " \\\n".join([first, *listed]) + "\n" if listed else ""


def cpu_torch(version: str) -> str:
    """Return the lines of a build that only pip's setting `find-links` leads to, or the present lines."""
    places = map(Path, os.environ.get("PIP_FIND_LINKS", "").split())
    builds = [path.read_bytes() for place in places for path in place.glob(f"torch-{version}+cpu-*.whl")]
    first = f"torch=={version}+cpu"
    present = (FOLDER / "torch-cpu.txt").read_text() if (FOLDER / "torch-cpu.txt").exists() else ""
    kept = present if present.startswith(f"{first} ") else ""
    return lines(first, (hashlib.sha256(build).hexdigest() for build in builds)) or kept


def files() -> Iterator[tuple[str, str]]:
    """Yield names and contents of the files."""
    everything = resolved("campaign", {})
    versions = {name: package["version"] for name, package in everything.items()}
    entries = {name: entry(package) for name, package in everything.items()}
    yield "torch-cpu.txt", cpu_torch(versions["torch"])
    for file, names in APART.items():
        chosen = sorted(name for name in entries if re.match(names, name))
        yield f"{file}.txt", HEADER + "".join(map(entries.pop, chosen))
    for extra, included in GROUPS.items():
        chosen = sorted(resolved(extra, versions).keys() & entries.keys())
        yield f"{extra}.txt", HEADER + included + "".join(map(entries.pop, chosen))


def main() -> None:
    made = {FOLDER / name: text for name, text in files()}
    before, after = (
        dict(re.findall(r"^([\w-]+)==([^\s+]+)", "".join(texts), re.M))
        for texts in ((path.read_text() for path in made if path.exists()), made.values())
    )
    if "--dry-run" not in sys.argv:
        FOLDER.mkdir(exist_ok=True)
        for path, text in made.items():
            path.write_text(text) if text else path.unlink(missing_ok=True)
    rows = [(name, before.get(name, "-"), after.get(name, "-")) for name in sorted({**before, **after})]
    changed = [f"{name}: {old} -> {new}" for name, old, new in rows if old != new]
    print(*changed, f"{len(changed)} of {len(after)} locked distributions have another version", sep="\n")


if __name__ == "__main__":
    main()
