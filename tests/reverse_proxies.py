"""Reverse proxies that serve an upstream server below /kith and remove that prefix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.conftest import ROOT, is_eventually, is_ready
from tests.faults.servers import free_port
from tests.local_http import Handler, served_by

PREFIX = "/kith"
STOP_TIMEOUT_S = 60
HOP_BY_HOP = {"connection", "host", "keep-alive", "transfer-encoding"}
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; {locations} }}
}}
"""
Proxy = Callable[[str, Path], AbstractContextManager[str]]
"""Start a proxy in front of a URL, with a folder for its files. Yield the URL with the prefix, without a last slash."""


@contextmanager
def python_proxy(upstream: str, folder: Path) -> Iterator[str]:
    """Run a small proxy that needs no other program."""
    address = upstream.removeprefix("http://")

    class Forwarding(Handler):
        def forward(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            body = self.read_body()
            with closing(HTTPConnection(address, timeout=60)) as connection:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
                connection.request(self.command, self.path.removeprefix(PREFIX), body or None, headers)
                answer = connection.getresponse()
                kept = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
                self.answer(answer.status, answer.read(), kept)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = forward

    with served_by(Forwarding) as url:
        yield f"{url}{PREFIX}"


@contextmanager
def nginx(upstream: str, folder: Path) -> Iterator[str]:
    """Run nginx with the example of docs/deployment.md."""
    (example,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
    assert example.count("http://127.0.0.1:8000/;") == 1
    port, file = free_port(), folder / "nginx.conf"
    locations = example.replace("http://127.0.0.1:8000/;", f"{upstream}/;")
    file.write_text(NGINX.format(folder=folder, port=port, locations=locations))
    with _running("nginx", "-p", str(folder), "-c", str(file)):
        yield _when_ready(f"http://127.0.0.1:{port}{PREFIX}")


@contextmanager
def haproxy(upstream: str, folder: Path) -> Iterator[str]:
    """Run HAProxy with docker/haproxy.cfg, whose two nodes are the same server."""
    with haproxy_of(upstream, upstream, KITH_PATH_PREFIX=PREFIX) as url:
        yield _when_ready(f"{url}{PREFIX}")


@contextmanager
def haproxy_of(*nodes: str, **environment: str) -> Iterator[str]:
    """Run HAProxy with docker/haproxy.cfg in front of the URLs of two nodes, which may be away; yield its URL."""
    port = free_port()
    for number, node in enumerate(nodes, 1):
        environment[f"KITH_NODE_{number}"] = node.removeprefix("http://")
    file = str(ROOT / "docker" / "haproxy.cfg")
    with _running("haproxy", "-db", "-f", file, KITH_LISTEN=f"127.0.0.1:{port}", **environment):
        yield f"http://127.0.0.1:{port}"


def _when_ready(url: str) -> str:
    is_eventually(lambda: is_ready(url))
    return url


@contextmanager
def _running(name: str, *arguments: str, **environment: str) -> Iterator[None]:
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {name})")
    process = subprocess.Popen(
        [program, *arguments], env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


PROXIES: dict[str, Proxy] = {"python": python_proxy, "nginx": nginx, "haproxy": haproxy}
