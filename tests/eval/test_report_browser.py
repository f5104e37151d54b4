"""The report in a real browser: it renders, at the width of a screen and of a telephone, light and dark.

Skipped where there is no Chromium, unless EYAS_BROWSER=required.
"""

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.report import write_report
from tests.eval.recorded import apart, conditions, config_at, in_turn, measurements, record, record_training
from tests.http_server import running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("EYAS_BROWSER") != "required", reason="no chromium on the PATH (apt-get install chromium)"
)

PROBE = Path(__file__).with_name("report_probe.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Two reports behind a small HTTP server: one of legs, levels and GPUs, one of pairs with training."""
    folder = tmp_path_factory.mktemp("site")
    legs = config_at(folder / "legs")
    legs = legs.model_copy(update={"engine": legs.engine.model_copy(update={"kind": "sglang"})})
    long = "/models/drafters/a-long-name-of-a-folder-that-goes-on-and-on/without-any-space-at-all"
    servers = {
        "none": {"max_running_requests": 48, "version": "0.5.23"},
        "result": {"max_running_requests": 48, "version": "0.5.23", "speculative_draft_model_path": long, "schedule": {"path": long}},
    }
    gpus = [(2400.0 + index, 61.0, 300.0) for index in range(8)]
    found = [measured for level in (1, 2, 4, 8) for measured in apart(drift=1.02, level=level)]
    lines = conditions(gpus, environment={"NCCL_ALGO": "Ring", "SGLANG_LONG": long})
    record(legs, found, lines=lines, servers=servers, equalised={"max-running-requests": 48, "mem-fraction-static": 0.78})
    pairs = config_at(folder / "pairs")
    record(pairs, [in_turn(measured) for measured in measurements()], template={"prompt_tokens": 5, "server_prompt_tokens": 30})
    record_training(pairs)
    for config in (legs, pairs):
        write_report(config)
    plan = [{"url": f"/{name}/report/report.html", "width": width} for name in ("legs", "pairs") for width in WIDTHS]
    (folder / "probe.html").write_text(PROBE.read_text(encoding="utf-8").replace("= PLAN", f"= {json.dumps(plan)}"), encoding="utf-8")
    with running(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/probe.html", folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/favicon.ico":  # the browser asks by itself, and a 404 would be an error on its console
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(request: pytest.FixtureRequest, site: tuple[str, Path]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """(colour scheme, what the probe found in every frame, lines of the console)."""
    url, folder = site
    assert CHROMIUM is not None, "EYAS_BROWSER=required, but there is no chromium on the PATH"
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-extensions", "--no-first-run"),
        *(f"--user-data-dir={folder / request.param}", "--window-size=1300,900", "--enable-logging=stderr", "--v=0"),
        f"--blink-settings=preferredColorScheme={0 if request.param == 'dark' else 1}",
        *("--virtual-time-budget=20000", "--dump-dom", url),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', ended.stdout, re.DOTALL)
    assert found is not None, ended.stderr[-2000:]
    console = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    return request.param, json.loads(html.unescape(found.group(1))), console


def test_nothing_is_said_on_the_console(seen):
    assert seen[2] == []


def test_the_colours_follow_the_readers_wish(seen):
    scheme, frames, _ = seen
    assert {frame["dark"] for frame in frames} == {scheme == "dark"}
    assert {frame["page"] for frame in frames} == {"rgb(20, 23, 27)" if scheme == "dark" else "rgb(246, 245, 241)"}


def test_every_section_and_figure_is_there(seen):
    for frame in seen[1]:
        legs = "/legs/" in frame["url"]
        expected = {"Speed", "Acceptance", "By category", "By context length", "Replies", "Conditions"}
        expected |= {"Drift of the baseline", "Requests in flight", "Server arguments compared"} if legs else {"Training"}
        assert expected <= set(frame["sections"])
        assert len(frame["figures"]) == 10
        assert all(width >= 280 and height >= 90 for width, height in frame["figures"])
        assert frame["texts"] > 2500


def test_nothing_scrolls_sideways_but_the_tables_in_themselves(seen):
    for frame in seen[1]:
        assert frame["width"] in WIDTHS
        assert frame["scrollWidth"] <= frame["width"], frame["url"]
        assert frame["outside"] == []


def test_all_text_has_the_contrast_and_the_size_to_be_read(seen):
    for frame in seen[1]:
        assert frame["faint"] == []
        assert frame["small"] == []
