"""Find odd words and fragments in docstrings, comments, messages and Markdown: `python -m tests.prose [--list]`.

Each top-level folder has two rates: odd words per 10,000 words, and the share of docstrings that open with a fragment.
The command exits with status 1 if a rate is above its limit. A word list cannot judge style; docs/contributing.md says
what a reader checks.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("bench", "docker", "docs", "kith", "models", "requirements", "service", "tests", "training")
MAX_ODD_PER_10_000 = 2.0
MAX_FRAGMENTS_PERCENT = 3.0
MIN_SPACES = 4  # a string with fewer is a name or a value, not a sentence

PRONOUNS = ("nobody", "somebody", "whoever", "whomever", "whom", "such a one", "the like", "none of whom")
ARCHAIC = ("anew", "lately", "amid", "thereof", "therein", "hereby", "whereof", "likewise", "be it", "as it stands")
REPORTED = (
    "told of",
    "tell of",
    "tells of",
    "is told",
    "are told",
    "it is said",
    "is said of",
    "is said to",
    "at hand",
)
RELATIVE = (
    "what is kept",
    "what is held",
    "what is left",
    "what is known",
    "what is asked",
    "what is sent",
    "what is meant",
)
ODD = re.compile(rf"\b(?:{'|'.join((*PRONOUNS, *ARCHAIC, *REPORTED, *RELATIVE))})\b", re.IGNORECASE)
OPENINGS = (
    "of",
    "as",
    "what",
    "who",
    "whose",
    "how",
    "whether",
    "by",
    "where",
    "that",
    "those",
    "to",
    "with",
    "without",
)
PLACES = ("until", "before", "after", "behind", "beside", "whom", "whoever")
FRAGMENT = re.compile(rf"\s*(?:{'|'.join((*OPENINGS, *PLACES))})\b", re.IGNORECASE)
SCRIPT = re.compile(r'"(?:\\.|[^"\\\n])*"|`(?:\\.|[^`\\])*`|(?<!:)//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class Passage:
    """One docstring, comment, message or page, with its first line."""

    line: int
    text: str
    docstring: bool = False


@dataclass
class Count:
    """Words, docstrings and places to look at, of one folder."""

    words: int = 0
    docstrings: int = 0
    odd: list[str] = field(default_factory=list)
    fragments: list[str] = field(default_factory=list)

    def add(self, name: str, passage: Passage) -> None:
        """Count one passage of the file `name`."""
        self.words += len(re.findall(r"\w+", passage.text))
        for hit in ODD.finditer(passage.text):
            line = passage.line + passage.text.count("\n", 0, hit.start())
            self.odd.append(f"{name}:{line}: {hit.group()}")
        self.docstrings += passage.docstring
        if passage.docstring and FRAGMENT.match(passage.text):
            self.fragments.append(f"{name}:{passage.line}: {passage.text.strip().splitlines()[0]}")

    @property
    def odd_rate(self) -> float:
        """Odd words per 10,000 words."""
        return 1e4 * len(self.odd) / max(1, self.words)

    @property
    def fragment_rate(self) -> float:
        """Docstrings that open with a fragment, in percent."""
        return 100 * len(self.fragments) / max(1, self.docstrings)

    def passes(self) -> bool:
        """Return whether both rates are within their limits."""
        return self.odd_rate <= MAX_ODD_PER_10_000 and self.fragment_rate <= MAX_FRAGMENTS_PERCENT


def python_passages(source: str) -> Iterator[Passage]:
    """Yield the docstrings, sentences and comments of a Python module."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)  # an expression in lambdas and conditional expressions
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.add(id(value))
                yield Passage(value.lineno, value.value, docstring=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = str(node.value)
            if text.count(" ") >= MIN_SPACES:
                yield Passage(node.lineno, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], token.string)


def script_passages(text: str) -> Iterator[Passage]:
    """Yield the comments and sentences of a JavaScript module."""
    for part in SCRIPT.finditer(text):
        if part.group().startswith("/") or part.group().count(" ") >= MIN_SPACES:
            yield Passage(1 + text.count("\n", 0, part.start()), part.group())


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of one file; nothing for formats without prose."""
    text = path.read_text(encoding="utf-8") if path.suffix in {".py", ".js", ".mjs", ".md", ".html"} else ""
    if path.suffix == ".py":
        yield from python_passages(text)
    elif path.suffix in {".js", ".mjs"}:
        yield from script_passages(text)
    elif text:
        yield Passage(1, text)


def count_prose(root: Path) -> dict[str, Count]:
    """Return the counts of each top-level folder of `root`, and of the pages beside them as `.`."""
    counts: defaultdict[str, Count] = defaultdict(Count)
    files = [*root.glob("*.md"), *(path for name in FOLDERS for path in sorted((root / name).rglob("*")))]
    for path in files:
        name = path.relative_to(root)
        for passage in passages(path) if path.is_file() else ():
            counts[name.parts[0] if len(name.parts) > 1 else "."].add(str(name), passage)
    return dict(counts)


def main(arguments: list[str] | None = None) -> int:
    """Print the rates, and the places of folders above a limit; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.prose", description="Check the project's prose.")
    parser.add_argument("--list", action="store_true", help="list every place")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder to check (default: the project)")
    options = parser.parse_args(arguments)
    counts = count_prose(options.root)
    failed = [name for name, count in counts.items() if not count.passes()]
    for name, count in counts.items():
        if options.list or name in failed:
            print(*(f"odd word: {place}" for place in count.odd), sep="\n", end="\n" if count.odd else "")
            print(*(f"fragment: {place}" for place in count.fragments), sep="\n", end="\n" if count.fragments else "")
    for name, count in counts.items():
        print(f"{name:12} {count.odd_rate:5.1f} odd words per 10,000, {count.fragment_rate:4.1f} % fragments")
    if failed:
        limits = f"{MAX_ODD_PER_10_000:g} odd words per 10,000 and {MAX_FRAGMENTS_PERCENT:g} % fragments"
        print(f"Above the limits ({limits}): {', '.join(failed)}. Rewrite the sentences listed above.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
