"""Turns unpacked packages into clean documents."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

Document = tuple[str, str]  # (name, text); paragraphs separated by one blank line

MIN_PARAGRAPH_CHARS = 60
MIN_LETTER_SHARE = 0.85
_R_STRING_VECTOR = 16
_CHAPTER = re.compile(r"^(?:CHAPTER|Chapter) [0-9IVXLC]+\.?", re.MULTILINE)


def documents(source_name: str, directory: Path) -> Iterator[Document]:
    """Documents of one unpacked source, in a fixed order."""
    yield from _EXTRACTORS[source_name](directory)


def _files(directory: Path, pattern: str) -> list[Path]:
    return sorted(path for path in directory.rglob(pattern) if path.is_file())


def _unwrap(text: str) -> str:
    """Join the lines of each paragraph."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r", ""))
    joined = (re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)
    return "\n\n".join(paragraph for paragraph in joined if paragraph)


def _plain_marks(text: str) -> str:
    """Underscores that mark emphasis in digitised books are dropped."""
    return re.sub(r"\b_|_\b", "", text).replace("--", "—")


def _chapters(name: str, text: str) -> Iterator[Document]:
    starts = [match.start() for match in _CHAPTER.finditer(text)] or [0]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(text)
        chapter = _unwrap(_plain_marks(text[start:end]))
        if len(chapter) > 400:
            yield f"{name}/{number}", chapter


def _austen(directory: Path) -> Iterator[Document]:
    (database,) = _files(directory, "Rdata.rdb")
    for number, lines in enumerate(_r_string_vectors(database.read_bytes())):
        yield from _chapters(f"austen/{number}", "\n".join(lines))


def _r_string_vectors(database: bytes) -> Iterator[list[str]]:
    """String vectors of an R lazy-load database: each record is a big-endian length and a zlib
    stream of one object in R's version 3 XDR serialisation."""
    rest = database
    while rest:
        stream = zlib.decompressobj()
        blob = stream.decompress(rest[4:])
        rest = stream.unused_data
        offset = 14 + 4 + struct.unpack_from(">i", blob, 14)[0]
        flags, count = struct.unpack_from(">ii", blob, offset)
        if flags & 0xFF != _R_STRING_VECTOR:
            continue
        offset += 8
        strings = []
        for _ in range(count):
            length = struct.unpack_from(">ii", blob, offset)[1]
            offset += 8
            strings.append(blob[offset : offset + max(length, 0)].decode("utf-8", "replace"))
            offset += max(length, 0)
        yield strings


def _shakespeare(directory: Path) -> Iterator[Document]:
    for path in _files(directory, "*.md"):
        title = path.stem
        scenes = re.split(r"^(?=### )", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for number, scene in enumerate(scenes):
            text = re.sub(r"^#+ ", "", scene, flags=re.MULTILINE)
            text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
            text = re.sub(r"\*\*|\b_|_\b|^_|_$", "", text, flags=re.MULTILINE)
            text = re.sub(r"\n{3,}", "\n\n", text).strip()
            if len(text) > 400:
                yield f"shakespeare/{title}/{number}", text


def _moby_dick(directory: Path) -> Iterator[Document]:
    (book,) = _files(directory, "data.txt")
    yield from _chapters("moby_dick", book.read_text(encoding="utf-8"))


def _addresses(directory: Path) -> Iterator[Document]:
    for path in _files(directory, "*.txt"):
        yield f"addresses/{path.stem}", _unwrap(path.read_text(encoding="utf-8"))


def _bible(directory: Path) -> Iterator[Document]:
    for index_path in _files(directory, "*.bzs"):
        index = index_path.read_bytes()
        packed = index_path.with_suffix(".bzz").read_bytes()
        for number, (start, size, _) in enumerate(struct.iter_unpack("<III", index)):
            if not size:
                continue
            markup = zlib.decompress(packed[start : start + size]).decode("utf-8", "replace")
            text = _strip_bible_markup(markup)
            yield from _cut(f"bible/{index_path.stem}/{number}", text)


def _strip_bible_markup(markup: str) -> str:
    markup = re.sub(r"<note\b.*?</note>", "", markup, flags=re.DOTALL)
    markup = re.sub(r"<title\b.*?</title>", "\n\n", markup, flags=re.DOTALL)
    markup = re.sub(r"<(?:div|lg|chapter|p)\b[^>]*>", "\n\n", markup)
    markup = re.sub(r"<[^>]+>", " ", markup)
    markup = markup.replace("\x00", " ").replace("&amp;", "&").replace("¶", "")
    text = _unwrap(re.sub(r" +([,.;:!?])", r"\1", markup))
    return "\n\n".join(p for p in text.split("\n\n") if len(p) > 1)


def _cut(name: str, text: str, target: int = 12_000) -> Iterator[Document]:
    """Cut a long text at paragraph ends into documents of about ``target`` characters."""
    part: list[str] = []
    size = number = 0
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        size += len(paragraph)
        if size >= target:
            yield f"{name}/{number}", "\n\n".join(part)
            part, size, number = [], 0, number + 1
    if size > 400:
        yield f"{name}/{number}", "\n\n".join(part)


class _ParagraphParser(HTMLParser):
    """Collects the text of ``<p>`` elements; marks a section break at each ``<h1>``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[list[str]] = [[]]
        self._buffer: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._flush()
            self._buffer = []
        elif tag in ("h1", "pre", "ul", "ol", "table", "dl", "div"):
            self._flush()
            if tag == "h1" and self.sections[-1]:
                self.sections.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._flush()

    def handle_data(self, data: str) -> None:
        if self._buffer is not None:
            self._buffer.append(data)

    def _flush(self) -> None:
        if self._buffer is None:
            return
        paragraph = re.sub(r"\s+", " ", "".join(self._buffer)).strip()
        self._buffer = None
        if is_prose(paragraph):
            self.sections[-1].append(paragraph)


def is_prose(paragraph: str) -> bool:
    """Whether a documentation paragraph reads as a sentence rather than as code or a list."""
    if len(paragraph) < MIN_PARAGRAPH_CHARS or paragraph[-1] not in ".!?:":
        return False
    readable = sum(char.isalpha() or char == " " for char in paragraph)
    return readable >= MIN_LETTER_SHARE * len(paragraph)


def _html(
    name: str, pattern: str, excluded: tuple[str, ...]
) -> Callable[[Path], Iterator[Document]]:
    def extract(directory: Path) -> Iterator[Document]:
        for path in _files(directory, pattern):
            relative = path.relative_to(directory).as_posix()
            if any(part in relative for part in excluded):
                continue
            parser = _ParagraphParser()
            parser.feed(path.read_text(encoding="utf-8", errors="replace"))
            parser.close()
            for number, section in enumerate(parser.sections):
                if sum(map(len, section)) > 300:
                    yield f"{name}/{relative}/{number}", "\n\n".join(section)

    return extract


_SPHINX_EXTRAS = ("genindex", "modindex", "_static", "_sources", "_modules", "search.html")
_EXTRACTORS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "austen": _austen,
    "shakespeare": _shakespeare,
    "moby_dick": _moby_dick,
    "addresses": _addresses,
    "bible": _bible,
    "postgresql": _html("postgresql", "*.html", ("/release-", "bookindex")),
    "python": _html("python", "*.html", (*_SPHINX_EXTRAS, "changelog")),
    "django": _html("django", "*.html", (*_SPHINX_EXTRAS, "/releases/")),
    "sqlite": _html("sqlite", "*.html", ("/releaselog/", "changes.html", "session/changelog")),
    "rust": _html("rust", "print.html", ()),
}
