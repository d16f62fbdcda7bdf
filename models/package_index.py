"""Files of a Python package index by the Simple API (PEP 503, 691), from where pip is set to look.

Only the address of a file is asked for: nothing is built, and no code of a package runs.
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

from models.download import Downloader, without_credentials
from models.errors import DownloadError, IndexFileError

DEFAULT_INDEX: Final = "https://pypi.org/simple"
JSON: Final = "application/vnd.pypi.simple.v1+json"
ACCEPT: Final = f"{JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"


def index_urls(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The index and the extra indexes that pip would use: from PIP_INDEX_URL and PIP_EXTRA_INDEX_URL, else from pip's
    configuration, else PyPI. Those that are no HTTP servers are left out."""
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
    # Passwords in addresses may hold percent signs, which interpolation would read as its own.
    parser = configparser.RawConfigParser()
    try:
        parser.read([*files, *([named] if named else [])], encoding="utf-8")
    except (configparser.Error, UnicodeError) as error:
        raise IndexFileError(f"pip's configuration cannot be read ({error})") from error
    found: dict[str, str] = {}
    for section in ("global", "install", "download"):
        found |= dict(parser[section]) if parser.has_section(section) else {}
    return found


def find_file(downloader: Downloader, project: str, file: str, indexes: list[str] | None = None) -> str:
    """The address of one file of a project, from the first index that has it.

    Raises:
        IndexFileError: no index has it, or none answers.
    """
    name = re.sub(r"[-_.]+", "-", project).lower()
    problems = []
    for index in index_urls() if indexes is None else indexes:
        page = f"{index}/{name}/"
        try:
            response = downloader.get(page, {"Accept": ACCEPT})
            is_json = response.headers.get("Content-Type", "").partition(";")[0].strip() == JSON
            links = _links_of_json(response.text) if is_json else _links_of_html(response.text)
        except DownloadError as error:
            problems.append(error.detail)
            continue
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{without_credentials(page)} is no page of the Simple API ({error})")
            continue
        if file in links:
            # Relative to where redirects led.
            link = urljoin(str(response.url), links[file]).partition("#")[0]
            return _with_credentials(link, index)
        problems.append(f"{without_credentials(page)} does not list it")
    raise IndexFileError(f"{file}: {'; '.join(problems) or 'no index is set'}")


def _with_credentials(link: str, index: str) -> str:
    """A private index lists files of its own without the password that they need too."""
    asked, found = urlsplit(index), urlsplit(link)
    same = (asked.hostname, asked.port) == (found.hostname, found.port)
    return urlunsplit(found._replace(netloc=asked.netloc)) if same and asked.username else link


def _links_of_json(text: str) -> dict[str, str]:
    return {str(file["filename"]): str(file["url"]) for file in json.loads(text)["files"]}


def _links_of_html(text: str) -> dict[str, str]:
    anchors = _Anchors()
    anchors.feed(text)
    return anchors.links


class _Anchors(HTMLParser):
    """Addresses by the text of their links, which is the file's name."""

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
