"""Pages in a headless browser, where one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    # The browser itself asks for updates and time: it finds nobody.
    *("--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
# What a probe returns is written where `--dump-dom` shows it.
_PROBE = """
<script>
addEventListener("load", () => {
  const probe = document.createElement("pre");
  probe.id = "probe";
  const seen = (() => { PROBE })();
  seen.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  probe.textContent = JSON.stringify(seen);
  document.body.append(probe);
});
</script>
"""


def look(
    page: str, probe: str = "return {};", *, width: int = 1200
) -> tuple[dict[str, Any], list[str]]:
    """Opens a page and runs a script in it once it is loaded.

    Args:
      page: its HTML.
      probe: the body of a function of JavaScript that returns an object.
      width: of the window.

    Returns:
      What the probe returned, with the addresses that the page fetched as "fetched"; and what the
      page, or the browser about it, wrote to the console.
    """
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(
            page.replace("</html>", _PROBE.replace("PROBE", probe) + "</html>"), encoding="utf-8"
        )
        flags = (f"--user-data-dir={folder}/profile", f"--window-size={width},900", "--dump-dom")
        ran = subprocess.run(
            (BROWSER, *_FLAGS, *flags, file.as_uri()),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    seen = re.search(r'<pre id="probe">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert seen is not None, ran.stderr
    console = [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(seen[1])), console
