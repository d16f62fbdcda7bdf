"""The prose check finds odd words and fragments, and passes plain sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import prose


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "text", "word", "place"),
    [
        ("docs/page.md", "# Page\n\n@ knows.\n", "Nobody", "odd word: docs/page.md:3: Nobody"),
        ("kith/odd.py", '"""Module."""\n# Started @.\n', "anew", "odd word: kith/odd.py:2: anew"),
        ("kith/message.py", 'raise ValueError("The key of @ is not valid.")\n', "somebody", "message.py:1: somebody"),
        ("training/part.py", '"""@ the disk."""\n', "Of", "fragment: training/part.py:1: Of the disk."),
        ("docker/page.js", "// Words.\nsay(`The name ${x}\n@ here, now.`);\n", "is told", "docker/page.js:3: is told"),
    ],
)
def test_odd_prose_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, word: str, place: str
) -> None:
    write(tmp_path, name, text.replace("@", word))
    assert prose.main(["--root", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert place in printed
    assert "Rewrite the sentences" in printed


def test_plain_prose_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        tmp_path,
        "kith/plain.py",
        '"""Return the threshold for an FPIR target."""\nNAMES = ["@"]\n'.replace("@", "nobody"),
    )
    write(tmp_path, "docs/page.md", "# Page\n\nA gallery holds subjects.\n")
    assert prose.main(["--root", str(tmp_path), "--list"]) == 0
    assert "odd word:" not in capsys.readouterr().out
