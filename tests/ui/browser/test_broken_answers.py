"""The page's questions: an answer that breaks off after its head is no answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import everstep.ui

pytestmark = pytest.mark.campaign("machine")

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as View

STATIC = Path(everstep.ui.__file__).parent / "static"


class Half(SimpleHTTPRequestHandler):
    """Serves the page's modules, and half an answer: at /kept the connection stays open, at /closed not."""

    ended = threading.Event()

    def do_GET(self) -> None:
        if self.path not in ("/kept", "/closed"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b'{"series": [')
        self.wfile.flush()
        if self.path == "/kept":
            self.ended.wait(30)
        self.close_connection = True
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def view(browser: Browser) -> Iterator[View]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Half, directory=str(STATIC))) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        context = browser.new_context()
        found = context.new_page()
        found.goto(f"http://127.0.0.1:{server.server_port}/icon.svg")
        yield found
        context.close()
        Half.ended.set()
        server.shutdown()
        serving.join()


def test_an_answer_that_breaks_off_is_an_error(view: View) -> None:
    asked = """async ([path, leave]) => {
      const { get } = await import("/api.js");
      const stop = new AbortController();
      const { fetch } = globalThis;
      globalThis.fetch = async (...given) => {
        const answer = await fetch(...given); // its head is here, and its body is not
        if (leave) setTimeout(() => stop.abort(), 50);
        return answer;
      };
      return get(path, {}, stop.signal).then(JSON.stringify, (error) => `${error.name}: ${error.message}`);
    }"""
    assert view.evaluate(asked, ["/kept", True]).startswith("AbortError: ")
    assert view.evaluate(asked, ["/closed", False]) == "Error: the server's answer cannot be read (200)"
