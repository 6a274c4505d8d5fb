"""pip's own wheel, for a Python that comes without pip and without ensurepip, as Debian's does.

It comes from the index that pip itself would use, as its environment variables and configuration files name it, and is
checked against the hash that the index gives. Standard library only.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import json
import os
import re
import ssl
import urllib.parse
import urllib.request
from html import unescape
from pathlib import Path

DEFAULT_INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-py3-none-any\.whl")  # no pre-releases
TIMEOUT = 60.0


class NoPip(Exception):
    """Why pip could not be had."""


def fetch_pip(place: Path) -> Path:
    """Download the newest wheel of pip into that folder.

    Raises:
        NoPip: the index cannot be reached, has none, or what came is not what the index announced.
    """
    index = setting("index-url") or DEFAULT_INDEX
    page = f"{index.rstrip('/')}/pip/"
    try:
        wheels = list_wheels(*get(page))
        if not wheels:
            raise NoPip(f"{safe(page)} lists no wheel of pip with a SHA-256")
        name, (url, digest) = max(wheels.items(), key=lambda item: version_of(item[0]))
        content, _, _ = get(urllib.parse.urljoin(page, url))
    except (OSError, ValueError) as error:  # URLError is an OSError
        raise NoPip(f"cannot get pip from {safe(page)}: {error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise NoPip(f"what {safe(page)} delivered as {name} does not have the SHA-256 that it announced")
    wheel = place / name
    wheel.write_bytes(content)
    return wheel


def setting(name: str) -> str | None:
    """What pip would use: its environment variable, else the user's configuration file, else the system's."""
    if value := os.environ.get("PIP_" + name.upper().replace("-", "_")):
        return value
    home = Path.home()
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config", "pip/pip.conf")
    chosen = [Path(file) for file in (os.environ.get("PIP_CONFIG_FILE"),) if file]
    for file in [*chosen, user, home / ".pip/pip.conf", Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf")]:
        parser = configparser.RawConfigParser()
        parser.read(file)
        for section in ("install", "global"):
            if value := parser.get(section, name, fallback=None):
                return value
    return None


def list_wheels(content: bytes, kind: str, base: str) -> dict[str, tuple[str, str]]:
    """The wheels on a page of the index: name -> (URL, SHA-256). Indexes speak JSON (PEP 691) or HTML (PEP 503)."""
    if "json" in kind:
        files = [(file["filename"], file["url"], file["hashes"].get("sha256", "")) for file in json.loads(content)["files"]]
    else:
        links = re.findall(r"""href=["']([^"'#]+)#sha256=([0-9a-f]{64})""", content.decode("utf-8", "replace"))
        files = [(url.rsplit("/", 1)[-1], unescape(url), digest) for url, digest in links]
    return {name: (urllib.parse.urljoin(base, url), digest) for name, url, digest in files if WHEEL.fullmatch(name) and digest}


def version_of(name: str) -> tuple[int, ...]:
    match = WHEEL.fullmatch(name)
    return tuple(map(int, match[1].split("."))) if match else ()


def get(url: str) -> tuple[bytes, str, str]:
    """A page's content, its type, and where it was found in the end."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{parts.scheme}:// is not supported here")
    headers = {"Accept": ACCEPT}
    if parts.username:  # urllib would take it for a part of the host's name
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    request = urllib.request.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), headers=headers)  # noqa: S310  # the scheme is checked above
    context = ssl.create_default_context(cafile=setting("cert"))
    with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as answer:  # noqa: S310  # the same
        content: bytes = answer.read()
        return content, answer.headers.get_content_type(), answer.geturl()


def safe(url: str) -> str:
    """The URL without a password in it."""
    return re.sub(r"//[^/]*@", "//", url)
