"""Hints name extras that exist."""

from __future__ import annotations

import re
import tomllib

from tests.conftest import ROOT


def test_every_hint_names_an_extra_that_a_clone_can_install() -> None:
    extras_of_the_distribution = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = [file for folder in ("service", "training", "models", "docs") for file in (ROOT / folder).rglob("*.*")]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".md")]
    named = {extra for text in texts for extra in re.findall(r"pip install '\.\[(\w+)\]'", text)}
    assert {"mqtt", "postgres"} <= named <= extras_of_the_distribution.keys()
    assert {"milvus", "mqtt"} <= extras_of_the_distribution.keys()  # of the settings' hint
    assert not [text for text in texts if "pip install 'kith-face" in text]
