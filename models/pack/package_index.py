"""Lookup of files in a Python package index (Simple API, PEP 503 and 691) with pip's configuration.

Only the URL of a file is looked up: no package is built, and no package code runs.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import urljoin, urlsplit, urlunsplit

from models.errors import DownloadError, IndexFileError
from models.pack.download import Downloader, without_credentials

DEFAULT_INDEX: Final = "https://pypi.org/simple"
SIMPLE_JSON: Final = "application/vnd.pypi.simple.v1+json"
ACCEPT: Final = f"{SIMPLE_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"


def index_urls(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return pip's HTTP indexes: PIP_INDEX_URL and PIP_EXTRA_INDEX_URL, else pip's configuration, else PyPI."""
    settings = _pip_configuration(environ)
    index = environ.get("PIP_INDEX_URL") or settings.get("index-url") or DEFAULT_INDEX
    extra = environ.get("PIP_EXTRA_INDEX_URL") or settings.get("extra-index-url") or ""
    return [url.rstrip("/") for url in (index, *extra.split()) if urlsplit(url).scheme in ("http", "https")]


def _pip_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return {}
    home, user = Path.home(), Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        user / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    # Passwords in URLs may contain percent signs, which interpolation would misread.
    parser = configparser.RawConfigParser()
    try:
        parser.read([*files, *([named] if named else [])], encoding="utf-8")
    except (configparser.Error, UnicodeError) as error:
        raise IndexFileError(f"pip's configuration cannot be read ({error})") from error
    options: dict[str, str] = {}
    for section in ("global", "install", "download"):
        options |= dict(parser[section]) if parser.has_section(section) else {}
    return options


def find_file(downloader: Downloader, project: str, file: str, indexes: list[str] | None = None) -> str:
    """Return the URL of a project's file from the first index that lists it.

    Raises:
        IndexFileError: no index answers or lists the file.
    """
    name = re.sub(r"[-_.]+", "-", project).lower()
    problems = []
    for index in index_urls() if indexes is None else indexes:
        page = f"{index}/{name}/"
        try:
            response = downloader.get(page, {"Accept": ACCEPT})
            is_json = response.headers.get("Content-Type", "").partition(";")[0].strip() == SIMPLE_JSON
            links = _links_of_json(response.text) if is_json else _links_of_html(response.text)
        except DownloadError as error:
            problems.append(error.detail)
            continue
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{without_credentials(page)} is not a Simple API page ({error})")
            continue
        if file in links:
            # Links are relative to the URL after redirects.
            link = urljoin(str(response.url), links[file]).partition("#")[0]
            return _with_credentials(link, index)
        problems.append(f"{without_credentials(page)} does not list it")
    raise IndexFileError(f"{file}: {'; '.join(problems) or 'no index is set'}")


def _with_credentials(link: str, index: str) -> str:
    """Add the index's credentials to links to the same host: private indexes list their files without them."""
    source, target = urlsplit(index), urlsplit(link)
    same_host = (source.hostname, source.port) == (target.hostname, target.port)
    return urlunsplit(target._replace(netloc=source.netloc)) if same_host and source.username else link


def _links_of_json(text: str) -> dict[str, str]:
    return {str(file["filename"]): str(file["url"]) for file in json.loads(text)["files"]}


def _links_of_html(text: str) -> dict[str, str]:
    anchors = _LinkParser()
    anchors.feed(text)
    return anchors.links


class _LinkParser(HTMLParser):
    """Collects link targets by link text, which is the file name."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._href = dict(attrs).get("href")

    def handle_data(self, data: str) -> None:
        if self._href is not None and data.strip():
            self.links[data.strip()] = self._href

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._href = None
